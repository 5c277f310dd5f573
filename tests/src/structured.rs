//! Requests with output constrained by a JSON schema: the ids must not depend on the drafts, and another
//! library must find the texts valid.

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

/// Concurrent requests.
const CONCURRENCY: usize = 12;

/// Draft settings: k, and tokens of a tree (0 for a chain). A sequence with a grammar gets a chain even if a
/// tree is requested.
const DRAFTS: [(u32, u32); 3] = [(4, 0), (8, 0), (4, 12)];

/// A request and the schema that constrains its output.
pub type SchemaCase = (Value, Case);

/// One request per schema and temperature; prompts, seeds and log probabilities vary too. `first` is the
/// number of the first schema.
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

/// Draft counters of some requests.
#[derive(Debug, Clone, Copy, Default)]
pub struct Drafted {
    /// Verified drafted tokens.
    pub drafted: u64,
    /// Accepted of these.
    pub accepted: u64,
}

/// Sends the requests without drafts, with chains of 4 and 8, and with trees; ids, log probabilities and ends
/// must be equal.
pub async fn ask_at_every_k(client: &Client, cases: &[SchemaCase]) -> anyhow::Result<(Vec<Answer>, Drafted)> {
    let plain: Vec<Case> = cases.iter().map(|(_, case)| case.with_k(0)).collect();
    let plain = client.ask_all(&plain, CONCURRENCY).await?;
    let mut sum = Drafted::default();
    for (k, num_tree_tokens) in DRAFTS {
        let variants: Vec<Case> = cases.iter().map(|(_, case)| case.with_tree(k, num_tree_tokens)).collect();
        for ((expected, got), case) in
            plain.iter().zip(client.ask_all(&variants, CONCURRENCY).await?).zip(&variants)
        {
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

/// Returns the number of finished answers. At least 90% must finish, and Python's `jsonschema` must find each
/// of those valid.
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
    let stdout = String::from_utf8_lossy(&output.stdout);
    ensure!(
        stdout.trim() == finished.to_string(),
        "{stdout} of {finished} are valid\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(finished)
}
