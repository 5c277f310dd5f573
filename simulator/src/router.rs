//! The router: drives the real scheduler as the router's own driver does, with frames in place of sockets.

use std::collections::BTreeMap;
use std::time::Duration;

use scheduling::profile::Profile;
use scheduling::scheduler::events::{ClientEvent, NewSequence, WorkerInfo};
use scheduling::scheduler::lanes::{LaneKey, TemperatureBand};
use scheduling::scheduler::policy::{DraftTokens, PolicyConfig, SpeculationRequest};
use scheduling::scheduler::{Command, Event, Scheduler, SchedulerConfig, SchedulerReport, WorkerKey};
use speculation::Role;

use crate::clients::Request;
use crate::clock::RouterFrame;
use crate::record::{Entry, Recording};
use crate::{Experiment, Policy, Setup};

/// Deadline of a target's step, and longest time without targets of a model: longer than any run.
const NO_TIMEOUT: Duration = Duration::from_secs(3_600);

/// The model that all workers serve.
const MODEL: &str = "simulated";

/// The router; see the module documentation.
#[derive(Debug)]
pub(super) struct Router {
    policy: Policy,
    vocab_size: u32,
    scheduler: Scheduler,
    outboxes: BTreeMap<WorkerKey, RouterFrame>,
    recording: Option<Recording>,
}

impl Router {
    /// Creates a router without workers, which records its scheduler's events and commands if `is_recorded`.
    pub(super) fn new(setup: &Setup, experiment: &Experiment, is_recorded: bool) -> Self {
        let policy = setup.policy;
        let (draft_tokens, max_draft_tokens) = match policy {
            Policy::Fixed(k) => (DraftTokens::Fixed(k), k),
            Policy::Lanes { max_k } => (DraftTokens::Auto, max_k),
        };
        let config = SchedulerConfig {
            policy: PolicyConfig::new(draft_tokens, max_draft_tokens),
            target_deadline: NO_TIMEOUT,
            target_wait: NO_TIMEOUT,
            queue_wait: NO_TIMEOUT,
            replay_ids_per_second: 0,
            tpot_objective: None,
            shadow_share: 0.0,
            rules: experiment.rules,
        };
        let recording = is_recorded.then(|| Recording { config: config.clone(), entries: Vec::new() });
        Self {
            policy,
            vocab_size: setup.profile.vocab_size,
            scheduler: Scheduler::new(config),
            outboxes: BTreeMap::new(),
            recording,
        }
    }

    pub(super) fn take_recording(&mut self) -> Option<Recording> {
        self.recording.take()
    }

    /// Passes an event in and adds steps and closes to the outboxes. Returns the events for clients.
    pub(super) fn on_event(&mut self, now: Duration, event: Event) -> Vec<ClientEvent> {
        let Self { scheduler, outboxes, recording, .. } = self;
        let mut entry =
            recording.is_some().then(|| Entry { at: now, event: event.clone(), commands: Vec::new() });
        let mut for_clients = Vec::new();
        for command in scheduler.on_event(now, event) {
            if let Some(entry) = &mut entry {
                entry.commands.push(command.clone());
            }
            match command {
                Command::Send(key, step) => outboxes.entry(key).or_default().steps.push(step),
                Command::Close(key, id, assignment) => {
                    outboxes.entry(key).or_default().closes.push((id, assignment));
                }
                Command::Client(event) => for_clients.push(event),
                Command::RoundBegun(..)
                | Command::Assigned(_)
                | Command::Disconnect(_)
                | Command::Report(_) => {}
            }
        }
        if let Some(recording) = recording {
            recording.entries.extend(entry);
        }
        for_clients
    }

    /// Takes the frames that are sent now.
    pub(super) fn take_frames(&mut self) -> BTreeMap<WorkerKey, RouterFrame> {
        std::mem::take(&mut self.outboxes)
    }

    pub(super) fn next_wakeup(&mut self) -> Option<Duration> {
        self.scheduler.next_wakeup()
    }

    pub(super) fn report(&self) -> SchedulerReport {
        self.scheduler.report()
    }

    /// Converts a request to a submission, as the router's front end does.
    pub(super) fn submission(&self, request: Request) -> Event {
        let Request { id, task_type, spec, prompt } = request;
        // A client that wants no drafts says so in its request.
        let enabled = (self.policy == Policy::Fixed(0)).then_some(false);
        let temperature = TemperatureBand::of(&spec.sampling);
        Event::Submit(Box::new(NewSequence {
            id,
            lane: LaneKey { model: MODEL.to_owned(), task_type, temperature },
            spec,
            vocab_size: self.vocab_size,
            prompt,
            speculation: SpeculationRequest { enabled, ..SpeculationRequest::default() },
            prediction: None,
            api_key: 0,
            may_expire: false,
        }))
    }
}

/// Info that a worker of the profile reports when it connects. Its KV is not limited.
pub(super) fn worker_info(profile: &Profile, role: Role, experiment: &Experiment) -> WorkerInfo {
    WorkerInfo {
        vocab_size: profile.vocab_size,
        step_times: experiment.reported_step_times(profile, role),
        max_tree_tokens: experiment.max_tree_tokens(role),
        ..WorkerInfo::of(role, MODEL)
    }
}
