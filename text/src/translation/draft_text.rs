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
        match self.ending(&anchored, text.len()) {
            Some(ending) if self.decodes_from(text.as_bytes(), ending) => ending.to_vec(),
            _ => self.spell(text.as_bytes()).0,
        }
    }

    /// The last of `ids` that have `len` bytes together, and each of them at least one. No other ending can
    /// be a text of this length. To compare each ending with the text would take quadratic time.
    fn ending<'a>(&self, ids: &'a [TokenId], len: usize) -> Option<&'a [TokenId]> {
        let (mut first, mut left) = (ids.len(), len);
        while left > 0 {
            first = first.checked_sub(1)?;
            let num_bytes = self.vocabulary.bytes(ids[first]).len();
            left = left.checked_sub(num_bytes).filter(|_| num_bytes > 0)?;
        }
        Some(&ids[first..])
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::tests::{byte_level, sentencepiece};
    use super::*;

    fn draft(json: &Value) -> DraftText {
        let mut tokenizer = Tokenizer::from_bytes(json.to_string()).unwrap();
        tokenizer.set_encode_special_tokens(true);
        let vocabulary = Vocabulary::of(&tokenizer).unwrap();
        DraftText::new(tokenizer, vocabulary, Vec::new())
    }

    fn normalizing() -> DraftText {
        let mut json = byte_level();
        json["normalizer"] = json!({ "type": "NFC" });
        draft(&json)
    }

    /// Reference: each ending of the ids is compared with the text. Returns the ids and whether they are the
    /// tokenizer's.
    fn tokenized_naively(draft: &DraftText, text: &str) -> (Vec<TokenId>, bool) {
        let encode = |text: &str| draft.tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec();
        let is_text = |ids: &[TokenId]| {
            let bytes = ids.iter().map(|&id| draft.vocabulary.bytes(id));
            bytes.clone().all(|bytes| !bytes.is_empty())
                && !ids.iter().any(|&id| draft.vocabulary.is_special(id))
                && bytes.collect::<Vec<_>>().concat() == text.as_bytes()
        };
        let (plain, anchored) = (encode(text), encode(&format!("{ANCHOR}{text}")));
        let endings = (0..anchored.len()).map(|first| &anchored[first..]);
        let found = std::iter::once(plain.as_slice()).chain(endings).find(|ids| is_text(ids));
        match found {
            Some(ids) => (ids.to_vec(), true),
            None => (draft.spell(text.as_bytes()).0, false),
        }
    }

    #[test]
    fn a_text_is_tokenized_as_if_every_ending_was_compared() {
        const PIECES: [&str; 7] = [" a", "a", "\n", "e\u{301}", "\u{e9}", "<|end|>", "</s>\u{65e5}"];
        let drafts = [draft(&byte_level()), normalizing(), draft(&sentencepiece())];
        let mut num_tokenized = [0; 3];
        let num_texts = PIECES.len().pow(4);
        for number in 0..num_texts {
            let digits = (0..4_u32).map(|place| number / PIECES.len().pow(place) % PIECES.len());
            let text: String = digits.map(|digit| PIECES[digit]).collect();
            for (draft, num_tokenized) in drafts.iter().zip(&mut num_tokenized) {
                let (expected, is_tokenized) = tokenized_naively(draft, &text);
                assert_eq!(draft.tokenize(&text), expected, "{text:?}");
                *num_tokenized += usize::from(is_tokenized);
            }
        }
        assert_eq!(num_tokenized[0], num_texts);
        assert!((1..num_texts).contains(&num_tokenized[1]), "the decomposed ones are spelt");
        assert_eq!(num_tokenized[2], num_texts, "the anchor keeps the beginning");
    }

    /// Every ending of the ids is like the text but for its last character.
    #[test]
    fn a_long_periodic_text_that_the_tokenizer_changes_is_spelt() {
        let draft = normalizing();
        let text = " a".repeat(128_000) + "e\u{301}";
        let ids = draft.tokenize(&text);
        assert_eq!(ids, draft.spell(text.as_bytes()).0);
        assert!(draft.decodes_from(text.as_bytes(), &ids));
    }
}
