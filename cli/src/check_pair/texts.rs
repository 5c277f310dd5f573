//! Compares the token ids of two checkpoints: fingerprints, special tokens, chat templates. No model is
//! loaded.

use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Map, Value};
use speculation::TokenId;
use speculation::fingerprint::{TokenList, first_difference, token_list_from_json};
use text::{ConversationMessage, Framing, ModelText, asset, with_added_tokens};

use super::error::CheckPairError;
use crate::load::Prompt;
use crate::load::prompts::Content;

/// The tokenizer and template files of one checkpoint.
pub struct CheckpointText {
    directory: PathBuf,
    tokenizer: Vec<u8>,
    config: Option<Vec<u8>>,
    template: Option<Vec<u8>>,
    tokens: TokenList,
}

/// Comparison of two checkpoints.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TextCheck {
    /// Fingerprint of the target's token list.
    pub target_fingerprint: String,
    /// Fingerprint of the draft's token list.
    pub draft_fingerprint: String,
    /// The lowest id with a different meaning; `None` if the lists are equal. A router pairs only equal
    /// lists.
    pub first_difference: Option<String>,
    /// Special tokens that differ.
    pub special_tokens: Vec<String>,
    /// How the chat templates compare.
    pub chat_template: TemplateCheck,
}

/// How the chat templates compare. The router formats conversations with the target's template only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TemplateCheck {
    /// The same text, or no template in either.
    Equal,
    /// Different text: the draft may have been trained with another format.
    Differs,
    /// Only the target has one: the draft may be a base model.
    OnlyTarget,
    /// Only the draft has one: conversations cannot be served.
    OnlyDraft,
}

impl TextCheck {
    /// Whether a router would use the draft for this target.
    pub fn can_pair(&self) -> bool {
        self.first_difference.is_none()
    }
}

impl CheckpointText {
    /// Reads the text files of a checkpoint directory.
    pub fn read(directory: &Path) -> Result<Self, CheckPairError> {
        let optional = |name: &str| {
            let path = directory.join(name);
            path.exists().then(|| read(&path)).transpose()
        };
        let (config, template) = (optional(asset::TOKENIZER_CONFIG)?, optional(asset::CHAT_TEMPLATE)?);
        let directory = directory.to_owned();
        let tokenizer = with_added_tokens(&read(&directory.join(asset::TOKENIZER))?, config.as_deref())
            .map_err(|source| CheckPairError::Text { directory: directory.clone(), source })?
            .into_owned();
        let tokens = token_list_from_json(&String::from_utf8_lossy(&tokenizer))
            .map_err(|source| CheckPairError::TokenList { directory: directory.clone(), source })?;
        Ok(Self { directory, tokenizer, config, template, tokens })
    }

    /// Content of tokenizer.json, with the tokens that only tokenizer_config.json has.
    pub(crate) fn tokenizer(&self) -> &[u8] {
        &self.tokenizer
    }

    /// The tokenizer's vocabulary, by id.
    pub(crate) fn tokens(&self) -> &TokenList {
        &self.tokens
    }

    /// Number of ids, including unused ones in gaps.
    pub fn num_ids(&self) -> u32 {
        self.tokens.num_ids()
    }

    /// Returns an encoder, which converts prompts to ids as the router would.
    pub fn prompt_encoder(&self) -> Result<PromptEncoder, CheckPairError> {
        let text = ModelText::from_assets(|name| match name {
            asset::TOKENIZER => Some(self.tokenizer.as_slice()),
            asset::TOKENIZER_CONFIG => self.config.as_deref(),
            asset::CHAT_TEMPLATE => self.template.as_deref(),
            _ => None,
        });
        let broken = |source| CheckPairError::Text { directory: self.directory.clone(), source };
        Ok(PromptEncoder { text: text.map_err(broken)? })
    }

    /// Compares a draft with this target.
    pub fn compare(&self, draft: &Self) -> TextCheck {
        let difference = first_difference(&self.tokens, &draft.tokens);
        TextCheck {
            target_fingerprint: self.tokens.fingerprint(),
            draft_fingerprint: draft.tokens.fingerprint(),
            first_difference: difference.map(|difference| difference.to_string()),
            special_tokens: special_differences(&self.config_json(), &draft.config_json()),
            chat_template: match (self.chat_template(), draft.chat_template()) {
                (Some(target), Some(draft)) if target != draft => TemplateCheck::Differs,
                (Some(_), None) => TemplateCheck::OnlyTarget,
                (None, Some(_)) => TemplateCheck::OnlyDraft,
                _ => TemplateCheck::Equal,
            },
        }
    }

    /// Null if the file is absent or invalid; [`Self::prompt_encoder`] reports an invalid file.
    fn config_json(&self) -> Value {
        let parsed = self.config.as_deref().map(serde_json::from_slice);
        parsed.and_then(Result::ok).unwrap_or(Value::Null)
    }

    /// A separate template file takes precedence over the one in the tokenizer's configuration.
    fn chat_template(&self) -> Option<String> {
        let in_file = self.template.as_deref().map(|bytes| String::from_utf8_lossy(bytes).into_owned());
        in_file.or_else(|| match self.config_json().get("chat_template") {
            None | Some(Value::Null) => None,
            Some(template) => Some(template.as_str().map_or_else(|| template.to_string(), str::to_owned)),
        })
    }
}

fn read(path: &Path) -> Result<Vec<u8>, CheckPairError> {
    let failed = |source| CheckPairError::Read { path: path.to_owned(), source };
    let bytes = std::fs::read(path).map_err(failed)?;
    engine::check_lfs_pointer(&bytes).map_err(failed)?;
    Ok(bytes)
}

/// Fields of tokenizer_config.json that name a special token.
const SPECIAL_TOKEN_FIELDS: [&str; 6] =
    ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"];

fn special_differences(target: &Value, draft: &Value) -> Vec<String> {
    let spelt = |config: &Value, name: &str| {
        let token = config.get(name)?;
        token.as_str().or_else(|| token.get("content")?.as_str()).map(str::to_owned)
    };
    let name = |token: Option<String>| token.map_or_else(|| "none".to_owned(), |token| format!("{token:?}"));
    SPECIAL_TOKEN_FIELDS
        .iter()
        .filter_map(|field| {
            let (target, draft) = (spelt(target, field), spelt(draft, field));
            let differs = target != draft;
            differs
                .then(|| format!("{field} is {} at the target, {} at the draft", name(target), name(draft)))
        })
        .collect()
}

/// Converts prompts to the ids that the router would send.
pub struct PromptEncoder {
    text: ModelText,
}

impl PromptEncoder {
    /// The ids of a prompt: as a conversation if the model has a chat template, else as plain text.
    pub fn encode(&self, prompt: &Prompt) -> Result<Vec<TokenId>, CheckPairError> {
        let refused = |reason: String| CheckPairError::Prompt { task: prompt.task.clone(), reason };
        let messages = match &prompt.content {
            Content::Prompt(text) if self.text.chat_template().is_none() => {
                return self.text.encode(text, Framing::Add).map_err(|error| refused(error.to_string()));
            }
            Content::Prompt(text) => vec![ConversationMessage::new("user", text.to_owned())],
            Content::Messages(list) => messages(list).map_err(refused)?,
        };
        let Some(template) = self.text.chat_template() else {
            return Err(refused("the target has no chat template for its messages".to_owned()));
        };
        let framed = template.render(&messages, &Map::new()).map_err(|error| refused(error.to_string()))?;
        self.text.encode(&framed, Framing::AsIs).map_err(|error| refused(error.to_string()))
    }
}

fn messages(list: &Value) -> Result<Vec<ConversationMessage>, String> {
    let one = |entry: &Value| {
        let text = |field: &str| entry.get(field).and_then(Value::as_str);
        match (text("role"), text("content")) {
            (Some(role), Some(content)) => Ok(ConversationMessage::new(role, content.to_owned())),
            _ => Err("a message needs `role` and `content`, both text".to_owned()),
        }
    };
    list.as_array().ok_or_else(|| "`messages` is not a list".to_owned())?.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn checkpoint(
        tokens: &[&str],
        config: Value,
        template: Option<&str>,
    ) -> (tempfile::TempDir, CheckpointText) {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
        let vocab: Map<String, Value> =
            (0..).zip(tokens).map(|(id, token)| ((*token).to_owned(), json!(id))).collect();
        write("tokenizer.json", &json!({"model": {"type": "BPE", "vocab": vocab, "merges": []}}).to_string());
        write("tokenizer_config.json", &config.to_string());
        if let Some(template) = template {
            write("chat_template.jinja", template);
        }
        let text = CheckpointText::read(directory.path()).unwrap();
        (directory, text)
    }

    #[test]
    fn a_file_that_git_lfs_did_not_fetch_is_named() {
        let (directory, _) = checkpoint(&["a"], json!({}), None);
        let path = directory.path().join("tokenizer.json");
        std::fs::write(&path, "version https://git-lfs.github.com/spec/v1\n").unwrap();
        let error = CheckpointText::read(directory.path()).err().unwrap().to_string();
        assert!(error.starts_with(&format!("cannot read {}: ", path.display())), "{error}");
        assert!(error.contains("pointer of Git LFS"), "{error}");
    }

    #[test]
    fn what_differs_is_named() {
        let (_a, target) =
            checkpoint(&["<s>", "a", "b"], json!({"eos_token": "<s>"}), Some("{{ messages }}"));
        let (_b, same) =
            checkpoint(&["<s>", "a", "b"], json!({"eos_token": {"content": "<s>"}}), Some("{{ messages }}"));
        let check = target.compare(&same);
        assert_eq!((check.first_difference, check.special_tokens.len()), (None, 0));
        assert_eq!(check.chat_template, TemplateCheck::Equal);
        assert_eq!(check.target_fingerprint, check.draft_fingerprint);

        let other = json!({"eos_token": "a", "chat_template": "{{ bos_token }}"});
        let (_c, other) = checkpoint(&["<s>", "a", "c"], other, None);
        let check = target.compare(&other);
        assert_eq!(check.first_difference.as_deref(), Some(r#"token 2 is "b" in one and "c" in the other"#));
        assert_eq!(check.special_tokens, [r#"eos_token is "<s>" at the target, "a" at the draft"#]);
        assert_eq!(check.chat_template, TemplateCheck::Differs);
        let (_d, base) = checkpoint(&["<s>"], json!({}), None);
        assert_eq!(target.compare(&base).chat_template, TemplateCheck::OnlyTarget);
        assert_eq!(base.compare(&target).chat_template, TemplateCheck::OnlyDraft);
    }
}
