//! OpenAI's formats: request bodies ([`body`], [`message`], [`shapes`], [`structured`], [`tools`],
//! `functions`, listed in [`fields`]) and responses ([`response`], [`logprobs`], [`error`]).

pub mod body;
mod chunk;
mod chunk_choice;
pub mod error;
pub mod fields;
mod full_response;
mod functions;
pub mod logprobs;
pub mod message;
pub mod models;
pub mod respond;
pub mod response;
pub(super) mod responses;
pub mod shapes;
pub mod structured;
pub mod tools;
