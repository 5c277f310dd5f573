//! OpenAI's shapes, and nothing else: what a body may hold ([`body`], [`shapes`]) and what answers look like
//! ([`response`], [`logprobs`], [`error`]).

pub mod body;
pub mod error;
pub mod logprobs;
pub mod models;
pub mod response;
pub mod shapes;
