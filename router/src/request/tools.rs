//! [`RawTools`]: the tools that a model may call, and which calls the request requires.

use std::collections::{BTreeSet, HashSet};

use grammar::{Grammar, GrammarKind};
use serde_json::{Map, Value, json};
use text::ModelText;

use super::bounds::at_most;
use super::check::is_name;
use super::json_values::ValueCount;
use super::limits;
use super::moved_schema::moved_schema;
use super::structure::RawGrammar;
use crate::error::RouterError;
use crate::output::{CallFormat, OutputFormat, ReasoningFormat, ToolSyntax};

/// Tools as sent by the client.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RawTools {
    /// The tools; empty if the request uses none.
    pub tools: Vec<Tool>,
    /// Which calls are requested.
    pub choice: ToolChoice,
    /// Whether one answer may contain several calls.
    pub parallel: bool,
    /// The API's names of the fields, for messages.
    pub names: ToolFieldNames,
}

/// Names of the fields of tools, which differ between APIs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ToolFieldNames {
    /// `tools` or `functions`.
    pub tools: &'static str,
    /// `tool_choice` or `function_call`.
    pub choice: &'static str,
}

impl Default for ToolFieldNames {
    fn default() -> Self {
        Self { tools: "tools", choice: "tool_choice" }
    }
}

/// One tool.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// Name of the tool.
    pub name: String,
    /// Where the client wrote the name, for messages.
    pub name_path: String,
    /// JSON schema of the arguments, an object; absent: any object.
    pub parameters: Option<Map<String, Value>>,
}

/// Which calls a request requires.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolChoice {
    /// No calls.
    None,
    /// The model decides.
    Auto(AllowedTools),
    /// At least one call.
    Required(AllowedTools),
    /// One call of this tool.
    Named(String),
}

/// Which of a request's tools may be called.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum AllowedTools {
    /// All.
    #[default]
    All,
    /// Those with these names, at least one. The prompt describes the others, too.
    Only(BTreeSet<String>),
}

impl Default for ToolChoice {
    fn default() -> Self {
        Self::Auto(AllowedTools::All)
    }
}

impl ToolChoice {
    /// Whether this tool may be called.
    pub fn allows(&self, name: &str) -> bool {
        match self {
            Self::None => false,
            Self::Auto(AllowedTools::All) | Self::Required(AllowedTools::All) => true,
            Self::Auto(AllowedTools::Only(names)) | Self::Required(AllowedTools::Only(names)) => {
                names.contains(name)
            }
            Self::Named(named) => named == name,
        }
    }

    /// Whether the output must contain a call.
    pub fn is_required(&self) -> bool {
        matches!(self, Self::Required(_) | Self::Named(_))
    }

    /// The tools that the choice names.
    fn names(&self) -> Vec<&String> {
        match self {
            Self::Auto(AllowedTools::Only(names)) | Self::Required(AllowedTools::Only(names)) => {
                names.iter().collect()
            }
            Self::Named(name) => vec![name],
            Self::None | Self::Auto(AllowedTools::All) | Self::Required(AllowedTools::All) => Vec::new(),
        }
    }
}

impl RawTools {
    /// Checks the tools.
    pub(super) fn check(&self) -> Result<(), RouterError> {
        let ToolFieldNames { tools: field, choice } = self.names;
        at_most(field, self.tools.len(), "tools", limits::TOOLS_MAX)?;
        let mut names = HashSet::new();
        for tool in &self.tools {
            let path = &tool.name_path;
            let max = limits::TOOL_NAME_LEN_MAX;
            if !is_name(&tool.name, max) {
                let message = format!("{path} must have 1 to {max} of the characters A-Z a-z 0-9 _ . -");
                return Err(RouterError::invalid(path, message));
            }
            if !names.insert(&tool.name) {
                let message = format!("{path}: two tools are named `{}`", tool.name);
                return Err(RouterError::invalid(path, message));
            }
        }
        let unknown = self.choice.names().into_iter().filter(|name| !names.contains(name));
        let unknown: Vec<String> = unknown.map(|name| format!("`{name}`")).collect();
        if !unknown.is_empty() {
            let which = if unknown.len() == 1 { "is not one of" } else { "are not among" };
            let message = format!("{choice} names {}, which {which} the {field}", unknown.join(", "));
            return Err(RouterError::invalid(choice, message));
        }
        if self.choice.is_required() && self.tools.is_empty() {
            let message = format!("{choice} requires a call, but there are no {field}");
            return Err(RouterError::invalid(choice, message));
        }
        Ok(())
    }

    /// The tools that may be called.
    fn callable(&self) -> impl Iterator<Item = &Tool> {
        self.tools.iter().filter(|tool| self.choice.allows(&tool.name))
    }

    /// Counts the JSON values of the schemas. Unless no call is allowed, the variables of the chat template
    /// contain them, too, and they are counted there.
    pub(super) fn count_values(&self, count: &mut ValueCount) -> Result<(), RouterError> {
        if self.choice != ToolChoice::None {
            return Ok(());
        }
        let schemas = self.tools.iter().filter_map(|tool| tool.parameters.as_ref());
        count.add(self.names.tools, schemas.flat_map(Map::values))
    }

    /// Returns the grammar of the output, given the grammar that the request asks for. With `tool_choice`
    /// auto the model may call tools or answer; the answer must match the request's grammar.
    pub(super) fn grammar(
        &self,
        requested: Option<RawGrammar>,
        model: &ModelText,
    ) -> Result<Option<RawGrammar>, RouterError> {
        match (self.required_grammar(), requested) {
            (Some(_), Some(requested)) => {
                let choice = self.names.choice;
                let message =
                    format!("{choice} and {} both constrain the output: send one of them", requested.field);
                Err(RouterError::invalid(choice, message))
            }
            (None, Some(requested))
                if matches!(self.choice, ToolChoice::Auto(_)) && !self.tools.is_empty() =>
            {
                self.calls_or(&requested, model).map(Some)
            }
            (required, requested) => Ok(required.or(requested)),
        }
    }

    /// Returns the grammar of an output that must consist of calls.
    fn required_grammar(&self) -> Option<RawGrammar> {
        let schema = match &self.choice {
            ToolChoice::None | ToolChoice::Auto(_) => return None,
            ToolChoice::Required(_) => {
                let (mut schema, calls) = self.call_schemas("parameters");
                schema.insert("type".to_owned(), json!("array"));
                schema.insert("minItems".to_owned(), json!(1));
                schema.insert("maxItems".to_owned(), json!(self.max_calls()));
                schema.insert("items".to_owned(), json!({ "anyOf": calls }));
                Value::Object(schema)
            }
            ToolChoice::Named(name) => {
                let named = self.tools.iter().find(|tool| tool.name == *name);
                Value::Object(named.map(Tool::schema).unwrap_or_default())
            }
        };
        Some(RawGrammar { field: self.names.tools, grammar: Grammar::json_schema(&schema) })
    }

    /// Returns the grammar of an output that consists of calls, in the syntax of the chat template, or
    /// matches `output`.
    fn calls_or(&self, output: &RawGrammar, model: &ModelText) -> Result<RawGrammar, RouterError> {
        let field = output.field;
        let ToolFieldNames { tools, choice } = self.names;
        let unsupported = |why: &str| {
            let message = format!(
                "{tools} cannot be combined with {field}{why}: leave one of them out, or set {choice} to none"
            );
            RouterError::invalid(tools, message)
        };
        let syntax = tool_syntax(self.names, model)?;
        if output.grammar.kind != GrammarKind::JsonSchema {
            return Err(unsupported(", which is not a JSON schema"));
        }
        // A grammar excludes special tokens, and with them calls that begin with one.
        let is_special =
            |mark: &&str| model.token_id(mark).is_some_and(|id| model.vocabulary().text_bytes(id).is_empty());
        let (arguments, open, close, separator) = match syntax {
            ToolSyntax::Llama => ("parameters", "", "", r#"";" " "?"#),
            ToolSyntax::Hermes if !syntax.special_tokens().iter().any(is_special) => {
                ("arguments", r#""<tool_call>" "\n"? "#, r#" "\n"? "</tool_call>""#, r#""\n"?"#)
            }
            ToolSyntax::Hermes | ToolSyntax::Mistral => {
                return Err(unsupported(" for this model, whose calls begin with a special token"));
            }
        };
        let (mut schema, calls) = self.call_schemas(arguments);
        schema.insert("anyOf".to_owned(), json!(calls));
        let rule = |schema: &str| {
            Grammar::lark_json(schema)
                .map_err(|error| RouterError::invalid(field, format!("{field} cannot be used: {error}")))
        };
        let (call, value) = (rule(&Value::Object(schema).to_string())?, rule(&output.grammar.text)?);
        let calls = match self.max_calls() {
            1 => "call".to_owned(),
            max => format!("call ({separator} call){{0,{}}}", max - 1),
        };
        let text = format!(
            "start: calls | value\ncalls: {calls}\ncall: {open}body{close}\nbody: {call}\nvalue: {value}\n"
        );
        Ok(RawGrammar { field, grammar: Grammar { kind: GrammarKind::Lark, text } })
    }

    fn max_calls(&self) -> usize {
        if self.parallel { limits::TOOL_CALLS_MAX } else { 1 }
    }

    /// Returns the schema of a call of each tool that may be called, with its arguments under this name, and
    /// the root that they need: the schema of each tool's arguments is a definition there.
    fn call_schemas(&self, arguments: &str) -> (Map<String, Value>, Vec<Value>) {
        let mut definitions = Map::new();
        let mut calls = Vec::new();
        for (idx, tool) in self.callable().enumerate() {
            let name = format!("tool{idx}");
            calls.push(json!({
                "type": "object",
                "properties": {
                    "name": { "const": tool.name },
                    arguments: { "$ref": format!("#/$defs/{name}") }
                },
                "required": ["name", arguments],
                "additionalProperties": false
            }));
            let schema = moved_schema(&name, tool.schema());
            definitions.insert(name, schema);
        }
        (Map::from_iter([("$defs".to_owned(), Value::Object(definitions))]), calls)
    }
}

impl Tool {
    fn schema(&self) -> Map<String, Value> {
        let mut schema = self.parameters.clone().unwrap_or_default();
        schema.entry("type").or_insert_with(|| json!("object"));
        schema
    }
}

/// Returns the syntax of calls that the model's chat template describes.
fn tool_syntax(names: ToolFieldNames, model: &ModelText) -> Result<ToolSyntax, RouterError> {
    let ToolFieldNames { tools, choice } = names;
    let template = model.chat_template_for(true);
    let syntax = template.and_then(|template| ToolSyntax::from_template(template.source()));
    syntax.ok_or_else(|| {
        let message = format!(
            "this model's chat template has no supported tool call format (Hermes, Llama 3 or Mistral): \
             require a call with {choice}, or leave {tools} out"
        );
        RouterError::invalid(tools, message)
    })
}

/// Returns how to parse this model's output. Output constrained by a grammar has no reasoning.
pub(super) fn output_format(
    tools: &RawTools,
    has_grammar: bool,
    model: &ModelText,
) -> Result<OutputFormat, RouterError> {
    let uses_tools = tools.choice != ToolChoice::None && !tools.tools.is_empty();
    let template = model.chat_template_for(uses_tools);
    let calls = match &tools.choice {
        ToolChoice::Required(_) => CallFormat::Required,
        ToolChoice::Named(name) => CallFormat::Named(name.clone()),
        ToolChoice::Auto(_) if !tools.tools.is_empty() => CallFormat::Auto {
            syntax: tool_syntax(tools.names, model)?,
            tools: tools.callable().map(|tool| tool.name.clone()).collect(),
        },
        ToolChoice::None | ToolChoice::Auto(_) => CallFormat::None,
    };
    let reasoning = match template {
        Some(template) if !has_grammar => ReasoningFormat::from_template(template.source()),
        _ => ReasoningFormat::None,
    };
    Ok(OutputFormat { calls, reasoning, single_call: !tools.parallel })
}
