//! Runs scenario files: prose, events in, decisions out.
//!
//! A file in `scheduling/testdata/` is a list of cases. A case consists of one or more lines of input, a line
//! `----`, and the expected output up to an empty line. Lines that begin with `#` are prose and may stand
//! between cases. All cases of a file share one state:
//!
//! ```text
//! # The first sequence is answered and returns 5 ms later.
//! arrived a at=0ms rows=1
//! next at=0ms
//! ----
//! run a
//! ```
//!
//! A line of input is a verb, followed by words and `key=value` pairs; `key=(a,b)` is a list. A failing test
//! prints the actual output of each case that differs. `UPDATE=1 cargo test` writes the actual output into
//! the files instead.

use std::fmt::{Debug, Display};
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// Separates a case's input from its expected output.
const SEPARATOR: &str = "----";

/// One line of input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Line {
    /// The first word.
    pub(crate) verb: String,
    /// The other words, in order.
    pub(crate) words: Vec<String>,
    pairs: Vec<(String, String)>,
    /// File and line number, for messages.
    place: String,
}

impl Line {
    pub(crate) fn parse(text: &str, place: String) -> Self {
        let mut tokens = split(text).into_iter();
        let verb = tokens.next().unwrap_or_default();
        let (mut words, mut pairs) = (Vec::new(), Vec::new());
        for token in tokens {
            match token.split_once('=') {
                Some((key, value)) => pairs.push((key.to_owned(), value.to_owned())),
                None => words.push(token),
            }
        }
        Self { verb, words, pairs, place }
    }

    /// Whether the line has a word.
    pub(crate) fn has(&self, word: &str) -> bool {
        self.words.iter().any(|has| has == word)
    }

    /// Value of a key, if the line has it.
    pub(crate) fn get<T: FromStr<Err: Debug>>(&self, key: &str) -> Option<T> {
        self.value(key).map(|value| self.convert(key, value))
    }

    /// Value of a required key.
    pub(crate) fn need<T: FromStr<Err: Debug>>(&self, key: &str) -> T {
        self.get(key).unwrap_or_else(|| panic!("{}: `{}` requires {key}=..", self.place, self.verb))
    }

    /// Values of `key=(a,b)`; empty if the line lacks the key.
    pub(crate) fn list<T: FromStr<Err: Debug>>(&self, key: &str) -> Vec<T> {
        let Some(value) = self.value(key) else { return Vec::new() };
        let inner = value.trim_start_matches('(').trim_end_matches(')');
        inner.split(',').filter(|item| !item.is_empty()).map(|item| self.convert(key, item.trim())).collect()
    }

    /// Value of a key as a duration: `250us`, `1.5ms`, `2s`.
    pub(crate) fn duration(&self, key: &str) -> Option<Duration> {
        let value = self.value(key)?;
        let unit_at = value.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(value.len());
        let seconds = match &value[unit_at..] {
            "us" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            _ => panic!("{}: {key}={value} is not a duration (us, ms or s)", self.place),
        };
        let micros = (self.convert::<f64>(key, &value[..unit_at]) * seconds * 1e6).round();
        Some(Duration::from_micros(micros as u64))
    }

    /// Fails the test: the verb of this line is unknown.
    pub(crate) fn unknown(&self) -> ! {
        panic!("{}: unknown verb `{}`", self.place, self.verb)
    }

    fn value(&self, key: &str) -> Option<&str> {
        self.pairs.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    fn convert<T: FromStr<Err: Debug>>(&self, key: &str, value: &str) -> T {
        value.parse().unwrap_or_else(|error| panic!("{}: {key}={value}: {error:?}", self.place))
    }
}

/// Words of a line; spaces inside parentheses do not split.
fn split(text: &str) -> Vec<String> {
    let (mut tokens, mut token, mut depth) = (Vec::new(), String::new(), 0);
    for c in text.chars() {
        depth += i32::from(c == '(') - i32::from(c == ')');
        if c.is_whitespace() && depth == 0 {
            tokens.push(std::mem::take(&mut token));
        } else {
            token.push(c);
        }
    }
    tokens.push(token);
    tokens.retain(|token| !token.is_empty());
    tokens
}

/// Runs every `.txt` file of a folder in `scheduling/testdata/`. Each file starts with `new()`. `step`
/// handles one line of input and returns its output, which may have any number of lines.
pub(crate) fn run_folder<S>(folder: &str, new: impl Fn() -> S, step: impl Fn(&mut S, &Line) -> String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(folder);
    let entries = fs::read_dir(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "txt"));
    files.sort();
    assert!(!files.is_empty(), "{}: no scenario files", path.display());
    let mut failures = Vec::new();
    for file in &files {
        let text = fs::read_to_string(file).unwrap();
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let mut state = new();
        let ran = run_text(&name, &text, |line| step(&mut state, line));
        if std::env::var_os("UPDATE").is_some() {
            fs::write(file, &ran.text).unwrap();
        } else {
            failures.extend(ran.failures);
        }
    }
    assert!(failures.is_empty(), "{}\nUPDATE=1 writes the actual output into the files", failures.join("\n"));
}

struct Ran {
    /// The file with the actual output in place of the expected one.
    text: String,
    failures: Vec<String>,
}

fn run_text(name: &str, text: &str, mut step: impl FnMut(&Line) -> String) -> Ran {
    let (mut ran, mut output) = (Ran { text: String::new(), failures: Vec::new() }, String::new());
    let mut lines = text.lines().enumerate();
    while let Some((index, line)) = lines.next() {
        push_line(&mut ran.text, line);
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if line != SEPARATOR {
            let printed = step(&Line::parse(line, format!("{name}:{}", index + 1)));
            printed
                .lines()
                .filter(|line| !line.trim().is_empty())
                .for_each(|line| push_line(&mut output, line));
            continue;
        }
        let expected = lines.by_ref().map(|(_, line)| line.trim_end()).take_while(|line| !line.is_empty());
        let expected = expected.fold(String::new(), |mut all, line| {
            push_line(&mut all, line);
            all
        });
        if output != expected {
            ran.failures.push(failure(format!("{name}:{}", index + 1), &expected, &output));
        }
        ran.text.push_str(&output);
        ran.text.push('\n');
        output.clear();
    }
    assert!(output.is_empty(), "{name}: output without `{SEPARATOR}`: {output}");
    ran.text.truncate(ran.text.trim_end().len());
    ran.text.push('\n');
    ran
}

fn push_line(text: &mut String, line: &str) {
    text.push_str(line.trim_end());
    text.push('\n');
}

fn failure(place: impl Display, expected: &str, output: &str) -> String {
    format!("{place}\n  expected:\n{}  got:\n{}", indented(expected), indented(output))
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("    {line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = include_str!("../testdata/runner/sums.txt");

    fn step(line: &Line) -> String {
        match line.verb.as_str() {
            "add" => (line.need::<f64>("a") + line.list::<f64>("b").iter().sum::<f64>()).to_string(),
            "wait" => format!("wait {} {}", line.duration("for").unwrap().as_micros(), line.words.join(",")),
            _ => line.unknown(),
        }
    }

    #[test]
    fn a_file_that_is_right_stays_as_it_is() {
        run_folder("runner", || (), |(), line| step(line));
        let ran = run_text("sums.txt", FILE, step);
        assert_eq!((ran.failures.as_slice(), ran.text.as_str()), ([].as_slice(), FILE));
    }

    #[test]
    fn a_case_that_differs_is_printed_and_can_be_written_back() {
        let wrong = FILE.replace("\n6\n", "\n7\n").replace("wait 1500 x,y\n", "");
        let ran = run_text("sums.txt", &wrong, step);
        assert_eq!(ran.text, FILE);
        assert_eq!(ran.failures.len(), 2);
        assert_eq!(ran.failures[0], "sums.txt:4\n  expected:\n    7\n    1\n  got:\n    6\n    1\n");
    }

    #[test]
    #[should_panic(expected = "sums.txt:1: unknown verb `divide`")]
    fn a_verb_that_nobody_knows_fails() {
        run_text("sums.txt", "divide a=1\n----\n", step);
    }
}
