//! The training loss: 0.8 KL(target || draft) + 0.2 cross entropy. With coupled draws, the acceptance
//! probability of a token grows with the overlap of both distributions. The divergence matches the whole
//! distribution, so it works for any temperature near 1 and not only for the likeliest token. The cross
//! entropy is that of the target's actual output.

use engine::TokenId;
use ndarray::{Array2, Zip};

use crate::ops::log_softmax;

/// Weight of the divergence.
pub const KL_SHARE: f32 = 0.8;

/// Sums over positions, in nats.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Loss {
    /// KL(target || draft).
    pub kl: f64,
    /// Cross entropy of the ids.
    pub cross_entropy: f64,
}

impl Loss {
    /// Computes the loss from the logits of both models, `[positions, vocab_size]` each, and the ids at these
    /// positions. Also returns the gradient of [`Self::weighted`] with respect to the draft's logits.
    ///
    /// In terms of probabilities the gradient is `q - p` for the divergence and `q - (1 at the id)` for the
    /// cross entropy.
    pub fn new(mut target: Array2<f32>, mut draft: Array2<f32>, labels: &[TokenId]) -> (Self, Array2<f32>) {
        log_softmax(&mut target);
        log_softmax(&mut draft);
        let mut loss = Self::default();
        Zip::from(&target).and(&draft).for_each(|&p, &q| loss.kl += f64::from(p.exp() * (p - q)));
        for (row, &id) in labels.iter().enumerate() {
            loss.cross_entropy -= f64::from(draft[(row, id as usize)]);
        }
        let mut d_logits = draft;
        Zip::from(&mut d_logits).and(&target).for_each(|q, &p| *q = q.exp() - KL_SHARE * p.exp());
        for (row, &id) in labels.iter().enumerate() {
            d_logits[(row, id as usize)] -= 1.0 - KL_SHARE;
        }
        (loss, d_logits)
    }

    /// The weighted sum of both.
    pub fn weighted(&self) -> f64 {
        f64::from(KL_SHARE) * self.kl + f64::from(1.0 - KL_SHARE) * self.cross_entropy
    }
}

impl std::ops::AddAssign for Loss {
    fn add_assign(&mut self, more: Self) {
        self.kl += more.kl;
        self.cross_entropy += more.cross_entropy;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_what_the_formula_says() {
        let matrix = |numbers: [f32; 4]| Array2::from_shape_vec((2, 2), numbers.to_vec()).unwrap();
        let (target, draft) = ([0.0, 1.0, 2.0, 0.5], [0.5, -0.5, 2.0, 0.5]);
        let (loss, gradient) = Loss::new(matrix(target), matrix(draft), &[1, 0]);
        let log_softmax = |row: &[f32]| {
            let sum: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
            row.iter().map(|x| f64::from(*x) - sum.ln()).collect::<Vec<f64>>()
        };
        let (mut kl, mut cross_entropy) = (0.0, 0.0);
        for (row, id) in [(0, 1), (2, 0)] {
            let (p, q) = (log_softmax(&target[row..row + 2]), log_softmax(&draft[row..row + 2]));
            kl += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
            cross_entropy -= q[id];
        }
        assert!((loss.kl - kl).abs() < 1e-6 && (loss.cross_entropy - cross_entropy).abs() < 1e-6, "{loss:?}");
        assert!((loss.weighted() - 0.8 * kl - 0.2 * cross_entropy).abs() < 1e-6);

        let step = 1e-2;
        for at in 0..4 {
            let moved = |by: f32| {
                let mut draft = draft;
                draft[at] += by;
                Loss::new(matrix(target), matrix(draft), &[1, 0]).0.weighted()
            };
            let slope = (moved(step) - moved(-step)) / (2.0 * f64::from(step));
            let found = f64::from(gradient[(at / 2, at % 2)]);
            assert!(
                (slope - found).abs() < 1e-4,
                "{at}: the loss rises by {slope}, the gradient says {found}"
            );
        }
    }
}
