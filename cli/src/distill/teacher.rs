//! The target as teacher, run by the serving engine.

use distill::draft::DraftModel;
use distill::training::Teacher;
use distill::windows::Window;
use ndarray::Array2;

use super::error::DistillCommandError;
use crate::check_pair::local::LocalModel;

impl Teacher for LocalModel {
    type Error = DistillCommandError;

    fn logits(&mut self, window: &Window) -> Result<Array2<f32>, DistillCommandError> {
        let vocab_size = self.vocab_size() as usize;
        let logits = self.score(window.inputs(), window.num_labels())?;
        let mut numbers = Vec::with_capacity(logits.rows() * vocab_size);
        for row in 0..logits.rows() {
            numbers.extend_from_slice(&logits.row(row)[..vocab_size]);
        }
        let shape = (logits.rows(), vocab_size);
        Ok(Array2::from_shape_vec(shape, numbers).expect("every row has as many logits as there are tokens"))
    }
}

/// The largest difference between the logits of the draft in training and those of the engine, over a window.
pub(super) fn max_logit_difference(
    draft: &DraftModel,
    served: &mut LocalModel,
    window: &Window,
) -> Result<f32, DistillCommandError> {
    let engines = served.logits(window)?;
    let ours = draft.forward(window.inputs(), (window.num_labels(), engines.ncols())).logits;
    Ok((engines - ours).fold(0.0, |max: f32, difference| max.max(difference.abs())))
}
