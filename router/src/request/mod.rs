//! One request, whichever API it came by: as sent and as checked ([`check`], within [`limits`]), the form that its output must have ([`structure`], [`tools`]), who sent it ([`auth`])
//! and how much they may send ([`key_limits`]), and what is recorded of it ([`record`], [`span`]).

mod api_keys;
pub mod auth;
mod bounds;
pub mod check;
pub mod key_limits;
pub mod limits;
pub mod record;
pub mod span;
pub mod structure;
pub mod tools;

pub use self::auth::{Auth, Caller};
pub use self::check::{CheckedRequest, SentRequest};
use crate::generation::SpeculationUsage;

/// What a client asks a model to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Answer a conversation.
    Chat,
    /// Continue a text.
    Completion,
}

impl Operation {
    /// The GenAI semantic conventions' word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completion => "text_completion",
        }
    }

    /// A fresh request id, in OpenAI's form.
    pub fn new_request_id(self) -> String {
        let prefix = match self {
            Self::Chat => "chatcmpl",
            Self::Completion => "cmpl",
        };
        format!("{prefix}-{}", uuid::Uuid::now_v7().simple())
    }
}

/// What a request cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Of each prompt once, however many choices it has.
    pub prompt_tokens: u64,
    /// Of all choices.
    pub completion_tokens: u64,
    /// Sums over all choices.
    pub speculation: SpeculationUsage,
}
