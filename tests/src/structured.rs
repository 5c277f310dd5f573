//! Requests whose output a JSON schema holds: the same ids whatever is drafted, and texts that another library finds valid.

use std::fmt::Write as _;
use std::process::Command;

use anyhow::ensure;
use grammar::Grammar;
use proto::v1::FinishReason;
use serde_json::{Value, json};

use crate::case::Case;
use crate::client::{Answer, Client};
use crate::pair::{self, PairText, TASK_TYPES};
use crate::python;

/// Requests at a time.
const BESIDE: usize = 12;

/// How a request is drafted for: k, and ids of a tree (0: a chain). A sequence with a grammar gets a chain whatever tree is asked for.
const DRAFTS: [(u32, u32); 3] = [(4, 0), (8, 0), (4, 12)];

/// A request and the schema that holds its output.
pub type SchemaCase = (Value, Case);

/// One request a schema and temperature: prompts, seeds and log probabilities vary along. `first` is the number of the first schema.
pub fn cases(first: usize, schemas: &[Value], temperatures: &[f32]) -> anyhow::Result<Vec<SchemaCase>> {
    let text = PairText::load()?;
    let prompts: Vec<Vec<u32>> = TASK_TYPES
        .iter()
        .map(|task_type| Ok(text.bundled(task_type)?.swap_remove(0)))
        .collect::<anyhow::Result<_>>()?;
    let mut cases = Vec::new();
    for (i, schema) in (first..).zip(schemas) {
        for &temperature in temperatures {
            let mut case = Case::new(
                format!("schema {i} at T = {temperature}"),
                prompts[i % prompts.len()].clone(),
                temperature,
            );
            case.seed = i as u64;
            case.max_tokens = 220;
            case.logprobs = (i % 5 == 0).then_some(1);
            case.grammar = Some(Grammar::json_schema(schema).to_wire());
            cases.push((schema.clone(), case));
        }
    }
    Ok(cases)
}

/// What was drafted for some requests.
#[derive(Debug, Clone, Copy, Default)]
pub struct Drafted {
    /// Tokens that were verified.
    pub drafted: u64,
    /// Those of them that were accepted.
    pub accepted: u64,
}

/// Asks without drafts, with chains of 4 and 8, and with trees; ids, log probabilities and ends must be equal.
pub async fn ask_at_every_k(client: &Client, cases: &[SchemaCase]) -> anyhow::Result<(Vec<Answer>, Drafted)> {
    let plain: Vec<Case> = cases.iter().map(|(_, case)| case.with_k(0)).collect();
    let plain = client.ask_all(&plain, BESIDE).await?;
    let mut sum = Drafted::default();
    for (k, num_tree_tokens) in DRAFTS {
        let asked: Vec<Case> = cases.iter().map(|(_, case)| case.with_tree(k, num_tree_tokens)).collect();
        for ((expected, got), case) in plain.iter().zip(client.ask_all(&asked, BESIDE).await?).zip(&asked) {
            let name = &case.name;
            ensure!(expected.token_ids == got.token_ids, "{name}: other ids than at k = 0");
            ensure!(expected.logprobs == got.logprobs, "{name}: other log probabilities");
            ensure!(expected.finish == got.finish && expected.text == got.text, "{name}: another end");
            sum.drafted += got.speculation().draft_tokens;
            sum.accepted += got.speculation().accepted_tokens;
        }
    }
    Ok((plain, sum))
}

/// How many answers came to an end: nearly all, and each of them is valid by the word of Python's `jsonschema`.
pub async fn check_valid(cases: &[SchemaCase], answers: &[Answer]) -> anyhow::Result<usize> {
    let mut lines = String::new();
    let mut finished = 0;
    for ((schema, _), answer) in cases.iter().zip(answers) {
        if answer.finish == FinishReason::Stop {
            writeln!(lines, "{}", json!({ "schema": schema, "text": answer.text }))?;
            finished += 1;
        }
    }
    ensure!(finished * 10 >= answers.len() * 9, "only {finished} of {} came to an end", answers.len());
    let scripts = pair::root().join("tests/tests/python");
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), lines)?;
    let output = tokio::task::spawn_blocking(move || {
        let python = python::interpreter(&scripts.join("requirements.txt"))?;
        anyhow::Ok(Command::new(python).arg(scripts.join("validate.py")).arg(file.path()).output()?)
    })
    .await??;
    let told = String::from_utf8_lossy(&output.stdout);
    ensure!(
        told.trim() == finished.to_string(),
        "{told} of {finished} are valid\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(finished)
}
