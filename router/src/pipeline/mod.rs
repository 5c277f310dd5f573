//! The path of a request: checks, admission, tokenization, scheduler. The result is a [`TextStream`], the
//! same for every API.

pub mod body_memory;
pub mod buffer_memory;
mod context;
pub mod deadline;
pub mod echo;
pub mod response_log;
pub mod response_store;
pub mod text_delta;
pub mod text_stream;

use std::sync::Arc;
use std::time::Duration;

use scheduling::scheduler::policy::PolicyConfig;
use service::health::Health;
use service::metrics::Metrics;
use service::shutdown::Lifetime;
use service::unix_time::since_unix_epoch;
use speculation::SequenceSpec;
use speculation::lookup::PredictedText;
use tracing::{Instrument as _, info_span};

use self::body_memory::BodyMemory;
use self::buffer_memory::{BufferMemory, MemoryReservation, RESPONSE_BYTES_MAX};
pub use self::context::{RequestContext, run_caught};
use self::deadline::Deadline;
use self::echo::{Echo, scored_bytes};
use self::response_log::ResponseLog;
use self::response_store::ResponseStore;
use self::text_delta::ResponseInfo;
use self::text_stream::{StartedPrompt, TextStream, TextStreamParts};
use crate::admission::{Admission, AdmissionRequest};
use crate::catalog::Catalog;
use crate::error::RouterError;
use crate::generation::{GenerationRequest, GenerationService, UnreadBytes, wait_started};
use crate::metrics::RouterMetrics;
use crate::request::gateway::Objectives;
use crate::request::record::RequestRecord;
use crate::request::{Auth, Caller, CheckedRequest, RawRequest, span};
use crate::request_log::RequestLog;
use crate::tokenize::{
    Prompt, TokenizePool, TokenizedPrompt, bad_word_ids, check_vocabulary, predicted_text, tokenize,
    tokenize_newest,
};

/// State shared by the APIs. Clones are handles to the same state.
#[derive(Clone)]
pub struct AppState {
    /// Runs generation requests.
    pub generation: Arc<dyn GenerationService>,
    /// Models being served.
    pub catalog: Catalog,
    /// Limits on concurrent requests.
    pub admission: Admission,
    /// Authenticates callers.
    pub auth: Auth,
    /// Served at `/health/*`.
    pub health: Health,
    /// Served at `/metrics`.
    pub metrics_page: Metrics,
    /// Metrics of the APIs.
    pub metrics: RouterMetrics,
    /// Thread pool for tokenization.
    pub tokenize: TokenizePool,
    /// Idle time on an open stream before a keep-alive is sent.
    pub keep_alive: Duration,
    /// Memory limit for buffered responses and echoed prompts.
    pub response_memory: BufferMemory,
    /// Memory limit for request bodies that are being read.
    pub body_memory: BodyMemory,
    /// Stored responses that a later request may continue.
    pub responses: ResponseStore,
    /// Priorities of the objectives that a gateway names.
    pub objectives: Arc<Objectives>,
    /// Log of finished requests; `None` if disabled.
    pub request_log: Option<RequestLog>,
    /// Whether the process's log has a line for each request.
    pub access_log: bool,
    /// The operator's settings per lane.
    pub policy: Arc<PolicyConfig>,
    /// Draining: new requests are refused. Cancelled: open streams end with an error.
    pub lifetime: Lifetime,
}

/// Checks a request, waits for admission, tokenizes it and submits it. Errors are recorded before they are
/// returned.
pub async fn start_request(
    state: &AppState,
    raw_request: RawRequest,
    caller: &Caller,
    request_context: RequestContext,
) -> Result<TextStream, RouterError> {
    let RequestContext { request_id, deadline, response, mut record } = request_context;
    let started = check_and_submit(state, raw_request, caller, &request_id, &mut record);
    let StartedRequest { request, prompts, echo_memory } =
        Deadline::enforce(deadline, started).await.inspect_err(|error| record.failed(error))?;
    let model = Arc::clone(&request.entry.text);
    let info = ResponseInfo {
        id: request_id,
        created: since_unix_epoch().as_secs(),
        model: request.entry.id.clone(),
        system_fingerprint: request.entry.numerics_id.clone(),
        seed: request.seed,
        num_choices: prompts.len() as u32 * request.num_choices,
        logprobs: request.logprobs.is_some(),
        output: request.output,
    };
    let log = state.request_log.clone().filter(|_| request.may_be_logged);
    let log = log.map(|log| ResponseLog::new(log, &info.id, &request.entry, &prompts, request.num_choices));
    Ok(TextStream::new(TextStreamParts {
        info,
        model,
        stop: request.stop,
        client_stop_token_ids: request.client_stop_token_ids,
        prompts,
        echo_memory,
        choices_per_prompt: request.num_choices,
        record,
        deadline,
        response,
        lifetime: state.lifetime.clone(),
        log,
    }))
}

/// A checked and tokenized request.
#[derive(Debug)]
pub struct Rendered {
    /// The request after the checks.
    pub request: CheckedRequest,
    /// At least one, each within the model's context window.
    pub prompts: Vec<(TokenizedPrompt, SequenceSpec)>,
}

/// Checks and tokenizes a request without running it, for gateways that route by token ids and for counting
/// tokens.
pub async fn render(
    state: &AppState,
    raw_request: RawRequest,
    caller: &Caller,
) -> Result<Rendered, RouterError> {
    let _work = state.lifetime.work("request");
    if state.lifetime.is_draining() {
        return Err(RouterError::Draining);
    }
    let mut request = raw_request.check(&state.catalog, caller)?;
    let prompts = tokenize_prompts(state, &mut request, caller).await?;
    tokenize_bad_words(state, &mut request, caller).await?;
    let prepare =
        |prompt| prepare(state, &request, prompt).map(|PreparedPrompt { prompt, spec, .. }| (prompt, spec));
    let prompts = prompts.into_iter().map(prepare).collect::<Result<_, RouterError>>()?;
    Ok(Rendered { request, prompts })
}

/// A request whose generations have started.
struct StartedRequest {
    request: CheckedRequest,
    prompts: Vec<StartedPrompt>,
    echo_memory: MemoryReservation,
}

/// A prompt that is ready for submission.
struct PreparedPrompt {
    prompt: TokenizedPrompt,
    task_type: String,
    spec: SequenceSpec,
}

async fn check_and_submit(
    state: &AppState,
    raw_request: RawRequest,
    caller: &Caller,
    request_id: &str,
    record: &mut RequestRecord,
) -> Result<StartedRequest, RouterError> {
    // Before the check, so that a drain waits for every request that passes it, while it waits for admission,
    // too.
    record.in_flight(state.lifetime.work("request"));
    if state.lifetime.is_draining() {
        return Err(RouterError::Draining);
    }
    let mut request = raw_request.check(&state.catalog, caller)?;
    span::record_request(record.span(), caller, &request);
    record.for_model(&request.entry.id);
    admit(state, &request, caller, record).await?;

    let tokenized = tokenize_prompts(state, &mut request, caller).await?;
    let prediction = tokenize_prediction(state, &mut request, caller).await?;
    tokenize_bad_words(state, &mut request, caller).await?;
    if let [prompt] = tokenized.as_slice() {
        request.output.apply_prompt(&prompt.text);
    }
    // Check that every prompt fits before the first one starts.
    let prepared = tokenized.into_iter().map(|prompt| prepare(state, &request, prompt));
    let prepared = prepared.collect::<Result<Vec<_>, RouterError>>()?;
    let echo_memory = reserve_echo(state, &request, &prepared)?;
    let mut started = Vec::with_capacity(prepared.len());
    let unread = UnreadBytes::default();
    for PreparedPrompt { prompt: TokenizedPrompt { ids, text, .. }, task_type, spec } in prepared {
        span::record_lane(record.span(), &task_type, spec.acceptance);
        let needs_prompt_logprobs = request.prompt_logprobs.is_some() && ids.len() > 1;
        let stream = if spec.max_len > spec.prompt_len || needs_prompt_logprobs {
            let generation = GenerationRequest {
                request_id: request_id.to_owned(),
                model: request.entry.model.clone(),
                vocab_size: request.entry.vocab_size,
                prompt_ids: ids.clone(),
                num_choices: request.num_choices,
                spec,
                task_type: task_type.clone(),
                speculation: request.speculation,
                prediction: prediction.clone(),
                span: record.span().clone(),
                unread: unread.clone(),
                fair_queue_key: caller.fair_queue_key(),
                may_expire: started.iter().all(|earlier: &StartedPrompt| earlier.stream.is_none()),
            };
            Some(state.generation.submit(generation).await?)
        } else {
            None
        };
        started.push(StartedPrompt { stream, ids, echo: echo_of(&request, text), task_type });
    }
    // Until then nothing is streamed, so an error of any prompt can still set the response's status.
    let streams = started.iter_mut().filter_map(|prompt| prompt.stream.as_mut());
    wait_started(streams).instrument(info_span!("wait for target")).await?;
    Ok(StartedRequest { request, prompts: started, echo_memory })
}

/// Counts the request against its key's limits, compiles its grammar and waits for admission.
async fn admit(
    state: &AppState,
    request: &CheckedRequest,
    caller: &Caller,
    record: &mut RequestRecord,
) -> Result<(), RouterError> {
    if let Some(usage) = &caller.usage {
        record.set_key_slot(usage.acquire()?);
    }
    record.waiting(&request.entry.model);
    if let Some(grammar) = request.grammar.clone() {
        let check = state.tokenize.check_grammar(caller.fair_queue_key(), move || grammar.check());
        check.instrument(info_span!("grammar")).await?;
    }
    let admission_request = AdmissionRequest {
        num_sequences: request.num_sequences(),
        priority: request.priority,
        fair_queue_key: caller.fair_queue_key(),
    };
    let permit = state.admission.admit(admission_request);
    let permit = permit.instrument(info_span!("queue")).await?;
    record.admitted(permit);
    Ok(())
}

/// Tokenizes the prompts of a request, taking them out of it.
async fn tokenize_prompts(
    state: &AppState,
    request: &mut CheckedRequest,
    caller: &Caller,
) -> Result<Vec<TokenizedPrompt>, RouterError> {
    let (model, prompts) = (Arc::clone(&request.entry.text), std::mem::take(&mut request.prompts));
    let (max_model_len, max_prompt_tokens) = (request.entry.max_model_len, request.truncate_prompt_tokens);
    let vocab_size = request.entry.vocab_size;
    let limits = request.drop_oldest_messages.then(|| request.prompt_limits());
    let job = move || {
        let tokenized = |prompt: Prompt| {
            let field = prompt.field();
            let prompt = match limits {
                Some(limits) => tokenize_newest(&model, prompt, max_model_len, limits)?,
                None => tokenize(&model, prompt, max_model_len)?,
            };
            let prompt = prompt.keep_last(max_prompt_tokens, &model);
            check_vocabulary(&model, field, &prompt.ids, vocab_size)?;
            Ok(prompt)
        };
        prompts.into_iter().map(tokenized).collect()
    };
    run_tokenizer(state, caller, job).await
}

/// Tokenizes the text that the client predicts, taking it out of the request.
async fn tokenize_prediction(
    state: &AppState,
    request: &mut CheckedRequest,
    caller: &Caller,
) -> Result<Option<Arc<PredictedText>>, RouterError> {
    let Some(text) = request.prediction.take() else { return Ok(None) };
    let (model, max_model_len) = (Arc::clone(&request.entry.text), request.entry.max_model_len);
    let vocab_size = request.entry.vocab_size;
    let job = move || Ok(Some(Arc::new(predicted_text(&model, &text, max_model_len, vocab_size)?)));
    run_tokenizer(state, caller, job).await
}

/// Tokenizes the words that the output must not contain, and checks the excluded tokens.
async fn tokenize_bad_words(
    state: &AppState,
    request: &mut CheckedRequest,
    caller: &Caller,
) -> Result<(), RouterError> {
    let mut ids = Vec::new();
    if !request.bad_words.is_empty() {
        let (model, words) = (Arc::clone(&request.entry.text), request.bad_words.clone());
        let vocab_size = request.entry.vocab_size;
        let job = move || bad_word_ids(&model, &words, vocab_size);
        ids = run_tokenizer(state, caller, job).await?;
    }
    request.exclude(ids)
}

/// Runs a job on the tokenizer's threads, in the caller's turn.
async fn run_tokenizer<T: Send + 'static>(
    state: &AppState,
    caller: &Caller,
    job: impl FnOnce() -> Result<T, RouterError> + Send + 'static,
) -> Result<T, RouterError> {
    state.tokenize.run(caller.fair_queue_key(), job).instrument(info_span!("tokenize")).await
}

/// Sets the task type (detected from the prompt where the request has none) and the sequence's parameters.
fn prepare(
    state: &AppState,
    request: &CheckedRequest,
    prompt: TokenizedPrompt,
) -> Result<PreparedPrompt, RouterError> {
    let task_type = request.task_type.clone().unwrap_or_else(|| prompt.task_type.to_owned());
    let acceptance = state.policy.lane(&task_type).acceptance;
    let spec = request.spec(prompt.ids.len() as u32, acceptance)?;
    Ok(PreparedPrompt { prompt, task_type, spec })
}

/// Reserves the memory of echoed prompts with their log probabilities: the choices of a prompt share one,
/// until the client has taken the last of them.
fn reserve_echo(
    state: &AppState,
    request: &CheckedRequest,
    prepared: &[PreparedPrompt],
) -> Result<MemoryReservation, RouterError> {
    let mut reservation = state.response_memory.reserve();
    if let Some(num_top) = request.prompt_logprobs {
        let field = if request.echo { "echo" } else { "prompt_logprobs" };
        let num_tokens: usize = prepared.iter().map(|prepared| prepared.prompt.ids.len()).sum();
        let num_bytes = scored_bytes(num_tokens, num_top);
        if num_bytes > RESPONSE_BYTES_MAX {
            let message = format!(
                "{field}: the log probabilities of {num_tokens} prompt tokens take {num_bytes} bytes, at most \
                 {RESPONSE_BYTES_MAX} are allowed: send fewer prompts, or request fewer log probabilities"
            );
            return Err(RouterError::invalid(field, message));
        }
        reservation.grow(num_bytes)?;
    }
    Ok(reservation)
}

/// How the request wants a prompt with this text repeated.
fn echo_of(request: &CheckedRequest, text: String) -> Echo {
    match (request.echo, request.prompt_logprobs) {
        (false, None) => Echo::Off,
        (true, None) => Echo::Text(text),
        (true, Some(_)) => Echo::Logprobs(text),
        (false, Some(_)) => Echo::Logprobs(String::new()),
    }
}
