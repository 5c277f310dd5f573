//! Tests of a target worker through its service. One binary, because linking several takes longer than
//! running them.

mod logprobs;
mod no_gpu;
mod portions;
mod trees;
