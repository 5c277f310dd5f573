//! AdamW (Loshchilov and Hutter, 2019): steps along the running mean of the gradient divided by the root of
//! its running square, with weight decay.

use std::collections::BTreeMap;

use ndarray::{Array2, Zip};

use crate::weights::Weights;

const BETA_1: f32 = 0.9;
const BETA_2: f32 = 0.95;
const EPS: f32 = 1e-8;

/// Weight decay of matrices; norms and biases do not decay.
const WEIGHT_DECAY: f32 = 0.05;

/// Maximum norm of the gradients; longer ones are clipped.
pub const GRADIENT_NORM_MAX: f64 = 1.0;

/// Gradient of the loss with respect to each weight, by name.
pub type Gradients = BTreeMap<String, Array2<f32>>;

/// The optimizer's state: running means.
#[derive(Debug, Default)]
pub struct AdamW {
    steps: i32,
    means: BTreeMap<String, (Array2<f32>, Array2<f32>)>,
}

impl AdamW {
    /// Makes one step. Weights without a gradient are unchanged.
    pub fn step(&mut self, weights: &mut Weights, gradients: &Gradients, rate: f32) {
        self.steps += 1;
        let (correct_1, correct_2) = (1.0 - BETA_1.powi(self.steps), 1.0 - BETA_2.powi(self.steps));
        for (name, tensor) in weights.iter_mut() {
            let Some(gradient) = gradients.get(name) else { continue };
            let decay = if tensor.is_matrix() { rate * WEIGHT_DECAY } else { 0.0 };
            let zeros = || Array2::zeros(gradient.raw_dim());
            let (mean, square) = self.means.entry(name.to_owned()).or_insert_with(|| (zeros(), zeros()));
            Zip::from(&mut tensor.numbers).and(mean).and(square).and(gradient).for_each(
                |x, mean, square, g| {
                    *mean = BETA_1 * *mean + (1.0 - BETA_1) * g;
                    *square = BETA_2 * *square + (1.0 - BETA_2) * g * g;
                    let step = (*mean / correct_1) / ((*square / correct_2).sqrt() + EPS);
                    *x -= decay * *x + rate * step;
                },
            );
        }
    }
}

/// Norm of all gradients together.
pub fn norm(gradients: &Gradients) -> f64 {
    let squares = gradients.values().flatten().map(|g| f64::from(*g) * f64::from(*g));
    squares.sum::<f64>().sqrt()
}

/// Scales all gradients down if their norm exceeds [`GRADIENT_NORM_MAX`].
pub fn clip(gradients: &mut Gradients) {
    let norm = norm(gradients);
    if norm > GRADIENT_NORM_MAX {
        let factor = (GRADIENT_NORM_MAX / norm) as f32;
        gradients.values_mut().for_each(|gradient| *gradient *= factor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_gradients_are_shortened_together() {
        let mut gradients: Gradients = [("a", 3.0), ("b", 4.0)]
            .map(|(name, number)| (name.to_owned(), Array2::from_elem((1, 1), number)))
            .into();
        clip(&mut gradients);
        assert!((norm(&gradients) - 1.0).abs() < 1e-6);
        assert!((gradients["a"][(0, 0)] - 0.6).abs() < 1e-6, "{gradients:?}");
        let before = gradients.clone();
        clip(&mut gradients);
        assert!((norm(&gradients) - norm(&before)).abs() < 1e-6);
    }
}
