//! tokenizer_config.json: special tokens and, in older checkpoints, the chat templates.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{ChatTemplate, ModelTextError, asset};

/// Name of the template of conversations with tools.
const TOOL_USE: &str = "tool_use";
const DEFAULT: &str = "default";

/// The used fields.
#[derive(Debug, Default, Deserialize)]
pub(super) struct TokenizerConfig {
    #[serde(default)]
    bos_token: Option<SpecialToken>,
    #[serde(default)]
    eos_token: Option<SpecialToken>,
    #[serde(default)]
    chat_template: Option<TemplateField>,
    /// Other fields, some of which are special tokens.
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// A special token: its text, or an object that contains the text.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum SpecialToken {
    Text(String),
    Object { content: String },
}

impl SpecialToken {
    fn content(&self) -> String {
        match self {
            Self::Text(text) | Self::Object { content: text } => text.clone(),
        }
    }

    /// The text of a token among other fields.
    fn content_of(value: &Value) -> Option<Value> {
        let token = Self::deserialize(value).ok()?;
        Some(Value::String(token.content()))
    }
}

/// A chat template: one text, or several named ones as a list or, as in memory, an object.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum TemplateField {
    One(String),
    Listed(Vec<NamedTemplate>),
    Named(BTreeMap<String, String>),
}

#[derive(Debug, Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl TemplateField {
    /// The template of this name; a single one is the default.
    fn named(&self, wanted: &str) -> Option<&str> {
        match self {
            Self::One(template) => (wanted == DEFAULT).then_some(template),
            Self::Listed(templates) => {
                templates.iter().find(|named| named.name == wanted).map(|named| named.template.as_str())
            }
            Self::Named(templates) => templates.get(wanted).map(String::as_str),
        }
    }
}

impl TokenizerConfig {
    /// Reads the file, if there is one.
    pub(super) fn parse(json: Option<&[u8]>) -> Result<Self, ModelTextError> {
        let Some(json) = json else { return Ok(Self::default()) };
        serde_json::from_slice(json)
            .map_err(|error| ModelTextError::TokenizerConfig { reason: error.to_string() })
    }

    /// The chat template, and the one of conversations with tools if it differs. Files take precedence.
    pub(super) fn templates<'a>(
        &self,
        fetch: impl Fn(&str) -> Option<&'a [u8]>,
    ) -> Result<(Option<ChatTemplate>, Option<ChatTemplate>), ModelTextError> {
        let file = |name| {
            let text = fetch(name).map(std::str::from_utf8).transpose();
            text.map_err(|error| ModelTextError::ChatTemplate { reason: format!("{name}: {error}") })
        };
        let named = |name| self.chat_template.as_ref().and_then(|field| field.named(name));
        let (default, tool_use) = match file(asset::CHAT_TEMPLATE)? {
            Some(default) => (Some(default), file(asset::TOOL_TEMPLATE)?),
            None => (named(DEFAULT), file(asset::TOOL_TEMPLATE)?.or(named(TOOL_USE))),
        };
        let compile = |source: Option<&str>| source.map(|source| self.compile(source)).transpose();
        Ok((compile(default)?, compile(tool_use)?))
    }

    fn compile(&self, source: &str) -> Result<ChatTemplate, ModelTextError> {
        let text =
            |token: &Option<SpecialToken>| token.as_ref().map(SpecialToken::content).unwrap_or_default();
        let template = ChatTemplate::compile(source, &text(&self.bos_token), &text(&self.eos_token))?;
        Ok(template.with_special_tokens(self.special_tokens()))
    }

    /// Variables of special tokens besides BOS and EOS, as transformers names them.
    fn special_tokens(&self) -> Map<String, Value> {
        let mut tokens = Map::new();
        for (name, value) in &self.others {
            if name == "additional_special_tokens" {
                let list = value.as_array().map(|list| list.iter().filter_map(SpecialToken::content_of));
                tokens.extend(list.map(|list| (name.clone(), Value::Array(list.collect()))));
            } else if name == "extra_special_tokens" {
                let named = value.as_object().into_iter().flatten();
                tokens.extend(
                    named.filter_map(|(name, token)| Some((name.clone(), SpecialToken::content_of(token)?))),
                );
            } else if name.ends_with("_token") {
                tokens.extend(SpecialToken::content_of(value).map(|token| (name.clone(), token)));
            }
        }
        tokens
    }
}
