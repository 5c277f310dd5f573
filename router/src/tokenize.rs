//! Converts prompts to token ids: renders chat templates and tokenizes. On long prompts this takes
//! milliseconds and would block other requests on the async runtime, so it runs on the threads of a
//! [`TokenizePool`].

mod bad_words;
mod chat;
mod jobs;
mod newest;
mod pool;

use serde_json::Map;
use speculation::TokenId;
use speculation::lookup::PredictedText;

use crate::detokenize::decode;
use crate::error::RouterError;
use crate::task_type::classify;
use text::{ConversationMessage, Framing, ModelText};

pub use self::bad_words::bad_word_ids;
pub use self::newest::{PromptLimits, tokenize_newest};
pub use self::pool::TokenizePool;

/// Prompt of a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompt {
    /// Plain text.
    Text {
        /// The text.
        text: String,
        /// Whether the tokenizer adds its special tokens.
        framing: Framing,
    },
    /// Token ids, used unchanged.
    TokenIds(Vec<TokenId>),
    /// A conversation, rendered by the model's chat template.
    Chat {
        /// Messages, oldest first.
        messages: Vec<ConversationMessage>,
        /// Further variables for the chat template.
        template_kwargs: Map<String, serde_json::Value>,
    },
}

impl Prompt {
    /// The field that holds it, for messages.
    pub fn field(&self) -> &'static str {
        match self {
            Self::Text { .. } | Self::TokenIds(_) => "prompt",
            Self::Chat { .. } => "messages",
        }
    }
}

/// A prompt as ids and as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenizedPrompt {
    /// Never empty.
    pub ids: Vec<TokenId>,
    /// The text for `echo`: as sent, rendered, or decoded.
    pub text: String,
    /// Task type detected from the text.
    pub task_type: &'static str,
}

impl TokenizedPrompt {
    /// Keeps the last `max_tokens` tokens, or all of them if `max_tokens` is `None`.
    pub fn keep_last(mut self, max_tokens: Option<u32>, model: &ModelText) -> Self {
        let num_removed =
            max_tokens.map_or(0, |max_tokens| self.ids.len().saturating_sub(max_tokens as usize));
        if num_removed > 0 {
            self.ids.drain(..num_removed);
            self.text = decode(model, &self.ids);
        }
        self
    }
}

/// Refuses a text that cannot fit the model's window, whatever its tokens are: tokenizing it would take long
/// and delay other requests.
fn check_bytes(
    model: &ModelText,
    text: &str,
    max_model_len: u32,
    param: &'static str,
) -> Result<(), RouterError> {
    let max_bytes = |bytes_per_token| bytes_per_token * max_model_len as usize;
    match model.max_bytes_per_token().map(max_bytes) {
        Some(limit) if text.len() > limit => {
            Err(RouterError::PromptTooLong { max_model_len, prompt_bytes: text.len(), limit, param })
        }
        _ => Ok(()),
    }
}

/// Tokenizes a text, possibly to no ids. Refuses a text too long for `max_model_len` tokens.
pub fn encode_text(
    model: &ModelText,
    text: &str,
    framing: Framing,
    max_model_len: u32,
) -> Result<Vec<TokenId>, RouterError> {
    check_bytes(model, text, max_model_len, "prompt")?;
    Ok(model.encode(text, framing)?)
}

/// Tokenizes one prompt. Refuses a text too long for `max_model_len` tokens.
pub fn tokenize(
    model: &ModelText,
    prompt: Prompt,
    max_model_len: u32,
) -> Result<TokenizedPrompt, RouterError> {
    let field = prompt.field();
    let tokenized = match prompt {
        Prompt::Text { text, framing } => {
            let ids = encode_text(model, &text, framing, max_model_len)?;
            TokenizedPrompt { ids, task_type: classify(&text), text }
        }
        Prompt::TokenIds(ids) => {
            let text = decode(model, &ids);
            TokenizedPrompt { ids, task_type: classify(&text), text }
        }
        Prompt::Chat { messages, template_kwargs } => {
            let has_tools = template_kwargs.get("tools").is_some_and(|tools| !tools.is_null());
            let template = model.chat_template_for(has_tools).ok_or_else(|| {
                RouterError::invalid(
                    field,
                    "this model has no chat template: send the whole prompt as text to /v1/completions",
                )
            })?;
            let rendered = chat::render(model, template, &messages, &template_kwargs)?;
            check_bytes(model, &rendered.text, max_model_len, field)?;
            let (ids, task_type) = (model.encode_chat(&rendered)?, classify(&task_type_text(&messages)));
            TokenizedPrompt { ids, task_type, text: rendered.text }
        }
    };
    if tokenized.ids.is_empty() {
        return Err(RouterError::invalid(field, format!("{field} must not be empty: it has no tokens")));
    }
    Ok(tokenized)
}

/// Refuses tokens that the model has no embeddings for: added ones that it was not trained with.
pub fn check_vocabulary(
    model: &ModelText,
    field: &'static str,
    ids: &[TokenId],
    vocab_size: u32,
) -> Result<(), RouterError> {
    let Some(&id) = ids.iter().find(|&&id| id >= vocab_size) else { return Ok(()) };
    let message = format!(
        "{field} has the token `{}` ({id}), which the tokenizer has and the model does not: leave it out",
        model.vocabulary().spell(id)
    );
    Err(RouterError::invalid(field, message))
}

/// Tokenizes and indexes the text that the client predicts. Tokens beyond the window could never be used.
pub fn predicted_text(
    model: &ModelText,
    text: &str,
    max_model_len: u32,
    vocab_size: u32,
) -> Result<PredictedText, RouterError> {
    let field = "prediction";
    check_bytes(model, text, max_model_len, field)?;
    let ids = model.encode(text, Framing::AsIs)?;
    if ids.len() > max_model_len as usize {
        let message = format!(
            "{field} has {} tokens, more than this model's {max_model_len} for prompt and output: shorten it",
            ids.len()
        );
        return Err(RouterError::invalid(field, message));
    }
    check_vocabulary(model, field, &ids, vocab_size)?;
    Ok(PredictedText::new(ids))
}

/// Text that determines a conversation's task type: the system message and the last user message.
fn task_type_text(messages: &[ConversationMessage]) -> String {
    let system = messages.iter().find(|message| message.role == "system");
    let last_user = messages.iter().rfind(|message| message.role == "user");
    let texts: Vec<&str> = system.into_iter().chain(last_user).map(ConversationMessage::text).collect();
    texts.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bundled tokenizer.
    pub(super) fn demo() -> ModelText {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/target/");
        let tokenizer = std::fs::read(format!("{dir}{}", text::asset::TOKENIZER)).unwrap();
        ModelText::from_assets(|name| (name == text::asset::TOKENIZER).then_some(&*tokenizer)).unwrap()
    }

    #[test]
    fn tokens_without_embeddings_are_refused() {
        let model = demo();
        check_vocabulary(&model, "prompt", &[0, 99], 100).unwrap();
        let error = check_vocabulary(&model, "prompt", &[0, 100], 100).unwrap_err();
        assert!(matches!(error, RouterError::InvalidRequest { message, .. } if message.contains("(100)")));
        assert!(predicted_text(&model, "hello there", 100, 4).is_err());
    }
}
