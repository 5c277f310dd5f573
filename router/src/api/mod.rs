//! The APIs: HTTP ([`http`], in OpenAI's shapes, [`openai`], and vLLM's and Anthropic's beside them) and gRPC ([`grpc`], and vLLM's service, [`vllm_grpc`]). Each turns what was sent into one
//! `SentRequest` and one `TextStream` into its own responses. An API never judges a value, counts tokens or knows a worker.

mod admin;
mod answer;
mod anthropic;
mod debug;
mod exchange;
mod functions;
pub mod grpc;
pub mod http;
mod incoming;
mod json;
pub mod openai;
mod rollout;
mod sse;
mod turns;
mod vllm;
pub mod vllm_grpc;

pub(crate) use admin::check as check_operator;
pub(crate) use exchange::read_chat;

use crate::error::RouterError;
use crate::request::{Operation, SentRequest};

/// Reads a body as the HTTP API does: for what tries it on foreign bytes.
pub fn read_openai_body(operation: Operation, body: &[u8]) -> Result<SentRequest, RouterError> {
    let openai::shapes::Object(body): openai::shapes::Object<openai::body::Body> = json::from_body(body)?;
    body.into_sent(operation, None).map(|(sent, _)| sent)
}
