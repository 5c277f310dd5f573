//! OpenAI's shapes, and nothing else: what a body may hold ([`body`], [`shapes`], [`structured`], [`tools`], listed in [`fields`]) and what answers look like
//! ([`response`], [`logprobs`], [`error`]).

pub mod body;
mod chunk;
mod chunk_choice;
pub mod error;
pub mod fields;
pub mod logprobs;
pub mod models;
pub mod respond;
pub mod response;
pub(super) mod responses;
pub mod shapes;
pub mod structured;
pub mod tools;
mod whole;
