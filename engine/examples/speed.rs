//! How fast a checkpoint decodes, verifies and prefills here: `cargo run --release -p outrider-engine
//! --example speed -- DIR [threads]`. Each line is the best of several forwards behind a context of 64
//! tokens; GMAC/s counts every weight once a row, GB/s every weight's bytes once a forward.
#![expect(clippy::print_stdout, reason = "the table is the program's output")]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use engine::{Engine, EngineError, LoadOptions, SequenceRows, TokenId, WeightFormat};

const CONTEXT: usize = 64;
const ROWS: [usize; 8] = [1, 2, 4, 5, 8, 16, 64, 512];
const TIME_PER_LINE: Duration = Duration::from_millis(400);

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1);
    let Some(model_dir) = args.next() else {
        println!("usage: speed DIR [threads]");
        return ExitCode::from(64);
    };
    let threads = args.next().and_then(|arg| arg.to_str()?.parse().ok()).unwrap_or(1);
    match table(PathBuf::from(model_dir), threads) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn table(model_dir: PathBuf, threads: usize) -> Result<(), EngineError> {
    for weights in [WeightFormat::Bf16, WeightFormat::F32] {
        let options = LoadOptions {
            model_dir: model_dir.clone(),
            weights,
            threads,
            tensor_parallel: 1,
            kv_memory_bytes: 1 << 30,
            max_model_len: None,
        };
        let start = Instant::now();
        let mut engine = Engine::load(&options)?;
        let parameters = engine.info().num_parameters as f64;
        let bytes = parameters * if weights == WeightFormat::Bf16 { 2.0 } else { 4.0 };
        println!("{weights:?}, {parameters} weights, {threads} threads, loaded in {:?}", start.elapsed());
        for rows in ROWS {
            let seconds = best(&mut engine, rows)?;
            let (ms, gmacs, gbs) =
                (seconds * 1e3, parameters * rows as f64 / seconds / 1e9, bytes / seconds / 1e9);
            println!(
                "  {rows:>4} rows {ms:>9.3} ms {:>9.0} rows/s {gmacs:>7.1} GMAC/s {gbs:>6.1} GB/s",
                rows as f64 / seconds
            );
        }
    }
    Ok(())
}

/// Seconds of the fastest forward of so many rows; few rows all want logits, as in verification, many only
/// the last.
fn best(engine: &mut Engine, rows: usize) -> Result<f64, EngineError> {
    let vocab = engine.info().vocab_size;
    let ids: Vec<TokenId> = (0..(CONTEXT + rows) as u32).map(|i| (i * 37 + 11) % vocab).collect();
    let slot = engine.open();
    engine.forward(&[SequenceRows { slot, token_ids: &ids[..CONTEXT], num_logits: 0 }])?;
    let num_logits = if rows <= 16 { rows } else { 1 };
    let (mut best, start) = (f64::MAX, Instant::now());
    while start.elapsed() < TIME_PER_LINE {
        let begin = Instant::now();
        engine.forward(&[SequenceRows { slot, token_ids: &ids[CONTEXT..], num_logits }])?;
        best = best.min(begin.elapsed().as_secs_f64());
        engine.truncate(slot, CONTEXT as u32);
    }
    engine.close(slot);
    Ok(best)
}
