//! Weights generated from a seed, for measuring a model's speed without its files. Every number is a bf16, so
//! that all formats hold the same model; matrices preserve the magnitude of their inputs. The text of such a
//! model is noise.

use std::ops::Range;

use cpu_kernels::NumbersMut;
use half::bf16;

use super::source::{RowSeeds, TensorPart, TensorSource};
use crate::EngineError;

/// Tensors that depend only on the seed and their names.
pub(crate) struct RandomTensors {
    pub(crate) seed: u64,
}

impl RandomTensors {
    /// Generator state for the numbers of row `row` of a tensor.
    fn state(&self, name: &str, row: usize) -> u64 {
        name.bytes().fold(mix(self.seed ^ mix(row as u64)), |state, byte| mix(state ^ u64::from(byte)))
    }

    /// Row `row` of a tensor: uniform, with a variance of 1 / `len`.
    fn row(&self, name: &str, row: usize, len: usize) -> impl Iterator<Item = bf16> + use<> {
        let (state, size) = (self.state(name, row), size(len));
        (0..len as u64).map(move |i| {
            // 24 bits give a number in [-1, 1) exactly.
            let unit = (mix(state.wrapping_add(i)) >> 40) as f32 / (1 << 23) as f32 - 1.0;
            bf16::from_f32(unit * size)
        })
    }
}

impl TensorSource for RandomTensors {
    fn check(&self, _part: &TensorPart) -> Result<(), EngineError> {
        Ok(())
    }

    fn read(
        &self,
        part: &TensorPart,
        rows: Range<usize>,
        mut out: NumbersMut<'_>,
    ) -> Result<(), EngineError> {
        let columns = part.columns.clone();
        for (i, row) in rows.enumerate() {
            let numbers = self.row(&part.name, part.rows.start + row, part.shape[1]);
            let numbers = numbers.skip(columns.start).take(columns.len()).map(bf16::to_f32);
            out.put(i * columns.len(), numbers);
        }
        Ok(())
    }

    fn seeds(&self, part: &TensorPart, rows: Range<usize>) -> Option<RowSeeds> {
        let states = rows.map(|row| self.state(&part.name, part.rows.start + row)).collect();
        Some(RowSeeds { states, columns: part.columns.clone(), size: size(part.shape[1]) })
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, EngineError> {
        // Norm weights are close to one, biases close to zero.
        let centre = if name.ends_with("bias") { 0.0 } else { 1.0 };
        Ok(self.row(name, 0, len).map(|x| centre + x.to_f32()).collect())
    }
}

/// The largest magnitude in a row of `len` numbers.
fn size(len: usize) -> f32 {
    (3.0 / len as f32).sqrt()
}

/// The finalizer of splitmix64: a deterministic hash that spreads neighbouring inputs. Inlined across codegen
/// units, since it is called for each number.
#[inline]
fn mix(x: u64) -> u64 {
    let z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
