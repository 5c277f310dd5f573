//! The doors: requests come in over HTTP ([`http`], in the shapes of [`openai`]) or gRPC ([`grpc`]), become one
//! [`SentRequest`], are checked once ([`request`]), and start once ([`begin`]): admission, tokenize, lane. What comes
//! back is one [`TextStream`], whichever the door.
//!
//! A door must never judge a value, count tokens, or know a worker.

pub mod auth;
mod bounds;
mod debug;
pub mod grpc;
pub mod http;
mod json;
pub mod limits;
pub mod openai;
pub mod request;

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use service::health::Health;
use service::metrics::Metrics;
use service::shutdown::Lifetime;
use speculation::SequenceSpec;
use tracing::{Instrument as _, info_span};

pub use self::auth::{Auth, Caller};
pub use self::request::{CheckedRequest, SentRequest};
use crate::admission::Admission;
use crate::catalog::Catalog;
use crate::error::RouterError;
use crate::generation::{Generation, Lanes};
use crate::lane::policy::PolicyConfig;
use crate::metrics::RouterMetrics;
use crate::request_record::RequestRecord;
use crate::request_span;
use crate::token_span::text_stream::{Echo, ResponseInfo, StartedPrompt, TextStream, TextStreamParts};
use crate::tokenize::{TokenizePool, TokenizedPrompt, tokenize};

/// What a client asks a model to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Answer a conversation.
    Chat,
    /// Continue a text.
    Completion,
}

impl Operation {
    /// The GenAI semantic conventions' word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completion => "text_completion",
        }
    }

    /// A fresh request id, in OpenAI's form.
    pub fn new_request_id(self) -> String {
        let prefix = match self {
            Self::Chat => "chatcmpl",
            Self::Completion => "cmpl",
        };
        format!("{prefix}-{}", uuid::Uuid::now_v7().simple())
    }
}

/// What the doors share. Clones are handles to the same.
#[derive(Clone)]
pub struct AppState {
    /// Who runs generations.
    pub lanes: Arc<dyn Lanes>,
    /// Which models exist.
    pub catalog: Catalog,
    /// How much may run at once.
    pub admission: Admission,
    /// Who may ask.
    pub auth: Auth,
    /// Shown at `/health/*`.
    pub health: Health,
    /// Shown at `/metrics`.
    pub metrics_page: Metrics,
    /// What the doors count.
    pub metrics: RouterMetrics,
    /// Where text becomes ids.
    pub tokenize: TokenizePool,
    /// How long a client that reads a stream hears nothing at most.
    pub keep_alive: Duration,
    /// What the operator settled for lanes.
    pub policy: Arc<PolicyConfig>,
    /// While it drains nothing new is taken; when it is cancelled, streams are cut.
    pub lifetime: Lifetime,
}

/// Checks a request, waits for its turn, tokenizes it and hands it to its lane. On an error the record has been told.
pub async fn begin(
    state: &AppState,
    sent: SentRequest,
    caller: &Caller,
    request_id: String,
    mut record: RequestRecord,
) -> Result<TextStream, RouterError> {
    match start(state, sent, caller, &request_id, &mut record).await {
        Ok((request, prompts)) => Ok(TextStream::new(TextStreamParts {
            info: ResponseInfo {
                id: request_id,
                created: unix_seconds(),
                model: request.entry.id.clone(),
                system_fingerprint: request.entry.numerics_id.clone(),
                seed: request.seed,
                num_choices: prompts.len() as u32 * request.num_choices,
                logprobs: request.logprobs.is_some(),
            },
            model: Arc::clone(&request.entry.text),
            stop: request.stop,
            prompts,
            num_choices: request.num_choices,
            record,
            lifetime: state.lifetime.clone(),
        })),
        Err(error) => {
            record.failed(&error);
            Err(error)
        }
    }
}

async fn start(
    state: &AppState,
    sent: SentRequest,
    caller: &Caller,
    request_id: &str,
    record: &mut RequestRecord,
) -> Result<(CheckedRequest, Vec<StartedPrompt>), RouterError> {
    if state.lifetime.is_draining() {
        return Err(RouterError::Draining);
    }
    let mut request = sent.check(&state.catalog, caller)?;
    request_span::record_request(record.span(), request_id, caller, &request);
    record.waiting(&request.entry.id);

    let permit = state.admission.admit(request.num_sequences(), request.priority);
    let permit = permit.instrument(info_span!("queue")).await?;
    record.admitted(permit, state.lifetime.work("request"));

    let (model, prompts) = (Arc::clone(&request.entry.text), std::mem::take(&mut request.prompts));
    let job = move || prompts.into_iter().map(|prompt| tokenize(&model, prompt)).collect();
    let tokenized: Vec<TokenizedPrompt> = state.tokenize.run(job).instrument(info_span!("tokenize")).await?;

    // Every prompt is known to fit before the first one starts.
    let planned: Result<Vec<Planned>, RouterError> =
        tokenized.into_iter().map(|prompt| plan(state, &request, prompt)).collect();
    let planned = planned?;
    let mut started = Vec::with_capacity(planned.len());
    for Planned { prompt: TokenizedPrompt { ids, text, .. }, task_type, spec } in planned {
        request_span::record_lane(record.span(), &task_type, spec.acceptance);
        let scores_prompt = request.wants_prompt_logprobs() && ids.len() > 1;
        let stream = if spec.max_len > spec.prompt_len || scores_prompt {
            let generation = Generation {
                request_id: request_id.to_owned(),
                model: request.entry.id.clone(),
                prompt_ids: ids.clone(),
                num_choices: request.num_choices,
                spec,
                task_type,
                speculation: request.speculation,
                span: record.span().clone(),
            };
            Some(state.lanes.submit(generation).await?)
        } else {
            None
        };
        let echo = match (request.echo, request.logprobs) {
            (false, _) => Echo::Off,
            (true, None) => Echo::Text(text),
            (true, Some(_)) => Echo::Logprobs(text),
        };
        started.push(StartedPrompt { stream, ids, echo });
    }
    Ok((request, started))
}

/// A prompt that is ready to start.
struct Planned {
    prompt: TokenizedPrompt,
    task_type: String,
    spec: SequenceSpec,
}

/// Where nobody says what a prompt asks for, its text does.
fn plan(state: &AppState, request: &CheckedRequest, prompt: TokenizedPrompt) -> Result<Planned, RouterError> {
    let task_type = request.task_type.clone().unwrap_or_else(|| prompt.task_type.to_owned());
    let acceptance = state.policy.lane(&task_type).acceptance;
    let spec = request.spec(prompt.ids.len() as u32, acceptance)?;
    Ok(Planned { prompt, task_type, spec })
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
