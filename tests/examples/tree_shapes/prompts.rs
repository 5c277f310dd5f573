//! The prompts that texts are generated for.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use speculation::TokenId;
use tests::pair::{PairText, read_prompts};

use crate::shape::number;

/// Which prompts of each task type to run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Selection {
    skipped: usize,
    per_type: usize,
    /// Texts of one prompt, with different seeds.
    pub(crate) texts: usize,
}

impl Selection {
    /// Parses `3`, `3+7` (seven after the first three) or `10x4` (four texts of each of ten).
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let (prompts, texts) = text.split_once('x').unwrap_or((text, "1"));
        let (skipped, per_type) = prompts.split_once('+').unwrap_or(("0", prompts));
        let selection =
            Self { skipped: number(skipped)?, per_type: number(per_type)?, texts: number(texts)? };
        if selection.per_type == 0 || selection.texts == 0 {
            return Err(format!("`{text}` selects no text"));
        }
        Ok(selection)
    }

    /// The prompts in `dir`, in the format that the bundled pair was trained on.
    pub(crate) fn read(self, dir: &Path) -> anyhow::Result<Vec<Vec<TokenId>>> {
        let text = PairText::of(&dir.join("target"))?;
        let mut prompts = Vec::new();
        for file in prompt_files(&dir.join("prompts"))? {
            for prompt in read_prompts(&file, self.skipped + self.per_type)?.iter().skip(self.skipped) {
                prompts.push(text.chat_ids(prompt)?);
            }
        }
        ensure!(!prompts.is_empty(), "{} holds no such prompts", dir.join("prompts").display());
        Ok(prompts)
    }
}

/// A file of each task type, in order of name.
fn prompt_files(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "jsonl") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}
