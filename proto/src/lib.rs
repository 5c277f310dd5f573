//! The wire `outrider.v1`, and vLLM's for gateways ([`vllm`]): generated types and nothing else, and their conversion to and from the domain types of
//! `speculation`, where every bound is checked. Holds no logic.

#![forbid(unsafe_code)]

pub mod convert;
pub mod frame;
pub mod sampling;
pub mod version;

/// Generated from `proto/outrider/v1/*.proto`.
pub mod v1 {
    #![allow(
        missing_docs,
        clippy::allow_attributes,
        clippy::all,
        clippy::too_many_lines,
        unreachable_pub,
        reason = "generated code"
    )]
    tonic::include_proto!("outrider.v1");
}

/// Generated from `proto/vllm/vllm_engine.proto`.
pub mod vllm {
    #![allow(
        missing_docs,
        clippy::allow_attributes,
        clippy::all,
        clippy::too_many_lines,
        unreachable_pub,
        reason = "generated code"
    )]
    tonic::include_proto!("vllm.grpc.engine");
}

/// The encoded descriptor set, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// Names the noise and draw of docs/contract.md, part B; both sides of a pair must have the same.
pub const SAMPLING_SCHEME: &str = "philox4x32-10/gumbel52/v1";

/// Frames are split so that none is larger than this many encoded bytes.
pub const MAX_FRAME_BYTES: usize = 1 << 20;

/// A field of a frame that breaks its bound.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct WireError {
    /// The field, as the proto names it.
    pub field: &'static str,
    /// What is wrong, with the limit.
    pub problem: String,
}

impl WireError {
    pub(crate) fn new(field: &'static str, problem: impl Into<String>) -> Self {
        Self { field, problem: problem.into() }
    }
}
