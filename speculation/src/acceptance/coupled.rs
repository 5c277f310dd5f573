//! Coupled acceptance (contract B4, B9): drafted tokens are compared with the target's draw, not weighed by
//! probability.

use crate::{Draft, TokenId};

use super::CommittedToken;

/// `drawn` is the target's draw from `row`.
pub(super) fn choose_token(draft: &Draft, row: usize, drawn: TokenId) -> CommittedToken {
    CommittedToken { token_id: drawn, next: draft.child(row, drawn) }
}
