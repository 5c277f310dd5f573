//! The script that times vLLM (deploy/gpu-peer-vllm.py), with a stand-in for vLLM on a clock of its own.

use std::path::{Path, PathBuf};
use std::process::Command;

use engine::cuda::gpu_check::{CheckTarget, Report, Section};

/// Lines of the script for these options. The stand-in has room for 1,024 tokens.
fn lines(options: &str) -> Vec<String> {
    let engine = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new("python3")
        .env("PYTHONPATH", engine.join("tests/fake-vllm"))
        .arg(engine.join("../deploy/gpu-peer-vllm.py"))
        .arg(engine.join("src/cuda/gpu_check/shapes/tiny.json"))
        .args(options.split(' '))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn a_step_of_one_row_and_a_prompt_are_timed_without_their_context() {
    let expected = [
        "vllm 0.0, bf16: 1 x 1 rows behind 32: 1.010 ms",
        "vllm 0.0, bf16: prompt of 100 rows behind 32: 2.000 ms",
        "vllm 0.0, bf16: 1 x 1 rows behind 512: 1.010 ms",
        "vllm 0.0, bf16: prompt of 100 rows behind 512: 2.000 ms",
    ];
    assert_eq!(lines("--contexts 32 512 --prompt 100"), expected);
}

#[test]
fn every_verify_step_has_all_its_rows_and_what_does_not_fit_is_not_run() {
    let expected = [
        "vllm 0.0, bf16: 2 x 5 rows behind 32: 1.100 ms",
        "vllm 0.0, bf16: 3 x 5 rows behind 32: 1.150 ms",
        "vllm 0.0, bf16: 2 x 5 rows behind 320: 1.100 ms",
        "vllm 0.0, bf16: 3 x 5 rows behind 320: NOT RUN, kv has no room for it",
    ];
    assert_eq!(lines("--contexts 32 320 --rows 5 --sequences 2 3"), expected);
}

#[test]
fn a_machine_without_vllm_is_told_so() {
    let peers = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy");
    let pair = (PathBuf::new(), PathBuf::new());
    let target = CheckTarget { ordinal: 0, kernels: None, pair, peers, is_dry: true, clusters: false };
    let mut lines = Vec::new();
    let mut say = |line: &str| lines.push(line.to_owned());
    let mut report = Report::new(&mut say);
    Section::Vllm.run(&target, &mut report).unwrap();
    assert_eq!(report.failed, 0, "{lines:#?}");
    let cases: Vec<&str> = lines.iter().filter_map(|line| line.split(':').next()).collect();
    assert_eq!(cases, ["NOT RUN vllm, one row and a prompt", "NOT RUN vllm, verify rows"], "{lines:#?}");
}
