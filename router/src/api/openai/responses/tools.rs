//! The tools of a request. Chat templates describe only functions, each with one name, so a custom tool
//! becomes a function ([`custom_tools`]), and the function of a tool in a namespace has both names.
//! [`ClientTools`] finds the client's tool when the model calls the function.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::custom_tools;
use crate::error::RouterError;
use crate::request::tools::ToolChoice;

/// The tool that a function stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ClientTool<'a> {
    pub(super) namespace: Option<&'a str>,
    pub(super) name: &'a str,
    /// Whether it is a custom tool.
    pub(super) is_custom: bool,
}

/// The tools that are no plain functions, by the names of their functions.
#[derive(Debug, Default)]
pub(super) struct ClientTools(HashMap<String, Converted>);

#[derive(Debug)]
struct Converted {
    /// Namespace and name, if the name of the function is another one.
    in_namespace: Option<(String, String)>,
    is_custom: bool,
}

impl ClientTools {
    /// Returns the tool that this function stands for.
    pub(super) fn get<'a>(&'a self, function: &'a str) -> ClientTool<'a> {
        let Some(Converted { in_namespace, is_custom }) = self.0.get(function) else {
            return ClientTool { namespace: None, name: function, is_custom: false };
        };
        let (namespace, name) = match in_namespace {
            Some((namespace, name)) => (Some(namespace.as_str()), name.as_str()),
            None => (None, function),
        };
        ClientTool { namespace, name, is_custom: *is_custom }
    }

    /// Converts a tool, if necessary.
    fn convert(
        &mut self,
        path: &str,
        namespace: Option<&str>,
        mut tool: Value,
        choice: &ToolChoice,
    ) -> Result<Value, RouterError> {
        let is_custom = tool["type"] == custom_tools::TYPE;
        // A tool without a name is refused with all functions.
        if let Some(name) = tool["name"].as_str().map(str::to_owned) {
            let in_namespace = namespace.map(|namespace| (namespace.to_owned(), name.clone()));
            let function = namespace.map_or(name.clone(), |namespace| function_name(namespace, &name));
            tool["name"] = json!(function);
            if is_custom || in_namespace.is_some() {
                self.0.insert(function, Converted { in_namespace, is_custom });
            }
        }
        if is_custom { custom_tools::as_function(path, tool, choice) } else { Ok(tool) }
    }
}

/// Name of the function for a tool of a namespace, as the Codex CLI joins them.
pub(super) fn function_name(namespace: &str, name: &str) -> String {
    let separator = if namespace.ends_with('_') || name.starts_with('_') { "" } else { "__" };
    [namespace, separator, name].concat()
}

/// Returns the functions for these tools, with the paths of the tools. The model sees no description of a
/// namespace.
pub(super) fn as_functions(
    tools: Vec<Value>,
    choice: &ToolChoice,
) -> Result<(Vec<(String, Value)>, ClientTools), RouterError> {
    let (mut functions, mut client_tools) = (Vec::new(), ClientTools::default());
    for (idx, mut tool) in tools.into_iter().enumerate() {
        let path = format!("tools[{idx}]");
        if tool["type"] != "namespace" {
            let function = client_tools.convert(&path, None, tool, choice)?;
            functions.push((path, function));
            continue;
        }
        let invalid = |field: &str, expected: &str| {
            let path = format!("{path}.{field}");
            let message = format!("{path} must be {expected}");
            RouterError::invalid(path, message)
        };
        let inner = tool["tools"].take();
        let namespace = tool["name"].as_str().ok_or_else(|| invalid("name", "a string"))?;
        let Value::Array(inner) = inner else { return Err(invalid("tools", "a list of tools")) };
        for (inner_idx, tool) in inner.into_iter().enumerate() {
            let path = format!("{path}.tools[{inner_idx}]");
            let function = client_tools.convert(&path, Some(namespace), tool, choice)?;
            functions.push((path, function));
        }
    }
    Ok((functions, client_tools))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_leads_back_to_its_tool() {
        let tool = |kind: &str, name: &str| json!({ "type": kind, "name": name });
        let namespace =
            |name: &str, tools: &[Value]| json!({ "type": "namespace", "name": name, "tools": tools });
        let tools = vec![
            tool("function", "echo"),
            tool("custom", "patch"),
            namespace("mcp__files", &[tool("function", "read"), tool("custom", "patch")]),
            namespace("mcp__old__", &[tool("function", "read")]),
            namespace("mcp__apps", &[tool("function", "_read")]),
        ];
        let (functions, client_tools) = as_functions(tools, &ToolChoice::Auto).unwrap();
        let found = functions.iter().map(|(path, function)| {
            assert_eq!(function["type"], "function");
            let name = function["name"].as_str().unwrap();
            let ClientTool { namespace, name: of_client, is_custom } = client_tools.get(name);
            (path.as_str(), name, namespace, of_client, is_custom)
        });
        let expected = [
            ("tools[0]", "echo", None, "echo", false),
            ("tools[1]", "patch", None, "patch", true),
            ("tools[2].tools[0]", "mcp__files__read", Some("mcp__files"), "read", false),
            ("tools[2].tools[1]", "mcp__files__patch", Some("mcp__files"), "patch", true),
            ("tools[3].tools[0]", "mcp__old__read", Some("mcp__old__"), "read", false),
            ("tools[4].tools[0]", "mcp__apps_read", Some("mcp__apps"), "_read", false),
        ];
        assert_eq!(found.collect::<Vec<_>>(), expected);
    }
}
