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
        let decoder = serde_json::to_value(tokenizer.get_decoder())
            .map_err(|error| ModelTextError::Tokenizer { reason: error.to_string() })?;
        let kind = |part: &Value| part["type"].as_str().unwrap_or("none").to_owned();
        let parts: Vec<String> = match decoder["decoders"].as_array() {
            Some(parts) => parts.iter().map(kind).collect(),
            None => vec![kind(&decoder)],
        };
        if parts.iter().all(|part| matches!(part.as_str(), "ByteLevel" | "Fuse")) {
            return Ok(Self::ByteLevel { byte_of: byte_of_character() });
        }
        let known = ["Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"];
        if parts.iter().any(|part| !known.contains(&part.as_str())) {
            return Ok(Self::Plain);
        }
        Ok(Self::SentencePiece { byte_fallback: parts.iter().any(|part| part == "ByteFallback") })
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
