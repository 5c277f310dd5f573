//! `outrider check-pair` as a program: its report on the bundled pair, and its errors.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

fn demo(role: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo").join(role)
}

fn check_pair(target: &Path, draft: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_outrider"));
    command.arg("check-pair").arg("--target").arg(target).arg("--draft").arg(draft).args(args);
    command.output().expect("the program starts")
}

fn reports(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON value")
}

/// A copy of the draft whose text files may be modified.
fn copy_of_draft() -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    for entry in std::fs::read_dir(demo("draft")).expect("the bundled draft is there") {
        let entry = entry.expect("its entries can be read");
        std::fs::copy(entry.path(), directory.path().join(entry.file_name())).expect("files can be copied");
    }
    directory
}

const SHORT: [&str; 6] = ["--num-prompts", "1", "--max-tokens", "16", "--temperatures", "0,1"];

#[test]
fn the_bundled_pair_is_measured_in_every_mode_and_compared_with_another_draft() {
    let against = demo("target").display().to_string();
    let output = check_pair(
        &demo("target"),
        &demo("draft"),
        &[&SHORT[..], &["--against", &against, "--json"]].concat(),
    );
    let found = reports(&output);
    let stderr = String::from_utf8_lossy(&output.stderr);
    // For each of the two drafts: four settings with eleven task types, one prompt each.
    assert_eq!(stderr.lines().count(), 2 * 4 * 11, "{stderr}");
    assert!(stderr.starts_with("outrider: 0/44 sequences after "), "{stderr}");
    assert!(stderr.lines().any(|line| line.ends_with(": temperature 1, rejection, sql")), "{stderr}");
    let (ours, perfect) = (&found[0], &found[1]);
    assert_eq!(ours["text"]["first_difference"], Value::Null);
    assert_eq!(ours["text"]["chat_template"], "equal");
    assert_eq!(ours["size"]["within_8_to_12"], false);
    let lines = ours["measured"]["acceptance"].as_array().expect("a list");
    // Greedy once, three modes at T = 1: each with eleven task types and their sum.
    assert_eq!(lines.len(), 4 * 12);
    for line in lines {
        let count = |name: &str| line[name].as_u64().expect("a count");
        assert!(count("accepted_tokens") <= count("draft_tokens"), "{line}");
        assert!(count("tokens") <= count("rounds") + count("accepted_tokens"), "{line}");
        assert_eq!(line["judged_by_position"][0].as_u64().is_some(), count("draft_tokens") > 0);
    }
    // The target drafting for itself is always right.
    for line in perfect["measured"]["acceptance"].as_array().expect("a list") {
        if line["mode"] == "coupled" {
            assert_eq!(line["accepted_tokens"], line["draft_tokens"], "{line}");
        }
    }
    let all = |report: &Value| {
        let tasks = report["measured"]["tasks"].as_array().expect("a list");
        tasks.iter().find(|task| task["task"] == "all").expect("the sum is among them").clone()
    };
    for task in
        [ours, perfect].iter().flat_map(|report| report["measured"]["tasks"].as_array().expect("a list"))
    {
        let no_k_pays = task["advice"].as_array().expect("a list").iter().all(|advice| advice["k"] == 0);
        assert_eq!(task["switch_off"], no_k_pays, "{task}");
    }
    assert_eq!(all(perfect)["acceptance_rate"], 1.0);
    assert!(all(ours)["advice"].as_array().is_some_and(|advice| advice.len() == 4));
    assert!(ours["measured"]["cost"]["ratio_at_8_rows"].as_f64().is_some_and(|ratio| ratio > 0.0));
}

#[test]
fn a_draft_that_numbers_a_token_differently_is_named_and_not_run() {
    let draft = copy_of_draft();
    let path = draft.path().join("tokenizer.json");
    let mut tokenizer: Value =
        serde_json::from_str(&std::fs::read_to_string(&path).expect("it can be read")).expect("it is JSON");
    let vocab = tokenizer["model"]["vocab"].as_object_mut().expect("a BPE vocabulary");
    let (token, id) =
        vocab.iter().find(|(_, id)| **id == 777).map(|(t, id)| (t.clone(), id.clone())).expect("777");
    vocab.remove(&token);
    vocab.insert("another".to_owned() + &token, id);
    std::fs::write(&path, tokenizer.to_string()).expect("it can be written");
    std::fs::write(draft.path().join("chat_template.jinja"), "{{ messages[0].content }}")
        .expect("it can be written");

    let output = check_pair(&demo("target"), draft.path(), &SHORT);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{text}");
    for expected in ["DIFFERENT, nothing is measured: token 777 is", "chat template: different"] {
        assert!(text.contains(expected), "{expected:?} is not in\n{text}");
    }
    assert!(!text.contains("Acceptance"), "{text}");
}

#[test]
fn a_task_type_without_a_fitting_prompt_is_named() {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let prompts = directory.path().join("prompts.jsonl");
    let line = |task: &str, prompt: &str| format!("{}\n", json!({ "task": task, "prompt": prompt }));
    let long = "many words ".repeat(3_000);
    std::fs::write(&prompts, [line("long", &long), line("short", "one"), line("long", &long)].concat())
        .expect("it can be written");
    let prompts = prompts.display().to_string();
    let check = |args: &[&str]| {
        let common = ["--prompts", &prompts, "--max-tokens", "4", "--temperatures", "0"];
        check_pair(&demo("target"), &demo("draft"), &[&common[..], args].concat())
    };
    let found = reports(&check(&["--json"]));
    assert_eq!(found[0]["measured"]["left_out"], json!({ "long": 2 }));
    let output = check(&[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("- task types left out, ") && text.contains(": long (2 prompts)\n"), "{text}");
}

#[test]
fn quantizing_is_compared_with_bf16() {
    let output =
        check_pair(&demo("target"), &demo("draft"), &[&SHORT[..], &["--quantization", "--json"]].concat());
    let found = reports(&output);
    let fidelity = found["fidelity"].as_array().expect("a list");
    assert_eq!(fidelity.len(), 4);
    let error = |i: usize| fidelity[i]["relative_error"].as_f64().expect("a number");
    for model in 0..2 {
        assert!(
            error(model) > 0.0 && error(model) < error(model + 2),
            "int4 errs more than int8: {fidelity:?}"
        );
    }
    assert!(fidelity.iter().all(|f| f["greedy_agreement"].as_f64().is_some_and(|share| share > 0.5)));
    let columns = found["acceptance"].as_array().expect("a list");
    assert_eq!(columns.len(), 7);
    assert!(
        columns.iter().all(|column| column["cells"].as_array().is_some_and(|cells| cells.len() == 2 * 12))
    );
}

#[test]
fn a_check_that_a_router_started_ends_with_the_router() {
    let start = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_outrider"));
        command.arg("check-pair").arg("--target").arg(demo("target")).arg("--draft").arg(demo("draft"));
        command.args(SHORT).arg("--json").env("OUTRIDER_EXIT_ON_STDIN_CLOSE", "true");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("the program starts")
    };
    let mut child = start();
    let stdin = child.stdin.take();
    let output = child.wait_with_output().expect("its output can be read");
    assert_eq!(reports(&output).as_array().map(Vec::len), Some(1), "a router that runs keeps the pipe open");
    drop(stdin);

    let mut child = start();
    drop(child.stdin.take());
    let output = child.wait_with_output().expect("its output can be read");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(output.stdout.is_empty() && error.contains("standard input has closed"), "{error}");
}

#[test]
fn what_makes_no_sense_is_refused_by_name() {
    let check = |args: &[&str], code: i32, expected: &str| {
        let output = check_pair(&demo("target"), &demo("draft"), args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{error}");
        assert!(error.contains(expected), "{expected:?} is not in {error}");
    };
    check(&["--draft-tokens", "99"], 64, "--draft-tokens is 99, expected 1 to 32");
    check(&["--num-prompts", "0"], 64, "--num-prompts is 0, expected 1 or more");
    check(&["--threads", "0"], 64, "expected a whole number, 1 or more");
    check(&["--temperatures", "0,3"], 64, "--temperatures is 3, expected 0 to 2");
    check(&["--max-tokens", "4294967295"], 1, "no prompt fits the models' window");
    check(&["--prompts", "nowhere.jsonl"], 1, "cannot read prompts from nowhere.jsonl");
    check(&["--max-tokens", "5000"], 1, "no prompt fits the models' window of 2048 tokens");
    let nowhere = check_pair(Path::new("nowhere"), &demo("draft"), &[]);
    assert!(String::from_utf8_lossy(&nowhere.stderr).contains("cannot read nowhere/tokenizer.json"));
}
