//! Coupled acceptance (contract B4, B8): drafted tokens are compared with the target's draw, not weighed by
//! probability.

use crate::{Draft, TokenId};

use super::Judgement;

/// `drawn` is the target's draw from `row`.
pub(super) fn judge(draft: &Draft, row: usize, drawn: TokenId) -> Judgement {
    Judgement { token_id: drawn, next: draft.child(row, drawn) }
}
