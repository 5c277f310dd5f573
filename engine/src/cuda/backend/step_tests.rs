//! Steps on the emulator: the device draws what the host draws from the same logits, and a step allocates
//! nothing after an equally large step has run.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use speculation::acceptance::{DrawResult, draw_rows};
use speculation::logits::{TokenCounts, score};
use speculation::{SamplingParams, SequenceSpec, TokenLogprobs};

use crate::cuda::emulator::Emulator;
use crate::cuda::ranks::{Ranks, load_on};
use crate::cuda::test_model::{TINY, changed_config};
use crate::{DrawRequest, Engine, LoadOptions, SequenceRows, SlotId, TokenId, WeightFormat};

/// Ids below this may be drawn; the model's vocabulary is larger.
const VOCAB: u32 = 100;

/// An engine with random weights, and the counter of its allocations.
pub(super) fn engine(emulator: Emulator) -> (Engine, Arc<AtomicU32>) {
    let (_dir, options) = changed_config("tests/golden/qwen3_norms/config.json", &[("head_dim", 16)]);
    let allocations = emulator.allocations();
    let load = |source: &dyn crate::weights::TensorSource, model| {
        load_on(Ranks::alone(emulator), &options, source, model)
    };
    (Engine::random_by(&options, 3, load).unwrap(), allocations)
}

pub(super) fn spec(seed: u64, sampling: SamplingParams) -> SequenceSpec {
    SequenceSpec {
        seed,
        prompt_len: 4,
        sampling,
        stop_token_ids: vec![9],
        max_len: 100,
        ..Default::default()
    }
}

/// Rows of one sequence: ids in its KV cache, then a context id and drafted ids.
struct Sequence {
    spec: Option<SequenceSpec>,
    prompt: Vec<TokenId>,
    context: TokenId,
    drafted: Vec<TokenId>,
}

impl Sequence {
    fn ids(&self) -> Vec<TokenId> {
        [&self.prompt[..], &[self.context], &self.drafted].concat()
    }

    /// All ids before the first drawn one.
    fn before(&self) -> Vec<TokenId> {
        [&self.prompt[..], &[self.context]].concat()
    }
}

fn sequences() -> Vec<Sequence> {
    let plain = SamplingParams::default();
    let hot = SamplingParams { temperature: 1.4, ..plain.clone() };
    let penalized = SamplingParams {
        temperature: 0.8,
        frequency_penalty: 0.6,
        repetition_penalty: 1.2,
        logit_bias: vec![(17, 3.0), (105, 50.0)],
        min_tokens: 30,
        ..plain.clone()
    };
    let greedy = SamplingParams { temperature: 0.0, ..plain.clone() };
    let filtered = SamplingParams { top_k: 9, top_p: 0.8, min_p: 0.01, ..penalized.clone() };
    let told = |spec, top| SequenceSpec { logprobs: Some(top), ..spec };
    let sequence = |spec, context, drafted: &[TokenId]| Sequence {
        spec,
        prompt: vec![3, 5, 8, 13],
        context,
        drafted: drafted.to_vec(),
    };
    vec![
        sequence(Some(spec(11, hot)), 21, &[4, 5, 6]),
        sequence(None, 22, &[7]),
        sequence(Some(spec(12, penalized.clone())), 23, &[5, 5, 21, 5]),
        sequence(Some(spec(13, greedy.clone())), 24, &[]),
        sequence(Some(spec(14, filtered)), 25, &[6, 7]),
        sequence(Some(spec(15, SamplingParams { top_p: 0.6, ..plain.clone() })), 26, &[8]),
        sequence(Some(told(spec(16, penalized), 5)), 27, &[5, 17]),
        sequence(Some(told(spec(17, SamplingParams { top_p: 0.9, ..greedy }), 0)), 28, &[]),
    ]
}

#[test]
fn drawn_rows_are_what_the_host_draws_from_the_same_logits() {
    let sequences = sequences();
    let (mut drawing, mut reading) = (engine(Emulator::build()).0, engine(Emulator::build()).0);
    let slots = |engine: &mut Engine| sequences.iter().map(|_| engine.open()).collect::<Vec<_>>();
    let (to_draw, to_read) = (slots(&mut drawing), slots(&mut reading));
    let (ids, before): (Vec<_>, Vec<_>) = sequences.iter().map(|s| (s.ids(), s.before())).unzip();
    let batch = |slots: &[_]| -> Vec<SequenceRows<'_>> {
        let rows = |(i, s): (usize, &Sequence)| SequenceRows {
            slot: slots[i],
            token_ids: &ids[i],
            num_logits: s.drafted.len() + 1,
        };
        sequences.iter().enumerate().map(rows).collect()
    };
    let request = |(s, before)| {
        let Sequence { spec, drafted, .. }: &Sequence = s;
        let before: &Vec<TokenId> = before;
        spec.as_ref().map(|spec| DrawRequest {
            spec,
            prefix: before,
            suffix: drafted,
            vocab_size: VOCAB,
            logprobs: spec.logprobs,
            prompt: None,
            candidate_rows: 0,
        })
    };
    let requests: Vec<_> = sequences.iter().zip(&before).map(request).collect();
    let outcome = drawing.forward_and_draw(&batch(&to_draw), &requests).unwrap();
    let mut logits = reading.forward(&batch(&to_read)).unwrap();

    let (mut row, mut left) = (0, 0);
    let (mut drawn, mut scores) = (outcome.drawn.iter(), outcome.scores.iter());
    for s in &sequences {
        let rows = row..row + s.drafted.len() + 1;
        row = rows.end;
        let Some(spec) = &s.spec else {
            for row in rows {
                assert!(
                    outcome.logits.row(left) == logits.row(row),
                    "rows without a request are as they were"
                );
                left += 1;
            }
            continue;
        };
        assert!(drawing.draws(spec));
        let mut counts = TokenCounts::new(spec.prompt_len);
        s.before().iter().for_each(|&id| counts.push(id));
        let width = logits.vocab_size();
        let values = logits.rows_mut(rows.clone());
        values.chunks_exact_mut(width).for_each(|row| row[VOCAB as usize..].fill(f32::NEG_INFINITY));
        let start = s.before().len() as u32;
        let raw = values.to_vec();
        let expected = draw_rows(spec, &mut counts, (start, &s.drafted), values);
        let found: Vec<DrawResult> = drawn.by_ref().take(rows.len()).copied().collect();
        assert_eq!(found, expected, "seed {}", spec.seed);
        let Some(top_n) = spec.logprobs else { continue };
        let tell = |(row, drawn): (&[f32], &DrawResult)| score(row, drawn.token(0).unwrap(), top_n);
        let expected: Vec<TokenLogprobs> = raw.chunks_exact(width).zip(&expected).map(tell).collect();
        let found: Vec<TokenLogprobs> = scores.by_ref().take(expected.len()).cloned().collect();
        assert_eq!(found, expected, "seed {}", spec.seed);
    }
    assert_eq!((drawn.next(), scores.next(), left), (None, None, outcome.logits.rows()));
}

#[test]
fn the_cpu_draws_nothing_and_says_so() {
    let model = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/qwen3_norms"));
    let options = LoadOptions::new(model, WeightFormat::AsStored, 1 << 20);
    let mut cpu = Engine::load(&options).unwrap();
    let spec = SequenceSpec::default();
    assert!(!cpu.draws(&spec));
    let slot = cpu.open();
    let request = DrawRequest {
        spec: &spec,
        prefix: &[1],
        suffix: &[],
        vocab_size: 5,
        logprobs: None,
        prompt: None,
        candidate_rows: 0,
    };
    let rows = SequenceRows { slot, token_ids: &[1], num_logits: 1 };
    assert!(cpu.forward_and_draw(&[rows], &[Some(request)]).is_err());
    assert_eq!(cpu.len(slot), 0, "refused before anything was appended");
}

pub(super) fn rows(slot: SlotId, token_ids: &[TokenId], num_logits: usize) -> SequenceRows<'_> {
    SequenceRows { slot, token_ids, num_logits }
}

#[test]
fn a_step_like_one_before_it_allocates_nothing() {
    let (mut engine, allocations) = engine(Emulator::build());
    let spec = spec(1, SamplingParams { presence_penalty: 0.5, ..SamplingParams::default() });
    let mut counts = Vec::new();
    for start in [40, 60] {
        let (a, b) = (engine.open(), engine.open());
        let prompt: Vec<TokenId> = (start..start + 30).collect();
        let mut ids = prompt.clone();
        engine.forward(&[rows(a, &prompt, 1), rows(b, &prompt[..20], 1)]).unwrap();
        for step in 0..6 {
            ids.push(step);
            // A decode step that is drawn, with a verify step whose logits are read.
            let request = DrawRequest {
                spec: &spec,
                prefix: &ids,
                suffix: &[],
                vocab_size: VOCAB,
                logprobs: Some(3),
                prompt: None,
                candidate_rows: 0,
            };
            let batch = [rows(a, &ids[ids.len() - 1..], 1), rows(b, &prompt[..3], 3)];
            engine.forward_and_draw(&batch, &[Some(request), None]).unwrap();
        }
        counts.push(allocations.load(Ordering::Relaxed));
        engine.close(a);
        engine.close(b);
    }
    assert!(counts[0] > 0);
    assert_eq!(counts[0], counts[1], "the second round took memory");
}

#[test]
fn replayed_steps_give_the_bits_of_launched_ones() {
    let mut emulator = Emulator::build();
    let replays = emulator.enable_graphs();
    let (mut replaying, mut launching) = (engine(emulator).0, engine(Emulator::build()).0);
    let ids: Vec<TokenId> = (1..60).collect();
    let logits_of = |engine: &mut Engine| -> Vec<Vec<f32>> {
        let slot = engine.open();
        let mut ends = vec![40];
        // Single rows, then verify steps of three rows that are cut back: equal sizes at other positions.
        ends.extend(41..47);
        let mut all = Vec::new();
        let mut from = 0;
        for end in ends {
            let logits = engine.forward(&[rows(slot, &ids[from..end], 1)]).unwrap();
            all.push(logits.row(0).to_vec());
            from = end;
        }
        for _ in 0..4 {
            let logits = engine.forward(&[rows(slot, &ids[from..from + 3], 3)]).unwrap();
            all.extend((0..3).map(|row| logits.row(row).to_vec()));
            engine.truncate(slot, from as u32 + 1);
            from += 1;
        }
        engine.close(slot);
        all
    };
    let expected = logits_of(&mut launching);
    assert!(logits_of(&mut replaying) == expected, "the bits differ");
    let first = replays.load(Ordering::Relaxed);
    assert!(first >= 6, "{first} replays");
    assert!(logits_of(&mut replaying) == expected, "the bits differ");
    assert!(replays.load(Ordering::Relaxed) > 2 * first, "what ran before is replayed sooner");
}

/// Steps of one row: the graph of the pass is replayed when its row is drawn as no row was before.
#[test]
fn passes_are_replayed_whatever_is_drawn() {
    let mut emulator = Emulator::build();
    let replays = emulator.enable_graphs();
    let mut engine = engine(emulator).0;
    let slot = engine.open();
    let mut ids: Vec<TokenId> = vec![1];
    let mut replayed = |sampling: SamplingParams, logprobs| {
        let before = replays.load(Ordering::Relaxed);
        let spec = spec(1, sampling);
        let request = DrawRequest {
            spec: &spec,
            prefix: &ids,
            suffix: &[],
            vocab_size: VOCAB,
            logprobs,
            prompt: None,
            candidate_rows: 0,
        };
        let batch = [rows(slot, &ids[ids.len() - 1..], 1)];
        engine.forward_and_draw(&batch, &[Some(request)]).unwrap();
        ids.push(5);
        replays.load(Ordering::Relaxed) - before
    };
    let plain = SamplingParams::default();
    for _ in 0..5 {
        replayed(plain.clone(), None);
    }
    assert_eq!(replayed(plain.clone(), None), 2, "the pass and its draw");
    let penalized = SamplingParams { presence_penalty: 0.5, ..plain.clone() };
    let filtered = SamplingParams { top_k: 5, ..plain.clone() };
    for (sampling, logprobs) in [(filtered, None), (penalized, None), (plain, Some(3))] {
        assert_eq!(replayed(sampling, logprobs), 1, "the pass");
    }
}

/// Two sequences that grow past one split and several blocks: their steps differ only in block tables and
/// sometimes in the number of splits.
#[test]
fn steps_of_sequences_that_grow_are_mostly_replayed() {
    const STEPS: u32 = 48;
    let mut emulator = Emulator::build();
    let replays = emulator.enable_graphs();
    let mut engine = engine(emulator).0;
    let prompt: Vec<TokenId> = (0..116).map(|i| i % 100).collect();
    let (a, b) = (engine.open(), engine.open());
    engine.forward(&[rows(a, &prompt, 1), rows(b, &prompt[..90], 1)]).unwrap();
    let before = replays.load(Ordering::Relaxed);
    for step in 0..STEPS {
        engine.forward(&[rows(a, &[step], 1), rows(b, &[step + 1], 1)]).unwrap();
    }
    let replayed = replays.load(Ordering::Relaxed) - before;
    println!("{replayed} of {STEPS} steps are replayed");
    assert!(replayed * 4 >= STEPS * 3, "{replayed} of {STEPS}");
}

/// Launches of a step of one row, measured as the difference of models that differ by a layer. Without fusion
/// a layer takes 17: two sums, two norms, four roundings, four products, rotation, KV write, attention and
/// its merge, SwiGLU. Attention merges by itself while contexts are short (`few_splits_are_merged`).
#[test]
fn a_layer_takes_nine_launches() {
    let launches = |layers: u64| {
        let (_dir, options) = changed_config(TINY, &[("num_hidden_layers", layers)]);
        let emulator = Emulator::build();
        let count = emulator.launches();
        let load = |source: &dyn crate::weights::TensorSource, model| {
            load_on(Ranks::alone(emulator), &options, source, model)
        };
        let mut engine = Engine::random_by(&options, 3, load).unwrap();
        let slot = engine.open();
        let before = count.load(Ordering::Relaxed);
        engine.forward(&[SequenceRows { slot, token_ids: &[1], num_logits: 1 }]).unwrap();
        count.load(Ordering::Relaxed) - before
    };
    let (two, three) = (launches(2), launches(3));
    println!("{two} launches with 2 layers, {three} with 3");
    assert_eq!(three - two, 9);
}
