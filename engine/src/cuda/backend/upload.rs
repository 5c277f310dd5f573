//! Copies rows of weight matrices to the device: the host reads the next rows while the device copies the
//! last ones. Random weights are generated on the device. Angles of positions are copied likewise.

use std::ops::Range;

use cpu_kernels::NumbersMut;
use half::bf16;

use crate::EngineError;
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::{Fp8Layout, random_bf16, random_f32};
use crate::rope::Rope;
use crate::weights::{Fp8Rows, StackedRows};

/// Bytes that are read before they are copied. There are two such buffers: one is filled while the other is
/// copied.
const CHUNK_BYTES: usize = 8 << 20;
/// Number of rows whose seeds are sent to the device at a time.
const SEEDED_ROWS: usize = 1 << 16;

/// Writes the rows `wanted` to the beginning of `out` as bf16.
pub(super) fn upload_bf16<E: Executor>(
    executor: &mut E,
    rows: &StackedRows<'_>,
    wanted: Range<usize>,
    out: &mut Tensor<E::Memory, bf16>,
) -> Result<(), EngineError> {
    let (columns, first) = (rows.columns(), wanted.start);
    for range in chunks(wanted, SEEDED_ROWS) {
        if let Some(seeds) = rows.seeds(range.clone()) {
            random_bf16(executor, &seeds, (out, range.start - first))?;
            continue;
        }
        for range in chunks(range, rows_of_chunk(columns * size_of::<bf16>())) {
            let (at, len) = ((range.start - first) * columns, range.len() * columns);
            let mut read = |numbers: &mut [bf16]| rows.read(range.clone(), NumbersMut::Bf16(numbers));
            out.write_by(executor, (at, len), &mut read)?;
        }
    }
    Ok(())
}

/// Writes the rows `wanted` to the beginning of `out`, widened to f32.
pub(super) fn upload_f32<E: Executor>(
    executor: &mut E,
    rows: &StackedRows<'_>,
    wanted: Range<usize>,
    out: &mut Tensor<E::Memory, f32>,
) -> Result<(), EngineError> {
    let (columns, first) = (rows.columns(), wanted.start);
    for range in chunks(wanted, SEEDED_ROWS) {
        if let Some(seeds) = rows.seeds(range.clone()) {
            random_f32(executor, &seeds, (out, range.start - first))?;
            continue;
        }
        for range in chunks(range, rows_of_chunk(columns * size_of::<f32>())) {
            let (at, len) = ((range.start - first) * columns, range.len() * columns);
            let mut read = |numbers: &mut [f32]| rows.read(range.clone(), NumbersMut::F32(numbers));
            out.write_by(executor, (at, len), &mut read)?;
        }
    }
    Ok(())
}

/// Rows of FP8 weights: their layout on the device, and the number of scales that each is read with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fp8RowForm<'a> {
    pub(super) layout: &'a Fp8Layout,
    pub(super) scales_per_row: usize,
}

/// Writes the rows `wanted` to the beginning of `out`, one byte per number, and returns their scales,
/// `[rows, scales_per_row]`.
pub(super) fn upload_fp8<E: Executor>(
    executor: &mut E,
    rows: &StackedRows<'_>,
    wanted: Range<usize>,
    Fp8RowForm { layout, scales_per_row }: Fp8RowForm<'_>,
    out: &mut Tensor<E::Memory, u8>,
) -> Result<Vec<f32>, EngineError> {
    let (columns, row_bytes, first) = (rows.columns(), layout.row_bytes(), wanted.start);
    let mut scales = vec![0.0; wanted.len() * scales_per_row];
    let mut codes = Vec::new();
    for range in chunks(wanted, rows_of_chunk(row_bytes)) {
        codes.resize(range.len() * columns, 0);
        let (at, len) = ((range.start - first) * row_bytes, range.len() * row_bytes);
        out.write_by(executor, (at, len), &mut |bytes: &mut [u8]| {
            let place = (range.start - first) * scales_per_row..(range.end - first) * scales_per_row;
            let place = Fp8Rows { codes: &mut codes, scales: &mut scales[place], scales_per_row };
            rows.read_fp8(range.clone(), place)?;
            let pairs = codes.chunks_exact(columns).zip(bytes.chunks_exact_mut(row_bytes));
            pairs.for_each(|(codes, bytes)| layout.pack(codes, bytes));
            Ok(())
        })?;
    }
    Ok(scales)
}

/// Returns the cosines and sines of the first `positions` positions, `[positions][cos | sin]` of
/// `head_dim / 2` each.
pub(super) fn upload_angles<E: Executor>(
    executor: &mut E,
    rope: &Rope,
    positions: usize,
) -> Result<Tensor<E::Memory, f32>, EngineError> {
    let width = 2 * rope.half_dim();
    let mut table = Tensor::zeros(executor, positions * width, "angles of positions")?;
    for range in chunks(0..positions, rows_of_chunk(width * size_of::<f32>())) {
        let (at, len) = (range.start * width, range.len() * width);
        table.write_by(executor, (at, len), &mut |numbers: &mut [f32]| {
            for (position, angles) in range.clone().zip(numbers.chunks_exact_mut(width)) {
                let (cos, sin) = angles.split_at_mut(width / 2);
                rope.angles(position as u32, cos, sin);
            }
            Ok(())
        })?;
    }
    // A model that is dropped before its first forward leaves no copies under way.
    executor.wait()?;
    Ok(table)
}

fn rows_of_chunk(row_bytes: usize) -> usize {
    (CHUNK_BYTES / row_bytes.max(1)).max(1)
}

/// Splits `range` into pieces of at most `len`.
fn chunks(range: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(len).map(move |first| first..range.end.min(first + len))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::cuda::emulator::Emulator;
    use crate::model_config::ModelConfig;

    /// With and without scaling; a table that is copied in several pieces.
    #[test]
    fn a_position_has_the_bits_of_its_angles() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        let mut e = Emulator::build();
        for (model, is_long) in
            [("qwen3_norms", true), ("llama_rope_llama3_new", false), ("qwen2_yarn_old", false)]
        {
            let rope = ModelConfig::read(&golden.join(model).join("config.json")).unwrap().rope;
            let width = 2 * rope.half_dim();
            let positions = if is_long { CHUNK_BYTES / (width * size_of::<f32>()) + 2 } else { 300 };
            let table = upload_angles(&mut e, &rope, positions).unwrap();
            let found = table.read(&mut e, 0..positions * width).unwrap();
            for (position, found) in found.chunks_exact(width).enumerate() {
                let (mut cos, mut sin) = (vec![0.0; width / 2], vec![0.0; width / 2]);
                rope.angles(position as u32, &mut cos, &mut sin);
                assert!(found == [cos, sin].concat(), "{model}: position {position}");
            }
        }
    }
}
