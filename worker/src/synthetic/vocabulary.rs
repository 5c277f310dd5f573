//! The text files of a synthetic model: a byte-level tokenizer in which every id has a text, and a chat
//! template.
//!
//! The vocabulary has the special tokens first, then the 256 single bytes, which can spell any prompt, then
//! made-up words, the only tokens that the model generates. Both roles generate the same files for the same
//! number of ids, so that they match like a real pair.

use scheduling::profile::text::{RESERVED_IDS, SPECIAL_TOKENS};
use serde_json::{Map, Value, json};

use crate::assets::{AssetError, Assets};

const CHAT_TEMPLATE: &str = "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}";

/// The byte-level encoding of a space.
const SPACE: char = '\u{120}';

/// Generates the files of a vocabulary of `vocab_size` ids.
pub fn assets(vocab_size: u32) -> Result<Assets, AssetError> {
    let config = json!({ "eos_token": SPECIAL_TOKENS[0], "tokenizer_class": "PreTrainedTokenizerFast" });
    Assets::from_files(vec![
        ("tokenizer.json", tokenizer(vocab_size).to_string()),
        ("tokenizer_config.json", config.to_string()),
        ("chat_template.jinja", CHAT_TEMPLATE.to_owned()),
    ])
}

fn tokenizer(vocab_size: u32) -> Value {
    let special = SPECIAL_TOKENS.iter().map(|token| (*token).to_owned());
    let bytes = (0..=255).map(|byte| spelled(byte).to_string());
    let words = (RESERVED_IDS..vocab_size).map(|id| word(id - RESERVED_IDS));
    let texts = special.chain(bytes).chain(words);
    let vocab: Map<String, Value> = texts.zip(0..vocab_size).map(|(text, id)| (text, id.into())).collect();
    let added: Vec<Value> = SPECIAL_TOKENS
        .iter()
        .enumerate()
        .map(|(id, content)| {
            json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true })
        })
        .collect();
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [] },
    })
}

/// The byte-level encoding of a byte: itself if visible, otherwise a letter from U+0100 on.
fn spelled(byte: u8) -> char {
    let is_visible = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if is_visible(byte) {
        return char::from(byte);
    }
    let hidden_before = (0..byte).filter(|&byte| !is_visible(byte)).count() as u32;
    char::from_u32(0x100 + hidden_before).expect("68 letters from U+0100 on are letters")
}

/// The made-up word of this number: a space and syllables, unique for each number.
fn word(number: u32) -> String {
    const CONSONANTS: &[u8] = b"bdfgklmnprstvz";
    const VOWELS: &[u8] = b"aeiou";
    let syllables = (CONSONANTS.len() * VOWELS.len()) as u32;
    let (mut left, mut word) = (number, String::from(SPACE));
    loop {
        let syllable = (left % syllables) as usize;
        word.push(char::from(CONSONANTS[syllable / VOWELS.len()]));
        word.push(char::from(VOWELS[syllable % VOWELS.len()]));
        // Words of n syllables come before those of n + 1, so all words differ.
        left = match (left / syllables).checked_sub(1) {
            Some(left) => left,
            None => return word,
        };
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_id_has_a_text_of_its_own() {
        for vocab_size in [2 * RESERVED_IDS, 4_096, 128_256] {
            let assets = assets(vocab_size).unwrap();
            let list = assets.token_list();
            assert_eq!((list.len(), list.num_ids()), (vocab_size as usize, vocab_size));
            let texts: BTreeSet<&str> = (0..vocab_size).map(|id| list.get(id).unwrap()).collect();
            assert_eq!(texts.len(), vocab_size as usize);
        }
        let small = assets(2 * RESERVED_IDS).unwrap();
        assert_eq!(small.token_list().get(0), Some("<|end|>"));
        assert_eq!(small.token_list().get(4 + u32::from(b' ')), Some("\u{120}"));
        assert_eq!(small.token_list().get(4 + u32::from(b'a')), Some("a"));
        assert_eq!(small.token_list().get(RESERVED_IDS), Some("\u{120}ba"));
    }
}
