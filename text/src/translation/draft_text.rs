//! Encodes bytes to draft ids whose bytes are exactly the given ones: with the draft's tokenizer if it keeps
//! the bytes, otherwise token by token.

use std::collections::HashMap;

use speculation::TokenId;
use tokenizers::Tokenizer;

use crate::bytes_bound::is_never_text;
use crate::vocabulary::Vocabulary;

/// Prefix for texts whose beginning the tokenizer changes (sentencepiece adds a space there); its ids are
/// removed again.
const ANCHOR: &str = "\n";

/// The draft's tokenizer and its tokens.
pub(super) struct DraftText {
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    /// Ordinary tokens by their bytes.
    by_bytes: HashMap<Box<[u8]>, TokenId>,
    /// Length of the longest of these tokens, in bytes.
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

    /// Ids before every text (BOS).
    pub(super) fn frame(&self) -> &[TokenId] {
        &self.frame
    }

    /// The lowest byte that occurs in text but has no token.
    pub(super) fn missing_byte(&self) -> Option<u8> {
        let is_missing =
            |byte: &u8| !is_never_text(usize::from(*byte)) && !self.by_bytes.contains_key(&[*byte][..]);
        (0..=u8::MAX).find(is_missing)
    }

    /// Encodes `bytes`; returns the ids and the number of bytes covered. Encoding stops only at a byte
    /// without a token, which does not occur in text.
    pub(super) fn encode(&self, bytes: &[u8]) -> (Vec<TokenId>, usize) {
        let (mut ids, mut covered) = (Vec::new(), 0);
        for chunk in bytes.utf8_chunks() {
            if !chunk.valid().is_empty() {
                ids.extend(self.tokenize(chunk.valid()));
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

    /// Encodes with the tokenizer if the result has exactly the bytes of the text; otherwise spells it.
    fn tokenize(&self, text: &str) -> Vec<TokenId> {
        let encode = |text: &str| {
            self.tokenizer
                .encode_fast(text, false)
                .map(|encoding| encoding.get_ids().to_vec())
                .unwrap_or_default()
        };
        let ids = encode(text);
        if self.decodes_from(text.as_bytes(), &ids) {
            return ids;
        }
        let anchored = encode(&format!("{ANCHOR}{text}"));
        let beginnings =
            (0..anchored.len()).find(|&first| self.decodes_from(text.as_bytes(), &anchored[first..]));
        match beginnings {
            Some(first) => anchored[first..].to_vec(),
            None => self.spell(text.as_bytes()).0,
        }
    }

    /// Encodes greedily, longest tokens first; returns the ids and the number of bytes covered.
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

    fn decodes_from(&self, bytes: &[u8], ids: &[TokenId]) -> bool {
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
