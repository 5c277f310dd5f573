//! The task that owns every sequence of this router: requests and worker frames in, steps and tokens out.
//!
//! It never waits for a worker or a client: steps go to bounded outboxes, tokens into the generation's bounded channel, and
//! whatever does not answer in time is a deadline of the sequence's own state machine. This file takes in what happens and finds the sequence that it
//! happens to; [`surroundings`] does what follows from it, [`seats`] finds workers, [`rounds`] begins rounds, [`measure`] keeps the times.

mod measure;
mod rounds;
mod seats;
mod surroundings;

use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use proto::convert::reply_from_wire;
use proto::v1;
use rustc_hash::FxHashMap;
use service::health::Health;
use service::shutdown::Lifetime;
use speculation::agreement::Agreement;
use speculation::placement::PrefixMarks;
use speculation::sequence::{Event, Limits, Sequence};
use speculation::spec::lane_number;
use speculation::{Role, SequenceId, SequenceSpec};
use tokio::time::Instant;

use self::surroundings::{Surroundings, deadline};
use crate::error::RouterError;
use crate::generation::{Generation, GenerationEvent, GenerationSink, GenerationStream, channel};
use crate::lane::policy::PolicyConfig;
use crate::lane::running::{RoundClock, Running};
use crate::lane::{Inbox, LaneKey, Submission};
use crate::metrics::RouterMetrics;
use crate::workers::{WorkerEvent, WorkerKey};

/// What an operator sets for the rounds.
#[derive(Debug, Clone)]
pub struct RoundsConfig {
    /// k, and what lanes may do.
    pub policy: PolicyConfig,
    /// How long a target may take for one step before it is sent again.
    pub target_deadline: Duration,
    /// How long a sequence may wait where no target serves its model.
    pub target_wait: Duration,
}

/// The owner's alarm may ring so much too early. Tokio's timers are whole milliseconds.
const EARLY: Duration = Duration::from_millis(2);

/// Timers later than this are left as they are: a sequence has many rounds until then.
const SOON: Duration = Duration::from_secs(1);

type Cancelled = Pin<Box<dyn Future<Output = SequenceId> + Send>>;

/// See the module's page.
pub struct Owner {
    /// Looked up several times for every token; the numbers are our own, so that nobody can make them collide.
    sequences: FxHashMap<SequenceId, Running>,
    next_sequence: u64,
    cancelled: FuturesUnordered<Cancelled>,
    health: Health,
    around: Surroundings,
}

impl Owner {
    /// An owner of nothing yet.
    pub fn new(config: RoundsConfig, metrics: RouterMetrics, health: Health) -> Self {
        Self {
            sequences: FxHashMap::default(),
            next_sequence: 1,
            cancelled: FuturesUnordered::new(),
            health,
            around: Surroundings::new(config, metrics),
        }
    }

    /// Runs until the lifetime is cancelled.
    pub async fn run(mut self, mut inbox: Inbox, lifetime: Lifetime) {
        let stopped = lifetime.cancelled();
        tokio::pin!(stopped);
        let alarm = tokio::time::sleep_until(self.around.wake_at(None));
        tokio::pin!(alarm);
        let mut flush_again = None;
        loop {
            self.around.look_at_clock();
            self.postpone_timers();
            // It may ring early, for nothing, but not all the time: that is cheaper than to set it anew for every frame.
            let wake = self.around.wake_at(flush_again);
            let is_in_vain = alarm.deadline() + EARLY < wake && alarm.deadline() < Instant::now() + SOON;
            if wake < alarm.deadline() || is_in_vain || alarm.is_elapsed() {
                // A timer that is reset to later still wakes the thread at its earlier time.
                alarm.set(tokio::time::sleep_until(wake));
            }
            tokio::select! {
                biased;
                // The process ends.
                () = &mut stopped => return,
                // Clients that left or have all they want: first, for their work is waste.
                Some(id) = self.cancelled.next(), if !self.cancelled.is_empty() => self.cancel(id),
                // What workers said moves sequences that are under way.
                Some(event) = inbox.workers.recv() => self.worker_event(event),
                // New requests.
                Some(submission) = inbox.submissions.recv() => self.submit(submission),
                // An operator asks why.
                Some(answer) = inbox.questions.recv() => {
                    self.around.look_at_clock();
                    drop(answer.send(self.around.explain()));
                }
                // Deadlines.
                () = &mut alarm => self.fire_timers(),
            }
            while let Ok(event) = inbox.workers.try_recv() {
                self.worker_event(event);
            }
            self.fill_seats();
            self.begin_rounds();
            flush_again = self.around.pool.flush();
            if self.around.has_unsaid() {
                let_frames_leave().await;
                self.around.speak();
            }
        }
    }

    fn submit(&mut self, Submission { generation, answer }: Submission) {
        self.around.look_at_clock();
        // A client that left before its answer is seen by the sink.
        drop(answer.send(self.accept(generation)));
    }

    fn accept(&mut self, generation: Generation) -> Result<GenerationStream, RouterError> {
        let Some(vocab_size) = self.around.pool.vocab_size_of(&generation.model) else {
            let reason = format!("no target worker is ready for model `{}`", generation.model);
            return Err(RouterError::Unavailable { reason });
        };
        let limits = Limits { vocab_size, target_deadline: self.around.config.target_deadline };
        let (sink, stream) = channel(generation.num_choices);
        for choice in 0..generation.num_choices {
            self.start_sequence(&generation, choice, limits, sink.clone());
        }
        Ok(stream)
    }

    fn start_sequence(&mut self, generation: &Generation, choice: u32, limits: Limits, sink: GenerationSink) {
        let id = SequenceId(self.next_sequence);
        self.next_sequence += 1;
        let lane = self.around.controllers.join(LaneKey::of(generation));
        let spec = SequenceSpec {
            choice,
            lane: lane_number(&lane.key.task_type),
            // The prompt is scored once.
            prompt_logprobs: generation.spec.prompt_logprobs.filter(|_| choice == 0),
            traceparent: service::telemetry::traceparent_of(&generation.span).unwrap_or_default(),
            ..generation.spec.clone()
        };
        let cancelled = sink.cancelled(choice);
        self.cancelled.push(Box::pin(async move {
            cancelled.cancelled_owned().await;
            id
        }));
        let now = self.around.now();
        let mut running = Running {
            id,
            marks: PrefixMarks::of(&generation.prompt_ids, spec.isolation_key),
            sequence: Sequence::new(id, Arc::new(spec), &generation.prompt_ids, limits),
            sink,
            choice,
            lane,
            request: generation.speculation,
            target: None,
            draft: None,
            numerics_id: None,
            clock: RoundClock::default(),
            agreement: Agreement::default(),
            asked: None,
            submitted_at: now,
            waits_since: now,
            target_by: now,
            timer: None,
            disabled_reason: None,
            span: generation.span.clone(),
            round: tracing::Span::none(),
            round_span_id: 0,
        };
        self.around.wait_for_target(&mut running);
        self.sequences.insert(id, running);
    }

    fn cancel(&mut self, id: SequenceId) {
        self.around.look_at_clock();
        self.drive(id, Event::Cancel);
        self.forget(id);
    }

    fn worker_event(&mut self, event: WorkerEvent) {
        self.around.look_at_clock();
        match event {
            WorkerEvent::Up(worker) => {
                self.around.pool.join(worker);
                self.around.has_room = true;
                self.show_health();
            }
            WorkerEvent::Down(key) => {
                self.worker_down(key);
                self.show_health();
            }
            WorkerEvent::Frame(key, frame) => self.worker_frame(key, frame),
        }
    }

    /// A router without a target serves nobody.
    fn show_health(&self) {
        if self.around.pool.has(Role::Target) {
            self.health.set_ready();
        } else {
            self.health.set_not_ready("no target worker is connected");
        }
    }

    fn worker_down(&mut self, key: WorkerKey) {
        let Some(worker) = self.around.pool.leave(key) else { return };
        let role = worker.role;
        let orphans: Vec<SequenceId> = self
            .sequences
            .iter()
            .filter(|(_, running)| running.worker(role) == Some(key))
            .map(|(id, _)| *id)
            .collect();
        if !orphans.is_empty() {
            tracing::warn!(
                role = role.as_str(),
                worker.address,
                sequences = orphans.len(),
                "worker lost: replaying"
            );
        }
        for id in orphans {
            self.drive(id, Event::Lost(role));
        }
    }

    fn worker_frame(&mut self, key: WorkerKey, frame: v1::WorkerFrame) {
        let Some(role) = self.around.pool.role_of(key) else { return };
        let timing = frame.timing.unwrap_or_default();
        if let Some(credits) = frame.credits {
            self.around.pool.credit(key, credits.blocks);
            self.around.has_room = true;
        }
        self.around.measure_step(key, &timing, frame.replies.len());
        for reply in frame.replies {
            let id = SequenceId(reply.sequence_id);
            let Some(running) = self.sequences.get_mut(&id).filter(|at| at.worker(role) == Some(key)) else {
                continue;
            };
            match reply_from_wire(reply) {
                Ok(reply) => {
                    self.around.measure_reply(running, (role, key), &reply, &timing);
                    self.around.hear_agreement(running, role, &reply);
                    self.around.drive(running, Event::Reply(role, reply));
                    if running.sequence.is_done() {
                        self.forget(id);
                    }
                }
                Err(error) => tracing::warn!(role = role.as_str(), %error, "a worker's reply makes no sense"),
            }
        }
        for preempted in frame.preempted {
            let id = SequenceId(preempted.sequence_id);
            if self.sequences.get(&id).is_some_and(|running| running.worker(role) == Some(key)) {
                self.drive(id, Event::Preempted(role, preempted.generation));
            }
        }
    }

    /// Most drafts come in time, and the next deadline after that is far: nobody is woken for one that was met.
    fn postpone_timers(&mut self) {
        let soon = self.around.now() + SOON;
        while let Some((at, id)) = self.around.first_timer().filter(|(at, _)| *at < soon) {
            let Some(running) = self.sequences.get_mut(&id) else { return };
            if deadline(running).is_some_and(|deadline| deadline <= at) {
                return;
            }
            self.around.postpone(running);
        }
    }

    fn fire_timers(&mut self) {
        self.around.look_at_clock();
        let now = self.around.now();
        while let Some(id) = self.around.next_timer(now) {
            let Some(running) = self.sequences.get_mut(&id) else { continue };
            running.timer = None;
            if running.target.is_some() {
                self.drive(id, Event::Tick);
            } else if self.around.may_go_on_waiting(running, now) {
                self.around.arm(running);
            } else {
                let reason = format!("no target worker came back for model `{}`", running.lane.key.model);
                self.around.fail(running, RouterError::Unavailable { reason });
                self.cancel(id);
            }
        }
    }

    /// Feeds one event to a sequence, and whatever follows from it.
    fn drive(&mut self, id: SequenceId, event: Event) {
        let Some(running) = self.sequences.get_mut(&id) else { return };
        self.around.drive(running, event);
        if running.sequence.is_done() {
            self.forget(id);
        }
    }

    fn forget(&mut self, id: SequenceId) {
        if let Some(running) = self.sequences.remove(&id) {
            self.around.let_go(running);
        }
    }
}

/// Lets the tasks go first that write to workers: the one that makes bytes of a frame, and the one of the connection. Workers wait for steps, and
/// writing to clients wakes threads that want the same cores.
async fn let_frames_leave() {
    for _ in 0..2 {
        let mut came_back = false;
        std::future::poll_fn(|context| {
            if std::mem::replace(&mut came_back, true) {
                return Poll::Ready(());
            }
            // To the end of this thread's queue; `yield_now` would look for events of the system before.
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }
}
