//! Prompts with task types: from lines of JSON, or a small built-in set.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::error::LoadError;

const BUILT_IN: &str = include_str!("prompts.jsonl");
/// Task type of prompts without one.
const UNNAMED_TASK: &str = "default";

/// A prompt with its task type.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    /// Task type.
    pub task: String,
    /// The prompt.
    pub content: Content,
}

/// The two forms of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// Text to continue.
    Prompt(String),
    /// A conversation in OpenAI's format.
    Messages(Value),
}

#[derive(Deserialize)]
struct Line {
    task: Option<String>,
    prompt: Option<String>,
    messages: Option<Value>,
}

impl Prompt {
    /// Four short prompts for each of eleven task types.
    pub fn built_in() -> Vec<Self> {
        let lines = BUILT_IN.lines().map(|line| Self::parse(line, UNNAMED_TASK));
        lines.map(|prompt| prompt.expect("the bundled prompts are read in a test")).collect()
    }

    /// Reads a file of lines `{"task", "prompt" | "messages"}`, or all `*.jsonl` files of a directory. Other
    /// fields are ignored; a line without a task gets the file's name as its task type.
    ///
    /// # Errors
    /// A file cannot be read, a line is not a prompt, or there are no prompts.
    pub fn read(path: &Path) -> Result<Vec<Self>, LoadError> {
        let mut prompts = Vec::new();
        for file in files(path)? {
            let text = std::fs::read_to_string(&file)
                .map_err(|source| LoadError::ReadPrompts { path: file.clone(), source })?;
            let task = file.file_stem().map_or(UNNAMED_TASK.into(), |name| name.to_string_lossy());
            // Some editors begin a file with a byte order mark.
            let text = text.trim_start_matches('\u{feff}');
            for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
                let prompt = Self::parse(line, &task);
                prompts.push(prompt.map_err(|reason| LoadError::BadPrompt {
                    path: file.clone(),
                    line: i + 1,
                    reason,
                })?);
            }
        }
        match prompts.is_empty() {
            true => Err(LoadError::NoPrompts { path: path.to_owned() }),
            false => Ok(prompts),
        }
    }

    fn parse(line: &str, default_task: &str) -> Result<Self, String> {
        let Line { task, prompt, messages } =
            serde_json::from_str(line).map_err(|error| error.to_string())?;
        let content = match (prompt, messages) {
            (Some(prompt), None) => Content::Prompt(prompt),
            (None, Some(messages)) if messages.is_array() => Content::Messages(messages),
            (None, Some(_)) => return Err("`messages` is not a list".to_owned()),
            (None, None) => return Err("neither `prompt` nor `messages`".to_owned()),
            (Some(_), Some(_)) => return Err("both `prompt` and `messages`: keep one".to_owned()),
        };
        Ok(Self { task: task.unwrap_or_else(|| default_task.to_owned()), content })
    }
}

fn files(path: &Path) -> Result<Vec<PathBuf>, LoadError> {
    let unreadable = |source| LoadError::ReadPrompts { path: path.to_owned(), source };
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let entries = path.read_dir().map_err(unreadable)?;
    let paths: Result<Vec<PathBuf>, _> = entries.map(|entry| entry.map(|entry| entry.path())).collect();
    let mut files = paths.map_err(unreadable)?;
    files.retain(|file| file.extension().is_some_and(|ending| ending == "jsonl"));
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn the_bundled_set_has_four_prompts_of_each_task_type() {
        let mut counts = BTreeMap::<String, usize>::new();
        for prompt in Prompt::built_in() {
            *counts.entry(prompt.task).or_default() += 1;
        }
        assert_eq!(counts.len(), 11);
        assert!(counts.values().all(|count| *count == 4), "{counts:?}");
    }

    #[test]
    fn a_directory_is_read_whole_and_faults_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
        write("b.jsonl", "\u{feff}{\"prompt\": \"two\", \"licence\": \"any\"}\r\n\r\n");
        write(
            "a.jsonl",
            "{\"task\": \"chat\", \"messages\": [{\"role\": \"user\", \"content\": \"one\"}]}\n",
        );
        write("notes.txt", "not a prompt");
        let prompts = Prompt::read(directory.path()).unwrap();
        let tasks: Vec<&str> = prompts.iter().map(|prompt| prompt.task.as_str()).collect();
        assert_eq!(tasks, ["chat", "b"]);
        assert_eq!(prompts[1].content, Content::Prompt("two".to_owned()));
        for (line, fault) in [
            ("{}", "line 2: neither `prompt` nor `messages`"),
            ("{\"prompt\": \"a\", \"messages\": []}", "line 2: both"),
            ("{\"messages\": 3}", "line 2: `messages` is not a list"),
            ("{", "line 2: EOF"),
        ] {
            write("b.jsonl", &format!("{{\"prompt\": \"two\"}}\n{line}\n"));
            let error = Prompt::read(directory.path()).unwrap_err().to_string();
            assert!(error.contains(fault), "{error}");
        }
    }
}
