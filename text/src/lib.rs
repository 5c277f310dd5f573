//! [`ModelText`]: what text needs to know of a model, namely its tokenizer, the bytes of each token, and its chat
//! template. It is built from the files of a checkpoint, by name, wherever they come from, and shared by every request
//! of the model. Building and encoding take CPU time: servers call them on threads of their own.

#![forbid(unsafe_code)]

mod bytes_bound;
mod chat_template;
mod shield;
pub mod translation;
mod vocabulary;

use std::fmt;

use serde::Deserialize;
use serde_json::{Map, Value};
use shield::Shield;
use speculation::TokenId;
use tokenizers::Tokenizer;

use bytes_bound::max_bytes_per_token;
pub use chat_template::{ChatTemplate, ConversationMessage};
pub use vocabulary::Vocabulary;

/// The assets that make a model's text, by the names that workers serve them under.
pub mod asset {
    /// The tokenizer; required.
    pub const TOKENIZER: &str = "tokenizer.json";
    /// Special tokens and, in older checkpoints, the chat template; optional.
    pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
    /// The chat template; optional, wins over the one in the tokenizer's configuration.
    pub const CHAT_TEMPLATE: &str = "chat_template.jinja";
}

/// Why a conversation or a text cannot be turned into a prompt.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// The chat template refuses the conversation, or fails on it.
    #[error("{0}")]
    Conversation(String),
    /// The template or the tokenizer broke.
    #[error("{0}")]
    Internal(String),
}

/// Why a model's text cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ModelTextError {
    /// The target serves no tokenizer.
    #[error("{} is missing: text cannot be served without it", asset::TOKENIZER)]
    NoTokenizer,
    /// Not a tokenizer.
    #[error("{}: {reason}", asset::TOKENIZER)]
    Tokenizer {
        /// As the parser puts it.
        reason: String,
    },
    /// Not the JSON that we expect.
    #[error("{}: {reason}", asset::TOKENIZER_CONFIG)]
    TokenizerConfig {
        /// As the parser puts it.
        reason: String,
    },
    /// The template does not compile.
    #[error("chat template: {reason}")]
    ChatTemplate {
        /// As the compiler puts it, with the line.
        reason: String,
    },
}

/// A model's tokenizer, token bytes and chat template.
pub struct ModelText {
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    max_bytes_per_token: Option<usize>,
    chat_template: Option<ChatTemplate>,
    /// Spellings of special tokens.
    special: Vec<String>,
}

/// A conversation as its template writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedChat {
    /// All of it.
    pub text: String,
    /// The same in parts that are tokenized one by one: a special token that a user spelled lies across two.
    parts: Vec<String>,
}

impl fmt::Debug for ModelText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelText")
            .field("vocabulary", &self.vocabulary.len())
            .field("chat_template", &self.chat_template.is_some())
            .finish()
    }
}

impl ModelText {
    /// Builds from assets by name (see [`asset`]). Takes up to a second for a large vocabulary: call it on a thread that
    /// may block.
    pub fn from_assets<'a>(fetch: impl Fn(&str) -> Option<&'a [u8]>) -> Result<Self, ModelTextError> {
        let tokenizer_json = fetch(asset::TOKENIZER).ok_or(ModelTextError::NoTokenizer)?;
        let mut tokenizer = Tokenizer::from_bytes(tokenizer_json)
            .map_err(|error| ModelTextError::Tokenizer { reason: error.to_string() })?;
        // A checkpoint may carry its training's cut or padding; a server must neither shorten nor lengthen a prompt.
        tokenizer
            .with_truncation(None)
            .map_err(|error| ModelTextError::Tokenizer { reason: error.to_string() })?
            .with_padding(None);
        let config = match fetch(asset::TOKENIZER_CONFIG) {
            Some(bytes) => serde_json::from_slice(bytes)
                .map_err(|error| ModelTextError::TokenizerConfig { reason: error.to_string() })?,
            None => TokenizerConfig::default(),
        };
        let template = match fetch(asset::CHAT_TEMPLATE) {
            Some(bytes) => Some(
                std::str::from_utf8(bytes)
                    .map_err(|error| ModelTextError::ChatTemplate { reason: error.to_string() })?,
            ),
            None => config.chat_template.as_ref().and_then(TemplateField::default_template),
        };
        let special =
            |token: &Option<SpecialToken>| token.as_ref().map(SpecialToken::content).unwrap_or_default();
        let chat_template = template
            .map(|source| {
                ChatTemplate::compile(source, &special(&config.bos_token), &special(&config.eos_token))
            })
            .transpose()?;
        let vocabulary = Vocabulary::of(&tokenizer)?;
        let max_bytes_per_token = max_bytes_per_token(&tokenizer, &vocabulary);
        let added = tokenizer.get_added_tokens_decoder();
        let special = added.values().filter(|token| token.special && !token.content.is_empty());
        let special = special.map(|token| token.content.clone()).collect();
        Ok(Self { tokenizer, vocabulary, max_bytes_per_token, chat_template, special })
    }

    /// The bytes of each token.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// The text of a whole list of ids by the library's decoder, special tokens left out. Ids that no token has add nothing.
    pub fn decode(&self, ids: &[TokenId]) -> String {
        let adds_text = |id: &TokenId| !self.vocabulary.text_bytes(*id).is_empty();
        self.decode_all(&ids.iter().copied().filter(adds_text).collect::<Vec<_>>())
    }

    /// The same, with special tokens as they are spelt.
    pub fn decode_all(&self, ids: &[TokenId]) -> String {
        // Some of the library's decoders panic where there is nothing to decode.
        if ids.iter().all(|&id| self.vocabulary.bytes(id).is_empty()) {
            return String::new();
        }
        // A decoder that fails on some list of tokens leaves it without text; the ids are there still.
        self.tokenizer.decode(ids, false).unwrap_or_default()
    }

    /// The most bytes of a text that one token can stand for, where that is known.
    pub fn max_bytes_per_token(&self) -> Option<usize> {
        self.max_bytes_per_token
    }

    /// The template that turns a conversation into a prompt, if the model has one.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.chat_template.as_ref()
    }

    /// The id of a token by its spelling.
    pub fn token_id(&self, spelling: &str) -> Option<TokenId> {
        self.tokenizer.token_to_id(spelling)
    }

    /// A conversation by the model's template: what the messages and variables hold is text, whatever it spells.
    pub fn render_chat(
        &self,
        template: &ChatTemplate,
        messages: &[ConversationMessage],
        extra: &Map<String, Value>,
    ) -> Result<RenderedChat, TextError> {
        let shield = Shield::new(&self.special, messages, extra);
        let rendered = template.render(&shield.messages(messages), &shield.object(extra))?;
        let parts: Vec<String> = shield.parts(&rendered).map(str::to_owned).collect();
        Ok(RenderedChat { text: parts.concat(), parts })
    }

    /// The ids of a conversation.
    pub fn encode_chat(&self, rendered: &RenderedChat) -> Result<Vec<TokenId>, TextError> {
        let parts: Result<Vec<_>, _> =
            rendered.parts.iter().map(|part| self.encode(part, Framing::AsIs)).collect();
        Ok(parts?.concat())
    }

    /// Text to ids. Text that spells a special token becomes that token, as `transformers` does it. The tokenizer's own
    /// leading or closing tokens (such as BOS) are added only where asked for: a rendered chat template holds them
    /// already.
    pub fn encode(&self, text: &str, framing: Framing) -> Result<Vec<TokenId>, TextError> {
        let add_special_tokens = matches!(framing, Framing::Add);
        self.tokenizer
            .encode_fast(text, add_special_tokens)
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|error| TextError::Internal(format!("the tokenizer failed: {error}")))
    }
}

/// Whether the tokenizer frames a text with its own special tokens (BOS and the like).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// Plain text does not hold them: add them.
    Add,
    /// The text holds what it needs.
    AsIs,
}

/// What we read of tokenizer_config.json.
#[derive(Debug, Default, Deserialize)]
struct TokenizerConfig {
    #[serde(default)]
    bos_token: Option<SpecialToken>,
    #[serde(default)]
    eos_token: Option<SpecialToken>,
    #[serde(default)]
    chat_template: Option<TemplateField>,
}

/// A special token is written as its text, or as an object that holds it.
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
}

/// A chat template is one text, or several by name.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum TemplateField {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Debug, Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl TemplateField {
    /// The one, or the one named "default".
    fn default_template(&self) -> Option<&str> {
        match self {
            Self::One(template) => Some(template),
            Self::Named(templates) => {
                templates.iter().find(|named| named.name == "default").map(|named| named.template.as_str())
            }
        }
    }
}

#[cfg(test)]
mod tests;
