//! A copy of a bundled checkpoint that may be damaged.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde_json::{Map, Value};
use tempfile::TempDir;

/// The copy; gone when dropped.
#[derive(Debug)]
pub struct CheckpointCopy(TempDir);

impl CheckpointCopy {
    /// Copies every file.
    pub fn of(checkpoint: &Path) -> anyhow::Result<Self> {
        let copy = Self(tempfile::tempdir()?);
        for entry in std::fs::read_dir(checkpoint).with_context(|| format!("{}", checkpoint.display()))? {
            let path = entry?.path();
            std::fs::copy(&path, copy.path(&path.file_name().unwrap_or_default().to_string_lossy()))?;
        }
        Ok(copy)
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        self.0.path()
    }

    /// One of its files.
    pub fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    /// Takes a file away.
    pub fn remove(&self, file: &str) -> anyhow::Result<()> {
        Ok(std::fs::remove_file(self.path(file))?)
    }

    /// Changes a file's bytes.
    pub fn edit(&self, file: &str, change: impl FnOnce(&mut Vec<u8>)) -> anyhow::Result<()> {
        let mut bytes = std::fs::read(self.path(file))?;
        change(&mut bytes);
        Ok(std::fs::write(self.path(file), bytes)?)
    }

    /// Changes a file that holds a JSON object.
    pub fn edit_json(&self, file: &str, change: impl FnOnce(&mut Map<String, Value>)) -> anyhow::Result<()> {
        let mut json: Map<String, Value> = serde_json::from_slice(&std::fs::read(self.path(file))?)?;
        change(&mut json);
        Ok(std::fs::write(self.path(file), Value::Object(json).to_string())?)
    }

    /// Gives the token with this id another spelling in `tokenizer.json`, and returns the old one.
    pub fn respell_token(&self, token_id: u32, spelling: &str) -> anyhow::Result<String> {
        let mut old = None;
        self.edit_json("tokenizer.json", |tokenizer| {
            let vocabulary = tokenizer.get_mut("model").and_then(|model| model["vocab"].as_object_mut());
            let Some(vocabulary) = vocabulary else { return };
            old = vocabulary.iter().find(|(_, id)| **id == token_id).map(|(token, _)| token.clone());
            vocabulary.retain(|_, id| *id != token_id);
            vocabulary.insert(spelling.to_owned(), token_id.into());
        })?;
        old.with_context(|| format!("no token has the id {token_id}"))
    }
}
