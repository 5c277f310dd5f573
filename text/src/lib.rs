//! [`ModelText`]: the text side of a model, which consists of its tokenizer, the bytes of each token, and its
//! chat template. Built from named checkpoint files of any origin and shared by all requests for the model.
//! Building and encoding are CPU-bound: servers run them on separate threads.

#![forbid(unsafe_code)]

mod added_tokens;
mod arguments;
mod bytes_bound;
mod chat_template;
mod escaper;
mod tokenizer;
mod tokenizer_config;
pub mod translation;
mod vocabulary;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use aho_corasick::AhoCorasick;
use escaper::SpecialTokenEscaper;
use serde_json::{Map, Value};
use speculation::TokenId;
use tokenizers::Tokenizer;

pub use added_tokens::with_added_tokens;
pub use arguments::{fields_of_json_arguments, parse_arguments};
use bytes_bound::max_bytes_per_token;
use chat_template::continuation;
pub use chat_template::continuation::CONTINUE_FINAL_MESSAGE;
pub use chat_template::{ADD_GENERATION_PROMPT, ChatTemplate, ConversationMessage, STACK_BYTES};
use tokenizer_config::TokenizerConfig;
pub use vocabulary::Vocabulary;

/// Names of the assets of a model's text, as served by workers.
pub mod asset {
    /// The tokenizer; required.
    pub const TOKENIZER: &str = "tokenizer.json";
    /// Special tokens and, in older checkpoints, the chat template; optional.
    pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
    /// The chat template; optional, overrides the one in the tokenizer's configuration.
    pub const CHAT_TEMPLATE: &str = "chat_template.jinja";
    /// The chat template of conversations with tools, if it differs; optional.
    pub const TOOL_TEMPLATE: &str = "additional_chat_templates/tool_use.jinja";
}

/// Why a conversation or a text cannot be converted to a prompt.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// The chat template refuses the conversation deliberately (`raise_exception`).
    #[error("{0}")]
    Refused(String),
    /// The chat template fails on the conversation.
    #[error("{0}")]
    Conversation(String),
    /// The chat template ran for too long on the conversation. Other forms of the same conversation would
    /// take as long, so none is tried.
    #[error("{0}")]
    TooLong(String),
    /// The template or the tokenizer failed.
    #[error("{0}")]
    Internal(String),
}

/// Why the text files of a model cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ModelTextError {
    /// The target serves no tokenizer.
    #[error("{} is missing: text cannot be served without it", asset::TOKENIZER)]
    NoTokenizer,
    /// The tokenizer is invalid.
    #[error("{}: {reason}", asset::TOKENIZER)]
    Tokenizer {
        /// The parser's message.
        reason: String,
    },
    /// The JSON is invalid or not as expected.
    #[error("{}: {reason}", asset::TOKENIZER_CONFIG)]
    TokenizerConfig {
        /// The parser's message.
        reason: String,
    },
    /// The template does not compile.
    #[error("chat template: {reason}")]
    ChatTemplate {
        /// The compiler's message, with the line.
        reason: String,
    },
}

impl ModelTextError {
    /// The error for a tokenizer that cannot be used.
    fn tokenizer(error: impl fmt::Display) -> Self {
        Self::Tokenizer { reason: error.to_string() }
    }
}

/// Precedes parts of a rendered conversation; few tokenizers merge it with text.
const LINE_BREAK: &str = "\n";

/// A model's tokenizer, token bytes and chat template.
pub struct ModelText {
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    max_bytes_per_token: Option<usize>,
    chat_template: Option<ChatTemplate>,
    /// Chat template of conversations with tools, if it differs.
    tool_template: Option<ChatTemplate>,
    /// Finds spellings of special tokens.
    special: AhoCorasick,
}

/// A conversation rendered by its template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedChat {
    /// The whole text.
    pub text: String,
    /// The same text in parts that are tokenized separately; a special token spelled by a user is split over
    /// two parts.
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
    /// Builds from assets by name (see [`asset`]). Takes up to a second for a large vocabulary: call it on a
    /// thread that may block.
    pub fn from_assets<'a>(fetch: impl Fn(&str) -> Option<&'a [u8]>) -> Result<Self, ModelTextError> {
        let tokenizer_json = fetch(asset::TOKENIZER).ok_or(ModelTextError::NoTokenizer)?;
        let config_json = fetch(asset::TOKENIZER_CONFIG);
        let tokenizer_json = with_added_tokens(tokenizer_json, config_json)?;
        let tokenizer = tokenizer::load(&tokenizer_json)?;
        let config = TokenizerConfig::parse(config_json)?;
        let (chat_template, tool_template) = config.templates(&fetch)?;
        let vocabulary = Vocabulary::of(&tokenizer)?;
        let max_bytes_per_token = max_bytes_per_token(&tokenizer, &vocabulary);
        let added = tokenizer.get_added_tokens_decoder();
        let special = added.values().filter(|token| token.special && !token.content.is_empty());
        let special =
            AhoCorasick::new(special.map(|token| &token.content)).map_err(ModelTextError::tokenizer)?;
        Ok(Self { tokenizer, vocabulary, max_bytes_per_token, chat_template, tool_template, special })
    }

    /// The bytes of each token.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// Decodes ids with the library's decoder, without special tokens. Unknown ids are skipped.
    pub fn decode(&self, ids: &[TokenId]) -> String {
        let adds_text = |id: &TokenId| !self.vocabulary.text_bytes(*id).is_empty();
        self.decode_all(&ids.iter().copied().filter(adds_text).collect::<Vec<_>>())
    }

    /// Like [`Self::decode`], including special tokens.
    pub fn decode_all(&self, ids: &[TokenId]) -> String {
        // Some of the library's decoders panic if there is nothing to decode.
        if ids.iter().all(|&id| self.vocabulary.bytes(id).is_empty()) {
            return String::new();
        }
        // If a decoder fails or panics on some tokens, the text is empty; the ids still exist.
        let decode = AssertUnwindSafe(|| self.tokenizer.decode(ids, false));
        catch_unwind(decode).ok().and_then(Result::ok).unwrap_or_default()
    }

    /// Maximum bytes of text per token, if known.
    pub fn max_bytes_per_token(&self) -> Option<usize> {
        self.max_bytes_per_token
    }

    /// The chat template, if the model has one.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.chat_template.as_ref()
    }

    /// The chat template of conversations with tools or of others, if the model has one.
    pub fn chat_template_for(&self, has_tools: bool) -> Option<&ChatTemplate> {
        let tool_template = self.tool_template.as_ref().filter(|_| has_tools);
        tool_template.or(self.chat_template.as_ref())
    }

    /// The id of a token by its spelling.
    pub fn token_id(&self, spelling: &str) -> Option<TokenId> {
        self.tokenizer.token_to_id(spelling)
    }

    /// Renders a conversation with the model's template. Messages and variables are treated as text, even
    /// where they spell special tokens. With the variable `continue_final_message`, which the template does
    /// not see, the text ends with the last message, for the model to continue it.
    pub fn render_chat(
        &self,
        template: &ChatTemplate,
        messages: &[ConversationMessage],
        extra: &Map<String, Value>,
    ) -> Result<RenderedChat, TextError> {
        let escaper = SpecialTokenEscaper::new(&self.special, messages, extra);
        let (mut messages, mut variables) = (escaper.messages(messages), escaper.object(extra));
        variables.remove(CONTINUE_FINAL_MESSAGE);
        let is_continued = continuation::is_requested(extra);
        if is_continued {
            continuation::mark_end(&mut messages)?;
            variables.insert(ADD_GENERATION_PROMPT.to_owned(), false.into());
        }
        let rendered = template.render_calls(&messages, &variables)?;
        let rendered = if is_continued { continuation::cut_at_end(&rendered)? } else { rendered.as_str() };
        let parts: Vec<String> = escaper.parts(rendered).map(str::to_owned).collect();
        Ok(RenderedChat { text: parts.concat(), parts })
    }

    /// Encodes a rendered conversation.
    pub fn encode_chat(&self, rendered: &RenderedChat) -> Result<Vec<TokenId>, TextError> {
        let Some((first, rest)) = rendered.parts.split_first() else { return Ok(Vec::new()) };
        let mut ids = self.encode(first, Framing::AsIs)?;
        if !rest.is_empty() {
            let line_break = self.encode(LINE_BREAK, Framing::AsIs)?;
            for part in rest {
                ids.extend(self.encode_continuation(part, &line_break)?);
            }
        }
        Ok(ids)
    }

    /// Encodes a part that continues other text. SentencePiece tokenizers mark the beginning of a text like a
    /// space. The part has no such mark behind a line break, whose ids are dropped. Where they merge with the
    /// part, it is encoded alone, possibly with the mark.
    fn encode_continuation(&self, part: &str, line_break: &[TokenId]) -> Result<Vec<TokenId>, TextError> {
        let ids = self.encode(&[LINE_BREAK, part].concat(), Framing::AsIs)?;
        match ids.strip_prefix(line_break) {
            Some(ids) => Ok(ids.to_vec()),
            None => self.encode(part, Framing::AsIs),
        }
    }

    /// Encodes text. Text that spells a special token becomes that token, as in `transformers`. The
    /// tokenizer's own leading or trailing tokens (such as BOS) are added only on request: a rendered chat
    /// template already contains them.
    pub fn encode(&self, text: &str, framing: Framing) -> Result<Vec<TokenId>, TextError> {
        let add_special_tokens = matches!(framing, Framing::Add);
        self.tokenizer
            .encode_fast(text, add_special_tokens)
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|error| TextError::Internal(format!("the tokenizer failed: {error}")))
    }
}

/// Whether to add the tokenizer's own special tokens (such as BOS) to a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// Add them: the text is plain.
    Add,
    /// Do not add them: the text contains what it needs.
    AsIs,
}

#[cfg(test)]
mod tests;
