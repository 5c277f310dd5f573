//! Weights out of a seed, for measuring a model's speed without its files. Every number is a bf16, so that all
//! formats hold the same model; matrices keep the size of what they are applied to. What such a model writes
//! is noise.

use half::bf16;

use super::source::{RowReader, TensorPart, TensorSource};
use super::{Matrix, MatrixData, MatrixFormat};
use crate::EngineError;
use crate::cpu::Threads;

/// Tensors that depend on the seed and their names alone.
pub(crate) struct RandomTensors<'a> {
    pub(crate) seed: u64,
    /// Who generates; their number changes nothing.
    pub(crate) threads: &'a Threads,
}

impl RandomTensors<'_> {
    /// Row `row` of a tensor, uniform with a variance of one over the row's length.
    fn row(&self, name: &str, row: usize, len: usize) -> impl Iterator<Item = bf16> + use<> {
        let mut state = mix(self.seed ^ mix(row as u64));
        for byte in name.bytes() {
            state = mix(state ^ u64::from(byte));
        }
        let size = (3.0 / len as f32).sqrt();
        (0..len as u64).map(move |i| {
            // 24 bits make a number in [-1, 1) exactly.
            let unit = (mix(state.wrapping_add(i)) >> 40) as f32 / (1 << 23) as f32 - 1.0;
            bf16::from_f32(unit * size)
        })
    }
}

impl TensorSource for RandomTensors<'_> {
    fn matrix(&self, part: &TensorPart, format: MatrixFormat) -> Result<Matrix, EngineError> {
        let rows: Vec<usize> = part.rows.clone().collect();
        let columns = part.columns.clone();
        let made = self.threads.map(&rows, |&row| {
            let row = self.row(&part.name, row, part.shape[1]);
            row.skip(columns.start).take(columns.len()).collect::<Vec<bf16>>()
        });
        let data = match format {
            MatrixFormat::F32 => {
                MatrixData::from(made.iter().flatten().map(|x| x.to_f32()).collect::<Vec<_>>())
            }
            MatrixFormat::Bf16 => MatrixData::from(made.concat()),
        };
        Ok(Matrix::new(data, [rows.len(), columns.len()]))
    }

    fn rows<'a>(&'a self, part: &TensorPart) -> Result<RowReader<'a>, EngineError> {
        let (part, first) = (part.clone(), part.rows.start);
        Ok(Box::new(move |row| self.row(&part.name, first + row, part.shape[1]).map(bf16::to_f32).collect()))
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, EngineError> {
        // A norm's weights are ones, more or less; a bias is small.
        let centre = if name.ends_with("bias") { 0.0 } else { 1.0 };
        Ok(self.row(name, 0, len).map(|x| centre + x.to_f32()).collect())
    }
}

/// The finalizer of splitmix64: equal inputs, equal outputs, and neighbours far apart.
fn mix(x: u64) -> u64 {
    let z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
