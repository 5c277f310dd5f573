//! Helpers shared by the engine's tests: golden cases, the bundled pair, files of tensors, loading, forwards
//! and greedy choice.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use engine::{Engine, LoadOptions, SequenceRows, SlotId, TokenId, WeightFormat};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize_to_file};

/// Names of the golden checkpoints, sorted.
pub(crate) fn golden_cases() -> Vec<String> {
    let has_checkpoint = |path: &Path| path.join("config.json").exists();
    let mut cases: Vec<String> = std::fs::read_dir(golden_dir())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| has_checkpoint(path))
        .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
        .collect();
    cases.sort();
    assert!(cases.len() >= 15, "golden cases are missing: {cases:?}");
    cases
}

/// Directory of the golden files.
pub(crate) fn golden_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// Directory of a model of the bundled pair.
pub(crate) fn demo_dir(role: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo").join(role)
}

/// Names, formats, shapes and bytes of a file's tensors.
pub(crate) type Tensors = Vec<(String, Dtype, Vec<usize>, Vec<u8>)>;

/// Reads the tensors of a checkpoint with one file.
pub(crate) fn read_tensors(dir: &Path) -> Tensors {
    let file = std::fs::read(dir.join("model.safetensors")).unwrap();
    let copy = |(name, view): (String, TensorView<'_>)| {
        (name, view.dtype(), view.shape().to_vec(), view.data().to_vec())
    };
    SafeTensors::deserialize(&file).unwrap().tensors().into_iter().map(copy).collect()
}

/// Writes a checkpoint's tensors to one file.
pub(crate) fn write_tensors(dir: &Path, tensors: &Tensors) {
    let view = |stored| {
        let (name, dtype, shape, bytes): &(String, Dtype, Vec<usize>, Vec<u8>) = stored;
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    };
    let views: HashMap<String, TensorView<'_>> = tensors.iter().map(view).collect();
    serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
}

/// Loads a model with KV memory for a few thousand tokens.
pub(crate) fn load(model_dir: &Path, weights: WeightFormat, threads: usize) -> Engine {
    Engine::load(&LoadOptions { threads, ..LoadOptions::new(model_dir, weights, 64 << 20) }).unwrap()
}

/// Appends ids to a sequence and returns the logits of the last `num_logits` rows.
pub(crate) fn feed(
    engine: &mut Engine,
    slot: SlotId,
    token_ids: &[TokenId],
    num_logits: usize,
) -> Vec<Vec<f32>> {
    let logits = engine.forward(&[SequenceRows { slot, token_ids, num_logits }]).unwrap();
    (0..logits.rows()).map(|i| logits.row(i).to_vec()).collect()
}

/// The lowest id among those with the largest logit.
pub(crate) fn argmax(logits: &[f32]) -> TokenId {
    (0..logits.len()).reduce(|best, i| if logits[i] > logits[best] { i } else { best }).unwrap() as TokenId
}

/// Repeatable random choices (splitmix64).
pub(crate) struct Random(u64);

impl Random {
    /// Equal seeds give equal choices.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below `n`, which is not zero.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}
