//! [`TranslatedSequence`]: one sequence in target ids and in draft ids, aligned by the bytes of the text.
//!
//! Every draft id covers the bytes from the end of the previous one to its own end, in the target's text. So
//! a cut of target ids implies a cut of draft ids. Text that the draft ids no longer cover is tokenized again
//! together with the next ids.

use speculation::TokenId;

use super::{Translation, Unit};

/// Minimum number of target ids before new ones to tokenize again if the map alone does not suffice. More
/// would make the draft's tokens closer to those of the whole text, but costs forward rows where they change.
const SUFFIX_IDS: usize = 8;

/// Number of further target ids to search backwards for the beginning of a word.
const WORD_IDS: usize = 8;

/// Up to this many new ids are translated one by one. For more, the draft's own tokenization is worth the
/// rows that it may cost.
const MAX_MAPPED_IDS: usize = 8;

/// A translated sequence; see the module documentation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TranslatedSequence {
    target: Track,
    draft: Track,
}

/// Ids, and the end of each in the text, in bytes from its beginning.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Track {
    ids: Vec<TokenId>,
    ends: Vec<u32>,
}

impl Track {
    fn push(&mut self, id: TokenId, end: u32) {
        self.ids.push(id);
        self.ends.push(end);
    }

    /// End of the first `len` ids.
    fn end_of(&self, len: usize) -> u32 {
        len.checked_sub(1).map_or(0, |last| self.ends[last])
    }

    /// End of all ids.
    fn end(&self) -> u32 {
        self.end_of(self.ids.len())
    }

    /// Number of ids that end at or before `end`.
    fn len_within(&self, end: u32) -> usize {
        self.ends.partition_point(|&other| other <= end)
    }

    fn truncate(&mut self, len: usize) {
        self.ids.truncate(len);
        self.ends.truncate(len);
    }
}

impl TranslatedSequence {
    /// The target ids of the sequence.
    pub fn target_ids(&self) -> &[TokenId] {
        &self.target.ids
    }

    /// The same text in draft ids, as far as they cover it.
    pub fn draft_ids(&self) -> &[TokenId] {
        &self.draft.ids
    }

    /// Whether the draft ids end where the target ids end, so that the draft's next token is at the next
    /// target position.
    pub fn is_covered(&self) -> bool {
        !self.draft.ids.is_empty() && self.draft.end() == self.target.end()
    }

    /// Number of target ids covered by the first `num_draft_ids` draft ids.
    pub fn num_covered(&self, num_draft_ids: usize) -> usize {
        self.target.len_within(self.draft.end_of(num_draft_ids.min(self.draft.ids.len())))
    }

    /// Number of draft ids for the first `len` target ids, if both end at the same byte.
    pub fn draft_len_at(&self, len: usize) -> Option<usize> {
        let end = self.target.end_of(len);
        let draft_len = self.draft.len_within(end);
        (draft_len > 0 && self.draft.end_of(draft_len) == end).then_some(draft_len)
    }

    /// Drops target ids from `len` on, and draft ids that extend past them.
    pub fn truncate(&mut self, len: usize) {
        self.target.truncate(len);
        let kept = if self.target.ids.is_empty() { 0 } else { self.draft.len_within(self.target.end()) };
        self.draft.truncate(kept);
    }

    /// Appends target ids. Returns the number of unchanged draft ids; the KV of the others is invalid.
    pub fn extend(&mut self, translation: &Translation, ids: &[TokenId]) -> usize {
        let first = self.target.ids.len();
        for &id in ids {
            let len = translation.unit(self.target.ids.len(), id).len() as u32;
            self.target.push(id, self.target.end() + len);
        }
        let was_covered = !self.draft.ids.is_empty() && self.draft.end() == self.target.end_of(first);
        let len = self.draft.ids.len();
        if was_covered && ids.len() <= MAX_MAPPED_IDS && self.append_mapped(translation, first) {
            return len;
        }
        self.tokenize_again(translation, first)
    }

    /// Translates the target ids from `first` on one by one; does nothing if one of them is not in the map.
    fn append_mapped(&mut self, translation: &Translation, first: usize) -> bool {
        let len = self.draft.ids.len();
        for at in first..self.target.ids.len() {
            let id = self.target.ids[at];
            if translation.unit(at, id) == Unit::Nothing {
                continue;
            }
            let Some(draft_id) = translation.to_draft(id) else {
                self.draft.truncate(len);
                return false;
            };
            self.draft.push(draft_id, self.target.ends[at]);
        }
        true
    }

    /// Tokenizes the text again from a position before the target id `first`; returns the number of unchanged
    /// draft ids.
    fn tokenize_again(&mut self, translation: &Translation, first: usize) -> usize {
        let old = self.draft.clone();
        if old.ids.is_empty() {
            translation.draft.frame().iter().for_each(|&id| self.draft.push(id, 0));
        }
        let from = self.place_before(translation, first);
        let kept = self.draft.len_within(self.target.end_of(from));
        self.draft.truncate(kept);
        self.append_text(translation, from);
        let is_same = |i: &usize| {
            old.ids.get(*i) == self.draft.ids.get(*i) && old.ends.get(*i) == self.draft.ends.get(*i)
        };
        let kept = kept.min(old.ids.len());
        let shorter = old.ids.len().min(self.draft.ids.len());
        kept + (kept..shorter).take_while(is_same).count()
    }

    /// Index of the target id from which to tokenize again: between two draft ids and between two characters,
    /// at the beginning of a word if possible.
    fn place_before(&self, translation: &Translation, first: usize) -> usize {
        let latest = first.saturating_sub(SUFFIX_IDS);
        let is_place = |&at: &usize| {
            let end = self.target.end_of(at);
            end == 0
                || (self.draft.ends.binary_search(&end).is_ok() && !self.is_inside_character(translation, at))
        };
        let nearest = (0..=latest).rev().find(is_place).unwrap_or(0);
        let words = (nearest.saturating_sub(WORD_IDS)..=nearest).rev();
        words.filter(is_place).find(|&at| self.begins_word(translation, at)).unwrap_or(nearest)
    }

    fn is_inside_character(&self, translation: &Translation, at: usize) -> bool {
        self.first_byte(translation, at).is_some_and(|byte| byte & 0xc0 == 0x80)
    }

    fn begins_word(&self, translation: &Translation, at: usize) -> bool {
        if at == 0 || self.target.end_of(at) == 0 {
            return true;
        }
        match translation.unit(at - 1, self.target.ids[at - 1]) {
            Unit::Special { .. } => true,
            Unit::Nothing => false,
            Unit::Text(before) => {
                let is_space = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_whitespace());
                is_space(self.first_byte(translation, at)) && !is_space(before.last().copied())
            }
        }
    }

    /// The first byte of text at or after the target id `at`; `None` before a special token.
    fn first_byte(&self, translation: &Translation, at: usize) -> Option<u8> {
        (at..self.target.ids.len()).find_map(|at| match translation.unit(at, self.target.ids[at]) {
            Unit::Nothing => None,
            Unit::Text(bytes) => Some(bytes.first().copied()),
            Unit::Special { .. } => Some(None),
        })?
    }

    /// Appends draft ids for the target ids from `from` on.
    fn append_text(&mut self, translation: &Translation, from: usize) {
        let mut text = Vec::new();
        for at in from..self.target.ids.len() {
            match translation.unit(at, self.target.ids[at]) {
                Unit::Nothing => {}
                Unit::Text(bytes) => text.extend_from_slice(bytes),
                Unit::Special { draft_id, .. } => {
                    if !self.append_bytes(translation, &text) {
                        return;
                    }
                    text.clear();
                    self.draft.push(draft_id, self.target.ends[at]);
                }
            }
        }
        self.append_bytes(translation, &text);
    }

    /// Appends draft ids for `text`; returns whether all of it was covered.
    fn append_bytes(&mut self, translation: &Translation, text: &[u8]) -> bool {
        let (ids, covered) = translation.draft.encode(text);
        let mut end = self.draft.end();
        for id in ids {
            end += translation.draft.vocabulary().bytes(id).len() as u32;
            self.draft.push(id, end);
        }
        covered == text.len()
    }
}
