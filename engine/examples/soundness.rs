//! Runs every code path of the engine that contains unsafe code, on small models, and compares the results
//! with the oracle by `==`. Meant to run under a sanitizer, which detects out-of-bounds reads and writes
//! (`make sanitize` covers the unit and kernel tests).
//!
//!     RUSTC_WORKSPACE_WRAPPER=$PWD/engine/address-sanitizer.sh CARGO_TARGET_DIR=target/sanitize \
//!         cargo run -p outrider-engine --example soundness -- engine/tests/golden
#![expect(clippy::print_stdout, reason = "the lines are the program's output")]

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use engine::{Engine, EngineError, LoadOptions, Oracle, SequenceRows, TokenId, WeightFormat};

const FORMATS: [WeightFormat; 5] =
    [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Fp8, WeightFormat::Int8, WeightFormat::Int4];

/// Rows of the forwards that a text is split into, repeated cyclically.
const CUTS: [&[usize]; 4] = [&[61], &[1], &[2, 5, 1, 16, 3], &[7, 12]];

fn main() -> ExitCode {
    let Some(golden) = std::env::args_os().nth(1) else {
        println!("usage: soundness DIR_OF_CHECKPOINTS");
        return ExitCode::from(64);
    };
    match run(Path::new(&golden)) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(wrong) => {
            println!("{wrong} forwards are wrong");
            ExitCode::FAILURE
        }
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(golden: &Path) -> Result<usize, EngineError> {
    let io = |source| EngineError::Io { path: golden.to_owned(), source };
    let mut cases: Vec<PathBuf> = std::fs::read_dir(golden)
        .map_err(io)?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.join("config.json").exists())
        .collect();
    cases.sort();
    let mut wrong = 0;
    for case in &cases {
        for format in FORMATS {
            let oracle = Oracle::load(case, format)?;
            for (threads, ranks) in [(1, 1), (3, 1), (2, 2)] {
                let found = check(case, format, &oracle, (threads, ranks))?;
                wrong += found.0;
                println!(
                    "{} {format:?}, {threads} threads, {ranks} ranks: {} rows, {} wrong",
                    case.file_name().unwrap_or_default().display(),
                    found.1,
                    found.0
                );
            }
        }
    }
    Ok(wrong)
}

/// Number of rows that differ from the oracle's, and number of all rows.
fn check(
    case: &Path,
    weights: WeightFormat,
    oracle: &Oracle,
    (threads, tensor_parallel): (usize, usize),
) -> Result<(usize, usize), EngineError> {
    let options = LoadOptions { threads, tensor_parallel, ..LoadOptions::new(case, weights, 4 << 20) };
    let mut engine = match Engine::load(&options) {
        Err(EngineError::BadOption { option: "tensor_parallel", .. }) => return Ok((0, 0)),
        loaded => loaded?,
    };
    let vocab_size = engine.info().vocab_size;
    let (mut wrong, mut rows) = (0, 0);
    for (salt, cut) in CUTS.iter().enumerate() {
        // Two texts with a common prefix in two sequences; the second reuses what the first has computed.
        let text = |tail: u32| -> Vec<TokenId> {
            (0..61).map(|i| (i * 29 + salt as u32 + if i < 40 { 0 } else { tail }) % vocab_size).collect()
        };
        let (texts, slots) = ([text(0), text(3)], [engine.open(), engine.open()]);
        for (ids, slot) in texts.iter().zip(slots) {
            let expected = oracle.logits_at_every_position(ids);
            let mut held = engine.share_prefix(slot, 1, ids).len as usize;
            for &len in cut.iter().cycle() {
                let end = ids.len().min(held + len);
                if end == held {
                    break;
                }
                let batch = [SequenceRows { slot, token_ids: &ids[held..end], num_logits: end - held }];
                let logits = engine.forward(&batch)?;
                wrong += (0..logits.rows()).filter(|&i| logits.row(i) != expected[held + i]).count();
                rows += end - held;
                held = end;
            }
            engine.truncate(slot, 50);
            engine.forward(&[SequenceRows { slot, token_ids: &ids[50..51], num_logits: 1 }])?;
        }
        slots.into_iter().for_each(|slot| engine.close(slot));
    }
    Ok((wrong, rows))
}
