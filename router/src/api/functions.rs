//! Function tools in the formats of all APIs: the tools of a request, `tool_choice`, calls and their ids.
//! Limits are checked in [`crate::request::tools`].

use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use text::parse_arguments as arguments_from_json;

use crate::error::RouterError;
use crate::request::tools::{AllowedTools, RawTools, Tool, ToolChoice, ToolFieldNames};

/// Format of a function tool in an API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ToolFormat {
    /// Chat completions: name, description and `parameters` are fields of `function`.
    Nested,
    /// The older `functions` of chat completions: like the content of `function`.
    Function,
    /// Responses: they are fields of the tool itself.
    Flat,
    /// Anthropic's messages: like [`Self::Flat`], with the schema called `input_schema`.
    InputSchema,
}

/// Type of a `tool_choice` that allows calls of some tools only; in chat completions also its field.
const ALLOWED_TOOLS: &str = "allowed_tools";

/// Tools of a request.
#[derive(Debug, Default)]
pub(super) struct ParsedTools {
    /// Input of the checks.
    pub(super) raw: RawTools,
    /// Tools for the chat template, each in the format of chat completions.
    template_tools: Vec<Value>,
}

impl ToolFormat {
    /// Names of the fields of a request.
    fn field_names(self) -> ToolFieldNames {
        match self {
            Self::Function => ToolFieldNames { tools: "functions", choice: "function_call" },
            Self::Nested | Self::Flat | Self::InputSchema => ToolFieldNames::default(),
        }
    }

    /// Path from a tool to its name.
    fn name_path(self) -> &'static str {
        match self {
            Self::Nested => ".function.name",
            Self::Function | Self::Flat | Self::InputSchema => ".name",
        }
    }

    /// Reads the tools and the settings for calls.
    pub(super) fn parse(
        self,
        tools: Vec<Value>,
        choice: ToolChoice,
        parallel: Option<bool>,
    ) -> Result<ParsedTools, RouterError> {
        let field = self.field_names().tools;
        let with_path = |(idx, tool): (usize, Value)| (format!("{field}[{idx}]"), tool);
        self.parse_at(tools.into_iter().enumerate().map(with_path).collect(), choice, parallel)
    }

    /// Like [`Self::parse`], for tools with their paths in the request.
    pub(super) fn parse_at(
        self,
        tools: Vec<(String, Value)>,
        choice: ToolChoice,
        parallel: Option<bool>,
    ) -> Result<ParsedTools, RouterError> {
        let parse = |(path, tool): (String, Value)| self.parse_tool(&path, tool);
        let (tools, template_tools) = tools.into_iter().map(parse).collect::<Result<_, RouterError>>()?;
        Ok(ParsedTools {
            raw: RawTools { tools, choice, parallel: parallel.unwrap_or(true), names: self.field_names() },
            template_tools,
        })
    }

    /// Reads the tool at this path; also returns it in the template's format.
    fn parse_tool(self, path: &str, tool: Value) -> Result<(Tool, Value), RouterError> {
        let invalid = |field: &str, expected: &str| RouterError::must_be(&format!("{path}{field}"), expected);
        let kind = &tool["type"];
        match self {
            Self::Function => {}
            Self::InputSchema if kind.is_null() || kind == "custom" => {}
            Self::InputSchema => {
                return Err(invalid(".type", "`custom`: tools that a server runs are not supported"));
            }
            _ if kind == "function" => {}
            // Custom tools and namespaces were converted.
            Self::Flat => {
                let expected = "`function`, `custom` or, not within another one, `namespace` or `tool_search`: tools \
                                that a server runs are not supported";
                return Err(invalid(".type", expected));
            }
            Self::Nested => {
                let expected =
                    "`function`: custom tools are supported by /v1/responses only, other tools are not";
                return Err(invalid(".type", expected));
            }
        }
        let (within, function) = match self {
            Self::Nested => (".function", &tool["function"]),
            Self::Function | Self::Flat | Self::InputSchema => ("", &tool),
        };
        let function = function.as_object().ok_or_else(|| invalid(within, "an object"))?;
        let name = function.get("name").and_then(Value::as_str);
        let name = name.ok_or_else(|| invalid(self.name_path(), "a string"))?.to_owned();
        let schema = if self == Self::InputSchema { "input_schema" } else { "parameters" };
        let parameters = match function.get(schema) {
            Some(Value::Object(schema)) => Some(schema.clone()),
            None | Some(Value::Null) if self != Self::InputSchema => None,
            _ => return Err(invalid(&format!("{within}.{schema}"), "a JSON schema: an object")),
        };
        let description = function.get("description").filter(|text| !text.is_null());
        if !description.is_none_or(Value::is_string) {
            return Err(invalid(&format!("{within}.description"), "a string"));
        }
        let template_tool = match self {
            Self::Nested => None,
            Self::Function | Self::Flat | Self::InputSchema => {
                let mut function = Map::from_iter([("name".to_owned(), json!(name))]);
                function.extend(description.map(|text| ("description".to_owned(), text.clone())));
                function.extend(parameters.clone().map(|schema| ("parameters".to_owned(), schema.into())));
                Some(json!({ "type": "function", "function": function }))
            }
        };
        let name_path = format!("{path}{}", self.name_path());
        Ok((Tool { name, name_path, parameters }, template_tool.unwrap_or(tool)))
    }

    /// Reads `tool_choice` in OpenAI's format.
    pub(super) fn parse_choice(self, choice: Option<&Value>) -> Result<ToolChoice, RouterError> {
        let Some(choice) = choice else { return Ok(ToolChoice::default()) };
        match choice {
            Value::Null => Ok(ToolChoice::default()),
            Value::String(word) if word == "none" => Ok(ToolChoice::None),
            Value::String(word) if word == "auto" => Ok(ToolChoice::default()),
            Value::String(word) if word == "required" => Ok(ToolChoice::Required(AllowedTools::All)),
            Value::Object(_) if choice["type"] == ALLOWED_TOOLS => self.parse_allowed(choice),
            Value::Object(_) if self.is_named_by(&choice["type"]) => {
                self.parse_name("tool_choice", choice).map(ToolChoice::Named)
            }
            _ => {
                let (named, allowed) = match self {
                    Self::Nested => (
                        r#"{"type": "function", "function": {"name": ..}}"#,
                        r#"{"type": "allowed_tools", "allowed_tools": {..}}"#,
                    ),
                    Self::Function | Self::Flat | Self::InputSchema => (
                        r#"{"type": "function", "name": ..}"#,
                        r#"{"type": "allowed_tools", "mode": .., "tools": [..]}"#,
                    ),
                };
                let expected = format!("one of none, auto, required, {named}, or {allowed}");
                Err(RouterError::must_be("tool_choice", expected))
            }
        }
    }

    /// Reads a `tool_choice` that allows calls of some of the tools only.
    fn parse_allowed(self, choice: &Value) -> Result<ToolChoice, RouterError> {
        let (path, allowed, types) = match self {
            Self::Nested => ("tool_choice.allowed_tools", &choice[ALLOWED_TOOLS], "function"),
            Self::Function | Self::Flat | Self::InputSchema => ("tool_choice", choice, "function or custom"),
        };
        let invalid =
            |field: &str, expected: &str| RouterError::must_be(&format!("{path}.{field}"), expected);
        let tools = allowed["tools"].as_array().filter(|tools| !tools.is_empty());
        let tools = tools.ok_or_else(|| invalid("tools", "a list of at least one tool"))?;
        let name_of = |(idx, tool): (usize, &Value)| {
            let field = format!("tools[{idx}]");
            if !self.is_named_by(&tool["type"]) {
                return Err(invalid(&format!("{field}.type"), types));
            }
            self.parse_name(&format!("{path}.{field}"), tool)
        };
        let names = tools.iter().enumerate().map(name_of).collect::<Result<_, RouterError>>()?;
        match allowed["mode"].as_str() {
            Some("auto") => Ok(ToolChoice::Auto(AllowedTools::Only(names))),
            Some("required") => Ok(ToolChoice::Required(AllowedTools::Only(names))),
            _ => Err(invalid("mode", "auto or required")),
        }
    }

    /// Whether an object of this type names a tool in `tool_choice`.
    fn is_named_by(self, kind: &Value) -> bool {
        kind == "function" || (self == Self::Flat && kind == "custom")
    }

    /// Returns the tool that the object at this path of `tool_choice` names.
    fn parse_name(self, path: &str, named: &Value) -> Result<String, RouterError> {
        let path = format!("{path}{}", self.name_path());
        let name = named.pointer(&self.name_path().replace('.', "/")).and_then(Value::as_str);
        let name = name.ok_or_else(|| RouterError::must_be(&path, "a string"))?;
        Ok(name.to_owned())
    }
}

impl ParsedTools {
    /// Sets the template's `tools` variable. Tools that may not be called are left out.
    pub(super) fn set_template_tools(&mut self, variables: &mut Map<String, Value>) {
        let template_tools = std::mem::take(&mut self.template_tools);
        variables.remove("tools");
        if self.raw.choice != ToolChoice::None && !template_tools.is_empty() {
            variables.insert("tools".to_owned(), Value::Array(template_tools));
        }
    }
}

/// Reads a call's arguments as sent back by a client; returns them as a conversation has them.
pub(super) fn parse_arguments(path: &str, arguments: &Value) -> Result<Value, RouterError> {
    let invalid =
        |why: &str| RouterError::must_be(path, format_args!("a JSON object, written as a string{why}"));
    match arguments {
        Value::Null => Ok(json!({})),
        Value::String(text) if text.is_empty() => Ok(json!({})),
        Value::String(text) => arguments_from_json(text).map_err(|error| invalid(&format!(": {error}"))),
        Value::Object(_) => Ok(arguments.clone()),
        _ => Err(invalid("")),
    }
}

/// The arguments of an answer's call as JSON; `{}` if they were cut off, because incomplete JSON has no
/// value.
pub(super) fn json_arguments(arguments: &str) -> &RawValue {
    serde_json::from_str(arguments).unwrap_or_else(|_| serde_json::from_str("{}").expect("it is JSON"))
}

/// Id of a choice's call.
pub(super) fn call_id(prefix: &str, response_id: &str, choice: u32, call: u32) -> String {
    format!("{prefix}{}_{choice}_{call}", unique_part(response_id))
}

/// Returns a response id without the prefix common to its API.
pub(super) fn unique_part(response_id: &str) -> &str {
    response_id.rsplit(['-', '_']).next().unwrap_or_default()
}
