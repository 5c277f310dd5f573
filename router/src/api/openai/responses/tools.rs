//! The tools of a request. Chat templates describe only functions, each with one name, so a custom tool
//! becomes a function ([`custom_tools`]), a search for tools, too ([`tool_search`]), and the function of a
//! tool in a namespace has both names. [`ClientTools`] finds the client's tool when the model calls the
//! function.

use std::collections::{HashMap, HashSet};

use serde_json::{Value, json};

use super::{custom_tools, tool_search};
use crate::error::RouterError;
use crate::request::tools::ToolChoice;

/// What a function stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ToolKind {
    Function,
    Custom,
    Search,
}

/// The tool that a function stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ClientTool<'a> {
    pub(super) namespace: Option<&'a str>,
    pub(super) name: &'a str,
    pub(super) kind: ToolKind,
}

/// Type of a tool that contains others.
const NAMESPACE: &str = "namespace";

/// Tools run by OpenAI's servers that clients (the Codex CLI) add to every request: the beginnings of their
/// types. A model that may choose need not call them, so they are left out, as llama.cpp's server does.
const LEFT_OUT: [&str; 2] = ["web_search", "image_generation"];

fn is_left_out(tool: &Value, choice: &ToolChoice) -> bool {
    let may_choose = !matches!(choice, ToolChoice::Required(_));
    let name = tool["type"].as_str().unwrap_or_default();
    may_choose && LEFT_OUT.iter().any(|left_out| name.starts_with(left_out))
}

/// The tools that are no plain functions, by the names of their functions.
#[derive(Debug, Default)]
pub(super) struct ClientTools(HashMap<String, Converted>);

#[derive(Debug)]
struct Converted {
    /// Namespace and name, if the name of the function is another one.
    in_namespace: Option<(String, String)>,
    kind: ToolKind,
}

impl ClientTools {
    /// Returns the tool that this function stands for.
    pub(super) fn get<'a>(&'a self, function: &'a str) -> ClientTool<'a> {
        let Some(Converted { in_namespace, kind }) = self.0.get(function) else {
            return ClientTool { namespace: None, name: function, kind: ToolKind::Function };
        };
        let (namespace, name) = match in_namespace {
            Some((namespace, name)) => (Some(namespace.as_str()), name.as_str()),
            None => (None, function),
        };
        ClientTool { namespace, name, kind: *kind }
    }

    /// Converts tools with their paths, and all tools of namespaces. The model sees no description of a
    /// namespace.
    fn convert_all(
        &mut self,
        tools: Vec<(String, Value)>,
        choice: &ToolChoice,
    ) -> Result<Vec<(String, Value)>, RouterError> {
        let mut functions = Vec::new();
        for (path, mut tool) in tools {
            if tool["type"] != NAMESPACE {
                let function = self.convert(&path, None, tool, choice)?;
                functions.push((path, function));
                continue;
            }
            let invalid =
                |field: &str, expected: &str| RouterError::must_be(&format!("{path}.{field}"), expected);
            let inner = tool["tools"].take();
            let namespace = tool["name"].as_str().ok_or_else(|| invalid("name", "a string"))?;
            let Value::Array(inner) = inner else { return Err(invalid("tools", "a list of tools")) };
            for (inner_idx, tool) in inner.into_iter().enumerate() {
                let path = format!("{path}.tools[{inner_idx}]");
                let function = self.convert(&path, Some(namespace), tool, choice)?;
                functions.push((path, function));
            }
        }
        Ok(functions)
    }

    /// Converts a tool, if necessary.
    fn convert(
        &mut self,
        path: &str,
        namespace: Option<&str>,
        mut tool: Value,
        choice: &ToolChoice,
    ) -> Result<Value, RouterError> {
        let kind = match tool["type"].as_str() {
            Some(custom_tools::TYPE) => ToolKind::Custom,
            Some(tool_search::TYPE) if namespace.is_none() => ToolKind::Search,
            _ => ToolKind::Function,
        };
        if kind == ToolKind::Search {
            self.0.insert(tool_search::TYPE.to_owned(), Converted { in_namespace: None, kind });
            return tool_search::as_function(path, tool);
        }
        // A tool without a name is refused with all functions.
        if let Some(name) = tool["name"].as_str().map(str::to_owned) {
            let in_namespace = namespace.map(|namespace| (namespace.to_owned(), name.clone()));
            let function = namespace.map_or(name.clone(), |namespace| function_name(namespace, &name));
            tool["name"] = json!(function);
            if kind == ToolKind::Custom || in_namespace.is_some() {
                self.0.entry(function).or_insert(Converted { in_namespace, kind });
            }
        }
        if kind == ToolKind::Custom { custom_tools::as_function(path, tool, choice) } else { Ok(tool) }
    }
}

/// Name of the function for a tool of a namespace, as the Codex CLI joins them.
pub(super) fn function_name(namespace: &str, name: &str) -> String {
    let separator = if namespace.ends_with('_') || name.starts_with('_') { "" } else { "__" };
    [namespace, separator, name].concat()
}

/// Returns the functions for the tools of a request, except [`LEFT_OUT`] ones, and for those that its input
/// has loaded, with the paths of the tools. A client may load a tool several times; the first one counts.
pub(super) fn as_functions(
    tools: &[Value],
    loaded: Vec<(String, Value)>,
    choice: &ToolChoice,
) -> Result<(Vec<(String, Value)>, ClientTools), RouterError> {
    let mut client_tools = ClientTools::default();
    let own = tools.iter().enumerate().filter(|(_, tool)| !is_left_out(tool, choice));
    let own = own.map(|(idx, tool)| (format!("tools[{idx}]"), tool.clone())).collect();
    let mut functions = client_tools.convert_all(own, choice)?;
    let mut names: HashSet<Value> = functions.iter().map(|(_, function)| function["name"].clone()).collect();
    let mut loaded_tools = ClientTools::default();
    for (path, function) in loaded_tools.convert_all(loaded, choice)? {
        if !names.insert(function["name"].clone()) {
            continue;
        }
        if let Some((name, tool)) =
            function["name"].as_str().and_then(|name| loaded_tools.0.remove_entry(name))
        {
            client_tools.0.insert(name, tool);
        }
        functions.push((path, function));
    }
    Ok((functions, client_tools))
}

/// Names of the functions for these tools; a tool without a name has none.
pub(super) fn function_names(tools: &[Value]) -> Vec<String> {
    let mut names = Vec::new();
    for tool in tools {
        let name = tool["name"].as_str().unwrap_or_default();
        if tool["type"] == NAMESPACE {
            let inner = tool["tools"].as_array().into_iter().flatten();
            names.extend(inner.filter_map(|inner| Some(function_name(name, inner["name"].as_str()?))));
        } else if !name.is_empty() {
            names.push(name.to_owned());
        }
    }
    names
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
        let loaded = ["input[0].tools[0]", "input[1].tools[0]"].map(|path| {
            (path.to_owned(), namespace("mcp__old", &[tool("function", "read"), tool("function", "write")]))
        });
        let (functions, client_tools) = as_functions(&tools, loaded.into(), &ToolChoice::default()).unwrap();
        let names = functions[..6].iter().map(|(_, function)| function["name"].clone());
        assert_eq!(json!(function_names(&tools)), names.collect::<Value>());
        let found = functions.iter().map(|(path, function)| {
            assert_eq!(function["type"], "function");
            let name = function["name"].as_str().unwrap();
            let ClientTool { namespace, name: of_client, kind } = client_tools.get(name);
            (path.as_str(), name, namespace, of_client, kind == ToolKind::Custom)
        });
        let expected = [
            ("tools[0]", "echo", None, "echo", false),
            ("tools[1]", "patch", None, "patch", true),
            ("tools[2].tools[0]", "mcp__files__read", Some("mcp__files"), "read", false),
            ("tools[2].tools[1]", "mcp__files__patch", Some("mcp__files"), "patch", true),
            ("tools[3].tools[0]", "mcp__old__read", Some("mcp__old__"), "read", false),
            ("tools[4].tools[0]", "mcp__apps_read", Some("mcp__apps"), "_read", false),
            ("input[0].tools[0].tools[1]", "mcp__old__write", Some("mcp__old"), "write", false),
        ];
        assert_eq!(found.collect::<Vec<_>>(), expected);
    }
}
