//! The APIs: HTTP ([`http`], in OpenAI's format, [`openai`], with vLLM's and Anthropic's endpoints) and gRPC
//! ([`grpc`], and vLLM's service, [`vllm_grpc`]). Each converts its request to a `RawRequest` and a
//! `TextStream` to its responses. An API never checks values, counts tokens or knows about workers.

pub mod admin;
pub mod allowed_hosts;
mod anthropic;
mod buffered_response;
mod conversation;
pub mod cors;
mod debug;
mod disabled;
mod error;
pub mod exact_arguments;
mod foreign_fields;
mod functions;
mod grammars;
pub mod grpc;
pub mod grpc_key;
mod handler;
pub mod http;
mod incoming;
mod integer;
mod json;
mod log_filter;
pub mod object;
pub mod openai;
mod pages;
mod parsed_output;
mod path_text;
mod request_id;
mod rollout;
pub mod speculation_settings;
mod sse;
mod template_variables;
mod tokenizer_request;
mod vllm;
pub mod vllm_grpc;

pub(crate) use admin::check_operator;
pub(crate) use handler::read_chat;

use self::object::Object;
use crate::error::RouterError;
use crate::request::{Operation, RawRequest};

/// Parses a body as the HTTP API does, for tests on untrusted input.
pub fn read_openai_body(operation: Operation, body: &[u8]) -> Result<RawRequest, RouterError> {
    let Object(body): Object<openai::body::Body> = json::parse_body(body)?;
    body.into_request(operation, None).map(|(request, _)| request)
}
