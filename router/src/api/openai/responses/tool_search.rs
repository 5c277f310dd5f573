//! Search for tools (the Codex CLI's): a tool with which the model finds further tools of the client. The
//! model sees a function; calls are items of their own type, and the client answers with the tools found,
//! which the model may call from then on, as those of `additional_tools` items.

use serde_json::{Map, Value, json};

use crate::error::RouterError;

/// Type of the tool, and the name of its function.
pub(super) const TYPE: &str = "tool_search";

/// Type of the items with the tools found.
pub(super) const OUTPUT: &str = "tool_search_output";

/// Type of the items that add tools without a search.
pub(super) const ADDITIONAL: &str = "additional_tools";

/// Who runs the search.
pub(super) const CLIENT: &str = "client";

/// Returns the function for the tool at this path.
pub(super) fn as_function(path: &str, mut tool: Value) -> Result<Value, RouterError> {
    if tool["execution"] != CLIENT {
        let expected = format!("{CLIENT}: tools that a server runs are not supported");
        return Err(RouterError::must_be(&format!("{path}.execution"), expected));
    }
    tool["type"] = json!("function");
    tool["name"] = json!(TYPE);
    Ok(tool)
}

/// The tools that items of the input add, with their paths.
pub(super) fn loaded_tools(items: &[Map<String, Value>]) -> Result<Vec<(String, Value)>, RouterError> {
    let mut loaded = Vec::new();
    for (idx, item) in items.iter().enumerate() {
        if !matches!(item.get("type").and_then(Value::as_str), Some(OUTPUT | ADDITIONAL)) {
            continue;
        }
        let path = format!("input[{idx}].tools");
        let Some(Value::Array(tools)) = item.get("tools") else {
            return Err(RouterError::must_be(&path, "a list of tools"));
        };
        let with_path = |(idx, tool): (usize, &Value)| (format!("{path}[{idx}]"), tool.clone());
        loaded.extend(tools.iter().enumerate().map(with_path));
    }
    Ok(loaded)
}
