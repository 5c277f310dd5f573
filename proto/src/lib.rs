//! The wire protocols: `outrider.v1`, and vLLM's for gateways ([`vllm`]). Contains the generated types and
//! their conversion to and from the domain types of `speculation`, where every bound is checked. Contains no
//! logic.

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

/// Identifies the noise and the draw (docs/contract.md, part B). It must be equal at both workers of a pair.
pub const SAMPLING_SCHEME: &str = "philox4x32-10/gumbel52/v1";

/// Maximum encoded size of a frame; larger ones are split.
pub const MAX_FRAME_BYTES: usize = 1 << 20;

/// Maximum size of an asset, and of all assets of a worker together, in bytes.
pub const MAX_ASSET_BYTES: u64 = 256 << 20;

/// A field of a frame that is out of bounds.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct WireError {
    /// Name of the field in the proto file.
    pub field: &'static str,
    /// The problem, including the limit.
    pub problem: String,
}

impl WireError {
    pub(crate) fn new(field: &'static str, problem: impl Into<String>) -> Self {
        Self { field, problem: problem.into() }
    }
}
