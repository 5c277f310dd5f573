//! Small models for tests: a configuration of this crate, changed, for random weights in any format.

use std::ops::Range;
use std::path::Path;

use cpu_kernels::{NumbersMut, SCALE_BLOCK};

use crate::weights::{Formats, Fp8Rows, Fp8Scales, ModelSpec, TensorPart, TensorSource};
use crate::{EngineError, LoadOptions, WeightFormat};

/// The shape from which `make gpu-check-dry` makes its smallest model, two layers.
pub(super) const TINY: &str = "src/cuda/gpu_check/shapes/tiny.json";
/// A shape whose products take operands in panels, two layers.
pub(super) const PANELS: &str = "src/cuda/gpu_check/shapes/panels.json";
/// Changes of that shape with which int8 takes all operands in panels, o_proj's inputs too.
pub(super) const WIDE_HEADS: &[(&str, u64)] = &[("num_attention_heads", 16), ("head_dim", 64)];

/// Copies a configuration, whose path is relative to this crate, and sets fields. Returns options that load
/// it as bf16, and the directory, which must outlive the load.
pub(super) fn changed_config(path: &str, changes: &[(&str, u64)]) -> (tempfile::TempDir, LoadOptions) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    for &(field, value) in changes {
        config[field] = value.into();
    }
    let dir = tempfile::tempdir().unwrap();
    let model_dir = dir.path().join("config.json");
    std::fs::write(&model_dir, config.to_string()).unwrap();
    let options = LoadOptions::new(model_dir, WeightFormat::Bf16, 1 << 20);
    (dir, options)
}

/// Random tensors whose FP8 weights have scales by block: those of rows, times a factor of the block.
pub(super) struct InBlocks<'a>(pub(super) &'a dyn TensorSource);

impl InBlocks<'_> {
    /// The model with FP8 weights in this form.
    pub(super) fn model(model: ModelSpec) -> ModelSpec {
        ModelSpec { formats: Formats::fp8(Fp8Scales::Blocks), ..model }
    }
}

impl TensorSource for InBlocks<'_> {
    fn check(&self, part: &TensorPart) -> Result<(), EngineError> {
        self.0.check(part)
    }

    fn read(&self, part: &TensorPart, rows: Range<usize>, out: NumbersMut<'_>) -> Result<(), EngineError> {
        self.0.read(part, rows, out)
    }

    fn read_fp8(&self, part: &TensorPart, rows: Range<usize>, out: Fp8Rows<'_>) -> Result<(), EngineError> {
        let Fp8Rows { codes, scales, scales_per_row } = out;
        self.0.read_fp8(part, rows.clone(), Fp8Rows { codes, scales: &mut *scales, scales_per_row })?;
        for (row, scales) in rows.zip(scales.chunks_exact_mut(scales_per_row)) {
            for (block, scale) in scales.iter_mut().enumerate() {
                let column = part.columns.start / SCALE_BLOCK + block;
                *scale *= [1.2, 0.7, 1.3, 0.4][((part.rows.start + row) / SCALE_BLOCK + column) % 4];
            }
        }
        Ok(())
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, EngineError> {
        self.0.vector(name, len)
    }
}
