//! [`resolve`]: replaces references to items of stored responses by the items. Some clients send back a
//! reference in place of an item, as the AI SDK does unless `store` is false.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::{Map, Value};

use super::answer::response_id_of;
use crate::api::exact_arguments::ExactArguments;
use crate::error::RouterError;
use crate::pipeline::response_store::StoredResponse;

type Item = Map<String, Value>;

/// The items of a response's JSON.
#[derive(Deserialize)]
struct StoredOutput {
    output: Vec<StoredItem>,
}

/// An item, or a part of its content, without log probabilities, which no conversation has: they may be a
/// hundred times as long as the text.
struct StoredItem(Item);

impl<'de> Deserialize<'de> for StoredItem {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ItemVisitor).map(Self)
    }
}

struct ItemVisitor;

impl<'de> Visitor<'de> for ItemVisitor {
    type Value = Item;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an item or a part of its content, which are objects")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Item, A::Error> {
        let mut item = Item::new();
        while let Some(name) = entries.next_key::<String>()? {
            let value = match name.as_str() {
                "logprobs" => {
                    entries.next_value::<IgnoredAny>()?;
                    continue;
                }
                "arguments" => entries.next_value_seed(ExactArguments(&[]))?,
                "content" => {
                    let parts: Option<Vec<StoredItem>> = entries.next_value()?;
                    parts
                        .map_or(Value::Null, |parts| parts.into_iter().map(|StoredItem(part)| part).collect())
                }
                _ => entries.next_value()?,
            };
            item.insert(name, value);
        }
        Ok(item)
    }
}

/// Replaces the references among these items; `get` returns stored responses. Each response is parsed once,
/// and each item replaces one reference only: a request of many references would otherwise take the time and
/// the memory of as many copies.
pub(super) fn resolve(
    items: &mut [Item],
    get: impl Fn(&str) -> Option<Arc<StoredResponse>>,
) -> Result<(), RouterError> {
    let (mut parsed, mut stored) = (HashSet::<String>::new(), HashMap::<String, Item>::new());
    for (idx, item) in items.iter_mut().enumerate() {
        if item.get("type").and_then(Value::as_str) != Some("item_reference") {
            continue;
        }
        let path = || format!("input[{idx}].id");
        let Some(id) = item.get("id").and_then(Value::as_str) else {
            return Err(RouterError::must_be(&path(), "a string"));
        };
        if let Some(response_id) = response_id_of(id)
            && !parsed.contains(&response_id)
        {
            let output = get(&response_id).map(|response| output_of(&response)).transpose()?;
            stored.extend(output.into_iter().flatten().filter_map(with_id));
            parsed.insert(response_id);
        }
        let Some(found) = stored.remove(id) else {
            let message = format!(
                "{} is `{id}`, which is not stored here or was referenced before: send the item itself",
                path()
            );
            return Err(RouterError::invalid(path(), message));
        };
        *item = found;
    }
    Ok(())
}

fn output_of(response: &StoredResponse) -> Result<Vec<Item>, RouterError> {
    match serde_json::from_str(&response.json) {
        Ok(StoredOutput { output }) => Ok(output.into_iter().map(|StoredItem(item)| item).collect()),
        Err(error) => Err(RouterError::Internal(format!("a stored response cannot be read: {error}"))),
    }
}

/// An item with its id.
fn with_id(item: Item) -> Option<(String, Item)> {
    let id = item.get("id")?.as_str()?.to_owned();
    Some((id, item))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_stored_item_is_read_without_its_log_probabilities() {
        let part = json!({ "type": "output_text", "text": "hi", "annotations": [] });
        let mut scored = part.clone();
        scored["logprobs"] = json!([{ "token": "hi", "logprob": -0.5, "top_logprobs": [] }]);
        let message = |part| json!({ "id": "msg_1_0", "type": "message", "content": [part] });
        let call = json!({ "id": "fc_1", "type": "function_call", "arguments": "{\"a\": 1}" });
        let response = json!({ "id": "resp_1", "output": [message(&scored), call] }).to_string();
        let StoredOutput { output } = serde_json::from_str(&response).unwrap();
        let items: Vec<Value> = output.into_iter().map(|StoredItem(item)| Value::Object(item)).collect();
        assert_eq!(items, [message(&part), call]);
    }
}
