//! Model directories on disk: whether one looks like a checkpoint, and the location of the bundled pair.
//!
//! Only checks which files exist. The workers load the model and check shapes and names.

use std::path::{Path, PathBuf};

use engine::weight_files::has_weights;

/// Path of the bundled pair in the repository.
pub const BUNDLED_PAIR: &str = "models/demo";

/// What a directory lacks to be a Hugging Face checkpoint; `None` if it looks like one.
pub(super) fn missing_in(directory: &Path) -> Option<String> {
    if !directory.is_dir() {
        return Some("is not a directory".to_owned());
    }
    for name in ["config.json", "tokenizer.json"] {
        if !directory.join(name).is_file() {
            return Some(format!("has no {name}"));
        }
    }
    if !has_weights(directory) {
        return Some("has no model.safetensors and no model.safetensors.index.json".to_owned());
    }
    None
}

/// The bundled pair: searched in the working directory and its parents, then next to this executable and in
/// its parents. It is found from anywhere inside the repository, and from anywhere with a binary that cargo
/// built there.
pub(super) fn bundled_pair() -> Option<PathBuf> {
    let working_directory = std::env::current_dir().ok();
    let executable = std::env::current_exe().ok();
    let starts = working_directory.into_iter().chain(executable);
    starts.into_iter().find_map(|start| find_pair_above(&start))
}

/// Formats a path for display: relative if it is below the working directory.
pub(super) fn display_path(path: &Path) -> std::path::Display<'_> {
    let working_directory = std::env::current_dir().unwrap_or_default();
    path.strip_prefix(working_directory).unwrap_or(path).display()
}

fn find_pair_above(start: &Path) -> Option<PathBuf> {
    let candidates = start.ancestors().map(|directory| directory.join(BUNDLED_PAIR));
    candidates.into_iter().find(|pair| pair.join("target/config.json").is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_missing_file_is_named() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("model");
        let missing = || missing_in(&directory).unwrap_or_default();
        assert_eq!(missing(), "is not a directory");
        std::fs::create_dir(&directory).unwrap();
        assert_eq!(missing(), "has no config.json");
        std::fs::write(directory.join("config.json"), "{}").unwrap();
        assert_eq!(missing(), "has no tokenizer.json");
        std::fs::write(directory.join("tokenizer.json"), "{}").unwrap();
        assert!(missing().starts_with("has no model.safetensors"));
        std::fs::write(directory.join("model.safetensors.index.json"), "{}").unwrap();
        assert_eq!(missing_in(&directory), None);
    }

    #[test]
    fn the_bundled_pair_is_found_from_below_it() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join(BUNDLED_PAIR).join("target");
        std::fs::create_dir_all(&target).unwrap();
        let below = root.path().join("target/debug");
        std::fs::create_dir_all(&below).unwrap();
        assert_eq!(find_pair_above(&below), None);
        std::fs::write(target.join("config.json"), "{}").unwrap();
        assert_eq!(find_pair_above(&below), Some(root.path().join(BUNDLED_PAIR)));
    }
}
