//! The APIs: HTTP ([`http`], in OpenAI's format, [`openai`], with vLLM's and Anthropic's endpoints) and gRPC
//! ([`grpc`], and vLLM's service, [`vllm_grpc`]). Each converts its request to a `SentRequest` and a
//! `TextStream` to its responses. An API never checks values, counts tokens or knows about workers.

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

/// Parses a body as the HTTP API does, for tests on untrusted input.
pub fn read_openai_body(operation: Operation, body: &[u8]) -> Result<SentRequest, RouterError> {
    let openai::shapes::Object(body): openai::shapes::Object<openai::body::Body> = json::from_body(body)?;
    body.into_sent(operation, None).map(|(sent, _)| sent)
}
