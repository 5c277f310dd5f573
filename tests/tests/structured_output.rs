//! Output under a grammar: valid by the word of another library, and the same ids whatever is drafted.

use std::fmt::Write as _;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use grammar::Grammar;
use proto::v1::FinishReason;
use serde_json::{Value, json};
use speculation::AcceptanceMode;
use tests::case::Case;
use tests::client::{Answer, Client};
use tests::cluster::{Cluster, RunningWorker, WorkerKind};
use tests::pair::{self, PairText, TASK_TYPES};
use tests::python;
use tests::schemas::schema;

/// Requests at a time.
const BESIDE: usize = 12;

/// One request a schema: prompts, seeds and temperatures vary along.
fn cases(schemas: &[Value], temperatures: &[f32]) -> anyhow::Result<Vec<(Value, Case)>> {
    let text = PairText::load()?;
    let prompts: Vec<Vec<u32>> = TASK_TYPES
        .iter()
        .map(|task_type| Ok(text.bundled(task_type)?.swap_remove(0)))
        .collect::<anyhow::Result<_>>()?;
    let mut cases = Vec::new();
    for (i, schema) in schemas.iter().enumerate() {
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

/// Asks at k = 0, 4 and 8; ids must be equal. The answers, and how many drafted tokens were verified and accepted.
async fn ask_at_every_k(client: &Client, cases: &[(Value, Case)]) -> anyhow::Result<(Vec<Answer>, u64, u64)> {
    let at = |k| cases.iter().map(|(_, case)| case.with_k(k)).collect::<Vec<_>>();
    let plain = client.ask_all(&at(0), BESIDE).await?;
    let (mut drafted, mut accepted) = (0, 0);
    for k in [4, 8] {
        for ((expected, got), (_, case)) in plain.iter().zip(client.ask_all(&at(k), BESIDE).await?).zip(cases)
        {
            let name = &case.name;
            ensure!(expected.token_ids == got.token_ids, "{name}, k = {k}: other ids than at k = 0");
            ensure!(expected.logprobs == got.logprobs, "{name}, k = {k}: other log probabilities");
            ensure!(
                expected.finish == got.finish && expected.text == got.text,
                "{name}, k = {k}: another end"
            );
            drafted += got.speculation().draft_tokens;
            accepted += got.speculation().accepted_tokens;
        }
    }
    Ok((plain, drafted, accepted))
}

/// Every finished answer is valid, and nearly all are finished.
async fn check_valid(cases: &[(Value, Case)], answers: &[Answer]) -> anyhow::Result<String> {
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
    Ok(format!("{finished} of {} answers came to an end, all of them valid", answers.len()))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_schemas_hold_and_speculation_changes_no_token() -> anyhow::Result<()> {
    let (cluster, _target, _draft) = Cluster::of_pair(WorkerKind::Draft).await?;
    let client = cluster.client().await?;
    let schemas: Vec<Value> = (0..100).map(schema).collect();
    let (even, odd): (Vec<_>, Vec<_>) = schemas.into_iter().enumerate().partition(|(i, _)| i % 2 == 0);
    let schemas_of =
        |part: Vec<(usize, Value)>| part.into_iter().map(|(_, schema)| schema).collect::<Vec<_>>();
    let cases = [cases(&schemas_of(even), &[0.0])?, cases(&schemas_of(odd), &[1.0])?].concat();
    let (answers, drafted, accepted) = ask_at_every_k(&client, &cases).await?;
    ensure!(accepted * 3 > drafted, "only {accepted} of {drafted} drafted tokens were accepted");
    println!("{}", check_valid(&cases, &answers).await?);
    cluster.stop().await
}

/// What a mask costs, and the promise on 1,000 schemas at both temperatures: minutes, so not in the gate. What was done is told part by part,
/// so that a run that is cut short has told something.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes: cargo test -p tests --test structured_output -- --ignored --nocapture"]
async fn a_thousand_schemas_hold_and_what_masks_cost() -> anyhow::Result<()> {
    let (cluster, target, draft) = Cluster::of_pair(WorkerKind::Draft).await?;
    let client = cluster.client().await?;
    let cases = cases(&(1_000..2_000).map(schema).collect::<Vec<_>>(), &[0.0, 1.0])?;
    let (micros_a_token, compared) = compare_times(&client, &cases[..20]).await?;
    println!("{compared}");
    for (idx, part) in cases.chunks(100).enumerate() {
        let (answers, drafted, accepted) = ask_at_every_k(&client, part).await?;
        println!("part {idx}: {accepted} of {drafted} drafted tokens were accepted");
        println!("part {idx}: {}", check_valid(part, &answers).await?);
        for (role, worker) in [("target", &target), ("draft", &draft)] {
            let (rows, mask, wait) = mask_cost(worker).await?;
            println!(
                "so far, {role}: {rows} rows, {mask:.0} us of masking a row ({:.3} of a token's {micros_a_token:.0} us without a grammar), \
                 {wait:.0} us of waiting for it",
                mask / micros_a_token
            );
        }
    }
    cluster.stop().await
}

/// The same prompts and lengths with and without a grammar, in turns: microseconds a token without one and without drafts, and all of it in
/// words.
async fn compare_times(client: &Client, cases: &[(Value, Case)]) -> anyhow::Result<(f64, String)> {
    let (mut plain, mut told) = (0.0, String::new());
    for k in [0, 4] {
        let mut micros = [0.0, 0.0];
        for _ in 0..3 {
            for (with_grammar, micros) in micros.iter_mut().enumerate() {
                let of = |(_, case): &(Value, Case)| Case {
                    grammar: case.grammar.clone().filter(|_| with_grammar == 1),
                    logprobs: None,
                    max_tokens: 40,
                    ..case.with_k(k)
                };
                let asked: Vec<Case> = cases.iter().map(of).collect();
                let began = Instant::now();
                let answers = client.ask_all(&asked, 1).await?;
                let tokens: usize = answers.iter().map(|answer| answer.token_ids.len()).sum();
                *micros += began.elapsed().as_secs_f64() * 1e6 / tokens as f64 / 3.0;
            }
        }
        let [without, with] = micros;
        plain = if k == 0 { without } else { plain };
        let ratio = with / without;
        writeln!(
            told,
            "k = {k}, one request at a time: {with:.0} us a token with a grammar, {without:.0} without: {ratio:.3}"
        )?;
    }
    Ok((plain, told))
}

/// Rows that were masked, and microseconds a row: of masking, and of waiting for it.
async fn mask_cost(worker: &RunningWorker) -> anyhow::Result<(u64, f64, f64)> {
    let page = worker.metrics().await?;
    let rows = page.sum("outrider_worker_grammar_rows_total");
    let per_row = |name| page.sum(name) as f64 / rows.max(1) as f64;
    let mask = per_row("outrider_worker_grammar_mask_microseconds_total");
    Ok((rows, mask, per_row("outrider_worker_grammar_wait_microseconds_total")))
}

/// A schema whose texts are long.
fn long_case(temperature: f32) -> anyhow::Result<Case> {
    let schema = json!({ "type": "array", "items": { "type": "string", "minLength": 5, "maxLength": 9 }, "minItems": 15, "maxItems": 20 });
    let (_, case) = cases(&[schema], &[temperature])?.swap_remove(0);
    Ok(Case { max_tokens: 200, ..case })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grammar_survives_its_target_and_its_draft_worker() -> anyhow::Result<()> {
    for temperature in [0.0, 1.0] {
        let case = long_case(temperature)?;
        let (cluster, first, draft) = Cluster::of_pair(WorkerKind::Draft).await?;
        let client = cluster.client().await?;
        let expected = client.ask(&case.with_k(0)).await?;
        ensure!(expected.token_ids.len() > 60, "too short to be interrupted");
        let mut stream = client.open(&case).await?;
        stream.read_tokens(20).await?;
        first.stop().await;
        let _second = cluster.add(WorkerKind::Target).await?;
        stream.read_tokens(40).await?;
        draft.stop().await;
        let _ngram = cluster.add(WorkerKind::Ngram).await?;
        let got = stream.rest().await?;
        ensure!(expected.token_ids == got.token_ids, "another text after the workers were replaced");
        cluster.stop().await?;
    }
    Ok(())
}

/// N-grams know no grammar, so that most of what they draft is barred: it is cut, and fails nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_draft_that_breaks_the_grammar_is_cut_in_every_mode() -> anyhow::Result<()> {
    let (cluster, _target, _draft) = Cluster::of_pair(WorkerKind::Ngram).await?;
    let client = cluster.client().await?;
    let case = Case { max_tokens: 80, ..long_case(1.0)? };
    let expected = client.ask(&case.with_k(0)).await?;
    let got = client.ask(&case.with_k(8)).await?;
    ensure!(expected.token_ids == got.token_ids, "a draft changed the text");
    for acceptance in [AcceptanceMode::Rejection, AcceptanceMode::Typical] {
        let (_, case) = cases(&[schema(3)], &[1.0])?.swap_remove(0);
        let answer = client.ask(&Case { acceptance, ..case.with_k(8) }).await?;
        ensure!(answer.finish == FinishReason::Stop, "{acceptance:?}: {:?}", answer.text);
        let value: Value = serde_json::from_str(&answer.text).context("not JSON")?;
        ensure!(value.is_object(), "{value}");
    }
    cluster.stop().await
}
