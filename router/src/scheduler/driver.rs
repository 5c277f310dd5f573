//! The task that owns the scheduler. It never waits for a worker or a client: steps go to bounded outboxes,
//! tokens to a bounded channel per request.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures::stream::FuturesUnordered;
use futures::{FutureExt as _, StreamExt as _};
use proto::convert::{proposal_ahead_from_wire, reply_from_wire, step_to_wire};
use proto::v1;
use scheduling::scheduler::events::{ClientEvent, Drain, Frame, NewSequence, Prompt, Report, StepTiming};
use scheduling::scheduler::lanes::{LaneKey, TemperatureBand};
use scheduling::scheduler::{Command, Event, Scheduler, SchedulerConfig, WorkerKey};
use scheduling::target_health::MIN_SILENCE;
use service::health::Health;
use service::shutdown::Lifetime;
use speculation::{Role, SequenceId, SequenceSpec};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Span;

use super::clients::Clients;
use super::outbox::Outboxes;
use super::reports::Reports;
use super::timelines::{SubmittedSequence, TimelineRecorder, Timelines};
use super::{Inbox, Order, Submission};
use crate::generation::{DrainState, GenerationRequest, GenerationSink, channel};
use crate::metrics::RouterMetrics;
use crate::workers::WorkerEvent;

/// The timer may fire this much before the next wakeup without being reset. Tokio's timers have a resolution
/// of one millisecond.
const EARLY_WAKEUP_MAX: Duration = Duration::from_millis(2);

/// A timer further away than this is not reset to later: many rounds end before it fires.
const TIMER_RESET_HORIZON: Duration = Duration::from_secs(1);

/// Timer interval when nothing is due.
const IDLE_INTERVAL: Duration = Duration::from_secs(3_600);

/// Why a router without a connected target is not ready.
pub const NO_TARGET: &str = "no target worker is connected";

type Cancelled = Pin<Box<dyn Future<Output = SequenceId> + Send>>;

/// Owns the scheduler; see the module documentation.
#[derive(Debug)]
pub struct Driver {
    scheduler: Scheduler,
    /// Event times are measured from here.
    started_at: Instant,
    /// Until when workers' streams are read before a deadline that this thread missed itself; see
    /// [`Driver::fire_deadlines`].
    reads_until: Option<Duration>,
    next_sequence: u64,
    cancelled: FuturesUnordered<Cancelled>,
    health: Health,
    executor: Executor,
}

/// Executes the scheduler's commands.
#[derive(Debug)]
struct Executor {
    outboxes: Outboxes,
    /// Cancelling a worker's token ends its connection.
    disconnect_tokens: BTreeMap<WorkerKey, CancellationToken>,
    clients: Clients,
    reports: Reports,
    recorder: TimelineRecorder,
}

impl Driver {
    /// Creates a driver with an empty scheduler: no workers, no sequences. It records the timelines of some
    /// sequences into `timelines`.
    pub fn new(
        config: SchedulerConfig,
        metrics: RouterMetrics,
        health: Health,
        timelines: Timelines,
    ) -> Self {
        Self {
            scheduler: Scheduler::new(config),
            started_at: Instant::now(),
            reads_until: None,
            next_sequence: 1,
            cancelled: FuturesUnordered::new(),
            health,
            executor: Executor {
                outboxes: Outboxes::default(),
                disconnect_tokens: BTreeMap::new(),
                clients: Clients::default(),
                reports: Reports::new(metrics),
                recorder: TimelineRecorder::new(timelines),
            },
        }
    }

    /// Runs until the lifetime is cancelled.
    pub async fn run(mut self, mut inbox: Inbox, lifetime: Lifetime) {
        let stopped = lifetime.cancelled();
        tokio::pin!(stopped);
        let timer = tokio::time::sleep_until(self.started_at + IDLE_INTERVAL);
        tokio::pin!(timer);
        let mut flush_retry_after = None;
        loop {
            let wake = self.wake_at(flush_retry_after);
            // Resetting the timer for every frame costs more than an occasional early wakeup.
            let fires_too_early = timer.deadline() + EARLY_WAKEUP_MAX < wake
                && timer.deadline() < Instant::now() + TIMER_RESET_HORIZON;
            if wake < timer.deadline() || fires_too_early || timer.is_elapsed() {
                // A timer that is reset to a later time still wakes the thread at the earlier one.
                timer.set(tokio::time::sleep_until(wake));
            }
            tokio::select! {
                biased;
                // Shutdown.
                () = &mut stopped => return,
                // Cancelled sequences: first, because further work on them is wasted.
                Some(id) = self.cancelled.next(), if !self.cancelled.is_empty() => self.cancel(self.now(), id),
                // Worker events: they advance sequences in progress.
                Some(event) = inbox.workers.recv() => self.on_worker_event(self.now(), event),
                // New requests.
                Some(submission) = inbox.submissions.recv() => self.submit(self.now(), submission),
                // An operator drains a worker, starts or undoes a rollout, or asks for a report.
                Some(order) = inbox.orders.recv() => self.on_order(self.now(), order),
                // Deadlines, which `take_waiting` handles after everything that arrived.
                () = &mut timer => {}
            }
            self.take_waiting(&mut inbox);
            self.on_event(self.now(), Event::Dispatch);
            self.executor.reports.warn_of_long_outages(self.now());
            flush_retry_after = self.executor.outboxes.flush();
            if self.executor.clients.has_pending() {
                yield_to_writers().await;
                self.executor.clients.flush();
            }
        }
    }

    /// Handles what waits beside the event that was selected: all events of workers and cancellations, one
    /// new request, one order, and deadlines. They would starve while workers never pause.
    fn take_waiting(&mut self, inbox: &mut Inbox) {
        for _ in 0..inbox.workers.len() {
            if let Ok(event) = inbox.workers.try_recv() {
                self.on_worker_event(self.now(), event);
            }
        }
        while let Some(Some(id)) = self.cancelled.next().now_or_never() {
            self.cancel(self.now(), id);
        }
        if let Ok(submission) = inbox.submissions.try_recv() {
            self.submit(self.now(), submission);
        }
        if let Ok(order) = inbox.orders.try_recv() {
            self.on_order(self.now(), order);
        }
        self.fire_deadlines();
    }

    /// Passes in the deadlines that are over. If this thread did not run when the first of them passed (its
    /// process was suspended, or the machine paused), what the workers sent meanwhile is read first: those
    /// that answered in time must not count as late. How long it reads, and from which lateness on, is as for
    /// silent targets ([`scheduling::target_health::TargetHealth::check_silence`]).
    fn fire_deadlines(&mut self) {
        let (now, read_time) = (self.now(), MIN_SILENCE / 2);
        let Some(due) = self.scheduler.next_wakeup().filter(|at| *at <= now) else {
            self.reads_until = None;
            return;
        };
        let wait = if now - due < read_time { Duration::ZERO } else { read_time };
        let until = *self.reads_until.get_or_insert(now + wait);
        if until <= now {
            self.reads_until = None;
            self.on_event(now, Event::Timer);
        }
    }

    fn wake_at(&mut self, flush_retry_after: Option<Duration>) -> Instant {
        let reads_until = self.reads_until.unwrap_or_default();
        let timer = self.scheduler.next_wakeup().map(|at| self.started_at + at.max(reads_until));
        let flush = flush_retry_after.map(|wait| Instant::now() + wait);
        timer.into_iter().chain(flush).min().unwrap_or_else(|| Instant::now() + IDLE_INTERVAL)
    }

    fn now(&self) -> Duration {
        self.started_at.elapsed()
    }

    /// Passes an event to the scheduler and executes the resulting commands.
    fn on_event(&mut self, now: Duration, event: Event) {
        for command in self.scheduler.on_event(now, event) {
            self.executor.execute(now, command);
        }
    }

    /// Ends a sequence that its client no longer wants.
    fn cancel(&mut self, now: Duration, id: SequenceId) {
        let is_stopped = self.executor.clients.remove(id).is_some_and(|client| client.is_stopped());
        let (end, event) =
            if is_stopped { ("finished", Event::Stop(id)) } else { ("cancelled", Event::Cancel(id)) };
        self.executor.recorder.finish(now, id, end);
        self.on_event(now, event);
    }

    fn submit(&mut self, now: Duration, Submission { request, reply_tx }: Submission) {
        let (sink, stream) = channel(request.num_choices, request.unread.clone());
        let prompt = Arc::new(Prompt::new(&request.prompt_ids, request.spec.isolation_key));
        for choice in 0..request.num_choices {
            let id = SequenceId(self.next_sequence);
            self.next_sequence += 1;
            self.add_client(id, sink.clone(), choice, &request.span);
            let submitted = SubmittedSequence {
                id,
                request_id: &request.request_id,
                choice,
                task_type: &request.task_type,
                prompt_len: request.spec.prompt_len,
            };
            self.executor.recorder.start(now, &submitted);
            let new = new_sequence(id, &request, choice, Arc::clone(&prompt));
            self.on_event(now, Event::Submit(Box::new(new)));
        }
        // If the client has left, the sink detects it.
        drop(reply_tx.send(stream));
    }

    /// Adds the client of a sequence, and watches for its cancellation.
    fn add_client(&mut self, id: SequenceId, sink: GenerationSink, choice: u32, span: &tracing::Span) {
        let cancelled = sink.cancelled(choice);
        self.cancelled.push(Box::pin(async move {
            cancelled.cancelled_owned().await;
            id
        }));
        self.executor.clients.insert(id, sink, choice, span.clone());
    }

    /// Executes an order. Its sender may have left before the answer.
    fn on_order(&mut self, now: Duration, order: Order) {
        match order {
            Order::Drain(drain, reply_tx) => {
                let state = self.drain(now, drain);
                if state.is_some() {
                    // Before the answer: an operator may ask for the readiness next.
                    self.update_health();
                }
                drop(reply_tx.send(state));
            }
            Order::Rollout(order, reply_tx) => {
                self.on_event(now, Event::Rollout(order));
                drop(reply_tx.send(self.scheduler.report()));
            }
            Order::Report(reply_tx) => drop(reply_tx.send(self.scheduler.report())),
        }
    }

    fn drain(&mut self, now: Duration, drain: Drain) -> Option<DrainState> {
        let report = self.scheduler.report();
        let connected = report.workers.into_iter().map(|worker| worker.address);
        let matching =
            connected.chain(report.drained).filter(|address| matches_address(address, &drain.address));
        let addresses: BTreeSet<String> = matching.collect();
        for address in &addresses {
            self.on_event(now, Event::Drain(Drain { address: address.clone(), ..drain.clone() }));
        }
        let mut after = self.scheduler.report();
        after.workers.retain(|worker| addresses.contains(&worker.address));
        after.drained.retain(|address| addresses.contains(address));
        (!addresses.is_empty()).then_some(DrainState { workers: after.workers, drained: after.drained })
    }

    fn on_worker_event(&mut self, now: Duration, event: WorkerEvent) {
        match event {
            WorkerEvent::Up(worker) => {
                self.executor.outboxes.insert(worker.key, worker.outbox);
                self.executor.disconnect_tokens.insert(worker.key, worker.disconnect);
                self.executor.reports.worker_joined(worker.key, &worker.info);
                self.executor.recorder.worker_joined(worker.key, worker.info.role);
                self.on_event(now, Event::WorkerUp(worker.key, Box::new(worker.info)));
                self.update_health();
            }
            WorkerEvent::Down(key) => {
                self.on_event(now, Event::WorkerDown(key));
                self.executor.outboxes.remove(key);
                self.executor.disconnect_tokens.remove(&key);
                self.executor.reports.worker_left(key);
                self.executor.recorder.worker_left(key);
                self.update_health();
            }
            WorkerEvent::Listed(key, is_listed) => {
                self.on_event(now, Event::Listed(key, is_listed));
                self.update_health();
            }
            WorkerEvent::Frame(key, frame, _place) => {
                let frame = frame_from_wire(key, frame);
                self.executor.recorder.record_replies(now, &frame.timing, &frame.replies);
                let is_draining = frame.is_draining;
                self.on_event(now, Event::Frame(key, frame));
                if is_draining {
                    self.update_health();
                }
            }
        }
    }

    /// The router is ready only while a target takes new sequences.
    fn update_health(&self) {
        if self.scheduler.has_open_worker(Role::Target) {
            self.health.set_ready();
        } else if self.scheduler.has_worker(Role::Target) {
            self.health.set_not_ready("every connected target worker is draining");
        } else {
            self.health.set_not_ready(NO_TARGET);
        }
    }
}

impl Executor {
    fn execute(&mut self, now: Duration, command: Command) {
        match command {
            Command::Send(worker, step) => {
                self.recorder.record_step(now, worker, &step);
                let span_id = self.clients.round_span_id(step.sequence_id);
                let mut step = step_to_wire(step);
                step.span_id = span_id;
                self.outboxes.step(worker, step);
            }
            Command::Close(worker, id, epoch) => {
                self.outboxes.close(worker, v1::CloseSequence { sequence_id: id.0, epoch });
            }
            Command::Assigned(id) => self.clients.target_assigned(id),
            Command::Disconnect(worker) => {
                if let Some(disconnect) = self.disconnect_tokens.get(&worker) {
                    disconnect.cancel();
                }
            }
            Command::RoundBegun(id, num_draft_tokens) => self.clients.begin_round(id, num_draft_tokens),
            Command::Client(event) => {
                self.record_event(now, &event);
                self.clients.push(event);
            }
            Command::Report(report) => {
                let span = match &report {
                    // Its log line names the request.
                    Report::NumericsChanged { id, .. } => self.clients.span(*id),
                    _ => Span::none(),
                };
                span.in_scope(|| self.reports.report(now, report));
            }
        }
    }

    /// Records a client's event in metrics and timelines.
    fn record_event(&mut self, now: Duration, event: &ClientEvent) {
        match event {
            ClientEvent::Commit(round) => {
                self.recorder.record_commit(round.id, round.commit.token_ids.len());
                self.reports.on_commit(round);
            }
            ClientEvent::PromptLogprobs(..) => {}
            ClientEvent::Finish(id, ..) => self.recorder.finish(now, *id, "finished"),
            ClientEvent::Fail(id, _) => self.recorder.finish(now, *id, "failed"),
        }
    }
}

/// Returns the sequence of one choice of a request.
fn new_sequence(
    id: SequenceId,
    request: &GenerationRequest,
    choice: u32,
    prompt: Arc<Prompt>,
) -> NewSequence {
    NewSequence {
        id,
        lane: LaneKey {
            model: request.model.clone(),
            task_type: request.task_type.clone(),
            temperature: TemperatureBand::of(&request.spec.sampling),
        },
        spec: SequenceSpec {
            choice,
            // The prompt is scored once, for the first choice.
            prompt_logprobs: request.spec.prompt_logprobs.filter(|_| choice == 0),
            traceparent: sampled_traceparent_of(&request.span),
            ..request.spec.clone()
        },
        vocab_size: request.vocab_size,
        prompt,
        speculation: request.speculation,
        prediction: request.prediction.clone(),
        api_key: request.fair_queue_key,
        // Only the first choice may expire: once it has begun the client reads its stream, and the other
        // choices must not fail the request.
        may_expire: request.may_expire && choice == 0,
    }
}

/// Whether `name` is this address: either the whole address or its HOST:PORT.
fn matches_address(address: &str, name: &str) -> bool {
    let authority = address.split_once("://").map_or(address, |(_, rest)| rest.trim_end_matches('/'));
    name == address || name == authority
}

/// Converts a worker's frame to the scheduler's types. Invalid replies are dropped: their steps are sent
/// again.
fn frame_from_wire(worker: WorkerKey, frame: v1::WorkerFrame) -> Frame {
    let timing = frame.timing.unwrap_or_default();
    let timing = StepTiming {
        rows: timing.rows,
        prefill_rows: timing.prefill_rows,
        sequences: timing.sequences,
        kv_tokens: timing.kv_tokens,
        queue: Duration::from_micros(timing.queue_us),
        compute: Duration::from_micros(timing.compute_us),
    };
    // A loop instead of a collected iterator, which would move each reply five times.
    let mut replies = Vec::with_capacity(frame.replies.len());
    for reply in frame.replies {
        match reply_from_wire(reply) {
            Ok(reply) => replies.push(reply),
            Err(error) => tracing::warn!(worker = worker.0, %error, "dropped an invalid reply of a worker"),
        }
    }
    let ahead = frame.ahead.into_iter().map(proposal_ahead_from_wire);
    let preempted = frame.preempted.iter().map(|at| (SequenceId(at.sequence_id), at.epoch));
    Frame {
        timing,
        credit_blocks: frame.credits.map(|credits| credits.blocks),
        preempted: preempted.collect(),
        is_draining: frame.draining,
        replies,
        ahead: ahead.collect(),
    }
}

/// Yields twice so that the tasks that write to workers run first: the one that encodes a frame and the one
/// of the connection.
async fn yield_to_writers() {
    for _ in 0..2 {
        let mut has_yielded = false;
        std::future::poll_fn(|context| {
            if std::mem::replace(&mut has_yielded, true) {
                return Poll::Ready(());
            }
            // Requeues this task at the end of the thread's queue; `yield_now` would poll for I/O events
            // first.
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }
}

/// `traceparent` that makes the workers' spans children of `span`. Empty if the request is not sampled: its
/// rounds and steps need no spans.
fn sampled_traceparent_of(span: &tracing::Span) -> String {
    let is_sampled = service::telemetry::trace_id_of(span).is_some();
    is_sampled.then(|| service::telemetry::traceparent_of(span)).flatten().unwrap_or_default()
}
