//! Tests the driver against the simulator, whose runs are logs of events and of the commands they cause. The
//! driver gets the same events at the same times, over the wire types, and must send the same steps and the
//! same tokens.

use futures::FutureExt as _;
use proto::convert::{proposal_ahead_to_wire, reply_to_wire, step_from_wire};
use scheduling::profile::Profile;
use service::metrics::Metrics;
use simulator::{ENDLESS, Policy, Recording, RequestKind, Setup, Traffic, run_recorded};
use speculation::{FinishReason, Reply, ReplyBody, Step, TokenId, TokenSpan};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::generation::{GenerationEvent, GenerationService as _, GenerationStream, UnreadBytes};
use crate::scheduler::queues;
use crate::workers::ConnectedWorker;

/// Output of the driver in the scheduler's types: steps and closes by worker, tokens by sequence.
#[derive(Debug, Default, PartialEq)]
struct Output {
    steps: Vec<(WorkerKey, Step)>,
    closes: Vec<(WorkerKey, SequenceId, u32)>,
    tokens: Vec<(SequenceId, Vec<TokenId>)>,
    finished: Vec<(SequenceId, FinishReason)>,
}

impl Output {
    fn of(commands: &[Command]) -> Self {
        let mut output = Self::default();
        for command in commands {
            match command {
                Command::Send(worker, step) => output.steps.push((*worker, step.clone())),
                Command::Close(worker, id, assignment) => output.closes.push((*worker, *id, *assignment)),
                Command::Client(ClientEvent::Commit(round)) => {
                    output.tokens.push((round.id, round.commit.token_ids.clone()))
                }
                Command::Client(ClientEvent::Finish(id, reason, _)) => output.finished.push((*id, *reason)),
                Command::Report(_) | Command::Assigned(_) => {}
                other => panic!("not in this run: {other:?}"),
            }
        }
        output.sorted()
    }

    /// Sorts by worker and sequence: frames of different workers, and tokens of different clients, have no
    /// common order.
    fn sorted(mut self) -> Self {
        self.steps.sort_by_key(|(worker, _)| *worker);
        self.closes.sort_by_key(|(worker, ..)| *worker);
        self.tokens.sort_by_key(|(id, _)| *id);
        self.finished.sort_by_key(|(id, _)| *id);
        self
    }
}

/// A driver with the receiving ends of all its channels.
struct Harness {
    driver: Driver,
    workers: Vec<(WorkerKey, Role, mpsc::Receiver<v1::RouterFrame>)>,
    clients: Vec<(SequenceId, GenerationStream)>,
}

impl Harness {
    fn new(recording: &Recording) -> Self {
        let metrics = RouterMetrics::register(&Metrics::new());
        let driver = Driver::new(recording.config.clone(), metrics, Health::new(), Timelines::default());
        Self { driver, workers: Vec::new(), clients: Vec::new() }
    }

    /// Passes an event to the driver as its queues would.
    fn deliver(&mut self, now: Duration, event: Event) {
        match event {
            Event::Submit(new) => self.submit(now, *new),
            Event::WorkerUp(key, info) => {
                let (outbox, frames) = mpsc::channel(64);
                self.workers.push((key, info.role, frames));
                self.driver.on_worker_event(
                    now,
                    WorkerEvent::Up(ConnectedWorker {
                        key,
                        info: *info,
                        outbox,
                        disconnect: CancellationToken::new(),
                    }),
                );
            }
            Event::Frame(key, frame) => {
                self.driver.on_worker_event(now, frame_event(key, frame_to_wire(&frame)))
            }
            Event::Timer | Event::Dispatch => self.driver.on_event(now, event),
            other => panic!("not in this run: {other:?}"),
        }
    }

    fn submit(&mut self, now: Duration, new: NewSequence) {
        let id = new.id;
        self.driver.next_sequence = id.0;
        let request = request_of(new);
        let (reply_tx, reply_rx) = oneshot::channel();
        self.driver.submit(now, Submission { request, reply_tx });
        let stream =
            reply_rx.now_or_never().expect("the driver answers at once").expect("the driver answers");
        self.clients.push((id, stream));
    }

    /// Output since the last call.
    fn take_output(&mut self) -> Output {
        assert!(self.driver.executor.outboxes.flush().is_none(), "the outboxes are drained");
        self.driver.executor.clients.flush();
        let mut output = Output::default();
        for (key, role, frames) in &mut self.workers {
            while let Ok(frame) = frames.try_recv() {
                let step = |step| (*key, step_from_wire(step, *role).expect("the driver's own step"));
                output.steps.extend(frame.steps.into_iter().map(step));
                let close = |close: v1::CloseSequence| (*key, SequenceId(close.sequence_id), close.epoch);
                output.closes.extend(frame.closes.into_iter().map(close));
            }
        }
        for (id, stream) in &mut self.clients {
            while let Some(Some(event)) = stream.next().now_or_never() {
                match event {
                    GenerationEvent::Tokens(tokens) => output.tokens.push((*id, tokens.token_ids.to_vec())),
                    GenerationEvent::Finished { reason, .. } => output.finished.push((*id, reason)),
                    other => panic!("not in this run: {other:?}"),
                }
            }
        }
        self.clients.retain(|(id, _)| output.finished.iter().all(|(finished, _)| finished != id));
        output.sorted()
    }
}

fn request_of(new: NewSequence) -> GenerationRequest {
    let NewSequence { lane, spec, vocab_size, prompt, speculation, prediction, api_key, may_expire, .. } =
        new;
    GenerationRequest {
        request_id: String::new(),
        model: lane.model,
        vocab_size,
        prompt_ids: prompt.ids().to_vec(),
        num_choices: 1,
        spec,
        task_type: lane.task_type,
        speculation,
        prediction,
        unread: UnreadBytes::default(),
        fair_queue_key: api_key,
        may_expire,
        span: tracing::Span::none(),
    }
}

fn frame_event(key: WorkerKey, frame: v1::WorkerFrame) -> WorkerEvent {
    let place = Arc::new(Semaphore::new(1)).try_acquire_owned().expect("it has a permit");
    WorkerEvent::Frame(key, frame, place)
}

fn frame_to_wire(frame: &Frame) -> v1::WorkerFrame {
    let StepTiming { rows, prefill_rows, sequences, kv_tokens, queue, compute } = frame.timing;
    let (queue_us, compute_us) = (queue.as_micros() as u64, compute.as_micros() as u64);
    assert_eq!(
        (queue.subsec_nanos() % 1_000, compute.subsec_nanos() % 1_000),
        (0, 0),
        "the wire has microseconds"
    );
    v1::WorkerFrame {
        replies: frame.replies.iter().map(reply_to_wire).collect(),
        ahead: frame.ahead.iter().cloned().map(proposal_ahead_to_wire).collect(),
        timing: Some(v1::StepTiming { rows, prefill_rows, sequences, kv_tokens, queue_us, compute_us }),
        ..v1::WorkerFrame::default()
    }
}

/// A simulated run of two lanes.
fn recording(seconds: u64) -> Recording {
    let profile = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/profiles/8b-h100.toml");
    let profile = Profile::parse(&std::fs::read_to_string(profile).unwrap()).unwrap();
    let kind = |task_type: &str, output_tokens| RequestKind {
        task_type: task_type.to_owned(),
        share: 0.5,
        prompt_tokens: 200,
        output_tokens,
    };
    let (_, recording) = run_recorded(&Setup {
        profile: &profile,
        traffic: Traffic::Closed { sequences: 12, kinds: vec![kind("code", 60), kind("chat", ENDLESS)] },
        policy: Policy::Lanes { max_k: 8 },
        seed: 7,
        duration: Duration::from_secs(seconds),
        warm_up: Duration::from_secs(1),
    });
    recording
}

#[test]
fn driver_output_equals_the_commands_of_the_simulated_scheduler() {
    let recording = recording(6);
    let mut harness = Harness::new(&recording);
    let (mut drafted, mut finished) = (0, 0);
    for (index, entry) in recording.entries.iter().enumerate() {
        harness.deliver(entry.at, entry.event.clone());
        let output = harness.take_output();
        assert_eq!(output, Output::of(&entry.commands), "event {index} at {:?}: {:?}", entry.at, entry.event);
        if matches!(entry.event, Event::Dispatch) {
            harness.driver.scheduler.next_wakeup();
        }
        drafted += output.tokens.iter().filter(|(_, ids)| ids.len() > 1).count();
        finished += output.finished.len();
    }
    assert!(drafted > 1_000 && finished > 50, "{drafted} spans of several tokens, {finished} requests");
}

/// As when the next frames of workers always wait already: then the driver selects nothing but them.
#[test]
fn reports_and_orders_have_a_turn_beside_every_frame() {
    let metrics = RouterMetrics::register(&Metrics::new());
    let mut driver = Driver::new(recording(1).config, metrics, Health::new(), Timelines::default());
    let (handle, _events, mut inbox) = queues();
    let drain = Drain { address: "10.0.0.1:8100".to_owned(), is_draining: true, moves_sequences: false };
    let (mut report, mut drained) = (handle.report(), handle.drain(drain));
    assert!((&mut report).now_or_never().is_none() && (&mut drained).now_or_never().is_none());
    driver.take_waiting(&mut inbox);
    assert!(report.now_or_never().expect("a report").is_ok());
    driver.take_waiting(&mut inbox);
    assert!(drained.now_or_never().expect("an answer to the order").is_ok());
}

/// The clock jumps over every deadline while the answer of a worker is on its way.
#[test]
fn a_router_that_was_suspended_reads_before_deadlines_pass() {
    const SUSPENDED: Duration = Duration::from_secs(60);
    let Recording { config, entries } = recording(1);
    let mut events = entries.into_iter().map(|entry| entry.event);
    let target = events.find_map(|event| match event {
        Event::WorkerUp(key, info) if info.role == Role::Target => Some((key, *info)),
        _ => None,
    });
    let new = events.find_map(|event| match event {
        Event::Submit(new) => Some(*new),
        _ => None,
    });
    let ((key, info), new) = (target.expect("a target joins"), new.expect("a sequence is submitted"));
    let config = SchedulerConfig { target_deadline: SUSPENDED / 2, ..config };
    let metrics = RouterMetrics::register(&Metrics::new());
    let mut driver = Driver::new(config, metrics, Health::new(), Timelines::default());
    let (handle, to_driver, mut inbox) = queues();
    let (outbox, mut frames) = mpsc::channel(64);
    // Returns the steps that are sent in one turn of the driver.
    let mut turn = |driver: &mut Driver| -> Vec<Step> {
        driver.take_waiting(&mut inbox);
        let now = driver.now();
        driver.on_event(now, Event::Dispatch);
        assert!(driver.executor.outboxes.flush().is_none(), "the outbox is drained");
        let sent =
            std::iter::from_fn(|| frames.try_recv().ok()).flat_map(|frame: v1::RouterFrame| frame.steps);
        sent.map(|step| step_from_wire(step, Role::Target).expect("the driver's own step")).collect()
    };
    let up = ConnectedWorker { key, info, outbox, disconnect: CancellationToken::new() };
    to_driver.try_send(WorkerEvent::Up(up)).unwrap();
    let mut submitted = handle.submit(request_of(new));
    assert!((&mut submitted).now_or_never().is_none());
    let step = turn(&mut driver).remove(0);
    let _stream = submitted.now_or_never().expect("the driver answers").unwrap();

    driver.started_at -= SUSPENDED;
    assert!(turn(&mut driver).is_empty(), "nothing is sent again: the answer may be on its way");
    let span = TokenSpan { start: step.start(), token_ids: vec![1], ..TokenSpan::default() };
    let replies = vec![reply_to_wire(&Reply::to(&step, ReplyBody::Span(span)))];
    let frame = v1::WorkerFrame { replies, ..v1::WorkerFrame::default() };
    to_driver.try_send(frame_event(key, frame)).unwrap();
    let next = turn(&mut driver).remove(0);
    assert_eq!(next.start(), step.start() + 1, "the answer was used");

    // It was suspended again, and this time no answer comes.
    driver.started_at -= MIN_SILENCE;
    assert!(turn(&mut driver).is_empty());
    driver.started_at -= SUSPENDED;
    assert!(turn(&mut driver).is_empty());
    driver.started_at -= MIN_SILENCE;
    assert_eq!(turn(&mut driver).remove(0).start(), next.start(), "the step is sent again");
}

#[test]
fn an_unsampled_request_propagates_no_trace() {
    use opentelemetry::trace::TracerProvider as _;
    use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider};
    use tracing_subscriber::layer::SubscriberExt as _;

    for (sampler, is_traced) in [(Sampler::AlwaysOff, false), (Sampler::AlwaysOn, true)] {
        let provider = SdkTracerProvider::builder().with_sampler(sampler).build();
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
        let _subscriber = tracing::subscriber::set_default(tracing_subscriber::registry().with(layer));
        let traceparent = sampled_traceparent_of(&tracing::info_span!("request"));
        assert_eq!(traceparent.is_empty(), !is_traced, "{traceparent}");
    }
}
