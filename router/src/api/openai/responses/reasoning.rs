//! [`Reasoning`]: `reasoning` of a response.

use serde::Deserialize;

use crate::api::disabled::unsupported;
use crate::error::RouterError;

/// `reasoning`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Reasoning {
    effort: Option<String>,
    summary: Option<String>,
    generate_summary: Option<String>,
    context: Option<String>,
    mode: Option<String>,
}

/// Kinds of summaries of reasoning.
const SUMMARIES: [&str; 3] = ["auto", "concise", "detailed"];

impl Reasoning {
    /// Returns the effort. Summaries have no effect, as clients request them by default: reasoning is sent
    /// whole. The other fields are refused unless the server may decide: the chat template decides which
    /// earlier reasoning the model sees.
    pub(super) fn into_effort(self) -> Result<Option<String>, RouterError> {
        for (field, value) in
            [("reasoning.summary", self.summary), ("reasoning.generate_summary", self.generate_summary)]
        {
            if let Some(other) = value.filter(|value| !SUMMARIES.contains(&value.as_str())) {
                return Err(RouterError::not_one_of(field, &SUMMARIES, &other));
            }
        }
        for (field, value, default) in
            [("reasoning.context", self.context, "auto"), ("reasoning.mode", self.mode, "standard")]
        {
            if value.is_some_and(|value| value != default) {
                return Err(unsupported(field));
            }
        }
        Ok(self.effort)
    }
}
