//! Which files of a checkpoint directory hold its weights: one model.safetensors, or an index and its shards.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::EngineError;
use crate::model_config::fields::{Fields, read_json_object};

/// Holds all weights of a checkpoint.
pub const SINGLE_FILE: &str = "model.safetensors";
/// Lists the files of a checkpoint in several files.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// The weight files of a checkpoint.
#[derive(Debug)]
pub struct WeightFiles {
    /// The file that lists the tensors: the single file, or the index.
    pub listing: PathBuf,
    /// The files in the order of their names.
    pub files: Vec<WeightFile>,
}

/// A file with weights.
#[derive(Debug)]
pub struct WeightFile {
    /// The file.
    pub path: PathBuf,
    /// Names of the tensors to read from it; `None`: all that it holds.
    pub tensors: Option<BTreeSet<String>>,
}

impl WeightFiles {
    /// Finds the files to read. They need not exist. If there are both a single file and an index, the single
    /// file wins, as in transformers.
    ///
    /// # Errors
    /// The index cannot be read, or names a file in another directory.
    pub fn of(model_dir: &Path) -> Result<Self, EngineError> {
        let (single, index) = (model_dir.join(SINGLE_FILE), model_dir.join(INDEX_FILE));
        if single.exists() || !index.exists() {
            let files = vec![WeightFile { path: single.clone(), tensors: None }];
            return Ok(Self { listing: single, files });
        }
        let object = read_json_object(&index)?;
        let fields = Fields::top(&index, &object);
        let map = fields.nested("weight_map")?.ok_or_else(|| fields.missing("weight_map"))?;
        let mut tensors_of = BTreeMap::<&str, BTreeSet<String>>::new();
        for tensor in map.names() {
            let file = map.optional_string(tensor)?.ok_or_else(|| map.missing(tensor))?;
            // Errors are one line, and name the file.
            let is_one_line = !file.contains(char::is_control);
            if !is_one_line || Path::new(file).file_name().is_none_or(|name| name != file) {
                return Err(
                    map.bad(tensor, format!("is {file:?}, expected a file name in the same directory"))
                );
            }
            tensors_of.entry(file).or_default().insert(tensor.to_owned());
        }
        let shard =
            |(file, tensors): (&str, _)| WeightFile { path: model_dir.join(file), tensors: Some(tensors) };
        let files = tensors_of.into_iter().map(shard).collect();
        Ok(Self { listing: index, files })
    }
}

/// Whether a directory has one of the files that a checkpoint's weights begin with.
pub fn has_weights(model_dir: &Path) -> bool {
    [SINGLE_FILE, INDEX_FILE].iter().any(|name| model_dir.join(name).is_file())
}
