//! Upper bound of the bytes of text per token, so that a too long prompt can be refused before tokenization.
//! Known only if the tokenizer keeps every byte of a text: otherwise text of any length could fit the window.

use serde_json::Value;
use tokenizers::Tokenizer;

use super::vocabulary::Vocabulary;

/// Length of the longest token in bytes; `None` if a text may be longer than its tokens.
pub(super) fn max_bytes_per_token(tokenizer: &Tokenizer, vocabulary: &Vocabulary) -> Option<usize> {
    let rewrites = tokenizer.get_normalizer().is_some() || !vocabulary.is_bytes();
    let added = tokenizer.get_added_tokens_decoder();
    let swallows_space = added.values().any(|token| token.lstrip || token.rstrip);
    let splits = serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?;
    if rewrites || swallows_space || !keeps_bytes(&splits) {
        return None;
    }
    let tokens = || (0..vocabulary.len()).map(|id| vocabulary.bytes(id as u32));
    let mut is_token = [false; 256];
    for token in tokens() {
        if let [byte] = token {
            is_token[usize::from(*byte)] = true;
        }
    }
    // A byte without a token of its own may be dropped.
    let all_bytes = is_token.iter().enumerate().all(|(byte, is_token)| *is_token || is_never_text(byte));
    tokens().map(<[u8]>::len).max().filter(|longest| all_bytes && *longest > 0)
}

/// Whether splitting a text keeps all of it.
fn keeps_bytes(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer["type"].as_str() {
        Some("ByteLevel" | "Digits") => true,
        Some("Split") => pre_tokenizer["behavior"] != "Removed",
        Some("Sequence") => {
            pre_tokenizer["pretokenizers"].as_array().is_some_and(|parts| parts.iter().all(keeps_bytes))
        }
        _ => false,
    }
}

/// Bytes that never occur in UTF-8.
pub(super) fn is_never_text(byte: usize) -> bool {
    matches!(byte, 0xc0 | 0xc1 | 0xf5..=0xff)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A tokenizer with a token for every byte and one for "ab", modified by `change`.
    fn byte_level(change: impl FnOnce(&mut Value)) -> Option<usize> {
        let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let mut next = 0x100;
        let mut vocab = serde_json::Map::new();
        for byte in 0..256 {
            let code = if printable(byte) {
                byte
            } else {
                next += 1;
                next - 1
            };
            vocab.insert(char::from_u32(code).unwrap().to_string(), json!(byte));
        }
        vocab.insert("ab".to_owned(), json!(256));
        let byte_level = json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true
        });
        let mut tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
            "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
                "merges": ["a b"] },
        });
        change(&mut tokenizer);
        let tokenizer = Tokenizer::from_bytes(tokenizer.to_string()).unwrap();
        max_bytes_per_token(&tokenizer, &Vocabulary::of(&tokenizer).unwrap())
    }

    #[test]
    fn only_a_tokenizer_that_keeps_every_byte_has_a_bound() {
        assert_eq!(byte_level(|_| ()), Some(2));
        let split = |behavior: &str| json!({ "type": "Split", "pattern": { "String": " " }, "behavior": behavior, "invert": false });
        assert_eq!(byte_level(|json| json["pre_tokenizer"] = split("Isolated")), Some(2));
        assert_eq!(byte_level(|json| json["pre_tokenizer"] = split("Removed")), None);
        assert_eq!(byte_level(|json| json["pre_tokenizer"] = Value::Null), None);
        assert_eq!(byte_level(|json| json["normalizer"] = json!({ "type": "NFC" })), None);
        let mask = json!([{ "id": 257, "content": "<mask>", "single_word": false, "lstrip": true, "rstrip": false,
            "normalized": false, "special": true }]);
        assert_eq!(byte_level(|json| json["added_tokens"] = mask), None);
        let without_a = |json: &mut Value| {
            json["model"]["vocab"].as_object_mut().unwrap().remove("c").unwrap();
        };
        assert_eq!(byte_level(without_a), None);
    }
}
