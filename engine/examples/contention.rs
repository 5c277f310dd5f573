//! Measures the throughput of forwards under CPU contention.
//!
//!     cargo run -p outrider-engine --example contention -- CONFIG.json [FORMAT] [THREADS] [ROWS] [ROUNDS]
//!
//! Uses random weights of the configuration's shape and forwards of ROWS rows after 128 tokens. Each round
//! measures one time slice of each case: an engine with one thread alone, one with THREADS alone, beside a
//! thread that keeps a core busy, and beside a second engine of THREADS. A ratio compares two slices of the
//! same round, since a shared machine varies in speed; prints the median over rounds with the minimum and the
//! maximum. `fair` is the fair share of the cores for an engine whose threads have equal priority, relative
//! to its share when it runs alone.
#![expect(clippy::print_stdout, reason = "the table is the program's output")]

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use engine::{Engine, EngineError, LoadOptions, SequenceRows, SlotId, TokenId, WeightFormat};

const CONTEXT: usize = 128;
const SLICE: Duration = Duration::from_millis(600);
/// Warm-up at the start of a slice, which is not measured.
const WARM_UP: Duration = Duration::from_millis(100);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default| args.get(at).map_or(Some(default), |arg| arg.parse::<usize>().ok());
    let format = WeightFormat::named(args.get(1).map_or("bf16", String::as_str));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let numbers = (number(2, cores), number(3, 1), number(4, 8));
    let (Some(config), Some(format), (Some(threads), Some(rows), Some(rounds))) =
        (args.first(), format, numbers)
    else {
        println!("usage: contention CONFIG.json [bf16|fp8|int8|int4|f32] [THREADS] [ROWS] [ROUNDS]");
        return ExitCode::from(64);
    };
    let setup = Setup { config: PathBuf::from(config), format, threads, rows };
    match run(&setup, rounds.max(1), cores) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

struct Setup {
    config: PathBuf,
    format: WeightFormat,
    threads: usize,
    rows: usize,
}

/// An engine with one sequence, and the ids of its repeated forward.
struct EngineUnderTest {
    engine: Engine,
    slot: SlotId,
    ids: Vec<TokenId>,
}

impl EngineUnderTest {
    fn load(setup: &Setup, threads: usize) -> Result<Self, EngineError> {
        let mut engine = Engine::random(
            &LoadOptions { threads, ..LoadOptions::new(&setup.config, setup.format, 1 << 30) },
            1,
        )?;
        let vocab = engine.info().vocab_size;
        let ids: Vec<TokenId> = (0..(CONTEXT + setup.rows) as u32).map(|i| (i * 37 + 11) % vocab).collect();
        let slot = engine.open();
        engine.forward(&[SequenceRows { slot, token_ids: &ids[..CONTEXT], num_logits: 0 }])?;
        Ok(Self { engine, slot, ids })
    }

    /// Forwards per second over one slice.
    fn slice(&mut self) -> Result<f64, EngineError> {
        let warm = Instant::now();
        while warm.elapsed() < WARM_UP {
            self.forward()?;
        }
        let (begin, mut forwards) = (Instant::now(), 0);
        while forwards == 0 || begin.elapsed() < SLICE {
            self.forward()?;
            forwards += 1;
        }
        Ok(f64::from(forwards) / begin.elapsed().as_secs_f64())
    }

    fn forward(&mut self) -> Result<(), EngineError> {
        let rows = SequenceRows { slot: self.slot, token_ids: &self.ids[CONTEXT..], num_logits: 1 };
        self.engine.forward(&[rows])?;
        self.engine.truncate(self.slot, CONTEXT as u32);
        Ok(())
    }
}

fn run(setup: &Setup, rounds: usize, cores: usize) -> Result<(), EngineError> {
    let (threads, rows) = (setup.threads, setup.rows);
    let mut one = EngineUnderTest::load(setup, 1)?;
    let mut many = [EngineUnderTest::load(setup, threads)?, EngineUnderTest::load(setup, threads)?];
    // Per round: one thread alone, many alone, beside a busy core, beside another engine, the other engine.
    let mut samples: Vec<[f64; 5]> = Vec::new();
    for _ in 0..rounds {
        let (single, alone) = (one.slice()?, many[0].slice()?);
        let crowded = beside_busy_core(|| many[0].slice())?;
        let pair = both(&mut many)?;
        samples.push([single, alone, crowded, pair[0], pair[1]]);
    }
    println!("{:?}, {rows} rows, {threads} threads on {cores} cores, {rounds} rounds", setup.format);
    let fair = |others: usize| {
        let wanted = threads + others;
        if wanted <= cores {
            1.0
        } else {
            cores.max(1) as f64 / wanted as f64 * threads as f64 / threads.min(cores) as f64
        }
    };
    line("one thread alone", &samples, 0, 1, None);
    line("alone", &samples, 1, 1, None);
    line("beside a busy core", &samples, 2, 1, Some(fair(1)));
    line("two engines, the first", &samples, 3, 1, Some(fair(threads)));
    line("two engines, the second", &samples, 4, 1, Some(fair(threads)));
    Ok(())
}

/// Calls `run` while a thread of this process spins.
fn beside_busy_core<T>(run: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let out = run();
        stop.store(true, Ordering::Relaxed);
        out
    })
}

fn both(pair: &mut [EngineUnderTest; 2]) -> Result<[f64; 2], EngineError> {
    let [first, second] = pair;
    std::thread::scope(|scope| {
        let other = scope.spawn(|| second.slice());
        let first = first.slice()?;
        let second = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok([first, second])
    })
}

/// Prints forwards per second, the ratio to column `base`, and how that compares with a fair share.
fn line(name: &str, samples: &[[f64; 5]], column: usize, base: usize, fair: Option<f64>) {
    let speed = median(samples.iter().map(|round| round[column]).collect());
    let mut ratios: Vec<f64> = samples.iter().map(|round| round[column] / round[base]).collect();
    ratios.sort_by(f64::total_cmp);
    let (least, most) = (ratios[0], ratios[ratios.len() - 1]);
    let ratio = median(ratios);
    let fair = fair.map_or_else(String::new, |fair| format!("  fair {fair:.2}  of fair {:.2}", ratio / fair));
    println!("  {name:<24} {speed:>8.2} forwards/s  ratio {ratio:.2} [{least:.2}, {most:.2}]{fair}");
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}
