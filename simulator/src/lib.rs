//! Simulates the pools of a [`Profile`](scheduling::profile::Profile) on a virtual clock, with the code that
//! routers and workers run.
//!
//! Real: the router's scheduler with the state machine of every sequence ([`scheduling::scheduler`]), and at
//! each worker the cache state of its sequences, the batch former and the split of rows into forwards
//! ([`scheduling::batch_former`], [`mod@scheduling::batch`]). Simulated: the clock, the network, forwards
//! that take their curve's time with noise, a model whose tokens and drafts are functions of seed and
//! position ([`scheduling::profile::synthetic`]), and the requests. This crate contains no scheduling rules.
//! Left out: loss of workers and messages, limits of KV, and the processing time of the processes themselves.
//!
//! [`router`] and [`worker`] are the two ends, [`clients`] sends requests and counts, [`plain`] is a server
//! without any of this for comparison, [`outcome`] has the results, and [`record`] the events and commands of
//! the scheduler.

#![forbid(unsafe_code)]

mod clients;
mod clock;
pub mod outcome;
pub mod plain;
pub mod record;
mod router;
mod setup;
#[cfg(test)]
mod tests;
mod worker;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

pub use outcome::{KindOutcome, LaneOutcome, RunOutcome};
pub use record::Recording;
pub use setup::{ENDLESS, Experiment, Policy, RequestKind, Setup, Traffic};

use clients::{Clients, Request};
use clock::{Clock, SimEvent};
use router::{Router, worker_info};
use scheduling::profile::text::{mix, unit};
use scheduling::scheduler::{Event, WorkerKey};
use speculation::Role;
use worker::{NextAction, Worker, WorkerSetup};

/// Runs a simulation to its end.
pub fn run(setup: &Setup<'_>) -> RunOutcome {
    run_with(setup, &Experiment::default())
}

/// Runs a simulation with other rules than those of routers and workers.
pub fn run_with(setup: &Setup<'_>, experiment: &Experiment) -> RunOutcome {
    let mut simulation = Simulation::new(setup, experiment, false);
    simulation.play();
    simulation.finish()
}

/// Runs a simulation and records the scheduler's events and commands.
pub fn run_recorded(setup: &Setup<'_>) -> (RunOutcome, Recording) {
    let mut simulation = Simulation::new(setup, &Experiment::default(), true);
    simulation.play();
    let recording = simulation.router.take_recording().expect("the simulation was created with recording");
    (simulation.finish(), recording)
}

struct Simulation<'a> {
    setup: &'a Setup<'a>,
    clock: Clock,
    /// Random source for the noise of forwards.
    rng: Rng,
    router: Router,
    /// Whether the router received events since its last dispatch; below, the time of its next wakeup.
    is_dispatch_due: bool,
    wakeup_at: Option<Duration>,
    workers: BTreeMap<WorkerKey, Worker>,
    /// Workers with new events.
    touched: BTreeSet<WorkerKey>,
    clients: Clients<'a>,
    experiment: Experiment,
}

impl<'a> Simulation<'a> {
    fn new(setup: &'a Setup<'a>, experiment: &Experiment, is_recorded: bool) -> Self {
        let profile = Arc::new(setup.profile.clone());
        let worker_setup = WorkerSetup {
            has_cached_prompts: matches!(setup.traffic, Traffic::Closed { .. })
                && !experiment.computes_prompts,
            experiment: *experiment,
        };
        let roles = std::iter::repeat_n(Role::Target, profile.target.workers as usize)
            .chain(std::iter::repeat_n(Role::Draft, profile.draft.workers as usize));
        let worker = |(key, role)| (WorkerKey(key), Worker::new(&profile, role, worker_setup));
        Self {
            setup,
            clock: Clock::default(),
            rng: Rng { state: mix(setup.seed) },
            router: Router::new(setup, experiment, is_recorded),
            is_dispatch_due: false,
            wakeup_at: None,
            workers: (1..).zip(roles).map(worker).collect(),
            touched: BTreeSet::new(),
            clients: Clients::new(setup),
            experiment: *experiment,
        }
    }

    fn play(&mut self) {
        self.begin();
        while let Some(events) = self.clock.advance() {
            if self.clients.is_over(self.clock.now) {
                break;
            }
            events.into_iter().for_each(|event| self.handle(event));
            // Process all events of one time before their consequences.
            self.dispatch();
            self.start_workers();
        }
    }

    fn begin(&mut self) {
        let roles: Vec<(WorkerKey, Role)> =
            self.workers.iter().map(|(key, worker)| (*key, worker.role())).collect();
        for (key, role) in roles {
            let info = worker_info(self.setup.profile, role, &self.experiment);
            self.send_event(Event::WorkerUp(key, Box::new(info)));
        }
        for request in self.clients.first_requests() {
            self.submit(request);
        }
        self.schedule_arrival();
        self.dispatch();
    }

    fn handle(&mut self, event: SimEvent) {
        let now = self.clock.now;
        match event {
            SimEvent::Arrival => {
                self.schedule_arrival();
                if let Some(request) = self.clients.arrive(now) {
                    self.submit(request);
                }
            }
            SimEvent::ToWorker(key, frame) => {
                self.touched.insert(key);
                if let Some(worker) = self.workers.get_mut(&key) {
                    worker.arrive(now, frame);
                }
            }
            SimEvent::ForwardDone(key) => self.forward_done(key),
            SimEvent::DelayOver(key) => {
                self.touched.insert(key);
            }
            SimEvent::ToRouter(key, frame) => self.send_event(Event::Frame(key, frame)),
            SimEvent::Wakeup => {
                self.wakeup_at = None;
                self.send_event(Event::Timer);
            }
        }
    }

    fn schedule_arrival(&mut self) {
        if let Some(wait) = self.clients.next_arrival() {
            self.clock.schedule_after(wait, SimEvent::Arrival);
        }
    }

    fn submit(&mut self, request: Request) {
        let submission = self.router.submission(request);
        self.send_event(submission);
    }

    /// Passes an event to the scheduler, and the events that follow to the clients.
    fn send_event(&mut self, event: Event) {
        let now = self.clock.now;
        self.is_dispatch_due = true;
        let mut next: Vec<Request> = Vec::new();
        for event in self.router.on_event(now, event) {
            next.extend(self.clients.on_event(now, event));
        }
        next.into_iter().for_each(|request| self.submit(request));
    }

    /// Dispatches the scheduler, sends its frames and sets its timer.
    fn dispatch(&mut self) {
        if !std::mem::take(&mut self.is_dispatch_due) {
            return;
        }
        self.send_event(Event::Dispatch);
        self.is_dispatch_due = false;
        let wire = self.wire();
        for (key, frame) in self.router.take_frames() {
            self.clock.schedule_after(wire, SimEvent::ToWorker(key, frame));
        }
        if let Some(at) = self.router.next_wakeup().map(|at| at.max(self.clock.now))
            && self.wakeup_at.is_none_or(|set| at < set)
        {
            self.wakeup_at = Some(at);
            self.clock.schedule_at(at, SimEvent::Wakeup);
        }
    }

    fn wire(&self) -> Duration {
        Duration::from_secs_f64(self.setup.profile.wire_us / 1e6)
    }

    /// Starts forwards at the workers with new events.
    fn start_workers(&mut self) {
        let (now, wire) = (self.clock.now, self.wire());
        for key in std::mem::take(&mut self.touched) {
            let Some(worker) = self.workers.get_mut(&key) else { continue };
            match worker.next_action(now) {
                NextAction::Idle => {
                    if let Some(frame) = worker.take_outbox() {
                        self.clock.schedule_after(wire, SimEvent::ToRouter(key, frame));
                    }
                }
                NextAction::Wait(delay) => self.clock.schedule_after(delay, SimEvent::DelayOver(key)),
                NextAction::Run(micros) => {
                    let took = self.setup.profile.with_noise(micros, self.rng.next());
                    let took = Duration::from_secs_f64(took / 1e6);
                    self.clock.schedule_after(took, SimEvent::ForwardDone(key));
                }
            }
        }
    }

    fn forward_done(&mut self, key: WorkerKey) {
        let (now, wire) = (self.clock.now, self.wire());
        let seconds = self.clients.elapsed(now).as_secs_f64();
        let Some(worker) = self.workers.get_mut(&key) else { return };
        let (frame, took) = worker.forward_done(now, seconds);
        if let Some(from) = self.clients.counts_from().filter(|from| now >= *from) {
            self.clients.outcome.forward(worker.role(), took, from, now);
        }
        if !frame.replies.is_empty() {
            self.clock.schedule_after(wire, SimEvent::ToRouter(key, frame));
        }
        self.touched.insert(key);
    }

    fn finish(mut self) -> RunOutcome {
        let lane = |lane: scheduling::scheduler::lanes::LaneExplanation| LaneOutcome {
            mean_k: self.clients.mean_k(&lane.task_type),
            name: lane.task_type,
            explanation: lane.choice,
        };
        let mut lanes: Vec<LaneOutcome> = self.router.report().lanes.into_iter().map(lane).collect();
        let kinds = self.setup.kinds();
        lanes.sort_by_key(|lane| kinds.iter().position(|kind| kind.task_type == lane.name));
        let outcome = &mut self.clients.outcome;
        outcome.seconds = (self.setup.duration - self.setup.warm_up).as_secs_f64();
        outcome.lanes = lanes;
        self.clients.outcome.sequences_at_end = self.clients.num_in_progress();
        self.clients.outcome
    }
}

/// A keyed sequence of pseudorandom numbers.
#[derive(Debug, Clone)]
pub(crate) struct Rng {
    state: u64,
}

impl Rng {
    /// The next number, in 0..1.
    pub(crate) fn next(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        unit(mix(self.state))
    }
}
