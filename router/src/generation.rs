//! The interface between text and scheduling: a checked, tokenized request goes in, committed token ids come
//! out.
//!
//! The API, admission and tokenization handle text and do not depend on workers; the scheduler handles ids
//! and does not depend on text. Its driver sends each request's events through a bounded [`channel()`]. Must
//! not depend on text, sockets, HTTP or gRPC.

mod channel;

use std::sync::Arc;

use async_trait::async_trait;
pub use scheduling::rollout::RolloutOrder;
pub use scheduling::scheduler::events::{Drain, SpeculationUsage};
pub use scheduling::scheduler::policy::SpeculationRequest;
use scheduling::scheduler::{SchedulerReport, WorkerReport};
use serde::Serialize;
use smallvec::SmallVec;
use speculation::lookup::PredictedText;
use speculation::step::PromptLogprobs;
use speculation::{FinishReason, SequenceSpec, TokenId, TokenLogprobs};

pub use self::channel::{
    GenerationSink, GenerationStream, MAX_UNREAD_BYTES, MAX_UNREAD_EVENTS, UnreadBytes, channel, wait_started,
};
use crate::error::RouterError;

/// One tokenized, validated request, ready to be scheduled.
#[derive(Debug, Clone)]
pub struct GenerationRequest {
    /// Identifies the request in logs, traces and responses.
    pub request_id: String,
    /// A model of the [`crate::catalog::Catalog`].
    pub model: String,
    /// Size of the model's vocabulary.
    pub vocab_size: u32,
    /// The prompt, never empty; `spec.prompt_len` is its length.
    pub prompt_ids: Vec<TokenId>,
    /// Number of sequences to run for this prompt; sequence `i` gets the spec with `choice = i`.
    pub num_choices: u32,
    /// Seed, sampling and limits; `choice` and `lane` are 0 and set by the scheduler. `max_len` equals
    /// `prompt_len` if only the prompt's log probabilities are requested: no token is generated then.
    pub spec: SequenceSpec,
    /// Task type from the client or its API key, else detected from the prompt.
    pub task_type: String,
    /// The client's settings for speculation.
    pub speculation: SpeculationRequest,
    /// The client's predicted output, if the request has one sequence.
    pub prediction: Option<Arc<PredictedText>>,
    /// The request's span: parent of the rounds' spans.
    pub span: tracing::Span,
    /// Unread bytes of the client.
    pub unread: UnreadBytes,
    /// Key for fair queueing: the API key, or one derived from a gateway's fairness id.
    pub fair_queue_key: u64,
    /// Whether the generation fails when it waits too long for its first target. Only set if no other
    /// generation of its request has started.
    pub may_expire: bool,
}

/// Event of a generation. Events of one choice arrive in order; choices interleave.
#[derive(Debug, Clone)]
pub enum GenerationEvent {
    /// Log probabilities of the prompt, if `spec.prompt_logprobs` requests them: once per generation, in
    /// ascending parts if the prompt is prefilled in parts, all before the first token of choice 0. Other
    /// choices may be ahead.
    PromptLogprobs(PromptLogprobs),
    /// One committed span of a choice; never empty.
    Tokens(CommittedTokens),
    /// The choice is complete. Sent once per choice, also if no token was to be generated.
    Finished {
        /// Index of the choice.
        choice: u32,
        /// Stop token, or length limit `max_len`.
        reason: FinishReason,
        /// Usage of the choice.
        usage: SpeculationUsage,
    },
    /// The generation failed; no further event follows for any choice.
    Failed(RouterError),
}

impl GenerationEvent {
    /// Size while the event is unread. The prompt's log probabilities count as 0: they arrive once, and the
    /// window limits their number.
    pub(crate) fn num_bytes(&self) -> usize {
        let payload = match self {
            Self::Tokens(tokens) => {
                let entries = tokens
                    .logprobs
                    .iter()
                    .map(|entry| size_of::<TokenLogprobs>() + entry.top.len() * size_of::<(TokenId, f32)>());
                tokens.token_ids.len() * size_of::<TokenId>() + entries.sum::<usize>()
            }
            Self::PromptLogprobs(_) | Self::Finished { .. } | Self::Failed(_) => 0,
        };
        size_of::<Self>() + payload
    }
}

/// Ids of a span. Usually few, and then stored inline, because memory allocated on one thread and freed on
/// another is expensive.
pub type SpanIds = SmallVec<[TokenId; 8]>;

/// One committed span of one choice.
#[derive(Debug, Clone, PartialEq)]
pub struct CommittedTokens {
    /// Index of the choice.
    pub choice: u32,
    /// Accepted drafted ids, then the target's own draw.
    pub token_ids: SpanIds,
    /// Number of leading `token_ids` that were drafted.
    pub num_drafted: u32,
    /// One entry per id if `spec.logprobs` requests them, else empty.
    pub logprobs: Vec<TokenLogprobs>,
    /// Usage of the choice up to and including this span; reported if a stop string ends the choice here.
    pub usage: SpeculationUsage,
}

/// Runs generations.
#[async_trait]
pub trait GenerationService: Send + Sync {
    /// Submits a request and returns once it is scheduled. An error here is sent to the client before the
    /// first byte (unknown model, no target ready, queue full).
    async fn submit(&self, request: GenerationRequest) -> Result<GenerationStream, RouterError>;

    /// Executes an operator's drain order, whose address may be just HOST:PORT; `None` if no worker matches.
    async fn drain(&self, drain: Drain) -> Result<Option<DrainState>, RouterError>;

    /// Executes an operator's rollout order; returns the report after it.
    async fn rollout(&self, order: RolloutOrder) -> Result<SchedulerReport, RouterError>;

    /// Current state of lanes and workers, with the reasons for decisions.
    async fn report(&self) -> Result<SchedulerReport, RouterError>;
}

/// Result of a drain order.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DrainState {
    /// The connected workers that matched.
    pub workers: Vec<WorkerReport>,
    /// The matching addresses that are drained, including for workers that connect later.
    pub drained: Vec<String>,
}
