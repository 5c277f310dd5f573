//! Prints the confusion matrix of the task type classifier (`router::task_type`) on labelled prompts, as
//! Markdown.
//!
//! `cargo run -p outrider-router --example task_type_confusion -- DIR`, where DIR contains `*.jsonl` files of
//! `{"task": .., "prompt": ..}` lines.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command-line tool prints its result")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use router::task_type::classify;
use serde::Deserialize;

#[derive(Deserialize)]
struct Line {
    task: String,
    prompt: String,
}

fn main() -> anyhow::Result<()> {
    let dir = std::env::args_os().nth(1).context("usage: task_type_confusion DIR")?;
    print(&count(Path::new(&dir))?);
    Ok(())
}

/// Number of prompts by actual and predicted task type.
fn count(dir: &Path) -> anyhow::Result<BTreeMap<(String, String), u32>> {
    let entries = std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let mut files: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<anyhow::Result<_>>()?;
    files.retain(|path| path.extension().is_some_and(|ending| ending == "jsonl"));
    anyhow::ensure!(!files.is_empty(), "no *.jsonl in {}", dir.display());
    let mut counts = BTreeMap::new();
    for path in files {
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            let Line { task, prompt } =
                serde_json::from_str(line).with_context(|| path.display().to_string())?;
            *counts.entry((task, classify(&prompt).to_owned())).or_default() += 1;
        }
    }
    Ok(counts)
}

fn print(counts: &BTreeMap<(String, String), u32>) {
    let types: BTreeSet<&str> =
        counts.keys().flat_map(|(actual, predicted)| [actual.as_str(), predicted.as_str()]).collect();
    let at = |actual: &str, predicted: &str| {
        counts.get(&(actual.to_owned(), predicted.to_owned())).copied().unwrap_or(0)
    };
    println!("| actual \\ predicted | {} | correct |", types.iter().copied().collect::<Vec<_>>().join(" | "));
    println!("|---|{}", "---|".repeat(types.len() + 1));
    let (mut correct, mut all) = (0, 0);
    for actual in &types {
        let row: Vec<u32> = types.iter().map(|predicted| at(actual, predicted)).collect();
        let sum: u32 = row.iter().sum();
        let cells: Vec<String> =
            row.iter().map(|count| if *count == 0 { String::new() } else { count.to_string() }).collect();
        println!("| {actual} | {} | {} of {sum} |", cells.join(" | "), at(actual, actual));
        correct += at(actual, actual);
        all += sum;
    }
    println!("\ncorrect: {correct} of {all}");
}
