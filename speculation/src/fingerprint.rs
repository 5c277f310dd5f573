//! Whether two models number the same tokens alike: a fingerprint over the token list, and the first token that differs.
//!
//! Sizes are not enough (models of one family pad their embeddings differently, and lists of equal length may disagree in
//! one entry), so the list itself is compared. Only `tokenizer.json`'s text comes in; reading the file is the caller's.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::TokenId;

/// Which string each id stands for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenList {
    tokens: BTreeMap<TokenId, String>,
}

/// Why no token list could be read from a tokenizer.json.
#[derive(Debug, thiserror::Error)]
pub enum TokenListError {
    /// Not JSON, or not the shape of a tokenizer.json.
    #[error("tokenizer.json cannot be read: {0}")]
    NotATokenizer(#[from] serde_json::Error),
    /// `model.vocab` is of no known kind.
    #[error(
        "tokenizer.json: model.vocab {0}; BPE, WordPiece, WordLevel and Unigram vocabularies can be read"
    )]
    BadVocabulary(String),
    /// Two entries of the vocabulary claim one id.
    #[error("tokenizer.json: id {id} stands for {first:?} and for {second:?}; give each token its own id")]
    DuplicateId {
        /// The id.
        id: TokenId,
        /// One token.
        first: String,
        /// The other.
        second: String,
    },
}

impl TokenList {
    /// SHA-256 in hex over (id, byte length, bytes) of every token by ascending id, numbers as little-endian u32.
    pub fn fingerprint(&self) -> String {
        let mut hash = Sha256::new();
        for (id, token) in &self.tokens {
            hash.update(id.to_le_bytes());
            hash.update((token.len() as u32).to_le_bytes());
            hash.update(token.as_bytes());
        }
        hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// How many tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The token that `id` stands for.
    pub fn get(&self, id: TokenId) -> Option<&str> {
        self.tokens.get(&id).map(String::as_str)
    }
}

/// One id for which two token lists disagree; `None` where a list has no such id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The lowest id at which the lists differ.
    pub id: TokenId,
    /// The token in the first list.
    pub left: Option<String>,
    /// The token in the second list.
    pub right: Option<String>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.left, &self.right) {
            (Some(left), Some(right)) => {
                write!(f, "token {} is {left:?} in one and {right:?} in the other", self.id)
            }
            (Some(token), None) => {
                write!(f, "token {} is {token:?} in one and missing in the other", self.id)
            }
            (None, Some(token)) => {
                write!(f, "token {} is missing in one and {token:?} in the other", self.id)
            }
            (None, None) => write!(f, "token {} is missing in both", self.id),
        }
    }
}

/// The lowest id at which two lists differ; `None` if they are equal.
pub fn first_difference(left: &TokenList, right: &TokenList) -> Option<Difference> {
    let ids = left.tokens.keys().chain(right.tokens.keys());
    let id = *ids.filter(|id| left.tokens.get(id) != right.tokens.get(id)).min()?;
    Some(Difference { id, left: left.tokens.get(&id).cloned(), right: right.tokens.get(&id).cloned() })
}

#[derive(Deserialize)]
struct TokenizerFile {
    model: ModelSection,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct ModelSection {
    vocab: Value,
}

#[derive(Deserialize)]
struct AddedToken {
    id: TokenId,
    content: String,
}

/// Reads the token list out of a Hugging Face tokenizer.json: the model's vocabulary, then `added_tokens`, which win where
/// both name an id, as they do when text is tokenized.
pub fn token_list_from_json(tokenizer_json: &str) -> Result<TokenList, TokenListError> {
    let file: TokenizerFile = serde_json::from_str(tokenizer_json)?;
    let mut tokens = BTreeMap::new();
    for (id, token) in vocabulary(&file.model.vocab)? {
        if let Some(first) = tokens.insert(id, token.to_owned()) {
            return Err(TokenListError::DuplicateId { id, first, second: token.to_owned() });
        }
    }
    for added in file.added_tokens {
        tokens.insert(added.id, added.content);
    }
    Ok(TokenList { tokens })
}

/// (id, token) pairs: BPE, WordPiece and WordLevel map tokens to ids, Unigram lists [token, score] in order of id.
fn vocabulary(vocab: &Value) -> Result<Vec<(TokenId, &str)>, TokenListError> {
    match vocab {
        Value::Object(map) => map.iter().map(|(token, id)| Ok((id_of(token, id)?, token.as_str()))).collect(),
        Value::Array(list) => (0..).zip(list).map(|(id, entry)| Ok((id, piece_of(id, entry)?))).collect(),
        _ => Err(TokenListError::BadVocabulary("is neither an object nor an array".into())),
    }
}

fn id_of(token: &str, id: &Value) -> Result<TokenId, TokenListError> {
    let id = id.as_u64().and_then(|id| TokenId::try_from(id).ok());
    id.ok_or_else(|| {
        TokenListError::BadVocabulary(format!("gives {token:?} something that is not a u32 as its id"))
    })
}

fn piece_of(id: TokenId, entry: &Value) -> Result<&str, TokenListError> {
    let piece = entry.get(0).and_then(Value::as_str);
    piece.ok_or_else(|| TokenListError::BadVocabulary(format!("entry {id} is not a [token, score] pair")))
}
