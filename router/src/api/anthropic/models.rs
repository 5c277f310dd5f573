//! `/v1/models` in Anthropic's format, for clients that send its version header.

use http::{HeaderMap, HeaderName};
use jiff::Timestamp;
use serde::Serialize;

use super::is_at_or_below;
use crate::api::pages::{Page, PageRequest, read_limit};
use crate::catalog::ModelEntry;
use crate::error::RouterError;

/// Path that this API shares with OpenAI's; those of single models begin with it and a slash.
const PATH: &str = "/v1/models";

/// Header that every client of Anthropic's API sends.
const VERSION: HeaderName = HeaderName::from_static("anthropic-version");

/// Maximum number of models in a page.
const LIMIT_MAX: usize = 1_000;

/// Whether a request at a path of both APIs is one of Anthropic's clients.
pub(in crate::api) fn has_version(headers: &HeaderMap) -> bool {
    headers.contains_key(VERSION)
}

/// Whether a request for models is one of Anthropic's clients.
pub(super) fn is_own_request(path: &str, headers: &HeaderMap) -> bool {
    is_at_or_below(path, PATH) && has_version(headers)
}

/// One model.
#[derive(Debug, Serialize)]
pub(in crate::api) struct Model<'a> {
    r#type: &'static str,
    id: &'a str,
    display_name: &'a str,
    created_at: String,
    /// Always `active`: the API has no other models.
    lifecycle: &'static str,
    /// The context window.
    max_input_tokens: u32,
    /// The window, less one position for the prompt.
    max_tokens: u32,
}

impl<'a> From<&'a ModelEntry> for Model<'a> {
    fn from(entry: &'a ModelEntry) -> Self {
        let seconds = i64::try_from(entry.created).unwrap_or_default();
        let created_at = Timestamp::from_second(seconds).unwrap_or_default().to_string();
        Self {
            r#type: "model",
            id: &entry.id,
            display_name: &entry.id,
            created_at,
            lifecycle: "active",
            max_input_tokens: entry.max_model_len,
            max_tokens: entry.max_model_len.saturating_sub(1),
        }
    }
}

/// A page of the list.
#[derive(Debug, Serialize)]
pub(in crate::api) struct ModelPage<'a> {
    data: Vec<Model<'a>>,
    has_more: bool,
    first_id: Option<&'a str>,
    last_id: Option<&'a str>,
}

impl<'a> ModelPage<'a> {
    /// Returns the page that the query parameters select.
    pub(in crate::api) fn new(
        models: impl Iterator<Item = &'a ModelEntry>,
        parameters: &[(String, String)],
    ) -> Result<Self, RouterError> {
        let mut request = PageRequest::default();
        for (name, value) in parameters {
            match name.as_str() {
                "limit" => request.limit = Some(read_limit(value, LIMIT_MAX)?),
                "after_id" => request.after = Some(("after_id", value.as_str())),
                "before_id" => request.before = Some(("before_id", value.as_str())),
                // Others select no models.
                _ => {}
            }
        }
        let models: Vec<Model<'a>> = models.map(Model::from).collect();
        let Page { items, has_more } = request.select(models, |model| model.id)?;
        let (first_id, last_id) = (items.first().map(|model| model.id), items.last().map(|model| model.id));
        Ok(Self { data: items, has_more, first_id, last_id })
    }
}
