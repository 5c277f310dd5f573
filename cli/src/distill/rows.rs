//! Reads a router's log into rows: usable ones, errors by line, and the rows held out for evaluation.

use std::collections::BTreeSet;
use std::fmt;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};

use engine::TokenId;
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::error::DistillCommandError;

/// One in this many prompts is held out for evaluation.
pub const HOLD_OUT_EVERY: u64 = 10;

/// Number of errors that are reported individually; the others are only counted.
const NAMED_FAULTS: usize = 5;

/// One prompt with its answer.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Row {
    /// Its task type.
    pub task: String,
    /// The model's name.
    pub model: String,
    /// The ids of the prompt.
    pub prompt_ids: Vec<TokenId>,
    /// The ids of the target's answer.
    pub completion_ids: Vec<TokenId>,
}

/// Contents of one or more logs.
#[derive(Debug, Default)]
pub struct Rows {
    /// Rows for training.
    pub train: Vec<Row>,
    /// Rows for evaluation.
    pub held_out: Vec<Row>,
    /// Lines that could not be used.
    pub faults: Faults,
    /// Models in the log other than the selected one.
    pub other_models: BTreeSet<String>,
}

/// Unusable lines.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Number of unusable lines.
    pub count: usize,
    /// The first ones, with file, line and reason.
    pub named: Vec<String>,
}

impl Faults {
    fn add(&mut self, place: String, reason: &str) {
        self.count += 1;
        if self.named.len() < NAMED_FAULTS {
            self.named.push(format!("{place}: {reason}"));
        }
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = if self.count == 1 { "line" } else { "lines" };
        write!(f, "{} {lines} cannot be used and are left out: {}", self.count, self.named.join("; "))?;
        match self.count - self.named.len() {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}

impl Rows {
    /// Reads logs, each with its rotated predecessor. `model` selects rows; `num_ids` is the number of ids of
    /// the tokenizer.
    ///
    /// # Errors
    /// A file cannot be read, there are rows of several models and none was selected, or there are rows but
    /// none of the selected model.
    pub fn read(logs: &[PathBuf], model: Option<&str>, num_ids: u32) -> Result<Self, DistillCommandError> {
        let mut rows = Self::default();
        let mut read = BTreeSet::new();
        for log in logs {
            for path in [previous(log), log.clone()] {
                // The predecessor may also be named as a log.
                if (path == *log || path.exists()) && read.insert(path.clone()) {
                    rows.read_file(&path, model, num_ids)?;
                }
            }
        }
        let models: BTreeSet<&str> =
            rows.train.iter().chain(&rows.held_out).map(|row| row.model.as_str()).collect();
        if models.len() > 1 {
            let models = models.into_iter().collect::<Vec<_>>().join(", ");
            return Err(DistillCommandError::SeveralModels { models });
        }
        if let Some(model) = model
            && models.is_empty()
            && !rows.other_models.is_empty()
        {
            let others = rows.other_models.into_iter().collect::<Vec<_>>().join(", ");
            return Err(DistillCommandError::NoSuchModel { model: model.to_owned(), others });
        }
        Ok(rows)
    }

    /// Number of answer tokens to train on.
    pub fn train_tokens(&self) -> usize {
        self.train.iter().map(|row| row.completion_ids.len()).sum()
    }

    fn read_file(
        &mut self,
        path: &Path,
        model: Option<&str>,
        num_ids: u32,
    ) -> Result<(), DistillCommandError> {
        let unreadable = |source| DistillCommandError::Read { path: path.to_owned(), source };
        let file = std::fs::File::open(path).map_err(unreadable)?;
        for (idx, line) in BufReader::new(file).split(b'\n').enumerate() {
            let line = line.map_err(unreadable)?;
            if line.trim_ascii().is_empty() {
                continue;
            }
            match parse(&line, num_ids) {
                Ok(row) if model.is_some_and(|model| model != row.model) => {
                    self.other_models.insert(row.model);
                }
                Ok(row) if is_held_out(&row.prompt_ids) => self.held_out.push(row),
                Ok(row) => self.train.push(row),
                Err(reason) => self.faults.add(format!("{}:{}", path.display(), idx + 1), &reason),
            }
        }
        Ok(())
    }
}

/// The name that a router gives to the rotated log.
fn previous(log: &Path) -> PathBuf {
    let mut name = log.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

fn parse(line: &[u8], num_ids: u32) -> Result<Row, String> {
    let row: Row = serde_json::from_slice(line).map_err(|error| error.to_string())?;
    if row.prompt_ids.is_empty() || row.completion_ids.is_empty() {
        return Err("the prompt or the answer has no tokens".to_owned());
    }
    match row.prompt_ids.iter().chain(&row.completion_ids).find(|id| **id >= num_ids) {
        Some(id) => Err(format!("token {id} is not in the tokenizer, which has {num_ids}")),
        None => Ok(row),
    }
}

/// Chosen by a hash of the prompt: a row stays on its side when other rows are added or removed, and equal
/// prompts are on the same side.
fn is_held_out(prompt_ids: &[TokenId]) -> bool {
    let mut hash = Sha256::new();
    for id in prompt_ids {
        hash.update(id.to_le_bytes());
    }
    let digest = hash.finalize();
    let first = u64::from_le_bytes(digest[..8].try_into().expect("a digest has 32 bytes"));
    first.is_multiple_of(HOLD_OUT_EVERY)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(model: &str, first: u32) -> String {
        format!(
            "{{\"task\":\"chat\",\"model\":\"{model}\",\"prompt\":\"x\",\"prompt_ids\":[{first},2],\"completion_ids\":[3]}}\n"
        )
    }

    #[test]
    fn broken_lines_are_named_and_the_others_are_used() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log.jsonl");
        let good: String = (0..50).map(|first| line("m", first)).collect();
        let broken = "half a li\n{\"task\":\"chat\"}\n\r\n";
        let strange = line("m", 70);
        std::fs::write(previous(&path), good).unwrap();
        std::fs::write(&path, [broken, strange.as_str(), &line("m", 60)].concat()).unwrap();
        let rows = Rows::read(std::slice::from_ref(&path), None, 64).unwrap();
        assert_eq!((rows.train.len() + rows.held_out.len(), rows.faults.count), (51, 3));
        let again = Rows::read(&[path.clone(), previous(&path), path], None, 64).unwrap();
        assert_eq!(again.train, rows.train, "a file counts once");
        assert!(!rows.held_out.is_empty() && rows.held_out.len() < 15, "{}", rows.held_out.len());
        let said = rows.faults.to_string();
        for expected in
            ["3 lines", "log.jsonl:1: expected", "log.jsonl:2: missing field", "log.jsonl:4: token 70"]
        {
            assert!(said.contains(expected), "{expected:?} is not in {said}");
        }
    }

    #[test]
    fn a_row_stays_on_its_side() {
        let sides: Vec<bool> = (0..40).map(|first| is_held_out(&[first, 1])).collect();
        assert_eq!(sides, (0..40).map(|first| is_held_out(&[first, 1])).collect::<Vec<_>>());
        assert!(sides.contains(&true) && sides.contains(&false));
    }

    #[test]
    fn one_model_is_trained_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log.jsonl");
        std::fs::write(&path, [line("a", 1), line("b", 2)].concat()).unwrap();
        let read = |model| Rows::read(std::slice::from_ref(&path), model, 64);
        let error = read(None).unwrap_err().to_string();
        assert!(error.contains("several models, a, b: choose one with --model"), "{error}");
        let rows = read(Some("b")).unwrap();
        assert_eq!(rows.train.len() + rows.held_out.len(), 1);
        let unknown = read(Some("c")).unwrap_err().to_string();
        assert_eq!(unknown, "the log has no row of --model c, only of a, b");
        let missing = Rows::read(&[directory.path().join("nowhere")], None, 64).unwrap_err().to_string();
        assert!(missing.starts_with("cannot read ") && missing.contains("nowhere"), "{missing}");
    }
}
