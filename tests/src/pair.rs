//! The bundled model pair and its prompts.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use scheduling::profile::Profile;
use serde::Deserialize;
use speculation::TokenId;
use tokenizers::Tokenizer;

/// The name under which every test serves the target.
pub const MODEL: &str = "demo";

/// The id with which both models of the pair end a text.
pub const END_OF_TEXT: TokenId = 0;

/// Every task type with bundled prompts.
pub const TASK_TYPES: [&str; 11] = [
    "api_call",
    "chat",
    "code",
    "creative",
    "math",
    "qa",
    "shell",
    "sql",
    "summarization",
    "support",
    "translation",
];

/// The repository's root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the tests are a folder of the repository")
        .to_owned()
}

/// The target's checkpoint.
pub fn target_dir() -> PathBuf {
    root().join("models/demo/target")
}

/// The draft's checkpoint.
pub fn draft_dir() -> PathBuf {
    root().join("models/demo/draft")
}

/// Directory of the bundled prompts, with one `TASK_TYPE.jsonl` each.
pub fn prompts_dir() -> PathBuf {
    root().join("models/demo/prompts")
}

/// The pair's profile, which synthetic workers reproduce.
pub fn profile() -> anyhow::Result<Profile> {
    let path = root().join("deploy/profiles/cpu-pair.toml");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    Profile::parse(&text).with_context(|| path.display().to_string())
}

/// The first `limit` prompts of a file of `{"prompt": ..}` lines.
pub fn read_prompts(path: &Path, limit: usize) -> anyhow::Result<Vec<String>> {
    #[derive(Deserialize)]
    struct Line {
        prompt: String,
    }
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let lines = text.lines().filter(|line| !line.trim().is_empty()).take(limit);
    lines
        .map(|line| Ok(serde_json::from_str::<Line>(line)?.prompt))
        .collect::<anyhow::Result<_>>()
        .with_context(|| format!("{} is not lines of {{\"prompt\": ..}}", path.display()))
}

/// Tokenizer of the pair, with which tests convert prompts to ids.
#[derive(Debug)]
pub struct PairText {
    tokenizer: Tokenizer,
}

impl PairText {
    /// Loads the bundled target's tokenizer.
    pub fn load() -> anyhow::Result<Self> {
        Self::of(&target_dir())
    }

    /// Loads the tokenizer of a checkpoint whose texts have the bundled pair's format.
    pub fn of(checkpoint: &Path) -> anyhow::Result<Self> {
        let path = checkpoint.join("tokenizer.json");
        let tokenizer =
            Tokenizer::from_file(&path).map_err(|error| anyhow!("{}: {error}", path.display()))?;
        Ok(Self { tokenizer })
    }

    /// Size of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.tokenizer.get_vocab_size(true)
    }

    /// The ids of a text without a chat template.
    pub fn ids(&self, text: &str) -> anyhow::Result<Vec<TokenId>> {
        let encoding = self.tokenizer.encode(text, false).map_err(|error| anyhow!("{error}"))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The ids of one user message, formatted as by the pair's chat template.
    pub fn chat_ids(&self, message: &str) -> anyhow::Result<Vec<TokenId>> {
        let framed = format!("<|user|>\n{message}<|end|>\n<|assistant|>\n");
        self.ids(&framed)
    }

    /// The bundled prompts of one task type, as ids.
    pub fn bundled(&self, task_type: &str) -> anyhow::Result<Vec<Vec<TokenId>>> {
        let path = prompts_dir().join(task_type).with_extension("jsonl");
        read_prompts(&path, usize::MAX)?.iter().map(|prompt| self.chat_ids(prompt)).collect()
    }
}
