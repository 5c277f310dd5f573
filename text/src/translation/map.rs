//! Maps tokens of the target to tokens of the draft: tokens of equal bytes, and special tokens by explicit
//! rules.

use std::collections::{BTreeMap, HashMap};

use speculation::TokenId;

use crate::vocabulary::Vocabulary;

/// Coverage of two vocabularies by a map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Coverage {
    /// Tokens that the draft can propose: pairs of the map.
    pub shared: usize,
    /// Those of at least two bytes.
    pub shared_of_two_bytes: usize,
    /// Tokens of the draft.
    pub draft_tokens: usize,
    /// Tokens of the target.
    pub target_tokens: usize,
}

impl Coverage {
    /// Share of the target's tokens that the draft can propose, in 0..=1.
    pub fn target_share(&self) -> f64 {
        self.shared as f64 / self.target_tokens.max(1) as f64
    }
}

/// The map. Ordinary tokens are paired with ordinary ones of equal bytes, special tokens with special ones of
/// equal spelling. Unpaired EOS ids of the target are paired with unpaired ones of the draft, in order.
#[derive(Debug)]
pub(super) struct TokenMap {
    /// By target id.
    to_draft: Vec<Option<TokenId>>,
    /// Pairs of target id and draft id that the draft proposes; each id occurs at most once.
    guessed: Vec<(TokenId, TokenId)>,
}

impl TokenMap {
    /// The second argument holds the EOS ids of target and draft.
    pub(super) fn new(
        (target, draft): (&Vocabulary, &Vocabulary),
        (target_ends, draft_ends): (&[TokenId], &[TokenId]),
    ) -> Self {
        let (mut ordinary, mut special) = (HashMap::new(), HashMap::new());
        for id in ids(draft) {
            let tokens = if draft.is_special(id) { &mut special } else { &mut ordinary };
            // The last of equal tokens wins: sentencepiece lists its byte tokens before its characters.
            tokens.insert(draft.bytes(id), id);
        }
        let mut to_draft = vec![None; target.len()];
        for id in ids(target) {
            let tokens = if target.is_special(id) { &special } else { &ordinary };
            to_draft[id as usize] = tokens.get(target.bytes(id)).copied();
        }
        let is_free = |id: &TokenId| (*id as usize) < draft.len() && !to_draft.contains(&Some(*id));
        let free: Vec<TokenId> = draft_ends.iter().copied().filter(is_free).collect();
        let is_unpaired = |id: &TokenId| to_draft.get(*id as usize).is_some_and(Option::is_none);
        let unpaired: Vec<TokenId> = target_ends.iter().copied().filter(is_unpaired).collect();
        for (end, draft_end) in unpaired.into_iter().zip(free) {
            to_draft[end as usize] = Some(draft_end);
        }
        // If several target ids have the same draft id, only the last is proposed: equal logits would split
        // one token's probability.
        let by_draft_id: BTreeMap<TokenId, TokenId> =
            (0..).zip(&to_draft).filter_map(|(id, draft_id)| Some(((*draft_id)?, id))).collect();
        let mut guessed: Vec<(TokenId, TokenId)> =
            by_draft_id.into_iter().map(|(draft_id, id)| (id, draft_id)).collect();
        guessed.sort_unstable();
        Self { to_draft, guessed }
    }

    pub(super) fn to_draft(&self, target_id: TokenId) -> Option<TokenId> {
        self.to_draft.get(target_id as usize).copied().flatten()
    }

    pub(super) fn guessed(&self) -> &[(TokenId, TokenId)] {
        &self.guessed
    }

    pub(super) fn coverage(&self, target: &Vocabulary, draft: &Vocabulary) -> Coverage {
        let is_long = |pair: &&(TokenId, TokenId)| target.bytes(pair.0).len() >= 2;
        Coverage {
            shared: self.guessed.len(),
            shared_of_two_bytes: self.guessed.iter().filter(is_long).count(),
            draft_tokens: ids(draft).count(),
            target_tokens: ids(target).count(),
        }
    }
}

/// Ids that have a token.
fn ids(vocabulary: &Vocabulary) -> impl Iterator<Item = TokenId> {
    (0..vocabulary.len() as TokenId).filter(|&id| !vocabulary.bytes(id).is_empty())
}
