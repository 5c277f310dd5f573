//! Loads a tokenizer so that equal texts get equal ids, and so that text cannot become a special token.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::{ModelWrapper, Tokenizer};

use super::ModelTextError;

/// Normalizers that only mark spaces or remove them at the ends of a text.
const HARMLESS: [&str; 3] = ["Prepend", "Replace", "Strip"];

/// Reads a tokenizer.json.
pub(super) fn load(tokenizer_json: &[u8]) -> Result<Tokenizer, ModelTextError> {
    let tokenizer_json = without_normalized_spellings(tokenizer_json)?;
    let mut tokenizer = Tokenizer::from_bytes(&tokenizer_json).map_err(ModelTextError::tokenizer)?;
    // A checkpoint may contain the truncation, padding or dropout of its training; a server must not change a
    // prompt's length, and the same text has the same ids.
    tokenizer.with_truncation(None).map_err(ModelTextError::tokenizer)?.with_padding(None);
    if let ModelWrapper::BPE(bpe) = tokenizer.get_model()
        && bpe.dropout.is_some()
    {
        let mut bpe = bpe.clone();
        bpe.dropout = None;
        tokenizer.with_model(bpe);
    }
    Ok(tokenizer)
}

#[derive(Deserialize)]
struct Parts {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct AddedToken {
    #[serde(default)]
    special: bool,
    #[serde(default)]
    normalized: bool,
}

/// Special tokens are not looked for in normalized text, if text that spells none of them may become one.
fn without_normalized_spellings(tokenizer_json: &[u8]) -> Result<Cow<'_, [u8]>, ModelTextError> {
    let parts: Parts = serde_json::from_slice(tokenizer_json).map_err(ModelTextError::tokenizer)?;
    let is_at_risk = parts.added_tokens.iter().any(|token| token.special && token.normalized);
    if !is_at_risk || is_harmless(&parts.normalizer) {
        return Ok(Cow::Borrowed(tokenizer_json));
    }
    let mut tokenizer: Value = serde_json::from_slice(tokenizer_json).map_err(ModelTextError::tokenizer)?;
    let tokens = tokenizer["added_tokens"].as_array_mut().into_iter().flatten();
    for token in tokens.filter(|token| token["special"] == true) {
        token["normalized"] = false.into();
    }
    serde_json::to_vec(&tokenizer).map(Cow::Owned).map_err(ModelTextError::tokenizer)
}

/// Whether a normalizer consists of [`HARMLESS`] ones.
fn is_harmless(normalizer: &Value) -> bool {
    match normalizer["type"].as_str() {
        None => normalizer.is_null(),
        Some("Sequence") => {
            normalizer["normalizers"].as_array().is_some_and(|parts| parts.iter().all(is_harmless))
        }
        Some(kind) => HARMLESS.contains(&kind),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use crate::{ChatTemplate, ConversationMessage, Framing, ModelText, asset};

    /// A tokenizer with these fields besides the empty ones.
    fn model_text(fields: &Value) -> ModelText {
        let mut tokenizer = json!({ "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null });
        let fields = fields.as_object().unwrap().clone();
        tokenizer.as_object_mut().unwrap().extend(fields);
        let tokenizer = tokenizer.to_string().into_bytes();
        ModelText::from_assets(|name| (name == asset::TOKENIZER).then_some(tokenizer.as_slice())).unwrap()
    }

    #[test]
    fn dropout_of_merges_is_for_training_only() {
        let text = model_text(&json!({ "model": { "type": "BPE", "dropout": 1.0,
            "vocab": { "a": 0, "b": 1, "ab": 2 }, "merges": ["a b"] } }));
        assert_eq!(text.encode("ab", Framing::AsIs).unwrap(), [2]);
    }

    /// The library's decoder strips the same space from both sides.
    #[test]
    fn tokens_that_the_decoder_panics_on_have_no_text() {
        let text = model_text(&json!({
            "model": { "type": "WordLevel", "unk_token": "a", "vocab": { "a": 0, " ": 1 } },
            "decoder": { "type": "Strip", "content": " ", "start": 1, "stop": 1 } }));
        assert_eq!([0, 1].map(|id| text.decode(&[id])), ["a", ""]);
    }

    #[test]
    fn what_is_normalized_to_the_spelling_of_a_special_token_stays_text() {
        let special = "<|im_end|>";
        let content = "\u{ff1c}|im_end|\u{ff1e}";
        let template = ChatTemplate::compile("{{ messages[0].content }}<|im_end|>", "", "").unwrap();
        let messages = [ConversationMessage::new("user", content.to_owned())];
        let (nfkc, lowercase) = (json!({ "type": "NFKC" }), json!({ "type": "Lowercase" }));
        let sequence = |parts: &[&Value]| json!({ "type": "Sequence", "normalizers": parts });
        for normalizer in [nfkc.clone(), sequence(&[&sequence(&[&lowercase, &nfkc])])] {
            let text = model_text(&json!({ "normalizer": normalizer,
                "model": { "type": "WordLevel", "unk_token": "a", "vocab": { "a": 0 } },
                "added_tokens": [{ "id": 1, "content": special, "special": true, "normalized": true,
                    "single_word": false, "lstrip": false, "rstrip": false }] }));
            let rendered = text.render_chat(&template, &messages, &Map::new()).unwrap();
            assert_eq!(text.encode_chat(&rendered).unwrap(), [0, 1], "{normalizer}");
        }
    }
}
