//! Coupled acceptance (contract B4): the draft is compared with the target's draw, never weighed.

use crate::TokenId;
use crate::logits::DrawError;

use super::{Judgement, Place, draw};

pub(super) fn judge(place: &Place<'_>, drafted: TokenId) -> Result<Judgement, DrawError> {
    let token_id = draw::ordinary(place)?;
    Ok(Judgement { token_id, accepted: token_id == drafted })
}
