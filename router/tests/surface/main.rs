//! The router as seen by clients, over HTTP and gRPC, with fake lanes: everything between a client's bytes
//! and the interface `router::generation`, and back.

#![expect(clippy::unwrap_used, reason = "a test's harness fails by panicking")]

mod access_log;
mod admission;
mod allowed_tools;
mod anthropic;
mod bad_constraints;
mod bad_input;
mod behaviour;
mod buffered_responses;
mod calls_or_json;
mod client;
mod client_gone;
mod console;
mod cors;
mod custom_tools;
mod deadlines;
mod drain;
mod echo;
mod errors;
mod fake_lanes;
mod fields;
mod functions;
mod gateway;
mod grpc;
mod hosts;
mod integers;
mod json_values;
mod lanes;
mod large_integers;
mod listeners;
mod log_filter;
mod logs;
mod models;
mod prediction;
mod prefill;
mod reasoning_effort;
mod replay;
mod request_log;
mod response_logprobs;
mod responses;
mod rollout;
mod several_prompts;
mod shapes;
mod slow_client;
mod telemetry;
mod template_limits;
mod token_ids;
mod tool_schemas;
mod tool_shapes;
mod tools;
mod truncation;
mod vllm;
mod vllm_grpc;
mod whole_and_streamed;
