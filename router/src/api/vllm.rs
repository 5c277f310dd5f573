//! vLLM's endpoints in addition to OpenAI's: tokenize, detokenize, render prompts to token ids ([`render`]),
//! version and health. Embeddings are refused, because no model here supports them.

mod render;

use axum::Router;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, post};
use http::{HeaderMap, Method, StatusCode, Uri};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::disabled::unsupported;
use super::functions::ToolFormat;
use super::incoming::authenticate;
use super::integer;
use super::object::Object;
use super::openai::message::{Message, conversation};
use super::openai::shapes::framing;
use super::template_variables::{PromptEnd, checked_variables};
use super::tokenizer_request::TokenizerRequest;
use crate::catalog::ModelEntry;
use crate::detokenize::decode_all;
use crate::error::RouterError;
use crate::pipeline::AppState;
use crate::request::check::checked_token_ids;
use crate::request::tools::ToolChoice;
use crate::tokenize::{Prompt, encode_text, tokenize};
use text::{ChatTemplate, Framing};

/// Routes of these endpoints.
pub(super) fn routes() -> Router<AppState> {
    Router::new()
        .route("/tokenize", post(tokenize_text))
        .route("/detokenize", post(detokenize_ids))
        .route("/tokenizer_info", get(tokenizer_info))
        .route("/version", get(version))
        .route("/metrics", get(metrics))
        .route("/health", get(health))
        // SageMaker's probe uses either method.
        .route("/ping", get(health).post(health))
        .route("/v1/embeddings", post(embeddings))
        .route("/v1/chat/completions/render", post(render::chat))
        .route("/v1/completions/render", post(render::completions))
}

async fn health(State(state): State<AppState>) -> StatusCode {
    if state.health.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

async fn version(State(state): State<AppState>, headers: HeaderMap) -> Result<Response, RouterError> {
    authenticate(&state, &headers)?;
    Ok(Json(json!({ "version": service::release::version() })).into_response())
}

/// Serves metrics at the clients' address, where load generators look for them. They cover the requests of
/// all clients, so with API keys they are served at the operators' address only.
async fn metrics(
    State(state): State<AppState>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, RouterError> {
    if !state.auth.is_open() {
        let path = uri.path().to_owned();
        return Err(RouterError::RouteNotFound { method: method.to_string(), path });
    }
    Ok(state.metrics_page.respond(&headers))
}

/// Serves the tokenizer settings a client needs, as in a checkpoint's `tokenizer_config.json`.
async fn tokenizer_info(State(state): State<AppState>, headers: HeaderMap) -> Result<Response, RouterError> {
    let caller = authenticate(&state, &headers)?;
    let entry = caller.model_or_sole(&state.catalog, None)?;
    let template = entry.text.chat_template();
    let eos_token = entry.eos_token_ids.first().map(|id| entry.text.vocabulary().spell(*id));
    let info = json!({
        "bos_token": template.and_then(ChatTemplate::bos_token),
        "eos_token": eos_token,
        "pad_token": null,
        "chat_template": template.map(ChatTemplate::source),
        "model_max_length": entry.max_model_len,
    });
    Ok(Json(info).into_response())
}

/// Body of `/tokenize`: a text or a conversation.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct TokenizeBody {
    model: Option<String>,
    prompt: Option<String>,
    messages: Option<Vec<Object<Message>>>,
    add_special_tokens: Option<bool>,
    return_token_strs: Option<bool>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    chat_template: Option<Value>,
    chat_template_kwargs: Option<Map<String, Value>>,
    tools: Option<Vec<Value>>,
}

#[derive(Debug, Serialize)]
struct TokenizeResponse {
    count: usize,
    max_model_len: u32,
    tokens: Vec<u32>,
    token_strs: Option<Vec<String>>,
}

async fn tokenize_text(State(state): State<AppState>, request: Request) -> Result<Response, RouterError> {
    let (request, body): (_, TokenizeBody) = TokenizerRequest::read(&state, request).await?;
    let entry = request.caller.model_or_sole(&state.catalog, body.model.as_deref())?;
    let with_token_strs = body.return_token_strs.unwrap_or(false);
    let prompt = body.into_prompt(&entry)?;
    let (text, max_model_len) = (entry.text.clone(), entry.max_model_len);
    let job = move || match prompt {
        TokenizePrompt::Text(prompt, framing) => encode_text(&text, &prompt, framing, max_model_len),
        TokenizePrompt::Chat(prompt) => Ok(tokenize(&text, prompt, max_model_len)?.ids),
    };
    let tokens = request.tokenize(&state, job).await?;
    let vocabulary = entry.text.vocabulary();
    let strings = || tokens.iter().map(|&id| vocabulary.spell(id)).collect();
    let token_strs = with_token_strs.then(strings);
    let response = TokenizeResponse { count: tokens.len(), max_model_len, token_strs, tokens };
    Ok(Json(response).into_response())
}

/// Input to tokenize.
enum TokenizePrompt {
    Text(String, Framing),
    Chat(Prompt),
}

impl TokenizeBody {
    fn into_prompt(self, entry: &ModelEntry) -> Result<TokenizePrompt, RouterError> {
        let invalid = |field: &str, why: &str| Err(RouterError::invalid(field, format!("{field} {why}")));
        if self.chat_template.is_some() {
            return Err(unsupported("chat_template"));
        }
        let tools = self.tools.unwrap_or_default();
        match (self.prompt, self.messages) {
            (Some(_), Some(_)) => invalid("messages", "cannot be combined with prompt: send one of them"),
            (None, None) => invalid("prompt", "is required, or messages"),
            (Some(_), None) if !tools.is_empty() => {
                invalid("tools", "is only allowed together with messages")
            }
            (Some(prompt), None) => Ok(TokenizePrompt::Text(prompt, framing(self.add_special_tokens))),
            (None, Some(_)) if self.add_special_tokens == Some(true) => {
                invalid("add_special_tokens", "is not supported for conversations: the template adds its own")
            }
            (None, messages) => {
                let mut variables = checked_variables(self.chat_template_kwargs)?;
                let prompt_end = PromptEnd {
                    add_generation_prompt: self.add_generation_prompt,
                    continue_final_message: self.continue_final_message,
                };
                prompt_end.set(&mut variables)?;
                let mut tools = ToolFormat::Nested.parse(tools, ToolChoice::default(), None)?;
                tools.set_template_tools(&mut variables);
                let prompts = conversation(messages, variables)?;
                let prompt =
                    prompts.into_iter().next().map(|prompt| prompt.check("messages", entry)).transpose()?;
                prompt
                    .map(TokenizePrompt::Chat)
                    .ok_or_else(|| RouterError::invalid("messages", "messages is required"))
            }
        }
    }
}

/// Body of `/detokenize`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct DetokenizeBody {
    model: Option<String>,
    #[serde(deserialize_with = "integer::optional_list")]
    tokens: Option<Vec<i64>>,
}

async fn detokenize_ids(State(state): State<AppState>, request: Request) -> Result<Response, RouterError> {
    let (request, body): (_, DetokenizeBody) = TokenizerRequest::read(&state, request).await?;
    let entry = request.caller.model_or_sole(&state.catalog, body.model.as_deref())?;
    let tokens = body.tokens.ok_or_else(|| RouterError::invalid("tokens", "tokens is required"))?;
    let ids = checked_token_ids("tokens", &tokens, &entry)?;
    let text = entry.text.clone();
    let prompt = request.tokenize(&state, move || Ok(decode_all(&text, &ids))).await?;
    Ok(Json(json!({ "prompt": prompt })).into_response())
}

async fn embeddings(State(state): State<AppState>, request: Request) -> Result<Response, RouterError> {
    let (request, body): (_, Value) = TokenizerRequest::read(&state, request).await?;
    let model = request.caller.model_or_sole(&state.catalog, body["model"].as_str())?;
    let message = format!(
        "the model `{}` generates text and does not support embeddings: use an embedding model",
        model.id
    );
    Err(RouterError::invalid("model", message))
}
