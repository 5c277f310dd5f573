//! Language models small enough to enumerate: logits depend only on the last ids.

use speculation::TokenId;
use speculation::noise::{Noise, Purpose};

/// A model over `vocab_size` tokens. Two models of one `family` agree less the larger their `deviation`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ToyModel {
    pub(crate) vocab_size: usize,
    pub(crate) family: u64,
    /// Distance of the logits from the family's own.
    pub(crate) deviation: f64,
}

impl ToyModel {
    /// Raw logits of the token after `ids`, in steps of 1/4 so that ties happen.
    pub(crate) fn row(&self, ids: &[TokenId]) -> Vec<f32> {
        // Any mixing of the last two ids works; the noise is only a source of numbers here.
        let context = ids
            .iter()
            .rev()
            .take(2)
            .fold(1_u32, |hash, &id| hash.wrapping_mul(2_654_435_761).wrapping_add(id));
        let own = Noise { seed: self.family, choice: 0 };
        let moved = Noise { seed: self.family, choice: 1 };
        let logit = |id: TokenId| {
            let exact = 1.5 * own.gumbel(context, id, Purpose::Draw)
                + self.deviation * moved.gumbel(context, id, Purpose::Draw);
            ((exact * 4.0).round() / 4.0) as f32
        };
        (0..self.vocab_size as TokenId).map(logit).collect()
    }

    /// Concatenated rows for the token after `ids` and after each prefix of `draft` appended to it.
    pub(crate) fn rows(&self, ids: &[TokenId], draft: &[TokenId]) -> Vec<f32> {
        let mut context = ids.to_vec();
        let mut rows = self.row(&context);
        for &id in draft {
            context.push(id);
            rows.extend(self.row(&context));
        }
        rows
    }
}
