//! `vllm.grpc.engine.VllmEngine`: the service through which gateways talk to vLLM, so that they can route to
//! this router unmodified. Token ids in, token ids out; the rest of the path is shared with the other APIs.
//! The protocol has no model field: if several models are served, the metadata `x-model` selects one.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use grammar::{Grammar, GrammarKind};
use proto::vllm;
use proto::vllm::generate_request::Input;
use proto::vllm::generate_response::Response as Body;
use proto::vllm::sampling_params::Constraint;
use proto::vllm::vllm_engine_server::{VllmEngine, VllmEngineServer};
use service::unix_time::since_unix_epoch;
use speculation::{FinishReason, TokenId};
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataMap;
use tonic::{Extensions, Request, Response, Status};

use super::grammars::grammar_from_choices;
use super::grpc::{self, deadline_from_metadata, widen};
use super::grpc_key::checked_caller;
use crate::error::RouterError;
use crate::metrics::Protocol;
use crate::pipeline::text_stream::TextStream;
use crate::pipeline::{AppState, RequestContext, run_caught, start_request};
use crate::request::bounds::is_id;
use crate::request::limits::{BODY_BYTES_MAX, ID_LEN_MAX};
use crate::request::raw::{RawPrompt, RawRequest, RawSampling};
use crate::request::structure::RawGrammar;
use crate::request::{Caller, Operation, Usage};
use text::Framing;

const MODEL: &str = "x-model";

/// Server type by which gateways recognize this protocol.
const SERVER_TYPE: &str = "vllm-grpc";

/// Creates the service.
pub fn vllm_grpc_service(state: AppState) -> VllmEngineServer<Engine> {
    let engine = Engine { state, running: RunningRequests::default(), started_at: Instant::now() };
    VllmEngineServer::new(engine).max_decoding_message_size(BODY_BYTES_MAX)
}

/// The handlers of `vllm.grpc.engine.VllmEngine`.
pub struct Engine {
    state: AppState,
    running: RunningRequests,
    started_at: Instant,
}

/// Running requests, by isolation key and request id.
#[derive(Clone, Default)]
struct RunningRequests(Arc<Mutex<RunningState>>);

type Key = (u64, String);

#[derive(Default)]
struct RunningState {
    aborts: HashMap<Key, CancellationToken>,
    last_received_at: f64,
}

/// Registration of a running request, from its arrival on; removed on drop.
struct Registration {
    key: Key,
    abort: CancellationToken,
    requests: RunningRequests,
}

impl RunningRequests {
    fn state(&self) -> MutexGuard<'_, RunningState> {
        // A panic under the lock leaves at most one entry added or removed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn register(&self, key: Key) -> Result<Registration, RouterError> {
        let abort = CancellationToken::new();
        let mut state = self.state();
        state.last_received_at = since_unix_epoch().as_secs_f64();
        if state.aborts.contains_key(&key) {
            let message = format!("a request with request_id `{}` is already running", key.1);
            return Err(RouterError::invalid("request_id", message));
        }
        state.aborts.insert(key.clone(), abort.clone());
        Ok(Registration { key, abort, requests: self.clone() })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.requests.state().aborts.remove(&self.key);
    }
}

#[tonic::async_trait]
impl VllmEngine for Engine {
    type GenerateStream = BoxStream<'static, Result<vllm::GenerateResponse, Status>>;

    async fn generate(
        &self,
        request: Request<vllm::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let (metadata, extensions, message) = request.into_parts();
        let kind = (Protocol::Grpc, Operation::Completion);
        let request_id = match sent_request_id(&message) {
            Ok(Some(id)) => id.to_owned(),
            // An invalid one is refused with all other faults of the message.
            Ok(None) | Err(_) => Operation::Completion.new_request_id(),
        };
        let request_context =
            RequestContext::open(&self.state, kind, request_id, metadata.as_ref(), &extensions);
        let span = request_context.record.span().clone();
        let is_streaming = message.stream;
        let started = self.start((&metadata, &extensions), message, request_context);
        let (text, running) = run_caught(span, started).await?;
        let Some(text) = text else {
            let aborted = complete(Vec::new(), "abort", &Usage::default());
            return Ok(Response::new(stream::once(async { Ok(aborted) }).boxed()));
        };
        Ok(Response::new(
            ResponseStream {
                text,
                running,
                output_ids: Vec::new(),
                finish: None,
                is_streaming,
                ended: false,
            }
            .messages(),
        ))
    }

    async fn embed(
        &self,
        _request: Request<vllm::EmbedRequest>,
    ) -> Result<Response<vllm::EmbedResponse>, Status> {
        Err(Status::unimplemented("the models here generate text and do not support embeddings"))
    }

    async fn health_check(
        &self,
        _request: Request<vllm::HealthCheckRequest>,
    ) -> Result<Response<vllm::HealthCheckResponse>, Status> {
        let state = self.state.health.state();
        let (healthy, message) = (self.state.health.is_ready(), state.as_str().to_owned());
        Ok(Response::new(vllm::HealthCheckResponse { healthy, message }))
    }

    async fn abort(
        &self,
        request: Request<vllm::AbortRequest>,
    ) -> Result<Response<vllm::AbortResponse>, Status> {
        let caller = checked_caller(request.extensions())?;
        let state = self.running.state();
        for id in request.into_inner().request_ids {
            // A request that has ended is ignored.
            if let Some(abort) = state.aborts.get(&(caller.isolation_key, id)) {
                abort.cancel();
            }
        }
        Ok(Response::new(vllm::AbortResponse {}))
    }

    async fn get_model_info(
        &self,
        request: Request<vllm::GetModelInfoRequest>,
    ) -> Result<Response<vllm::GetModelInfoResponse>, Status> {
        let caller = checked_caller(request.extensions())?;
        let entry = caller.model_or_sole(&self.state.catalog, model_from_metadata(request.metadata()))?;
        Ok(Response::new(vllm::GetModelInfoResponse {
            model_path: entry.id.clone(),
            is_generation: true,
            max_context_length: entry.max_model_len,
            vocab_size: entry.vocab_size,
            supports_vision: false,
        }))
    }

    async fn get_server_info(
        &self,
        _request: Request<vllm::GetServerInfoRequest>,
    ) -> Result<Response<vllm::GetServerInfoResponse>, Status> {
        let running = self.running.state();
        Ok(Response::new(vllm::GetServerInfoResponse {
            active_requests: running.aborts.len() as u32,
            is_paused: false,
            last_receive_timestamp: running.last_received_at,
            uptime_seconds: self.started_at.elapsed().as_secs_f64(),
            server_type: SERVER_TYPE.to_owned(),
        }))
    }
}

fn model_from_metadata(metadata: &MetadataMap) -> Option<&str> {
    metadata.get(MODEL).and_then(|value| value.to_str().ok())
}

impl Engine {
    async fn start(
        &self,
        head: (&MetadataMap, &Extensions),
        message: vllm::GenerateRequest,
        mut request_context: RequestContext,
    ) -> Result<(Option<TextStream>, Registration), RouterError> {
        match self.read(head, message, &mut request_context) {
            Ok((raw_request, caller, running)) => {
                let text = tokio::select! {
                    biased;
                    // Aborted while it waits: dropping the start gives up its place.
                    () = running.abort.cancelled() => None,
                    text = start_request(&self.state, raw_request, &caller, request_context) => Some(text?),
                };
                Ok((text, running))
            }
            Err(error) => Err(request_context.refuse(error)),
        }
    }

    fn read(
        &self,
        (metadata, extensions): (&MetadataMap, &Extensions),
        message: vllm::GenerateRequest,
        request_context: &mut RequestContext,
    ) -> Result<(RawRequest, Caller, Registration), RouterError> {
        let mut caller = checked_caller(extensions)?;
        request_context.record.sent_by(&caller);
        request_context.record.set_slo(grpc::apply_gateway_headers(&self.state, &mut caller, metadata)?);
        request_context.deadline = deadline_from_metadata(metadata)?;
        sent_request_id(&message)?;
        let entry = caller.model_or_sole(&self.state.catalog, model_from_metadata(metadata))?;
        let raw_request = RawRequest { model: Some(entry.id.clone()), ..parse_request(message)? };
        let running = self.running.register((caller.isolation_key, request_context.request_id.clone()))?;
        Ok((raw_request, caller, running))
    }
}

/// The id that the client gave to its request, if any.
fn sent_request_id(message: &vllm::GenerateRequest) -> Result<Option<&str>, RouterError> {
    match message.request_id.as_str() {
        "" => Ok(None),
        id if is_id(id.as_bytes()) => Ok(Some(id)),
        _ => {
            let message = format!("request_id must have at most {ID_LEN_MAX} visible ASCII characters");
            Err(RouterError::invalid("request_id", message))
        }
    }
}

fn parse_request(message: vllm::GenerateRequest) -> Result<RawRequest, RouterError> {
    if message.mm_inputs.is_some() {
        return Err(RouterError::invalid(
            "mm_inputs",
            "mm_inputs is not supported: the models here read text",
        ));
    }
    let prompts = match message.input {
        Some(Input::Tokenized(tokenized)) => {
            vec![RawPrompt::TokenIds(tokenized.input_ids.into_iter().map(i64::from).collect())]
        }
        Some(Input::Text(text)) => vec![RawPrompt::Text { text, framing: Framing::Add }],
        None => Vec::new(),
    };
    let sampling = message.sampling_params.unwrap_or_default();
    refuse_unsupported(&sampling)?;
    Ok(RawRequest {
        prompts,
        grammar: parse_constraint(sampling.constraint.as_ref())?,
        // By default the output may fill the rest of the window.
        max_tokens: sampling.max_tokens.map(i64::from),
        fill_context_window: sampling.max_tokens.is_none(),
        min_tokens: Some(sampling.min_tokens.into()),
        seed: sampling.seed.map(i64::from),
        truncate_prompt_tokens: sampling.truncate_prompt_tokens.map(i64::from),
        stop: sampling.stop.clone(),
        stop_token_ids: sampling.stop_token_ids.iter().map(|&id| id.into()).collect(),
        keep_special_tokens: !sampling.skip_special_tokens,
        ignore_eos: sampling.ignore_eos,
        sampling: parse_sampling(sampling),
        ..RawRequest::default()
    })
}

/// Reads the constraint on the output: the same grammars as over HTTP.
fn parse_constraint(constraint: Option<&Constraint>) -> Result<Option<RawGrammar>, RouterError> {
    let (field, grammar) = match constraint {
        Some(Constraint::JsonSchema(text)) => {
            ("sampling_params.json_schema", Grammar { kind: GrammarKind::JsonSchema, text: text.clone() })
        }
        Some(Constraint::JsonObject(true)) => ("sampling_params.json_object", Grammar::json_object()),
        Some(Constraint::Regex(text)) => {
            ("sampling_params.regex", Grammar { kind: GrammarKind::Regex, text: text.clone() })
        }
        Some(Constraint::Choice(choice)) => {
            return grammar_from_choices("sampling_params.choice", &choice.choices).map(Some);
        }
        // Grammars in EBNF and structural tags are refused.
        Some(Constraint::JsonObject(false) | Constraint::Grammar(_) | Constraint::StructuralTag(_))
        | None => {
            return Ok(None);
        }
    };
    Ok(Some(RawGrammar { field, grammar }))
}

fn refuse_unsupported(sampling: &vllm::SamplingParams) -> Result<(), RouterError> {
    let unsupported = [
        matches!(sampling.constraint, Some(Constraint::Grammar(_))).then_some("grammar"),
        matches!(sampling.constraint, Some(Constraint::StructuralTag(_))).then_some("structural_tag"),
        (sampling.n > 1).then_some("n"),
        // This protocol's responses have no fields for them.
        sampling.logprobs.is_some().then_some("logprobs"),
        sampling.prompt_logprobs.is_some().then_some("prompt_logprobs"),
        sampling.include_stop_str_in_output.then_some("include_stop_str_in_output"),
    ];
    match unsupported.into_iter().flatten().next() {
        None => Ok(()),
        Some(field) => {
            let field = format!("sampling_params.{field}");
            Err(RouterError::invalid(field.clone(), format!("{field} is not supported over this protocol")))
        }
    }
}

fn parse_sampling(sampling: vllm::SamplingParams) -> RawSampling {
    let unless_zero = |value: f32| (value != 0.0).then(|| widen(value));
    let mut logit_bias: Vec<(i64, f64)> =
        sampling.logit_bias.into_iter().map(|(id, bias)| (id.into(), widen(bias))).collect();
    // Maps have no order; sort so that equal requests are equal everywhere.
    logit_bias.sort_by_key(|(id, _)| *id);
    RawSampling {
        temperature: sampling.temperature.map(widen),
        top_p: unless_zero(sampling.top_p),
        top_k: Some(sampling.top_k.into()),
        min_p: Some(widen(sampling.min_p)),
        repetition_penalty: unless_zero(sampling.repetition_penalty),
        frequency_penalty: Some(widen(sampling.frequency_penalty)),
        presence_penalty: Some(widen(sampling.presence_penalty)),
        logit_bias,
        ..RawSampling::default()
    }
}

/// Response to one request.
struct ResponseStream {
    text: TextStream,
    running: Registration,
    output_ids: Vec<TokenId>,
    /// Set once the choice is complete.
    finish: Option<FinishReason>,
    /// Whether each delta is sent as a message before the final message, which contains everything.
    is_streaming: bool,
    ended: bool,
}

impl ResponseStream {
    fn messages(self) -> BoxStream<'static, Result<vllm::GenerateResponse, Status>> {
        stream::unfold(self, |mut stream| async move {
            let message = stream.next().await?;
            Some((message, stream))
        })
        .boxed()
    }

    async fn next(&mut self) -> Option<Result<vllm::GenerateResponse, Status>> {
        while !self.ended {
            if let Some(reason) = self.finish {
                return Some(Ok(self.complete(reason.as_str())));
            }
            let next = tokio::select! {
                biased;
                // The request was aborted.
                () = self.running.abort.cancelled() => {
                    self.text.fail(&RouterError::ClientGone);
                    return Some(Ok(self.complete("abort")));
                }
                // The next delta, or the end.
                next = self.text.next() => next,
            };
            match next {
                Some(Ok(delta)) => {
                    let token_ids: Vec<TokenId> = delta.tokens.iter().map(|token| token.id).collect();
                    self.output_ids.extend_from_slice(&token_ids);
                    self.finish = delta.finish;
                    if self.is_streaming && !token_ids.is_empty() {
                        return Some(Ok(self.chunk(token_ids)));
                    }
                }
                Some(Err(error)) => {
                    self.ended = true;
                    return Some(Err(error.into()));
                }
                None => self.ended = true,
            }
        }
        None
    }

    fn chunk(&self, token_ids: Vec<TokenId>) -> vllm::GenerateResponse {
        let usage = self.text.usage();
        let chunk = vllm::GenerateStreamChunk {
            token_ids,
            prompt_tokens: usage.prompt_tokens as u32,
            completion_tokens: usage.completion_tokens as u32,
            cached_tokens: usage.cached_tokens as u32,
        };
        vllm::GenerateResponse { response: Some(Body::Chunk(chunk)) }
    }

    fn complete(&mut self, finish_reason: &str) -> vllm::GenerateResponse {
        self.ended = true;
        complete(std::mem::take(&mut self.output_ids), finish_reason, &self.text.usage())
    }
}

/// The last message of a request.
fn complete(output_ids: Vec<TokenId>, finish_reason: &str, usage: &Usage) -> vllm::GenerateResponse {
    let complete = vllm::GenerateComplete {
        output_ids,
        finish_reason: finish_reason.to_owned(),
        prompt_tokens: usage.prompt_tokens as u32,
        completion_tokens: usage.completion_tokens as u32,
        cached_tokens: usage.cached_tokens as u32,
    };
    vllm::GenerateResponse { response: Some(Body::Complete(complete)) }
}
