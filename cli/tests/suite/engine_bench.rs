//! `outrider engine-bench` as a program: its output and its errors.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn bench(args: &[&str]) -> Output {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut command = Command::new(env!("CARGO_BIN_EXE_outrider"));
    command.current_dir(root).arg("engine-bench").args(["--case-ms", "1", "--read-mib", "4"]).args(args);
    command.output().expect("the program starts")
}

/// The printed JSON objects.
fn documents(output: &Output) -> Vec<serde_json::Value> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().map(|line| serde_json::from_str(line).expect("a JSON object on each line")).collect()
}

#[test]
fn one_document_for_each_format() {
    let model = ["--model", "models/demo/draft", "--weights", "bf16,int8,int4", "--json"];
    let found = documents(&bench(&[&model[..], &["--rows", "1,4", "--context", "16,2046"]].concat()));
    assert_eq!(found.len(), 3);
    let bytes: Vec<u64> = found.iter().filter_map(|document| document["bytes_per_token"].as_u64()).collect();
    assert!(bytes[0] > bytes[1] && bytes[1] > bytes[2], "{bytes:?}");
    // After a context of 16, a token reads the KV of 17: 4 layers, 2 heads of 32, keys and values in bf16.
    assert_eq!(found[0]["weight_bytes"].as_u64().map(|bytes| bytes + 17 * 1024), Some(bytes[0]));
    for document in &found {
        assert!(document["read_gb_s"].as_f64().is_some_and(|speed| speed > 0.0));
        let rows = document["rows"].as_array().expect("a list");
        let shapes: Vec<_> = rows
            .iter()
            .map(|row| [&row["rows"], &row["sequences"], &row["context"]].map(|n| n.as_u64()))
            .collect();
        let shape = |rows, sequences, context| [Some(rows), Some(sequences), Some(context)];
        assert_eq!(
            shapes,
            [shape(1, 1, 16), shape(4, 1, 16), shape(1, 8, 16), shape(1, 1, 2046), shape(1, 8, 2046)]
        );
        for row in rows {
            assert!(
                [
                    "ms",
                    "tokens_per_s",
                    "bandwidth_share",
                    "attention_share",
                    "vocabulary_share",
                    "draw_share"
                ]
                .iter()
                .all(|n| row[n].as_f64().is_some_and(|x| x > 0.0))
            );
        }
        // Parts of a step are timed within it, so their sum never exceeds the step.
        for row in rows {
            let part = |name: &str| row[name].as_f64().expect("a number");
            let parts = part("attention_share") + part("vocabulary_share") + part("draw_share");
            assert!(parts < 1.0 && part("step_ms") > part("ms"), "{row}");
        }
        assert_eq!(document["knees"].as_array().map(Vec::len), Some(2));
        assert!(document["load_peak_bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{document}");
        assert_eq!(document["left_out"][0]["rows"], 4);
    }
}

#[test]
fn each_case_is_a_line_on_standard_error() {
    let found = bench(&["--model", "models/demo/draft", "--rows", "1,2", "--context", "8", "--json"]);
    let stderr = String::from_utf8_lossy(&found.stderr).into_owned();
    assert_eq!(documents(&found).len(), 1);
    let lines: Vec<&str> = stderr.lines().collect();
    assert_eq!(lines.len(), 3, "{stderr}");
    assert!(lines[0].starts_with("outrider: 0/3 cases after "), "{stderr}");
    assert!(lines[0].ends_with(": context 8, sequences 1, rows 1"), "{stderr}");
    assert!(lines[2].starts_with("outrider: 2/3 cases after "), "{stderr}");
    assert!(lines[2].ends_with(": context 8, sequences 8, rows 1"), "{stderr}");
}

#[test]
fn random_weights_need_a_configuration_only() {
    let model = ["--model", "random:models/demo/draft/config.json", "--rows", "2", "--context", "8"];
    let found = bench(&model);
    let text = String::from_utf8_lossy(&found.stdout);
    assert!(found.status.success() && text.contains("bandwidth share"), "{text}");
    let bytes = |vocab| {
        let found = documents(&bench(&[&model[..], &["--vocab", vocab, "--json"]].concat()));
        found[0]["weight_bytes"].as_u64().expect("a number")
    };
    assert!(bytes("9000") > bytes("3000"));
}

#[test]
fn a_killed_run_leaves_no_temporary_files() {
    let temporary = tempfile::tempdir().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut child = Command::new(env!("CARGO_BIN_EXE_outrider"))
        .args(["engine-bench", "--model", "random:models/demo/draft/config.json", "--vocab", "3000"])
        .args(["--rows", "1", "--context", "8", "--read-mib", "4", "--case-ms", "600000"])
        .current_dir(root)
        .env("TMPDIR", temporary.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(line.starts_with("outrider: 0/2 cases"), "{line}");
    let left = std::fs::read_dir(temporary.path()).unwrap().count();
    assert_eq!(left, 0, "files in {}", temporary.path().display());
}

#[test]
fn a_lower_instruction_set_is_used_and_printed() {
    let model = ["--model", "models/demo/draft", "--rows", "1", "--context", "16", "--isa", "portable"];
    let found = documents(&bench(&[&model[..], &["--json"]].concat()));
    assert_eq!(found[0]["instruction_set"], "portable");
    assert_eq!(found[0]["slower_than"].as_array().map(Vec::len), Some(0));
    let table = bench(&model);
    assert!(String::from_utf8_lossy(&table.stdout).contains("computing with portable"));
}

#[test]
fn faults_are_one_line_and_a_code() {
    let refused = |args: &[&str], code, part: &str| {
        let output = bench(args);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(text.lines().count() == 1 && text.contains(part), "{text}");
    };
    refused(&["--model", "models/demo/draft", "--weights", "int3"], 64, "int3");
    refused(&["--model", "models/demo/draft", "--rows", "0"], 64, "--rows");
    refused(&["--model", "models/demo/draft", "--vocab", "500"], 64, "--vocab");
    refused(&["--model", "random:models/demo/draft/config.json", "--vocab", "0"], 64, "--vocab is 0");
    refused(&["--model", "models/demo/draft", "--isa", "mmx"], 64, "portable");
    refused(&["--model", "models/nothing"], 1, "models/nothing");
    refused(&["--model", "random:models/nothing.json"], 1, "models/nothing.json");
    refused(&["--model", "models/demo/draft", "--context", "9000"], 1, "2048");
    let list = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&list, "[1, 2]").unwrap();
    refused(
        &["--model", &format!("random:{}", list.path().display()), "--vocab", "500"],
        1,
        &format!("cannot use {} with --vocab: ", list.path().display()),
    );
    refused(&["--model", "random:models/nothing.json", "--vocab", "500"], 1, "models/nothing.json");
}
