//! [`SpeculationSettings`]: Outrider's field `speculation`, the same in the bodies of every API.

use serde::Deserialize;

use super::integer;
use crate::request::raw::RawSpeculation;

/// `speculation`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[expect(missing_docs, reason = "the fields are those of SpeculationRequest")]
pub struct SpeculationSettings {
    pub enabled: Option<bool>,
    #[serde(deserialize_with = "integer::optional")]
    pub num_draft_tokens: Option<i64>,
    #[serde(deserialize_with = "integer::optional")]
    pub num_tree_tokens: Option<i64>,
    pub acceptance: Option<String>,
}

impl From<SpeculationSettings> for RawSpeculation {
    fn from(settings: SpeculationSettings) -> Self {
        let SpeculationSettings { enabled, num_draft_tokens, num_tree_tokens, acceptance } = settings;
        Self { enabled, num_draft_tokens, num_tree_tokens, acceptance }
    }
}
