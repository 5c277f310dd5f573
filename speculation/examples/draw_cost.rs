//! Measures the cost of one draw against the plain loop that scores every token:
//! `cargo run -p outrider-speculation --example draw_cost`.
//!
//! Uses one thread, a vocabulary of 152,000 tokens, temperature 1, and rows from flat to peaked. Prints
//! milliseconds per row and the ratio of the two, the cost of a draft's candidates and of log probabilities,
//! then that of draws with filters. Fails if the draws commit different tokens; makes no assertions about time.

#![expect(clippy::print_stdout, reason = "the output is the job")]

use std::time::Instant;

use speculation::acceptance::{guess, guess_candidates};
use speculation::logits::{TokenCounts, score};
use speculation::noise::{Noise, Purpose};
use speculation::{SamplingParams, SequenceSpec, TokenId};

const VOCAB_SIZE: u32 = 152_000;
const DRAWS: u32 = 60;
const PLAIN_DRAWS: u32 = 6;
const FILTERED_DRAWS: u32 = 12;
/// Candidates for a token tree: a draw, the next best tokens and the row's surprise.
const NUM_CANDIDATES: usize = 8;
/// Log probabilities per token: the most that OpenAI's API allows.
const TOP_LOGPROBS: u32 = 20;

fn main() {
    println!(
        "{:<34} {:>9} {:>9} {:>7} {:>14} {:>12}",
        "logits", "plain ms", "draw ms", "ratio", "candidates ms", "logprobs ms"
    );
    for (name, mut logits) in rows() {
        let spec = SequenceSpec { seed: 7, ..SequenceSpec::default() };
        let counts = TokenCounts::new(0);
        let mut draw = |position| {
            guess(&spec, &counts, position, &mut logits).expect("a row of numbers can be drawn from").token_id
        };
        let (drawn, draw_ms) = timed(DRAWS, &mut draw);
        let (best, candidates_ms) = timed(DRAWS, &mut |position| {
            let found = guess_candidates(&spec, &counts, (position, NUM_CANDIDATES), &mut logits);
            found.expect("a row of numbers can be drawn from").token_ids[0]
        });
        assert_eq!(drawn, best, "the draw and the best candidate disagree on {name}");
        let (scored, logprobs_ms) =
            timed(FILTERED_DRAWS, &mut |_| score(&logits, 0, TOP_LOGPROBS).top.len() as TokenId);
        assert!(scored.iter().all(|&listed| listed == TOP_LOGPROBS), "{name}: too few log probabilities");
        let noise = Noise { seed: spec.seed, choice: spec.choice };
        let (plain, plain_ms) = timed(PLAIN_DRAWS, &mut |position| plain_draw(noise, position, &logits));
        assert_eq!(drawn[..plain.len()], plain[..], "the draw and the plain loop disagree on {name}");
        println!(
            "{name:<34} {plain_ms:>9.3} {draw_ms:>9.3} {:>7.1} {candidates_ms:>14.3} {logprobs_ms:>12.3}",
            plain_ms / draw_ms
        );
    }
    filters();
}

/// Prints the cost of each filter on each row, in milliseconds per draw.
fn filters() {
    let plain = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
    let filters = [
        ("top_k 40", SamplingParams { top_k: 40, ..plain.clone() }),
        ("top_p 0.9", SamplingParams { top_p: 0.9, ..plain.clone() }),
        ("min_p 0.05", SamplingParams { min_p: 0.05, ..plain.clone() }),
        ("top_k 40, top_p 0.9", SamplingParams { top_k: 40, top_p: 0.9, ..plain }),
    ];
    println!("\n{:<34} {:>20} {:>9}", "logits", "filter", "draw ms");
    for (name, mut logits) in rows() {
        for (filter, sampling) in &filters {
            let spec = SequenceSpec { seed: 7, sampling: sampling.clone(), ..SequenceSpec::default() };
            let counts = TokenCounts::new(0);
            let (_, ms) = timed(FILTERED_DRAWS, &mut |position| {
                guess(&spec, &counts, position, &mut logits)
                    .expect("a row of numbers can be drawn from")
                    .token_id
            });
            println!("{name:<34} {filter:>20} {ms:>9.3}");
        }
    }
}

/// Rows from no structure at all to a model that is nearly certain.
fn rows() -> Vec<(&'static str, Vec<f32>)> {
    let gumbel = |id: TokenId| Noise { seed: 99, choice: 9 }.gumbel(0, id, Purpose::Draft);
    let tailed = |spread: f64| (0..VOCAB_SIZE).map(|id| (spread * gumbel(id)) as f32).collect::<Vec<f32>>();
    let with_leader = |logit: f32| {
        let mut row = tailed(1.0);
        row[100_003] = logit;
        row
    };
    vec![
        ("all equal", vec![0.0; VOCAB_SIZE as usize]),
        ("Gumbel-tailed, spread 0.5", tailed(0.5)),
        ("Gumbel-tailed, spread 2", tailed(2.0)),
        ("spread 1, one logit of 40", with_leader(40.0)),
        ("spread 1, one logit of 80", with_leader(80.0)),
    ]
}

/// The rule as defined: score everything, keep the first best.
fn plain_draw(noise: Noise, position: u32, logits: &[f32]) -> TokenId {
    let mut best = (0, f64::NEG_INFINITY);
    for (id, &logit) in (0..).zip(logits) {
        let score = f64::from(logit) + noise.gumbel(position, id, Purpose::Draw);
        if score > best.1 {
            best = (id, score);
        }
    }
    best.0
}

/// Draws of `draw` at positions from 0 on, and the median time per call in milliseconds.
fn timed(draws: u32, draw: &mut dyn FnMut(u32) -> TokenId) -> (Vec<TokenId>, f64) {
    let mut ids = Vec::new();
    let mut times_ms = Vec::new();
    for position in 0..draws {
        let start = now();
        ids.push(draw(position));
        times_ms.push(start.elapsed().as_secs_f64() * 1e3);
    }
    times_ms.sort_by(f64::total_cmp);
    (ids, times_ms[times_ms.len() / 2])
}

#[expect(clippy::disallowed_methods, reason = "a program that measures reads the clock; the rules never do")]
fn now() -> Instant {
    Instant::now()
}
