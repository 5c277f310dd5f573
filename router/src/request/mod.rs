//! One request, for every API: as sent ([`raw`]) and as checked ([`checked`], by [`check`], `prompts` and
//! `exclusions`, within [`limits`] and [`json_values`]), the required form of its output ([`structure`],
//! [`tools`]), its sender ([`auth`], and the headers of a gateway: [`gateway`]) and their limits
//! ([`key_limits`]), and what is recorded of it ([`record`], [`span`], `access_log`).

mod access_log;
mod api_keys;
pub mod auth;
pub mod bounds;
pub mod check;
pub mod checked;
mod exclusions;
pub mod gateway;
pub mod json_values;
pub mod key_limits;
pub mod limits;
mod moved_schema;
mod prompts;
pub mod raw;
pub mod record;
pub mod span;
pub mod structure;
pub mod tools;
mod usage;

pub use self::auth::{Auth, Caller};
pub use self::checked::CheckedRequest;
pub use self::raw::RawRequest;
pub use self::usage::{AcceptanceCounts, Usage};

/// Kind of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Chat completion.
    Chat,
    /// Text completion.
    Completion,
}

impl Operation {
    /// Name in the GenAI semantic conventions.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completion => "text_completion",
        }
    }

    /// Prefix of request ids, as OpenAI's.
    pub fn id_prefix(self) -> &'static str {
        match self {
            Self::Chat => "chatcmpl-",
            Self::Completion => "cmpl-",
        }
    }

    /// Creates a new request id in OpenAI's form.
    pub fn new_request_id(self) -> String {
        new_id(self.id_prefix())
    }
}

/// Creates a new id.
pub fn new_id(prefix: &str) -> String {
    format!("{prefix}{}", uuid::Uuid::now_v7().simple())
}
