//! The APIs: HTTP ([`http`], in OpenAI's shapes, [`openai`], and vLLM's beside them) and gRPC ([`grpc`]). Each turns what was sent into one
//! `SentRequest` and one `TextStream` into its own responses. An API never judges a value, counts tokens or knows a worker.

mod debug;
pub mod grpc;
pub mod http;
mod incoming;
mod json;
pub mod openai;
mod vllm;
