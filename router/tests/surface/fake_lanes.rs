//! Fake lanes that generate deterministic text and record their requests.

use std::sync::{Arc, Mutex, MutexGuard};

use async_trait::async_trait;
use router::error::RouterError;
use router::generation::{
    CommittedTokens, Drain, DrainState, GenerationEvent, GenerationRequest, GenerationService,
    GenerationSink, GenerationStream, RolloutOrder, SpeculationUsage, channel,
};
use scheduling::draft_score::PairedReport;
use scheduling::rollout::Rollout;
use scheduling::scheduler::SchedulerReport;
use service::shutdown::Lifetime;
use speculation::lookup::PredictionCursor;
use speculation::step::PromptLogprobs;
use speculation::{FinishReason, TokenId, TokenLogprobs};

use crate::client::demo_encode;

/// Tokens per span; all but the last count as drafted.
pub(crate) const SPAN_LEN: usize = 3;

/// Behavior of the next generations.
#[derive(Debug, Clone)]
pub(crate) enum Script {
    /// Choice `c` generates "`c` text", then its first stop token, if it has one.
    Reply(String),
    /// As [`Self::Reply`], but the prompt is scored after all choices but the first have finished.
    ScoreLate(String),
    /// Choices generate one span and then nothing until they are cancelled.
    Hang,
    /// The first choice generates spans until it is cancelled.
    Flood,
    /// Choices generate one span and then fail.
    FailAfterOneSpan(RouterError),
    /// The first prompt gets a target and generates nothing; others fail before they get one.
    FailOtherPrompts(RouterError),
    /// Requests are refused.
    Refuse(RouterError),
    /// A lane with a bug: panics.
    Panic,
    /// The owner task ends after one span.
    Vanish,
}

/// The fake lanes.
pub(crate) struct FakeLanes {
    lifetime: Lifetime,
    span_len: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    script: Script,
    submitted: Vec<GenerationRequest>,
    /// (prompt index in order of submission, choice), in order of cancellation.
    cancelled: Vec<(usize, u32)>,
    /// Number of spans delivered by a flood.
    num_delivered: usize,
}

impl FakeLanes {
    pub(crate) fn new(lifetime: &Lifetime, span_len: usize) -> Arc<Self> {
        let state = State {
            script: Script::Reply(String::new()),
            submitted: Vec::new(),
            cancelled: Vec::new(),
            num_delivered: 0,
        };
        Arc::new(Self { lifetime: lifetime.clone(), span_len, state: Mutex::new(state) })
    }

    pub(crate) fn set_script(&self, script: Script) {
        self.state().script = script;
    }

    pub(crate) fn script(&self) -> Script {
        self.state().script.clone()
    }

    /// Requests submitted since the last call.
    pub(crate) fn take_submitted(&self) -> Vec<GenerationRequest> {
        std::mem::take(&mut self.state().submitted)
    }

    /// The single request submitted since the last call.
    pub(crate) fn take_one(&self) -> GenerationRequest {
        let mut submitted = self.take_submitted();
        assert_eq!(submitted.len(), 1, "{submitted:?}");
        submitted.remove(0)
    }

    pub(crate) fn cancelled(&self) -> Vec<(usize, u32)> {
        self.state().cancelled.clone()
    }

    pub(crate) fn num_delivered(&self) -> usize {
        self.state().num_delivered
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

/// Handle with which a running lane records its events.
#[derive(Clone)]
struct Handle(Arc<FakeLanes>);

/// `Arc<FakeLanes>` as a service of the router.
pub(crate) struct SharedLanes(pub(crate) Arc<FakeLanes>);

#[async_trait]
impl GenerationService for SharedLanes {
    async fn submit(&self, generation: GenerationRequest) -> Result<GenerationStream, RouterError> {
        let (script, prompt_idx) = {
            let mut state = self.0.state();
            state.submitted.push(generation.clone());
            (state.script.clone(), state.submitted.len() - 1)
        };
        match &script {
            Script::Refuse(error) => return Err(error.clone()),
            Script::Panic => panic!("a lane with a bug"),
            _ => {}
        }
        let (sink, stream) = channel(generation.num_choices, generation.unread.clone());
        match &script {
            Script::FailOtherPrompts(error) if prompt_idx > 0 => {
                sink.send(GenerationEvent::Failed(error.clone()));
            }
            _ => sink.mark_started(),
        }
        let handle = Handle(Arc::clone(&self.0));
        self.0.lifetime.spawn("fake-lane", run(handle, script, generation, prompt_idx, sink));
        Ok(stream)
    }

    async fn drain(&self, drain: Drain) -> Result<Option<DrainState>, RouterError> {
        let Drain { address, is_draining, moves_sequences } = drain;
        let drained = vec![format!("{address} {is_draining} {moves_sequences}")];
        Ok((address != "nobody").then_some(DrainState { workers: Vec::new(), drained }))
    }

    async fn rollout(&self, order: RolloutOrder) -> Result<SchedulerReport, RouterError> {
        let rollout = match order {
            RolloutOrder::Begin(settings) => {
                Some(Rollout::new(settings).report(PairedReport::default(), None))
            }
            RolloutOrder::Promote | RolloutOrder::End => None,
        };
        Ok(SchedulerReport { rollout, ..SchedulerReport::default() })
    }

    async fn report(&self) -> Result<SchedulerReport, RouterError> {
        Ok(SchedulerReport { waiting_for_target: 3, ..SchedulerReport::default() })
    }
}

async fn run(
    handle: Handle,
    script: Script,
    generation: GenerationRequest,
    prompt_idx: usize,
    sink: GenerationSink,
) {
    match script {
        Script::Flood => return flood(&handle.0, prompt_idx, &sink).await,
        Script::FailOtherPrompts(_) => return sink.cancelled(0).cancelled().await,
        _ => {}
    }
    let scores_late = matches!(script, Script::ScoreLate(_));
    if !scores_late {
        score_prompt(&generation, &sink);
    }
    let mut uncancelled = Vec::new();
    let mut choices: Vec<u32> = (0..generation.num_choices).collect();
    choices.rotate_left(usize::from(scores_late));
    for choice in choices {
        if scores_late && choice == 0 {
            score_prompt(&generation, &sink);
        }
        let text = match &script {
            Script::Reply(text) | Script::ScoreLate(text) => format!("{choice}{text}"),
            _ => format!("{choice} is only a beginning"),
        };
        if !generate((&script, handle.0.span_len), &generation, choice, &text, &sink) {
            handle.0.state().cancelled.push((prompt_idx, choice));
        } else {
            uncancelled.push(choice);
        }
    }
    match script {
        Script::Hang => {
            for choice in uncancelled {
                sink.cancelled(choice).cancelled().await;
                handle.0.state().cancelled.push((prompt_idx, choice));
            }
        }
        Script::FailAfterOneSpan(error) => {
            sink.send(GenerationEvent::Failed(error));
        }
        _ => {}
    }
}

async fn flood(lanes: &FakeLanes, prompt_idx: usize, sink: &GenerationSink) {
    let span = demo_encode(" flood");
    loop {
        let tokens = committed(None, 0, (0, &span), SpeculationUsage::default());
        if !sink.send(GenerationEvent::Tokens(tokens)) {
            break lanes.state().cancelled.push((prompt_idx, 0));
        }
        lanes.state().num_delivered += 1;
        tokio::task::yield_now().await;
    }
}

/// Sends prompt log probabilities in two parts, the second of which repeats an entry, as after a replay.
fn score_prompt(generation: &GenerationRequest, sink: &GenerationSink) {
    let Some(num_top) = generation.spec.prompt_logprobs else { return };
    let entries: Vec<TokenLogprobs> =
        (1..generation.prompt_ids.len()).map(|position| logprobs(position, num_top)).collect();
    let half = entries.len() / 2;
    for (start, entries) in [(1, &entries[..half]), (half.max(1), &entries[half.max(1) - 1..])] {
        let part = PromptLogprobs { start: start as u32, entries: entries.to_vec() };
        assert!(sink.send(GenerationEvent::PromptLogprobs(part)));
    }
}

/// Generates a text in spans; returns false if it was cancelled.
fn generate(
    (script, span_len): (&Script, usize),
    generation: &GenerationRequest,
    choice: u32,
    text: &str,
    sink: &GenerationSink,
) -> bool {
    let spec = &generation.spec;
    let mut ids = demo_encode(text);
    ids.extend(spec.stop_token_ids.first());
    let max_ids = (spec.max_len - spec.prompt_len) as usize;
    let reason = if ids.len() > max_ids { FinishReason::Length } else { FinishReason::Stop };
    ids.truncate(max_ids);
    let mut usage = SpeculationUsage { cached_tokens: u64::from(choice) + 1, ..SpeculationUsage::default() };
    let mut cursor = generation.prediction.clone().map(|text| PredictionCursor::new(text, 0));
    for (span_idx, span) in ids.chunks(span_len).enumerate() {
        if let Some(cursor) = &mut cursor {
            cursor.read_committed(&ids[..span_idx * span_len + span.len()], |_| {});
            let (appeared, not_yet) = cursor.num_appeared();
            usage.accepted_prediction_tokens = appeared;
            usage.rejected_prediction_tokens = not_yet;
        }
        let num_drafted = span.len() as u64 - 1;
        usage.rounds += 1;
        usage.draft_tokens += span_len as u64 - 1;
        usage.accepted_tokens += num_drafted;
        let tokens = committed(spec.logprobs, choice, (span_idx * span_len, span), usage);
        if !sink.send(GenerationEvent::Tokens(tokens)) {
            return false;
        }
        if !matches!(script, Script::Reply(_) | Script::ScoreLate(_)) {
            return true;
        }
    }
    sink.send(GenerationEvent::Finished { choice, reason, usage });
    true
}

fn committed(
    num_top: Option<u32>,
    choice: u32,
    (start, span): (usize, &[TokenId]),
    usage: SpeculationUsage,
) -> CommittedTokens {
    let logprobs = num_top.map_or_else(Vec::new, |num_top| {
        (start..start + span.len()).map(|position| logprobs(position, num_top)).collect()
    });
    CommittedTokens { choice, token_ids: span.into(), num_drafted: span.len() as u32 - 1, logprobs, usage }
}

/// Arbitrary values that differ by position.
fn logprobs(position: usize, num_top: u32) -> TokenLogprobs {
    let top = (0..num_top).map(|rank| (36 + rank, -0.5 - rank as f32)).collect();
    TokenLogprobs { logprob: -(position as f32) - 0.25, top }
}
