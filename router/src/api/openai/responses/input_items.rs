//! `GET /v1/responses/{id}/input_items`: the items of a stored response's own input, as the client sent them,
//! with what OpenAI's format adds: ids, types, and lists of parts in place of texts.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::Response;
use http::HeaderMap;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::stored_response;
use crate::api::buffered_response::buffered_response;
use crate::api::functions::unique_part;
use crate::api::incoming::{authenticate, invalid_query, unsupported_parameter};
use crate::api::json::to_json;
use crate::api::pages::{Page, PageRequest, Parameters, read_limit};
use crate::api::path_text::PathText;
use crate::error::RouterError;
use crate::pipeline::AppState;

type Item = Map<String, Value>;

/// Maximum number of items in a page.
const LIMIT_MAX: usize = 100;

/// A page of items.
#[derive(Serialize)]
struct ItemPage<'a> {
    object: &'static str,
    data: &'a [Item],
    first_id: Option<&'a str>,
    last_id: Option<&'a str>,
    has_more: bool,
}

/// `GET /v1/responses/{id}/input_items`.
pub(in crate::api) async fn list(
    State(state): State<AppState>,
    id: Result<PathText, RouterError>,
    parameters: Result<Query<Parameters>, QueryRejection>,
    headers: HeaderMap,
) -> Result<Response, RouterError> {
    let caller = authenticate(&state, &headers)?;
    let PathText(id) = id?;
    let Query(parameters) = parameters.map_err(|error| invalid_query(&error))?;
    let (request, is_ascending) = read_parameters(&parameters)?;
    let stored = stored_response(&state, caller.isolation_key, &id)?;
    let mut reservation = state.response_memory.reserve();
    reservation.grow(stored.input.len())?;
    let items: Vec<Item> = serde_json::from_str(&stored.input)
        .map_err(|error| RouterError::Internal(format!("a stored input cannot be read: {error}")))?;
    let completed = |(idx, item)| complete(&id, idx, item);
    let mut items: Vec<Item> = items.into_iter().enumerate().map(completed).collect();
    if !is_ascending {
        items.reverse();
    }
    let Page { items, has_more } = request.select(items, id_of)?;
    let page = ItemPage {
        object: "list",
        first_id: items.first().map(id_of),
        last_id: items.last().map(id_of),
        data: &items,
        has_more,
    };
    Ok(buffered_response(to_json(&page), reservation))
}

/// Returns the page to send, and whether the first item comes first; the last one does by default.
fn read_parameters(parameters: &[(String, String)]) -> Result<(PageRequest<'_>, bool), RouterError> {
    let (mut request, mut is_ascending) = (PageRequest::default(), false);
    for (name, value) in parameters {
        match (name.as_str(), value.as_str()) {
            ("limit", limit) => request.limit = Some(read_limit(limit, LIMIT_MAX)?),
            ("after", id) => request.after = Some(("after", id)),
            ("before", id) => request.before = Some(("before", id)),
            ("order", "asc") => is_ascending = true,
            ("order", "desc") => is_ascending = false,
            ("order", other) => {
                return Err(RouterError::must_be("order", format_args!("asc or desc, not `{other}`")));
            }
            (other, _) => return Err(unsupported_parameter(other)),
        }
    }
    Ok((request, is_ascending))
}

fn id_of(item: &Item) -> &str {
    item.get("id").and_then(Value::as_str).unwrap_or_default()
}

/// Adds what a client may leave out.
fn complete(response_id: &str, idx: usize, mut item: Item) -> Item {
    let kind = item.entry("type").or_insert_with(|| json!("message")).as_str().unwrap_or("message");
    let (is_message, prefix) = match kind {
        "message" => (true, "msg"),
        "function_call" => (false, "fc"),
        "function_call_output" => (false, "fco"),
        "custom_tool_call" => (false, "ctc"),
        "custom_tool_call_output" => (false, "ctco"),
        "tool_search_call" => (false, "tsc"),
        "tool_search_output" => (false, "tso"),
        "additional_tools" => (false, "at"),
        _ => (false, "rs"),
    };
    let is_assistant = item.get("role").is_some_and(|role| role == "assistant");
    if let Some(Value::String(text)) = item.get("content").filter(|_| is_message) {
        let kind = if is_assistant { "output_text" } else { "input_text" };
        let part = json!({ "type": kind, "text": text });
        item.insert("content".to_owned(), json!([part]));
    }
    if !item.get("id").is_some_and(Value::is_string) {
        let id = format!("{prefix}_{}_input_{idx}", unique_part(response_id));
        item.insert("id".to_owned(), json!(id));
    }
    item
}

/// A text as an item.
pub(super) fn from_text(text: String) -> Item {
    Item::from_iter([("role".to_owned(), json!("user")), ("content".to_owned(), Value::String(text))])
}
