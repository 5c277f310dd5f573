//! A copy of a bundled checkpoint that tests may damage.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde_json::{Map, Value};
use tempfile::TempDir;

/// The copy; removed on drop.
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

    /// Path of one of its files.
    pub fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    /// Removes a file.
    pub fn remove(&self, file: &str) -> anyhow::Result<()> {
        Ok(std::fs::remove_file(self.path(file))?)
    }

    /// Modifies the bytes of a file.
    pub fn edit(&self, file: &str, change: impl FnOnce(&mut Vec<u8>)) -> anyhow::Result<()> {
        let mut bytes = std::fs::read(self.path(file))?;
        change(&mut bytes);
        Ok(std::fs::write(self.path(file), bytes)?)
    }

    /// Modifies a file that contains a JSON object.
    pub fn edit_json(&self, file: &str, change: impl FnOnce(&mut Map<String, Value>)) -> anyhow::Result<()> {
        let mut json: Map<String, Value> = serde_json::from_slice(&std::fs::read(self.path(file))?)?;
        change(&mut json);
        Ok(std::fs::write(self.path(file), Value::Object(json).to_string())?)
    }

    /// Sets all values of a bf16 tensor in `model.safetensors` to NaN.
    pub fn fill_with_nan(&self, tensor: &str) -> anyhow::Result<()> {
        self.change_numbers(tensor, |_| f32::NAN)
    }

    /// Modifies every value of a bf16 tensor in `model.safetensors`; results are truncated to bf16.
    pub fn change_numbers(&self, tensor: &str, mut change: impl FnMut(f32) -> f32) -> anyhow::Result<()> {
        let mut changed = Ok(());
        self.edit("model.safetensors", |bytes| {
            changed = bf16_bytes(bytes, tensor).map(|range| {
                for number in bytes[range].chunks_exact_mut(2) {
                    let bits = u32::from(u16::from_le_bytes([number[0], number[1]])) << 16;
                    let upper_half = (change(f32::from_bits(bits)).to_bits() >> 16) as u16;
                    number.copy_from_slice(&upper_half.to_le_bytes());
                }
            });
        })?;
        changed
    }

    /// Changes the spelling of the token with this id in `tokenizer.json`, and returns the old one.
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

/// Byte range of a bf16 tensor in a safetensors file, which consists of the header's length, the header and
/// the tensors.
pub(crate) fn bf16_bytes(file: &[u8], tensor: &str) -> anyhow::Result<std::ops::Range<usize>> {
    let (length, rest) =
        file.split_first_chunk::<8>().context("the file is shorter than a header's length")?;
    let header_bytes = usize::try_from(u64::from_le_bytes(*length))?;
    let header: Value = serde_json::from_slice(rest.get(..header_bytes).context("the header is cut off")?)?;
    let entry = &header[tensor];
    anyhow::ensure!(entry["dtype"] == "BF16", "{tensor} is {}, not BF16", entry["dtype"]);
    let offset =
        |at: usize| entry["data_offsets"][at].as_u64().and_then(|offset| usize::try_from(offset).ok());
    let (from, to) = (offset(0).context("no first offset")?, offset(1).context("no last offset")?);
    let data = length.len() + header_bytes;
    anyhow::ensure!(data + to <= file.len() && from < to, "{tensor} ends behind the end of the file");
    Ok(data + from..data + to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pair;

    #[test]
    fn only_the_named_tensor_is_filled_with_nan() -> anyhow::Result<()> {
        let copy = CheckpointCopy::of(&pair::target_dir())?;
        let before = std::fs::read(copy.path("model.safetensors"))?;
        copy.fill_with_nan("model.norm.weight")?;
        let after = std::fs::read(copy.path("model.safetensors"))?;
        let range = bf16_bytes(&after, "model.norm.weight")?;
        assert!(after[range.clone()].chunks_exact(2).all(|number| number == [0xc0, 0x7f]));
        assert_eq!(before[..range.start], after[..range.start]);
        assert_eq!(before[range.end..], after[range.end..]);
        assert!(copy.fill_with_nan("no.such.tensor").is_err());
        Ok(())
    }
}
