//! [`Vocabulary`]: the bytes of each token, computed once per model, so that detokenization is a table
//! lookup. Tokens are byte strings, not text: a token may contain half a character.

use std::collections::HashMap;

use serde_json::Value;
use speculation::TokenId;
use tokenizers::Tokenizer;

use super::ModelTextError;

/// The mark for a space in sentencepiece tokenizers.
const SENTENCEPIECE_SPACE: &str = "\u{2581}";

/// Maximum number of tokens; a larger claimed id would exhaust memory.
const MAX_TOKENS: usize = 1 << 24;

/// The bytes of all tokens.
#[derive(Debug)]
pub struct Vocabulary {
    bytes: Vec<u8>,
    /// Token `id` is `bytes[ends[id - 1] .. ends[id]]`.
    ends: Vec<usize>,
    /// Whether the token is left out of text.
    special: Vec<bool>,
    /// Whether a text is the concatenated bytes of its tokens.
    is_bytes: bool,
}

impl Vocabulary {
    /// Reads all tokens of a tokenizer.
    pub(super) fn of(tokenizer: &Tokenizer) -> Result<Self, ModelTextError> {
        let spelling = Spelling::of(tokenizer)?;
        let added = tokenizer.get_added_tokens_decoder();
        let len = tokenizer.get_vocab(true).into_values().max().map_or(0, |last| last as usize + 1);
        if len > MAX_TOKENS {
            let reason = format!("token ids reach {}, at most {MAX_TOKENS} are served", len - 1);
            return Err(ModelTextError::Tokenizer { reason });
        }
        let mut vocabulary = Self {
            bytes: Vec::new(),
            ends: Vec::with_capacity(len),
            special: Vec::with_capacity(len),
            is_bytes: !matches!(spelling, Spelling::Plain),
        };
        for id in 0..len as TokenId {
            // An unused id is an empty token.
            if let Some(token) = tokenizer.id_to_token(id) {
                spelling.append_bytes(&token, &mut vocabulary.bytes);
            }
            vocabulary.ends.push(vocabulary.bytes.len());
            vocabulary.special.push(added.get(&id).is_some_and(|token| token.special));
        }
        Ok(vocabulary)
    }

    /// Leaves out the tokens with ids from `num_ids` on.
    pub(super) fn truncate(&mut self, num_ids: usize) {
        self.ends.truncate(num_ids);
        self.special.truncate(num_ids);
    }

    /// Number of ids. A model may have more rows than its tokenizer has tokens.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Whether a text is the concatenated bytes of its tokens. If not, the tokenizer's decoder must produce
    /// it.
    pub fn is_bytes(&self) -> bool {
        self.is_bytes
    }

    /// The bytes of the token, special or not; empty for an unused id.
    pub fn bytes(&self, id: TokenId) -> &[u8] {
        let idx = id as usize;
        let Some(&end) = self.ends.get(idx) else { return &[] };
        let start = if idx == 0 { 0 } else { self.ends[idx - 1] };
        &self.bytes[start..end]
    }

    /// Whether the token is left out of text; false for an unused id.
    pub(super) fn is_special(&self, id: TokenId) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// The bytes that the token adds to text; empty for a special token.
    pub fn text_bytes(&self, id: TokenId) -> &[u8] {
        if self.special.get(id as usize).copied().unwrap_or(true) { &[] } else { self.bytes(id) }
    }

    /// The bytes of all tokens for a grammar, which describes text: those of special tokens follow a 0xFF,
    /// which does not occur in text. `None` if a text is not the concatenated bytes of its tokens.
    pub fn marked(&self) -> Option<Vec<Vec<u8>>> {
        let mark = |id| if self.is_special(id) { [0xff].as_slice() } else { &[] };
        self.is_bytes
            .then(|| (0..self.len() as TokenId).map(|id| [mark(id), self.bytes(id)].concat()).collect())
    }

    /// The token as one string, for token lists: its text, or `bytes:\xe2\x82` if it is not whole characters.
    pub fn spell(&self, id: TokenId) -> String {
        let bytes = self.bytes(id);
        match std::str::from_utf8(bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => {
                use std::fmt::Write as _;
                bytes.iter().fold("bytes:".to_owned(), |mut spelled, byte| {
                    write!(spelled, "\\x{byte:02x}").expect("writing to a string cannot fail");
                    spelled
                })
            }
        }
    }
}

/// The encoding of bytes in a tokenizer's token strings.
enum Spelling {
    /// One printable character per byte (GPT-2, Llama 3, Qwen).
    ByteLevel { byte_of: HashMap<char, u8> },
    /// Text with a mark for spaces, and tokens such as `<0x0A>` for single bytes (Llama 2, Mistral).
    SentencePiece { byte_fallback: bool },
    /// Unchanged; the decoder determines what it adds to a text (WordPiece, CTC, none, ...).
    Plain,
}

impl Spelling {
    fn of(tokenizer: &Tokenizer) -> Result<Self, ModelTextError> {
        let decoder = serde_json::to_value(tokenizer.get_decoder()).map_err(ModelTextError::tokenizer)?;
        let parts = match decoder["decoders"].as_array() {
            Some(parts) => parts.as_slice(),
            None => std::slice::from_ref(&decoder),
        };
        let has = |wanted: &str| parts.iter().any(|part| kind(part) == wanted);
        if has("ByteLevel") && parts.iter().all(|part| matches!(kind(part), "ByteLevel" | "Fuse")) {
            return Ok(Self::ByteLevel { byte_of: byte_of_character() });
        }
        let marks_spaces = has("Replace") || has("Metaspace");
        if marks_spaces && (0..parts.len()).all(|idx| is_of_sentencepiece(parts, idx)) {
            return Ok(Self::SentencePiece { byte_fallback: has("ByteFallback") });
        }
        Ok(Self::Plain)
    }

    fn append_bytes(&self, token: &str, bytes: &mut Vec<u8>) {
        match self {
            Self::ByteLevel { byte_of } => {
                let start = bytes.len();
                for character in token.chars() {
                    let Some(&byte) = byte_of.get(&character) else {
                        // Added tokens are plain text, recognized by a character outside the table.
                        bytes.truncate(start);
                        bytes.extend_from_slice(token.as_bytes());
                        return;
                    };
                    bytes.push(byte);
                }
            }
            Self::Plain => bytes.extend_from_slice(token.as_bytes()),
            Self::SentencePiece { byte_fallback } => match byte_token(token) {
                Some(byte) if *byte_fallback => bytes.push(byte),
                _ => bytes.extend_from_slice(token.replace(SENTENCEPIECE_SPACE, " ").as_bytes()),
            },
        }
    }
}

/// The type of a decoder's part.
fn kind(part: &Value) -> &str {
    part["type"].as_str().unwrap_or("none")
}

/// Whether this part of a decoder only converts marks for spaces and byte tokens, or strips the space at the
/// beginning of a whole text, which a text after a prompt keeps.
fn is_of_sentencepiece(parts: &[Value], idx: usize) -> bool {
    let part = &parts[idx];
    match kind(part) {
        "ByteFallback" | "Fuse" => true,
        "Replace" => part["pattern"]["String"] == SENTENCEPIECE_SPACE && part["content"] == " ",
        "Metaspace" => part["replacement"] == SENTENCEPIECE_SPACE,
        "Strip" => {
            let is_of_text = parts[..idx].iter().any(|part| kind(part) == "Fuse");
            is_of_text && part["content"] == " " && part["stop"] == 0
        }
        _ => false,
    }
}

/// The byte of a token of the form `<0x0A>`.
fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

/// GPT-2's table: printable Latin-1 characters stand for themselves, other bytes for characters from U+0100
/// on.
fn byte_of_character() -> HashMap<char, u8> {
    let mut next_code = 0x100;
    (0..=u8::MAX)
        .map(|byte| {
            if matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) {
                return (char::from(byte), byte);
            }
            let character = char::from_u32(next_code).expect("0x100..0x144 are characters");
            next_code += 1;
            (character, byte)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The vocabulary of three tokens under this decoder.
    fn vocabulary(decoder: &Value) -> Vocabulary {
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": null, "post_processor": null, "decoder": decoder,
            "model": { "type": "WordLevel", "unk_token": "a",
                "vocab": { "a": 0, "\u{2581}\u{e9}": 1, "<0xE9>": 2 } },
        });
        Vocabulary::of(&Tokenizer::from_bytes(tokenizer.to_string()).unwrap()).unwrap()
    }

    #[test]
    fn a_decoder_that_does_more_than_join_bytes_is_left_to_the_library() {
        let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
        let replace = |pattern: &str, content: &str| json!({ "type": "Replace", "pattern": { "String": pattern }, "content": content });
        let spaces = || replace("\u{2581}", " ");
        let metaspace = |mark: &str| json!({ "type": "Metaspace", "replacement": mark, "prepend_scheme": "first", "split": true });
        let strip = |stop: u32| json!({ "type": "Strip", "content": " ", "start": 1, "stop": stop });
        let (fuse, bytes) = (json!({ "type": "Fuse" }), json!({ "type": "ByteFallback" }));
        let sequence = |parts: &[&Value]| json!({ "type": "Sequence", "decoders": parts });
        // The bytes of the last two tokens, or nothing if the library's decoder has to be asked.
        for (decoder, expected) in [
            (byte_level.clone(), Some(["\u{2581}\u{e9}".as_bytes(), b"<0xE9>"])),
            (sequence(&[&byte_level, &fuse]), Some(["\u{2581}\u{e9}".as_bytes(), b"<0xE9>"])),
            (metaspace("\u{2581}"), Some([" \u{e9}".as_bytes(), b"<0xE9>"])),
            (sequence(&[&spaces(), &bytes, &fuse]), Some([" \u{e9}".as_bytes(), b"\xe9"])),
            (sequence(&[&spaces(), &bytes, &fuse, &strip(0)]), Some([" \u{e9}".as_bytes(), b"\xe9"])),
            (json!(null), None),
            (fuse.clone(), None),
            (sequence(&[]), None),
            (metaspace("_"), None),
            (sequence(&[&replace("</w>", " "), &fuse]), None),
            (sequence(&[&spaces(), &replace("a", "b"), &fuse]), None),
            // Strips every token, or the end of a text.
            (sequence(&[&spaces(), &strip(0), &fuse]), None),
            (sequence(&[&spaces(), &fuse, &strip(1)]), None),
        ] {
            let vocabulary = vocabulary(&decoder);
            let found = vocabulary.is_bytes().then(|| [1, 2].map(|id| vocabulary.bytes(id)));
            assert_eq!(found, expected, "{decoder}");
        }
    }
}
