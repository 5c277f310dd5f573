//! Ballast for a model with FP8 weights: the original's codes and scales are kept, so that its sums do not
//! change.

use std::ops::Range;

use super::{BallastTensors, Run};
use crate::EngineError;
use crate::weights::{Fp8Rows, TensorPart, TensorSource};

impl BallastTensors<'_> {
    /// [`BallastTensors::read_more_rows`] for FP8.
    pub(super) fn read_more_fp8_rows(
        &self,
        part: &TensorPart,
        rows: Range<usize>,
        mut out: Fp8Rows<'_>,
        random: bool,
    ) -> Result<(), EngineError> {
        let columns = part.columns.clone();
        for run in self.ballast.runs(rows.clone()) {
            let offsets = run.channels.start - rows.start..run.channels.end - rows.start;
            let mut out = out.part(offsets, columns.len());
            match run.from {
                Some(from) => {
                    let count = run.channels.len();
                    let original = self.original_part(part, [from..from + count, columns.clone()]);
                    self.original.read_fp8(&original, 0..count, out)?;
                }
                None if random => {
                    let all = TensorPart { rows: 0..part.shape[0], ..part.clone() };
                    self.random.read_fp8(&all, run.channels, out)?;
                }
                None => out.fill_with_zeros(),
            }
        }
        Ok(())
    }

    /// [`BallastTensors::read_more_columns`] for FP8: each scale is that of the original's whole row.
    pub(super) fn read_more_fp8_columns(
        &self,
        part: &TensorPart,
        rows: Range<usize>,
        out: Fp8Rows<'_>,
    ) -> Result<(), EngineError> {
        let (width, whole) = (part.columns.len(), self.ballast.intermediate);
        let original = self.original_part(part, [rows.clone(), 0..whole]);
        let mut codes = vec![0; rows.len() * whole];
        let scales_per_row = out.scales_per_row;
        let all = Fp8Rows { codes: &mut codes, scales: &mut *out.scales, scales_per_row };
        self.original.read_fp8(&original, 0..rows.len(), all)?;
        out.codes.fill(0);
        for Run { channels, from } in self.ballast.runs(part.columns.clone()) {
            let Some(from) = from else { continue };
            let at = channels.start - part.columns.start;
            for (out, row) in out.codes.chunks_exact_mut(width).zip(codes.chunks_exact(whole)) {
                out[at..at + channels.len()].copy_from_slice(&row[from..from + channels.len()]);
            }
        }
        Ok(())
    }
}
