//! [`resolve`]: replaces references to items of stored responses by the items. Some clients send back a
//! reference in place of an item, as the AI SDK does unless `store` is false.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::answer::response_id_of;
use crate::error::RouterError;
use crate::pipeline::response_store::StoredResponse;

type Item = Map<String, Value>;

/// The items of a response's JSON.
#[derive(Deserialize)]
struct StoredOutput {
    output: Vec<Item>,
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
            return Err(RouterError::invalid(path(), format!("{} must be a string", path())));
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
        Ok(StoredOutput { output }) => Ok(output),
        Err(error) => Err(RouterError::Internal(format!("a stored response cannot be read: {error}"))),
    }
}

/// An item with its id.
fn with_id(item: Item) -> Option<(String, Item)> {
    let id = item.get("id")?.as_str()?.to_owned();
    Some((id, item))
}
