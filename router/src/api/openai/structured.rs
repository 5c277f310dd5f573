//! Fields that constrain the output: OpenAI's `response_format`, vLLM's `structured_outputs` and its older
//! `guided_*`.

use grammar::{Grammar, GrammarKind};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use crate::api::grammars::{
    FormatNames, grammar_from_choices, grammar_from_format, grammar_from_schema, raw_grammar,
};
use crate::api::object::Object;
use crate::error::RouterError;
use crate::request::structure::RawGrammar;

/// `response_format`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are OpenAI's")]
pub struct ResponseFormat {
    pub r#type: String,
    #[serde(default)]
    pub json_schema: Option<Object<JsonSchema>>,
    // llama.cpp's.
    #[serde(default)]
    pub schema: Option<Value>,
}

/// `response_format.json_schema`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are OpenAI's")]
pub struct JsonSchema {
    #[serde(default)]
    pub schema: Option<Value>,
    // The output always matches the schema, strict or not.
    #[serde(default, rename = "strict")]
    _strict: Option<bool>,
    #[serde(default, rename = "name")]
    _name: Option<String>,
    #[serde(default, rename = "description")]
    _description: Option<String>,
}

/// `structured_outputs`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[expect(missing_docs, reason = "the fields are vLLM's")]
pub struct StructuredOutputs {
    pub json: Option<Value>,
    pub json_object: Option<bool>,
    pub regex: Option<String>,
    pub choice: Option<Vec<String>>,
    pub grammar: Option<String>,
    #[serde(rename = "disable_fallback")]
    _disable_fallback: IgnoredAny,
}

/// All fields of a body that constrain the output.
#[derive(Debug, Default)]
pub(super) struct GrammarFields {
    pub(super) response_format: Option<ResponseFormat>,
    pub(super) structured_outputs: Option<StructuredOutputs>,
    pub(super) guided_json: Option<Value>,
    pub(super) guided_regex: Option<String>,
    pub(super) guided_choice: Option<Vec<String>>,
    pub(super) guided_grammar: Option<String>,
}

impl GrammarFields {
    /// Returns the grammar; at most one field may set it.
    pub(super) fn into_grammar(self) -> Result<Option<RawGrammar>, RouterError> {
        let mut grammars = Vec::new();
        if let Some(format) = self.response_format {
            grammars.extend(format.into_grammar()?);
        }
        let outputs = self.structured_outputs.unwrap_or_default();
        if outputs.json_object == Some(true) {
            grammars.push(raw_grammar("structured_outputs.json_object", Grammar::json_object()));
        }
        for (field, schema) in [("structured_outputs.json", outputs.json), ("guided_json", self.guided_json)]
        {
            grammars.extend(schema.map(|schema| grammar_from_schema(field, &schema)).transpose()?);
        }
        for (field, text) in
            [("structured_outputs.regex", outputs.regex), ("guided_regex", self.guided_regex)]
        {
            grammars.extend(text.map(|text| raw_grammar(field, Grammar { kind: GrammarKind::Regex, text })));
        }
        for (field, choices) in
            [("structured_outputs.choice", outputs.choice), ("guided_choice", self.guided_choice)]
        {
            grammars.extend(choices.map(|choices| grammar_from_choices(field, &choices)).transpose()?);
        }
        for (field, text) in
            [("structured_outputs.grammar", outputs.grammar), ("guided_grammar", self.guided_grammar)]
        {
            grammars.extend(text.map(|text| raw_grammar(field, Grammar { kind: GrammarKind::Lark, text })));
        }
        if let [first, second, ..] = grammars.as_slice() {
            let (first, second) = (first.field, second.field);
            let message = format!("{first} and {second} both constrain the output: send one of them");
            return Err(RouterError::invalid(second, message));
        }
        Ok(grammars.pop())
    }
}

/// `text.format` of a response: like `response_format` of a chat completion, without a nested object.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are OpenAI's")]
pub struct TextFormat {
    pub r#type: String,
    #[serde(default)]
    pub schema: Option<Value>,
    #[serde(default, rename = "strict")]
    _strict: Option<bool>,
    #[serde(default, rename = "name")]
    _name: Option<String>,
    #[serde(default, rename = "description")]
    _description: Option<String>,
}

impl ResponseFormat {
    fn into_grammar(self) -> Result<Option<RawGrammar>, RouterError> {
        let names = FormatNames {
            format: "response_format",
            kind: "response_format.type",
            schema: "response_format.json_schema.schema",
        };
        if self.json_schema.is_some() && self.r#type != "json_schema" {
            let field = "response_format.json_schema";
            let message = format!("{field} is only allowed where {} is json_schema", names.kind);
            return Err(RouterError::invalid(field, message));
        }
        let Some(schema) = self.schema else {
            let schema = self.json_schema.and_then(|Object(schema)| schema.schema);
            return grammar_from_format(&names, &self.r#type, schema);
        };
        let field = "response_format.schema";
        match (self.r#type.as_str(), self.json_schema) {
            ("json_object" | "json_schema", None) => grammar_from_schema(field, &schema).map(Some),
            (_, Some(_)) => {
                let message =
                    format!("{field} and response_format.json_schema are the same: send one of them");
                Err(RouterError::invalid(field, message))
            }
            (_, None) => {
                let message = format!("{field} is only allowed where {} is json_object", names.kind);
                Err(RouterError::invalid(field, message))
            }
        }
    }
}

impl TextFormat {
    pub(super) fn into_grammar(self) -> Result<Option<RawGrammar>, RouterError> {
        let names =
            FormatNames { format: "text.format", kind: "text.format.type", schema: "text.format.schema" };
        if self.schema.is_some() && self.r#type != "json_schema" {
            let field = names.schema;
            let message = format!("{field} is only allowed where {} is json_schema", names.kind);
            return Err(RouterError::invalid(field, message));
        }
        grammar_from_format(&names, &self.r#type, self.schema)
    }
}
