//! Bytes to the draft's ids, such that the bytes of the ids are those bytes, exactly: by the draft's tokenizer where it keeps them, token
//! by token where it does not.

use std::collections::HashMap;

use speculation::TokenId;
use tokenizers::Tokenizer;

use crate::bytes_bound::is_never_text;
use crate::vocabulary::Vocabulary;

/// Put before a text whose beginning the tokenizer changes (sentencepiece adds a space there), and taken off again.
const ANCHOR: &str = "\n";

/// The draft's tokenizer and its tokens.
pub(super) struct DraftText {
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    /// Ordinary tokens by their bytes.
    by_bytes: HashMap<Box<[u8]>, TokenId>,
    /// Bytes of the longest of them.
    longest: usize,
    frame: Vec<TokenId>,
}

impl std::fmt::Debug for DraftText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DraftText").field("vocabulary", &self.vocabulary.len()).finish_non_exhaustive()
    }
}

impl DraftText {
    pub(super) fn new(tokenizer: Tokenizer, vocabulary: Vocabulary, frame: Vec<TokenId>) -> Self {
        let ids = (0..vocabulary.len() as TokenId).filter(|&id| !vocabulary.is_special(id));
        let spelt = ids.filter(|&id| !vocabulary.bytes(id).is_empty());
        let by_bytes: HashMap<Box<[u8]>, TokenId> =
            spelt.map(|id| (vocabulary.bytes(id).into(), id)).collect();
        let longest = by_bytes.keys().map(|bytes| bytes.len()).max().unwrap_or(0);
        Self { tokenizer, vocabulary, by_bytes, longest, frame }
    }

    pub(super) fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// What stands before every text (BOS).
    pub(super) fn frame(&self) -> &[TokenId] {
        &self.frame
    }

    /// The lowest byte of text that no token spells.
    pub(super) fn missing_byte(&self) -> Option<u8> {
        let is_missing =
            |byte: &u8| !is_never_text(usize::from(*byte)) && !self.by_bytes.contains_key(&[*byte][..]);
        (0..=u8::MAX).find(is_missing)
    }

    /// The ids of `bytes`, and how many of these they stand for: all but in front of a byte that no token spells, which no text holds.
    pub(super) fn encode(&self, bytes: &[u8]) -> (Vec<TokenId>, usize) {
        let (mut ids, mut covered) = (Vec::new(), 0);
        for chunk in bytes.utf8_chunks() {
            if !chunk.valid().is_empty() {
                ids.extend(self.natural(chunk.valid()));
                covered += chunk.valid().len();
            }
            let (spelt, len) = self.spell(chunk.invalid());
            ids.extend(spelt);
            covered += len;
            if len < chunk.invalid().len() {
                break;
            }
        }
        (ids, covered)
    }

    /// As the tokenizer writes the text, if that is its bytes.
    fn natural(&self, text: &str) -> Vec<TokenId> {
        let encode = |text: &str| {
            self.tokenizer
                .encode_fast(text, false)
                .map(|encoding| encoding.get_ids().to_vec())
                .unwrap_or_default()
        };
        let ids = encode(text);
        if self.is_spelt_by(text.as_bytes(), &ids) {
            return ids;
        }
        let anchored = encode(&format!("{ANCHOR}{text}"));
        let beginnings =
            (0..anchored.len()).find(|&first| self.is_spelt_by(text.as_bytes(), &anchored[first..]));
        match beginnings {
            Some(first) => anchored[first..].to_vec(),
            None => self.spell(text.as_bytes()).0,
        }
    }

    /// The longest tokens first, and how many bytes they stand for.
    fn spell(&self, bytes: &[u8]) -> (Vec<TokenId>, usize) {
        let (mut ids, mut at) = (Vec::new(), 0);
        while at < bytes.len() {
            let lens = (1..=self.longest.min(bytes.len() - at)).rev();
            let found =
                lens.into_iter().find_map(|len| Some((len, *self.by_bytes.get(&bytes[at..at + len])?)));
            let Some((len, id)) = found else { break };
            ids.push(id);
            at += len;
        }
        (ids, at)
    }

    fn is_spelt_by(&self, bytes: &[u8], ids: &[TokenId]) -> bool {
        let mut rest = bytes;
        for &id in ids {
            let token = self.vocabulary.bytes(id);
            match rest.strip_prefix(token) {
                Some(after) if !token.is_empty() && !self.vocabulary.is_special(id) => rest = after,
                _ => return false,
            }
        }
        rest.is_empty()
    }
}

/// The ids that a tokenizer puts before a text.
pub(super) fn frame(tokenizer: &Tokenizer) -> Vec<TokenId> {
    let ids = |add_special_tokens| {
        let encoding = tokenizer.encode_fast("a", add_special_tokens);
        encoding.map(|encoding| encoding.get_ids().to_vec()).unwrap_or_default()
    };
    let (framed, plain) = (ids(true), ids(false));
    let len = (0..framed.len()).find(|&first| !plain.is_empty() && framed[first..].starts_with(&plain));
    framed[..len.unwrap_or(0)].to_vec()
}
