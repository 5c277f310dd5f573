//! `lookup-table`: measures what lookup drafts are worth on edits. Texts of a corpus are edited; the ids of
//! the edited text are committed verify step by verify step, as by a target that rewrites the text that way;
//! and the committed tokens per step are printed as a Markdown table. No model runs: it measures how often a
//! lookup draft matches what a perfect editor would write.

#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use clap::Parser;
use scheduling::lookup_rates::{LookupRates, LookupSource, reach_probabilities};
use serde::Deserialize;
use speculation::TokenId;
use speculation::lookup::{CheckedPrediction, LookupMatch, PredictedText, PredictionCursor, SuffixIndex};
use tests::pair::{PairText, TASK_TYPES};

/// Prints the number of tokens per verify step on edited texts, by lookup source
#[derive(Debug, Parser)]
#[command(name = "lookup-table")]
struct Args {
    /// Directory of texts: TASK_TYPE.jsonl with lines of {"prompt": .., "completion": ..}
    #[arg(long, value_name = "DIR")]
    corpus: PathBuf,
    /// Texts per task type
    #[arg(long, value_name = "N", default_value_t = 40)]
    num_texts: usize,
    /// Maximum tokens per draft
    #[arg(long, value_name = "K,..", value_delimiter = ',', default_values_t = [8, 16, 32])]
    draft_tokens: Vec<usize>,
}

/// Kind of edit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Edit {
    /// A word that occurs several times is renamed everywhere.
    Rename,
    /// A line in the middle is replaced.
    Replace,
    /// A line is inserted in the middle.
    Insert,
    /// Three lines are removed.
    Delete,
}

const EDITS: [Edit; 4] = [Edit::Rename, Edit::Replace, Edit::Insert, Edit::Delete];

/// Sources of drafts.
const SOURCES: [(&str, &[LookupSource]); 4] = [
    ("none", &[]),
    ("suffix", &[LookupSource::Suffix]),
    ("prediction", &[LookupSource::Prediction]),
    ("both", &LookupSource::ALL),
];

/// Allowed length of a text, bytes.
const LEN: std::ops::Range<usize> = 600..8_000;

/// One text as ids: the client's prompt, the original text, and the edited one.
struct Sample {
    edit: Edit,
    prompt: Vec<TokenId>,
    file: Vec<TokenId>,
    edited: Vec<TokenId>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Counts {
    steps: u64,
    tokens: u64,
    drafted: u64,
    accepted: u64,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let samples = samples(&args)?;
    ensure!(!samples.is_empty(), "{} holds no text of {LEN:?} characters", args.corpus.display());
    print(
        "| edit | texts | source | k | tokens per verify step | accepted of drafted |\n|---|---|---|---|---|---|",
    );
    for edit in EDITS {
        let samples: Vec<&Sample> = samples.iter().filter(|sample| sample.edit == edit).collect();
        ensure!(!samples.is_empty(), "no text allows {edit:?}: raise --num-texts");
        for (name, sources) in SOURCES {
            // Without drafts k has no effect.
            let lengths = if sources.is_empty() { &[0] } else { args.draft_tokens.as_slice() };
            for &k in lengths {
                let mut replay = Replay::new(sources, k);
                samples.iter().for_each(|sample| replay.run(sample));
                let Counts { steps, tokens, drafted, accepted } = replay.counts;
                let (num, per_step) = (samples.len(), tokens as f64 / steps as f64);
                let rate = if drafted > 0 {
                    format!("{:.2}", accepted as f64 / drafted as f64)
                } else {
                    "-".to_owned()
                };
                print(&format!("| {edit:?} | {num} | {name} | {k} | {per_step:.2} | {rate} |"));
            }
        }
    }
    Ok(())
}

#[expect(clippy::print_stdout, reason = "the table is this program's output")]
fn print(line: &str) {
    println!("{line}");
}

/// The first texts of each task type, each with every edit that is possible.
fn samples(args: &Args) -> anyhow::Result<Vec<Sample>> {
    let text = PairText::load()?;
    let mut samples = Vec::new();
    for task_type in TASK_TYPES {
        let files = read_texts(&args.corpus.join(task_type).with_extension("jsonl"))?;
        for file in files.into_iter().take(args.num_texts) {
            for edit in EDITS {
                let Some(edited) = apply(edit, &file) else { continue };
                samples.push(Sample {
                    edit,
                    prompt: text.chat_ids(&format!("Rewrite this with one change.\n{file}\n"))?,
                    file: text.ids(&file)?,
                    edited: text.ids(&edited)?,
                });
            }
        }
    }
    Ok(samples)
}

/// The longer part of each line, prompt or completion, if its length is allowed.
fn read_texts(path: &Path) -> anyhow::Result<Vec<String>> {
    #[derive(Deserialize)]
    struct Line {
        prompt: String,
        completion: String,
    }
    if !path.exists() {
        return Ok(Vec::new());
    }
    let lines = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut texts = Vec::new();
    for line in lines.lines() {
        let Line { prompt, completion } =
            serde_json::from_str(line).with_context(|| path.display().to_string())?;
        let longer = if completion.len() > prompt.len() { completion } else { prompt };
        texts.extend(Some(longer).filter(|text| LEN.contains(&text.len())));
    }
    Ok(texts)
}

fn apply(edit: Edit, file: &str) -> Option<String> {
    let lines: Vec<&str> = file.split_inclusive('\n').collect();
    let middle = lines.len() / 2;
    let written = "the line that nobody has written before, 4711\n";
    Some(match edit {
        Edit::Rename => rename(file)?,
        _ if lines.len() < 8 => return None,
        Edit::Replace => [&lines[..middle], &[written], &lines[middle + 1..]].concat().concat(),
        Edit::Insert => [&lines[..middle], &[written], &lines[middle..]].concat().concat(),
        Edit::Delete => [&lines[..middle], &lines[middle + 3..]].concat().concat(),
    })
}

/// Renames the first word of at least four bytes that occurs 2 to 8 times, by reversing it.
fn rename(file: &str) -> Option<String> {
    let is_letter = |c: char| c.is_alphanumeric() || c == '_';
    let words: Vec<&str> = file.split(|c: char| !is_letter(c)).filter(|word| word.len() >= 4).collect();
    let count = |word: &str| words.iter().filter(|other| **other == word).count();
    let word = words.iter().find(|word| (2..=8).contains(&count(word)))?;
    let renamed: String = word.chars().rev().collect();
    // Whole words only.
    let (mut out, mut copied) = (String::with_capacity(file.len()), 0);
    for (at, _) in file.match_indices(*word) {
        let end = at + word.len();
        if !file[..at].ends_with(is_letter) && !file[end..].starts_with(is_letter) {
            out.push_str(&file[copied..at]);
            out.push_str(&renamed);
            copied = end;
        }
    }
    out.push_str(&file[copied..]);
    Some(out)
}

/// One lane that processes all texts and drafts as the router would if rows cost nothing.
struct Replay<'a> {
    sources: &'a [LookupSource],
    k: usize,
    lane: [LookupRates; 2],
    counts: Counts,
}

impl<'a> Replay<'a> {
    fn new(sources: &'a [LookupSource], k: usize) -> Self {
        let lane = LookupSource::ALL.map(|_| LookupRates::of_lane());
        Self { sources, k, lane, counts: Counts::default() }
    }

    fn run(&mut self, sample: &Sample) {
        let ids = [&sample.prompt[..], &sample.edited[..]].concat();
        let text = Arc::new(PredictedText::new(sample.file.clone()));
        let mut prediction = PredictionCursor::new(text, sample.prompt.len());
        let mut suffix = SuffixIndex::new(&sample.prompt);
        let mut own = LookupSource::ALL.map(|_| LookupRates::of_sequence());
        let mut len = sample.prompt.len();
        while len < ids.len() {
            let found = |source: &LookupSource| {
                let found = match source {
                    LookupSource::Prediction => prediction.find(self.k),
                    LookupSource::Suffix => suffix.find(&ids[..len], self.k),
                }?;
                let rates = (&self.lane[*source as usize], &own[*source as usize]);
                let reached = reach_probabilities(*source, rates, (found.match_len, found.token_ids.len()));
                Some((reached.iter().sum::<f64>(), found))
            };
            let best = self.sources.iter().filter_map(found).max_by(|a, b| a.0.total_cmp(&b.0));
            let drafted = best.map(|(_, LookupMatch { token_ids, .. })| token_ids).unwrap_or_default();
            let rest = &ids[len..];
            let accepted = drafted.iter().zip(rest).take_while(|(a, b)| a == b).count();
            let committed = rest.len().min(accepted + 1);
            len += committed;
            self.counts.steps += 1;
            self.counts.tokens += committed as u64;
            self.counts.drafted += drafted.len() as u64;
            self.counts.accepted += accepted as u64;
            let mut learn = |source: LookupSource, expected: CheckedPrediction| {
                own[source as usize].observe(expected);
                self.lane[source as usize].observe(expected);
            };
            prediction.read_committed(&ids[..len], |expected| learn(LookupSource::Prediction, expected));
            suffix.read_committed(&ids[..len], |expected| learn(LookupSource::Suffix, expected));
        }
    }
}
