//! Tests of parsing and checking a profile, of its numbers, and of the profiles that are shipped.

use super::text::{RESERVED_IDS, SyntheticText};
use super::*;
use speculation::spec::lane_number;

const PROFILE: &str = r#"
name = "small"
vocab_size = 1024
max_model_len = 2048
wire_us = 100
noise = 0.05

[target]
device = "one"
max_batch_rows = 512
kv_blocks = 100
kv_block_size = 16
[target.step]
micros_by_rows = [[1, 1000], [64, 1000], [128, 2000]]
stair_rows = 8
kv_us_per_token = 0.5
prefill_tokens_per_second = 10000

[draft]
device = "another"
workers = 2
max_batch_rows = 512
kv_blocks = 100
kv_block_size = 16
[draft.step]
micros_by_rows = [[1, 100]]
prefill_tokens_per_second = 100000

[[acceptance]]
by_position = [0.8, 0.5]
[[acceptance]]
from_s = 10
by_position = [0.3]
[[acceptance]]
task_type = "code"
by_position = [0.9]
"#;

fn forward(rows: u32, prefill_rows: u32, kv_tokens: u64) -> ForwardRows {
    ForwardRows { rows, prefill_rows, kv_tokens, row_kv_tokens: 0 }
}

#[test]
fn times_have_stairs_a_knee_and_a_kv_term() {
    let profile = Profile::parse(PROFILE).unwrap();
    for (rows, micros) in [
        (forward(1, 0, 0), 1_000.0),
        (forward(64, 0, 0), 1_000.0),
        (forward(65, 0, 0), 1_125.0), // padded to 72 rows
        (forward(72, 0, 0), 1_125.0),
        (forward(256, 0, 0), 4_000.0), // the last line goes on
        (forward(1, 0, 200), 1_100.0),
        (forward(1, 10, 0), 2_000.0),
        (forward(0, 5, 0), 1_000.0), // no forward takes less than one row
        (forward(0, 50, 0), 5_000.0),
    ] {
        let got = profile.target.curve.micros(rows);
        assert!((got - micros).abs() < 1e-6, "{rows:?}: {got}");
    }
    assert_eq!(profile.draft.curve.micros(forward(500, 0, 0)), 100.0);
    assert_eq!((profile.draft.workers, profile.target.workers), (2, 1));
    let (low, high) = (profile.with_noise(1_000.0, 0.0), profile.with_noise(1_000.0, 1.0));
    assert!((low - 950.0).abs() < 1e-6 && (high - 1_050.0).abs() < 1e-6, "{low} {high}");
}

#[test]
fn acceptance_goes_by_task_type_position_and_time() {
    let acceptance = Profile::parse(PROFILE).unwrap().acceptance;
    for (task, position, seconds, rate) in [
        ("", 0, 0.0, 0.8),
        ("", 1, 9.9, 0.5),
        ("", 7, 9.9, 0.5),
        ("", 1, 10.0, 0.3),
        ("code", 3, 99.0, 0.9),
        ("poetry", 0, 0.0, 0.8),
    ] {
        assert_eq!(
            acceptance.rate(lane_number(task), position, seconds),
            rate,
            "{task} {position} {seconds}"
        );
    }
    assert_eq!(acceptance.task_types().collect::<Vec<_>>(), ["code"]);
}

#[test]
fn faults_are_named_with_field_and_limit() {
    let check = |from: &str, to: &str, words: &[&str]| {
        assert!(PROFILE.contains(from), "{from}");
        let error = Profile::parse(&PROFILE.replacen(from, to, 1)).unwrap_err().to_string();
        for word in words {
            assert!(error.contains(word), "`{error}` lacks `{word}`");
        }
    };
    check("vocab_size = 1024", "vocab_size = 300", &["vocab_size is 300", "expected 520 to"]);
    check("noise = 0.05", "noise = 5", &["noise is 5", "0 to 1"]);
    check("wire_us = 100", "wire_us = -1", &["wire_us is -1"]);
    check("wire_us = 100", "wire_us = 1e300", &["wire_us is 1", "3600000000, an hour"]);
    check("wire_us = 100", "wire_ms = 100", &["cannot be read", "unknown field `wire_ms`", "line 5"]);
    check("workers = 2", "workers = 0", &["draft.workers is 0"]);
    check("max_batch_rows = 512", "max_batch_rows = 8", &["target.max_batch_rows is 8", "33"]);
    check("kv_blocks = 100", "kv_blocks = 0", &["target.kv_blocks is 0"]);
    check("[64, 1000]", "[64, 999]", &["target.step.micros_by_rows[1]", "at least its time"]);
    check("[64, 1000]", "[64, 1e12]", &["target.step.micros_by_rows[1]", "at most 3600000000"]);
    check("= 100000", "= 1e-300", &["draft.step.prefill_tokens_per_second is 0.0", "one token an hour"]);
    check("[64, 1000]", "[1, 1000]", &["target.step.micros_by_rows[1]", "more rows"]);
    check("[[1, 100]]", "[]", &["draft.step.micros_by_rows is empty"]);
    check("stair_rows = 8", "stair_rows = 0", &["target.step.stair_rows is 0"]);
    check("= 100000", "= 0", &["draft.step.prefill_tokens_per_second is 0"]);
    check("[0.8, 0.5]", "[1.5]", &["acceptance[0].by_position[0] is 1.5"]);
    check("[0.8, 0.5]", "[]", &["acceptance[0].by_position is empty"]);
    check("from_s = 10", "from_s = 0", &["acceptance[1].from_s", "later"]);
    check(
        "by_position = [0.8, 0.5]",
        "from_s = 1\nby_position = [0.8]",
        &["acceptance lacks the default: an entry"],
    );
}

#[test]
fn a_text_is_a_function_of_seed_choice_and_position() {
    let text = SyntheticText { seed: 7, choice: 0, vocab_size: 1_024 };
    let tokens: Vec<u32> = (0..2_000).map(|position| text.token(position)).collect();
    assert!(tokens.iter().all(|id| (RESERVED_IDS..1_024).contains(id)));
    let differs = |other: SyntheticText| {
        (0..2_000).filter(|&position| other.token(position) != tokens[position as usize]).count()
    };
    assert!(differs(SyntheticText { seed: 8, ..text }) > 1_900);
    assert!(differs(SyntheticText { choice: 1, ..text }) > 1_900);
    for rate in [0.0, 0.3, 0.8, 1.0] {
        let right =
            (0..2_000).filter(|&position| text.draft_token(position, rate) == text.token(position)).count();
        assert!((right as f64 / 2_000.0 - rate).abs() < 0.04, "{rate}: {right} of 2000");
        assert!((0..2_000).all(|position| (RESERVED_IDS..1_024).contains(&text.draft_token(position, rate))));
    }
}

#[test]
fn shipped_profiles_can_be_read_and_keep_their_shape() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/profiles");
    let mut names = Vec::new();
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "toml") {
            continue;
        }
        let profile = Profile::parse(&std::fs::read_to_string(&path).unwrap())
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        for pool in [&profile.target, &profile.draft] {
            let (one, many) = (pool.curve.micros(forward(1, 0, 0)), pool.curve.micros(forward(512, 0, 0)));
            assert!(many > one, "{}: no knee within 512 rows", path.display());
        }
        names.push(profile.name);
    }
    assert_eq!(names.len(), 5, "{names:?}");
}
