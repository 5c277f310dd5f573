//! The gRPC API: `outrider.v1.Inference`. Converts messages to a [`RawRequest`] and text deltas to messages;
//! the rest of the path is shared with HTTP. Servers mount [`grpc_service`] behind
//! [`require_key`](super::grpc_key::require_key), which tells it the caller.

use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use grammar::Grammar;
use proto::v1;
use proto::v1::inference_server::{Inference, InferenceServer};
use serde_json::Map;
use speculation::FinishReason;
use tonic::metadata::MetadataMap;
use tonic::{Extensions, Request, Response, Status};

use super::grpc_key::checked_caller;
use super::incoming::{self, TASK_TYPE};
use super::template_variables::{OWN_VARIABLES, refuse_variables};
use crate::detokenize::OutputToken;
use crate::error::RouterError;
use crate::metrics::Protocol;
use crate::pipeline::deadline::{Deadline, GRPC_TIMEOUT_HEADER};
use crate::pipeline::text_delta::{Part, TextDelta};
use crate::pipeline::text_stream::TextStream;
use crate::pipeline::{AppState, RequestContext, run_caught, start_request};
use crate::request::gateway::Slo;
use crate::request::limits::BODY_BYTES_MAX;
use crate::request::raw::{FieldNames, RawPrompt, RawRequest, RawSampling, RawSpeculation};
use crate::request::structure::RawGrammar;
use crate::request::{Caller, Operation, Usage};
use text::{ConversationMessage, Framing};

const REQUEST_ID: &str = "x-request-id";

/// Creates the service.
pub fn grpc_service(state: AppState) -> InferenceServer<InferenceService> {
    InferenceServer::new(InferenceService { state }).max_decoding_message_size(BODY_BYTES_MAX)
}

/// The handlers of `outrider.v1.Inference`.
pub struct InferenceService {
    state: AppState,
}

#[tonic::async_trait]
impl Inference for InferenceService {
    type GenerateStream = BoxStream<'static, Result<v1::GenerateResponse, Status>>;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let (metadata, extensions, message) = request.into_parts();
        let operation = match message.prompt {
            Some(v1::generate_request::Prompt::Chat(_)) => Operation::Chat,
            _ => Operation::Completion,
        };
        let (kind, request_id) = ((Protocol::Grpc, operation), operation.new_request_id());
        let request_context =
            RequestContext::open(&self.state, kind, request_id.clone(), metadata.as_ref(), &extensions);
        let span = request_context.record.span().clone();
        let started = start(&self.state, (&metadata, &extensions), message, request_context);
        let text = run_caught(span, started).await?;
        let mut response = Response::new(messages(text));
        let request_id = request_id.parse().expect("an id is letters, digits and a hyphen");
        response.metadata_mut().insert(REQUEST_ID, request_id);
        Ok(response)
    }

    async fn list_models(
        &self,
        request: Request<v1::ListModelsRequest>,
    ) -> Result<Response<v1::ListModelsResponse>, Status> {
        let caller = checked_caller(request.extensions())?;
        let models = caller.models(&self.state.catalog);
        let models = models.iter().map(|entry| v1::Model {
            id: entry.id.clone(),
            max_model_len: entry.max_model_len,
            system_fingerprint: entry.numerics_id.clone(),
        });
        Ok(Response::new(v1::ListModelsResponse { models: models.collect() }))
    }
}

async fn start(
    state: &AppState,
    head: (&MetadataMap, &Extensions),
    message: v1::GenerateRequest,
    mut request_context: RequestContext,
) -> Result<TextStream, RouterError> {
    match read_request(state, head, message, &mut request_context) {
        Ok((raw_request, caller)) => start_request(state, raw_request, &caller, request_context).await,
        Err(error) => Err(request_context.refuse(error)),
    }
}

fn read_request(
    state: &AppState,
    (metadata, extensions): (&MetadataMap, &Extensions),
    message: v1::GenerateRequest,
    request_context: &mut RequestContext,
) -> Result<(RawRequest, Caller), RouterError> {
    let mut caller = checked_caller(extensions)?;
    request_context.record.sent_by(&caller);
    let raw_request = parse_request(metadata, message)?;
    request_context.deadline = deadline_from_metadata(metadata)?;
    request_context.record.set_slo(apply_gateway_headers(state, &mut caller, metadata)?);
    Ok((raw_request, caller))
}

/// Applies a gateway's metadata to the caller.
pub(super) fn apply_gateway_headers(
    state: &AppState,
    caller: &mut Caller,
    metadata: &MetadataMap,
) -> Result<Slo, RouterError> {
    incoming::apply_gateway_headers(state, caller, |name| {
        metadata.get(name).map(|value| value.as_encoded_bytes())
    })
}

/// Reads the client's deadline for the whole answer, if any.
pub(super) fn deadline_from_metadata(metadata: &MetadataMap) -> Result<Option<Deadline>, RouterError> {
    let timeout = metadata.get(GRPC_TIMEOUT_HEADER).map(|value| value.as_encoded_bytes());
    Ok(timeout.map(Deadline::from_grpc_timeout).transpose()?.flatten())
}

fn parse_request(metadata: &MetadataMap, message: v1::GenerateRequest) -> Result<RawRequest, RouterError> {
    let task_type = match (message.task_type, metadata.get(TASK_TYPE)) {
        (from_message, _) if !from_message.is_empty() => Some(from_message),
        (_, Some(header)) => Some(String::from_utf8_lossy(header.as_encoded_bytes()).into_owned()),
        (_, None) => None,
    };
    let sampling = message.sampling.unwrap_or_default();
    let (prompts, prompt_name) = match message.prompt {
        Some(v1::generate_request::Prompt::Text(text)) => {
            (vec![RawPrompt::Text { text, framing: Framing::Add }], "prompt")
        }
        Some(v1::generate_request::Prompt::TokenIds(ids)) => {
            (vec![RawPrompt::TokenIds(ids.ids.into_iter().map(i64::from).collect())], "prompt")
        }
        Some(v1::generate_request::Prompt::Chat(chat)) => (vec![parse_chat(chat)?], "messages"),
        None => (Vec::new(), "prompt"),
    };
    Ok(RawRequest {
        model: Some(message.model),
        prompts,
        max_tokens: message.max_tokens.map(i64::from),
        min_tokens: sampling.min_tokens.map(i64::from),
        sampling: parse_sampling(sampling),
        n: message.n.map(i64::from),
        seed: message.seed,
        stop: message.stop,
        stop_token_ids: message.stop_token_ids.into_iter().map(i64::from).collect(),
        keep_special_tokens: message.skip_special_tokens == Some(false),
        ignore_eos: message.ignore_eos,
        logprobs: message.logprobs.map(i64::from),
        echo: message.echo,
        grammar: message.grammar.map(|document| parse_grammar(&document)).transpose()?,
        task_type,
        speculation: message.speculation.map(parse_speculation).unwrap_or_default(),
        priority: Some(i64::from(message.priority)),
        names: FieldNames {
            prompt: prompt_name,
            echo: (prompt_name == "prompt").then_some("echo"),
            ..FieldNames::default()
        },
        ..RawRequest::default()
    })
}

fn parse_grammar(document: &str) -> Result<RawGrammar, RouterError> {
    let field = "grammar";
    let grammar = Grammar::from_wire(document);
    let grammar = grammar.map_err(|error| RouterError::invalid(field, format!("{field}: {error}")))?;
    Ok(RawGrammar { field, grammar })
}

fn parse_chat(chat: v1::Chat) -> Result<RawPrompt, RouterError> {
    let template_kwargs = if chat.template_kwargs.is_empty() {
        Map::new()
    } else {
        serde_json::from_str(&chat.template_kwargs).map_err(|error| {
            RouterError::must_be("template_kwargs", format_args!("a JSON object: {error}"))
        })?
    };
    // This API has no other way to pass tools to the template.
    refuse_variables("template_kwargs", &template_kwargs, &OWN_VARIABLES)?;
    let messages = chat.messages.into_iter().map(|message| ConversationMessage {
        role: message.role,
        content: Some(message.content),
        name: message.name,
        ..ConversationMessage::default()
    });
    Ok(RawPrompt::Chat { messages: messages.collect(), template_kwargs })
}

fn parse_sampling(sampling: v1::SamplingParams) -> RawSampling {
    RawSampling {
        temperature: sampling.temperature.map(widen),
        top_k: sampling.top_k.map(i64::from),
        top_p: sampling.top_p.map(widen),
        min_p: sampling.min_p.map(widen),
        repetition_penalty: sampling.repetition_penalty.map(widen),
        frequency_penalty: sampling.frequency_penalty.map(widen),
        presence_penalty: sampling.presence_penalty.map(widen),
        logit_bias: sampling
            .logit_bias
            .into_iter()
            .map(|entry| (i64::from(entry.token_id), widen(entry.bias)))
            .collect(),
        allowed_token_ids: (!sampling.allowed_token_ids.is_empty())
            .then(|| sampling.allowed_token_ids.into_iter().map(i64::from).collect()),
        bad_word_ids: sampling
            .bad_words
            .into_iter()
            .map(|word| word.token_ids.into_iter().map(i64::from).collect())
            .collect(),
        ..RawSampling::default()
    }
}

/// Returns the shortest decimal that parses to `value` (0.7 instead of 0.699999988079071), for messages and
/// so that bounds compare as over HTTP.
pub(super) fn widen(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| f64::from(value))
}

fn parse_speculation(speculation: v1::Speculation) -> RawSpeculation {
    let acceptance = match v1::AcceptanceMode::try_from(speculation.acceptance) {
        Ok(v1::AcceptanceMode::Unspecified) => None,
        Ok(v1::AcceptanceMode::Coupled) => Some("coupled".to_owned()),
        Ok(v1::AcceptanceMode::Rejection) => Some("rejection".to_owned()),
        Ok(v1::AcceptanceMode::Typical) => Some("typical".to_owned()),
        // A mode of a newer protocol: refused later, like every unknown mode.
        Err(_) => Some(speculation.acceptance.to_string()),
    };
    RawSpeculation {
        enabled: speculation.enabled,
        num_draft_tokens: speculation.num_draft_tokens.map(i64::from),
        num_tree_tokens: speculation.num_tree_tokens.map(i64::from),
        acceptance,
    }
}

/// The response stream: one message per delta, then one with the usage.
fn messages(text: TextStream) -> BoxStream<'static, Result<v1::GenerateResponse, Status>> {
    stream::unfold((text, false), |(mut text, ended)| async move {
        if ended {
            return None;
        }
        let (message, ended) = match text.next().await {
            Some(Ok(delta)) => (Ok(delta_response(&text, delta)), false),
            Some(Err(error)) => (Err(error.into()), true),
            None => {
                (Ok(v1::GenerateResponse { usage: Some(usage(&text.usage())), ..base_response(&text) }), true)
            }
        };
        Some((message, (text, ended)))
    })
    .boxed()
}

/// Fields repeated by every message.
fn base_response(text: &TextStream) -> v1::GenerateResponse {
    let info = text.info();
    v1::GenerateResponse {
        request_id: info.id.clone(),
        system_fingerprint: info.system_fingerprint.clone(),
        seed: info.seed as i64,
        ..v1::GenerateResponse::default()
    }
}

fn delta_response(text: &TextStream, delta: TextDelta) -> v1::GenerateResponse {
    let finish = match delta.finish {
        None => v1::FinishReason::Unspecified,
        Some(FinishReason::Stop) => v1::FinishReason::Stop,
        Some(FinishReason::Length) => v1::FinishReason::Length,
    };
    let token_ids = delta.tokens.iter().map(|token| token.id).collect();
    let logprobs = delta.tokens.into_iter().filter_map(wire_logprobs).collect();
    let message = v1::GenerateResponse { choice: delta.choice, finish: finish.into(), ..base_response(text) };
    match delta.part {
        Part::Prompt => v1::GenerateResponse {
            prompt: Some(v1::PromptEcho { text: delta.text, token_ids, logprobs }),
            ..message
        },
        Part::Output => v1::GenerateResponse {
            text: delta.text,
            token_ids,
            logprobs,
            num_drafted: delta.num_drafted,
            ..message
        },
    }
}

fn wire_logprobs(token: OutputToken) -> Option<v1::TokenLogprobs> {
    let logprobs = token.logprobs?;
    let top = logprobs.top.into_iter().map(|(token_id, value)| v1::TokenProb { token_id, value });
    Some(v1::TokenLogprobs { logprob: logprobs.logprob, top: top.collect() })
}

fn usage(usage: &Usage) -> v1::Usage {
    let speculation = &usage.speculation;
    v1::Usage {
        prompt_tokens: usage.prompt_tokens as u32,
        completion_tokens: usage.completion_tokens as u32,
        cached_tokens: usage.cached_tokens as u32,
        speculation: Some(v1::SpeculationUsage {
            rounds: speculation.rounds,
            draft_tokens: speculation.draft_tokens,
            accepted_tokens: speculation.accepted_tokens,
            acceptance_length: speculation.acceptance_length().unwrap_or_default(),
            disabled_reason: speculation.disabled_reason.unwrap_or_default().to_owned(),
        }),
    }
}
