//! One request, whichever API it came by: as sent ([`sent`]) and as checked ([`checked`], by [`check`], within [`limits`]), the form that its output must have ([`structure`], [`tools`]), who sent it ([`auth`], and what a gateway says of it: [`gateway`])
//! and how much they may send ([`key_limits`]), and what is recorded of it ([`record`], [`span`]).

mod api_keys;
pub mod auth;
mod bounds;
pub mod check;
pub mod checked;
pub mod gateway;
pub mod key_limits;
pub mod limits;
pub mod record;
pub mod sent;
pub mod span;
pub mod structure;
pub mod tools;
mod usage;

pub use self::auth::{Auth, Caller};
pub use self::checked::CheckedRequest;
pub use self::sent::SentRequest;
pub use self::usage::{AcceptanceCounts, Usage};

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

    /// What a request's id begins with, in OpenAI's form.
    pub fn id_prefix(self) -> &'static str {
        match self {
            Self::Chat => "chatcmpl-",
            Self::Completion => "cmpl-",
        }
    }

    /// A fresh request id, in OpenAI's form.
    pub fn new_request_id(self) -> String {
        format!("{}{}", self.id_prefix(), uuid::Uuid::now_v7().simple())
    }
}
