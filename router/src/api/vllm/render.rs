//! Renders prompts to token ids, with their sampling parameters, for gateways that generate elsewhere.

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Json, Response};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::api::incoming::task_type_from_headers;
use crate::api::openai::body::Body;
use crate::api::tokenizer_request::TokenizerRequest;
use crate::error::RouterError;
use crate::pipeline::{AppState, Rendered, render};
use crate::request::{CheckedRequest, Operation};

/// `POST /v1/chat/completions/render`.
pub(super) async fn chat(State(state): State<AppState>, request: Request) -> Result<Response, RouterError> {
    let mut rendered = render_prompts(&state, Operation::Chat, request).await?;
    Ok(Json(rendered.pop()).into_response())
}

/// `POST /v1/completions/render`.
pub(super) async fn completions(
    State(state): State<AppState>,
    request: Request,
) -> Result<Response, RouterError> {
    Ok(Json(render_prompts(&state, Operation::Completion, request).await?).into_response())
}

/// One prompt as token ids, with its sampling parameters in vLLM's format.
#[derive(Debug, Serialize)]
struct RenderedPrompt {
    request_id: String,
    token_ids: Vec<u32>,
    features: Option<()>,
    sampling_params: RenderedSampling,
    model: String,
    stream: bool,
    priority: u8,
}

#[derive(Debug, Clone, Serialize)]
struct RenderedSampling {
    n: u32,
    temperature: f32,
    top_p: f32,
    top_k: u32,
    min_p: f32,
    repetition_penalty: f32,
    frequency_penalty: f32,
    presence_penalty: f32,
    logit_bias: Option<Map<String, Value>>,
    allowed_token_ids: Option<Vec<u32>>,
    bad_words: Vec<String>,
    seed: i64,
    stop: Vec<String>,
    stop_token_ids: Vec<u32>,
    include_stop_str_in_output: bool,
    skip_special_tokens: bool,
    max_tokens: u32,
    min_tokens: u32,
    logprobs: Option<u32>,
    prompt_logprobs: Option<u32>,
}

impl RenderedSampling {
    fn new(request: &CheckedRequest, max_tokens: u32) -> Self {
        let sampling = &request.sampling;
        let biases = sampling.logit_bias.iter().map(|(id, bias)| (id.to_string(), json!(bias)));
        Self {
            n: request.num_choices,
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            top_k: sampling.top_k,
            min_p: sampling.min_p,
            repetition_penalty: sampling.repetition_penalty,
            frequency_penalty: sampling.frequency_penalty,
            presence_penalty: sampling.presence_penalty,
            logit_bias: (!sampling.logit_bias.is_empty()).then(|| biases.collect()),
            allowed_token_ids: Some(sampling.allowed_token_ids.clone()).filter(|ids| !ids.is_empty()),
            bad_words: request.bad_words.clone(),
            seed: request.seed as i64,
            stop: request.stop.strings.clone(),
            stop_token_ids: request.stop.token_ids.clone(),
            include_stop_str_in_output: request.stop.included,
            skip_special_tokens: !request.stop.keep_special_tokens,
            max_tokens,
            min_tokens: sampling.min_tokens,
            logprobs: request.logprobs,
            prompt_logprobs: request.prompt_logprobs,
        }
    }
}

async fn render_prompts(
    state: &AppState,
    operation: Operation,
    request: Request,
) -> Result<Vec<RenderedPrompt>, RouterError> {
    let task_type = task_type_from_headers(request.headers())?;
    let (tokenizer_request, body): (_, Body) = TokenizerRequest::read(state, request).await?;
    let (raw_request, options) = body.into_request(operation, task_type)?;
    let rendering = render(state, raw_request, &tokenizer_request.caller);
    let Rendered { request, prompts } = tokenizer_request.until_deadline(rendering).await?;
    let request_id = operation.new_request_id();
    let is_single = prompts.len() == 1;
    let prompts = prompts.into_iter().enumerate().map(|(idx, (prompt, spec))| RenderedPrompt {
        request_id: if is_single { request_id.clone() } else { format!("{request_id}-{idx}") },
        sampling_params: RenderedSampling::new(&request, spec.max_len - spec.prompt_len),
        token_ids: prompt.ids,
        features: None,
        model: request.entry.id.clone(),
        stream: options.stream.is_some(),
        priority: request.priority,
    });
    Ok(prompts.collect())
}
