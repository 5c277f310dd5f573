//! Measures how fast a model decodes, verifies and prefills on this machine: `cargo run --release -p
//! outrider-engine --example speed -- DIR|random:CONFIG.json [threads] [formats] [rows] [context]`, for
//! example `.. random:config.json 1 int8,int4 1,8,16`. Each line is the best of several forwards after a
//! context of 64 tokens: wall time, and CPU time of the thread if the system reports it, which other
//! processes disturb less. GMAC/s counts every weight once per row, GB/s every weight's bytes once per
//! forward, and attention is its share of the time of all forwards. The first line has the f32 multiply-adds
//! of one core. `OUTRIDER_ISA=avx2` selects a lower instruction set; to compare two builds, run them
//! alternately.
#![expect(clippy::print_stdout, reason = "the table is the program's output")]

use std::process::ExitCode;
use std::time::{Duration, Instant};

use engine::{Engine, LoadOptions, SequenceRows, TokenId, WeightFormat};

const CONTEXT: &str = "64";
const FORMATS: &str = "f32,bf16,fp8,int8,int4";
const ROWS: &str = "1,2,4,5,8,16,64,512";
const TIME_PER_LINE: Duration = Duration::from_millis(400);
/// Rows per forward of the prefill.
const FEED_ROWS: usize = 512;
/// Seed of random weights.
const SEED: u64 = 1;

type Error = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}\nusage: speed DIR|random:CONFIG.json [threads] [formats] [rows] [context]");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &[String]) -> Result<(), Error> {
    let arg = |index: usize, default: &'static str| args.get(index).map_or(default, String::as_str);
    let model = args.first().ok_or("the model is missing")?;
    let threads = arg(1, "1").parse()?;
    let rows: Vec<usize> = arg(3, ROWS).split(',').map(str::parse).collect::<Result<_, _>>()?;
    let context = arg(4, CONTEXT).parse()?;
    let most = engine::multiply_adds_per_second()? / 1e9;
    println!("{}, {}, {most:.1} GMAC/s peak in f32", engine::cpu_name(), engine::instruction_set()?);
    for name in arg(2, FORMATS).split(',') {
        let weights = WeightFormat::named(name).ok_or_else(|| format!("unknown format {name}"))?;
        table((model, weights), threads, context, &rows)?;
    }
    Ok(())
}

fn table(
    (model, weights): (&str, WeightFormat),
    threads: usize,
    context: usize,
    rows: &[usize],
) -> Result<(), Error> {
    let config = model.strip_prefix("random:");
    let options = LoadOptions { threads, ..LoadOptions::new(config.unwrap_or(model), weights, 1 << 30) };
    let start = Instant::now();
    let mut engine = match config {
        Some(_) => Engine::random(&options, SEED)?,
        None => Engine::load(&options)?,
    };
    let (parameters, bytes) = (engine.info().num_parameters as f64, engine.info().weight_bytes as f64);
    println!("{weights:?}, {parameters} weights, {threads} threads, loaded in {:?}", start.elapsed());
    for &rows in rows {
        let Best { wall, cpu, attention } = best(&mut engine, rows, context)?;
        let seconds = if threads == 1 { cpu } else { wall };
        println!(
            "  {rows:>4} rows {:>9.3} ms {:>9.3} ms CPU {:>7.1} GMAC/s {:>6.1} GB/s {attention:>6.3} attention",
            wall * 1e3,
            cpu * 1e3,
            parameters * rows as f64 / seconds / 1e9,
            bytes / seconds / 1e9,
        );
    }
    Ok(())
}

/// Best of several forwards, in seconds.
struct Best {
    wall: f64,
    /// CPU time of the calling thread, which computes too.
    cpu: f64,
    /// Attention's share of all forwards' time.
    attention: f64,
}

/// Times forwards of `rows` rows. Up to 16 rows all need logits, as in verification; of more rows only the
/// last does.
fn best(engine: &mut Engine, rows: usize, context: usize) -> Result<Best, Error> {
    let vocab = engine.info().vocab_size;
    let ids: Vec<TokenId> = (0..(context + rows) as u32).map(|i| (i * 37 + 11) % vocab).collect();
    let slot = engine.open();
    for ids in ids[..context].chunks(FEED_ROWS) {
        engine.forward(&[SequenceRows { slot, token_ids: ids, num_logits: 0 }])?;
    }
    let num_logits = if rows <= 16 { rows } else { 1 };
    let mut best = Best { wall: f64::MAX, cpu: f64::MAX, attention: 0.0 };
    let (mut total, before, start) = (0.0, engine.stage_times(), Instant::now());
    while start.elapsed() < TIME_PER_LINE {
        let (begin, begin_cpu) = (Instant::now(), cpu_seconds(start));
        engine.forward(&[SequenceRows { slot, token_ids: &ids[context..], num_logits }])?;
        let wall = begin.elapsed().as_secs_f64();
        (best.wall, total) = (best.wall.min(wall), total + wall);
        best.cpu = best.cpu.min(cpu_seconds(start) - begin_cpu);
        engine.truncate(slot, context as u32);
    }
    engine.close(slot);
    best.attention = engine.stage_times().since(&before).attention.as_secs_f64() / total;
    Ok(best)
}

/// CPU time of this thread if the system reports it, else elapsed time.
fn cpu_seconds(start: Instant) -> f64 {
    let elapsed = start.elapsed().as_secs_f64();
    // The system's count is updated when the thread yields.
    std::thread::yield_now();
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds: Option<f64> = text.split_whitespace().next().and_then(|ns| ns.parse().ok());
    nanoseconds.map_or(elapsed, |nanoseconds| nanoseconds / 1e9)
}
