//! Compares the token lists of two models: a fingerprint over the list, and the first token that differs.
//!
//! Comparing sizes is not enough: models of one family pad their embeddings differently, and lists of equal
//! length may differ in one entry. Input is the text of `tokenizer.json`; the caller reads the file.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::TokenId;

/// The token string of each id.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenList {
    tokens: BTreeMap<TokenId, String>,
    /// Ids of `added_tokens`.
    added: BTreeSet<TokenId>,
}

/// Why a token list could not be read from a tokenizer.json.
#[derive(Debug, thiserror::Error)]
pub enum TokenListError {
    /// Not JSON, or not the shape of a tokenizer.json.
    #[error("tokenizer.json cannot be read: {0}")]
    NotATokenizer(#[from] serde_json::Error),
    /// `model.vocab` has an unknown type.
    #[error(
        "tokenizer.json: model.vocab {0}; BPE, WordPiece, WordLevel and Unigram vocabularies can be read"
    )]
    BadVocabulary(String),
    /// Two entries of the vocabulary have the same id.
    #[error("tokenizer.json: id {id} stands for {first:?} and for {second:?}; give each token its own id")]
    DuplicateId {
        /// The id.
        id: TokenId,
        /// The first token.
        first: String,
        /// The second token.
        second: String,
    },
}

impl TokenList {
    /// SHA-256 in hex over (id, byte length, bytes) of every token by ascending id, numbers as little-endian
    /// u32.
    pub fn fingerprint(&self) -> String {
        let mut hash = Sha256::new();
        for (id, token) in &self.tokens {
            hash.update(id.to_le_bytes());
            hash.update((token.len() as u32).to_le_bytes());
            hash.update(token.as_bytes());
        }
        hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// One more than the highest id: the number of embedding rows that a model needs. More than [`Self::len`]
    /// if some ids have no token.
    pub fn num_ids(&self) -> u32 {
        self.tokens.last_key_value().map_or(0, |(id, _)| id.saturating_add(1))
    }

    /// The lowest id from `first` on whose token is not an added one.
    pub fn first_not_added(&self, first: TokenId) -> Option<TokenId> {
        self.tokens.range(first..).map(|(id, _)| *id).find(|id| !self.added.contains(id))
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The token of `id`.
    pub fn get(&self, id: TokenId) -> Option<&str> {
        self.tokens.get(&id).map(String::as_str)
    }
}

/// An id at which two token lists differ; `None` if a list has no such id.
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

/// Returns the lowest id at which two lists differ; `None` if they are equal.
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

/// Reads the token list of a Hugging Face tokenizer.json: the model's vocabulary, then `added_tokens`, which
/// take precedence for the same id, as in tokenization.
pub fn token_list_from_json(tokenizer_json: &str) -> Result<TokenList, TokenListError> {
    let file: TokenizerFile = serde_json::from_str(tokenizer_json)?;
    let mut tokens = BTreeMap::new();
    for (id, token) in vocabulary(&file.model.vocab)? {
        if let Some(first) = tokens.insert(id, token.to_owned()) {
            return Err(TokenListError::DuplicateId { id, first, second: token.to_owned() });
        }
    }
    let added = file.added_tokens.iter().map(|added| added.id).collect();
    tokens.extend(file.added_tokens.into_iter().map(|added| (added.id, added.content)));
    Ok(TokenList { tokens, added })
}

/// (id, token) pairs: BPE, WordPiece and WordLevel map tokens to ids, Unigram lists [token, score] in order
/// of id.
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

#[cfg(test)]
mod tests {
    use super::*;

    const BPE: &str = r#"{"model": {"type": "BPE", "vocab": {"a": 1, "b": 2, "<s>": 0}, "merges": []},
        "added_tokens": [{"id": 0, "content": "<s>", "special": true}, {"id": 3, "content": "<pad>"}]}"#;
    const UNIGRAM: &str =
        r#"{"model": {"type": "Unigram", "vocab": [["<s>", 0.0], ["a", -1.5], ["b", -2.5], ["<pad>", 0]]}}"#;

    fn list(json: &str) -> TokenList {
        token_list_from_json(json).unwrap()
    }

    #[test]
    fn equal_lists_have_equal_fingerprints_however_they_are_written() {
        assert_eq!((list(BPE).len(), list(BPE).get(3)), (4, Some("<pad>")));
        assert_eq!(list(BPE).fingerprint(), list(UNIGRAM).fingerprint());
        // sha256sum over the bytes documented at `fingerprint`, assembled by hand.
        let expected = "69a44e07cb3982a898f2593f34e667a43c5249751afddb603f2e6def177348a2";
        assert_eq!(list(BPE).fingerprint(), expected);
        assert_eq!(first_difference(&list(BPE), &list(UNIGRAM)), None);
    }

    #[test]
    fn ids_that_stand_for_nothing_need_a_place_too() {
        assert_eq!(list(BPE).num_ids(), 4);
        let with_gap = list(&BPE.replace("\"id\": 3", "\"id\": 9"));
        assert_eq!((with_gap.len(), with_gap.num_ids()), (4, 10));
        assert_eq!(TokenList::default().num_ids(), 0);
    }

    #[test]
    fn the_lowest_differing_id_is_named() {
        let check = |from: &str, to: &str, expected: &str| {
            let (left, right) = (list(BPE), list(&BPE.replace(from, to)));
            assert_ne!(left.fingerprint(), right.fingerprint());
            assert_eq!(first_difference(&left, &right).unwrap().to_string(), expected);
        };
        check("\"b\"", "\"\\nb\"", r#"token 2 is "b" in one and "\nb" in the other"#);
        check("\"b\": 2", "\"b\": 9", r#"token 2 is "b" in one and missing in the other"#);
        check("\"id\": 3", "\"id\": 2147483648", r#"token 3 is "<pad>" in one and missing in the other"#);
        check("\"a\": 1, \"b\": 2", "\"a\": 2, \"b\": 1", r#"token 1 is "a" in one and "b" in the other"#);
        check("\"a\": 1,", "\"a\": 1, \"c\": 4,", r#"token 4 is missing in one and "c" in the other"#);
        // An added token replaces the vocabulary's.
        check("\"id\": 3", "\"id\": 2", r#"token 2 is "b" in one and "<pad>" in the other"#);
    }

    #[test]
    fn what_is_not_a_tokenizer_is_refused_with_its_fault() {
        let check = |json: &str, expected: &str| {
            let error = token_list_from_json(json).unwrap_err().to_string();
            assert!(error.contains(expected), "{error} should say {expected:?}");
        };
        check("{", "cannot be read: EOF");
        check("{}", "missing field `model`");
        check(r#"{"model": {}}"#, "missing field `vocab`");
        check(r#"{"model": {"vocab": 3}}"#, "neither an object nor an array");
        check(r#"{"model": {"vocab": {"a": -1}}}"#, r#"gives "a" something that is not a u32"#);
        check(r#"{"model": {"vocab": {"a": 4294967296}}}"#, "not a u32");
        check(r#"{"model": {"vocab": [["a", 0], [3, 0]]}}"#, "entry 1 is not a [token, score] pair");
        check(r#"{"model": {"vocab": {"a": 1, "b": 1}}}"#, r#"id 1 stands for "a" and for "b""#);
    }
}
