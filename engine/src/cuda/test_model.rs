//! Small models for tests: a configuration of this crate, changed, for random weights.

use std::path::Path;

use crate::{LoadOptions, WeightFormat};

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
