//! The APIs: HTTP ([`http`], in OpenAI's shapes, [`openai`], and vLLM's and Anthropic's beside them) and gRPC ([`grpc`], and vLLM's service, [`vllm_grpc`]). Each turns what was sent into one
//! `SentRequest` and one `TextStream` into its own responses. An API never judges a value, counts tokens or knows a worker.

mod anthropic;
mod debug;
mod exchange;
pub mod grpc;
pub mod http;
mod incoming;
mod json;
pub mod openai;
mod sse;
mod vllm;
pub mod vllm_grpc;
