//! Token trees on whole models on the emulator: a row of a tree has the bits of a chain of its ancestors, the
//! kept path leaves the KV of a chain, and a draw from a row equals the host's draw from the same logits
//! after the same ids.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use speculation::acceptance::{DrawResult, draw_rows, guess_candidates};
use speculation::logits::{TokenCounts, score};
use speculation::tree::{Candidates, MAX_CANDIDATES};
use speculation::{SamplingParams, SequenceSpec, TokenLogprobs};

use crate::collective::RankBarrier;
use crate::cuda::emulator::Emulator;
use crate::cuda::numerics::Numerics;
use crate::cuda::ranks::{Exchange, Ranks, SumPhases, load_on, on_device};
use crate::cuda::test_model::changed_config;
use crate::{DrawRequest, Engine, SequenceRows, SlotId, TokenId, TreeRows};

/// Ids of a tree, and the parent of each.
struct Tree {
    ids: Vec<TokenId>,
    parents: Vec<u32>,
}

impl Tree {
    fn new(ids: &[TokenId], parents: &[u32]) -> Self {
        Self { ids: ids.to_vec(), parents: parents.to_vec() }
    }

    /// Rows of the path from the tree's first position to `row`.
    fn path(&self, row: usize) -> Vec<usize> {
        let parent = |&row: &usize| (self.parents[row] as usize).checked_sub(1);
        let mut path: Vec<usize> = std::iter::successors(Some(row), parent).collect();
        path.reverse();
        path
    }

    fn ids_to(&self, row: usize) -> Vec<TokenId> {
        self.path(row).into_iter().map(|row| self.ids[row]).collect()
    }
}

/// Deep and broad enough to reach past the block and the split in which it begins.
fn tree() -> Tree {
    Tree::new(&[7, 9, 11, 13, 7, 15, 17, 19, 21, 23], &[0, 0, 1, 1, 2, 3, 6, 7, 8, 8])
}

/// An engine with random weights for a golden configuration.
fn engine(model: &str, changes: &[(&str, u64)], ranks: Ranks<Emulator>) -> Engine {
    let (_dir, options) = changed_config(&format!("tests/golden/{model}/config.json"), changes);
    Engine::random_by(&options, 5, |source, model| load_on(ranks, &options, source, model)).unwrap()
}

const NORMS: (&str, &[(&str, u64)]) = ("qwen3_norms", &[("head_dim", 16), ("max_position_embeddings", 512)]);

fn alone() -> Ranks<Emulator> {
    Ranks::alone(Emulator::build())
}

fn two_ranks() -> Ranks<Emulator> {
    let barrier = Arc::new(RankBarrier::new(2, Duration::from_secs(100)));
    let member = |end| (Emulator::build(), Some(Box::new(end) as Box<dyn Exchange<Emulator>>));
    let members = on_device(2, &barrier).into_iter().map(member).collect();
    let (numerics, phases) = (Numerics::emulated(), SumPhases::BY_SIZE);
    Ranks { members, barrier, memory_utilization: None, numerics, phases }
}

fn text(len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|i| 2 + i * i * 5 % 59).collect()
}

/// Logits after `held` and after each row of a tree that follows it. Keeps the part of `held` that the slot
/// already has.
fn rows_of_tree(engine: &mut Engine, slot: SlotId, held: &[TokenId], tree: &Tree) -> Vec<Vec<f32>> {
    let other = engine.open();
    let token_ids = [&held[engine.len(slot) as usize..], &tree.ids].concat();
    let batch = [
        SequenceRows { slot: other, token_ids: &[5, 6, 7], num_logits: 0 },
        SequenceRows { slot, token_ids: &token_ids, num_logits: 1 + tree.ids.len() },
    ];
    let trees = [TreeRows { sequence: 1, num_stored: 0, parents: &tree.parents }];
    let logits = engine.forward_with_trees(&batch, &[], &trees).unwrap().logits;
    engine.close(other);
    (0..logits.rows()).map(|row| logits.row(row).to_vec()).collect()
}

/// Logits after `held` and after each of these chains that follow it, in one forward of forks.
fn rows_of_chains(
    engine: &mut Engine,
    slot: SlotId,
    held: &[TokenId],
    chains: &[Vec<TokenId>],
) -> Vec<Vec<f32>> {
    let before = held.len() - 1;
    let ids: Vec<Vec<TokenId>> =
        std::iter::once(&Vec::new()).chain(chains).map(|chain| [&held[before..], chain].concat()).collect();
    let forks: Vec<SlotId> = ids.iter().map(|_| engine.fork(slot, before as u32).unwrap()).collect();
    let rows = |(&slot, token_ids)| SequenceRows { slot, token_ids, num_logits: 1 };
    let token_ids = ids.iter().map(Vec::as_slice);
    let batch: Vec<SequenceRows<'_>> = forks.iter().zip(token_ids).map(rows).collect();
    let logits = engine.forward(&batch).unwrap();
    forks.iter().for_each(|&fork| engine.close(fork));
    (0..logits.rows()).map(|row| logits.row(row).to_vec()).collect()
}

/// Checks a tree after `start` ids, then after the kept path of that tree, and so on.
fn check(engine: &mut Engine, start: usize, what: &str) {
    let mut text = text(start);
    let slot = engine.open();
    if start > 1 {
        engine.forward(&[SequenceRows { slot, token_ids: &text[..start - 1], num_logits: 0 }]).unwrap();
    }
    let tree = tree();
    for kept in [9, 4] {
        let found = rows_of_tree(engine, slot, &text, &tree);
        let chains: Vec<Vec<TokenId>> = (0..tree.ids.len()).map(|row| tree.ids_to(row)).collect();
        let expected = rows_of_chains(engine, slot, &text, &chains);
        for (row, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert!(found == expected, "{what}, behind {start}, {kept} kept: row {row} is no chain's");
        }
        let (path, ids) = (tree.path(kept), tree.ids_to(kept));
        engine.keep_path(slot, text.len() as u32, (&path, &ids)).unwrap();
        text.extend(ids);
        text.push(40 + kept as TokenId);
    }
    let held = engine.len(slot) as usize;
    let last = SequenceRows { slot, token_ids: &text[held..], num_logits: 1 };
    let found = engine.forward(&[last]).unwrap().row(0).to_vec();
    let fresh = engine.open();
    let whole = SequenceRows { slot: fresh, token_ids: &text, num_logits: 1 };
    assert!(found == engine.forward(&[whole]).unwrap().row(0), "{what}, behind {start}: what was kept");
    engine.close(fresh);
    engine.close(slot);
}

#[test]
fn rows_of_trees_have_the_bits_of_chains() {
    let window = ("mistral_window", &[("head_dim", 16)][..]);
    let biases = ("qwen2_window_layers", &[("num_attention_heads", 2), ("num_key_value_heads", 1)][..]);
    for ((model, changes), starts) in [(NORMS, &[1, 123][..]), (window, &[29]), (biases, &[16])] {
        let engine = &mut engine(model, changes, alone());
        starts.iter().for_each(|&start| check(engine, start, model));
    }
}

#[test]
fn ranks_and_graphs_change_no_bit_of_a_tree() {
    check(&mut engine(NORMS.0, NORMS.1, two_ranks()), 14, "two ranks");
    let mut emulator = Emulator::build();
    let replays = emulator.enable_graphs();
    let engine = &mut engine(NORMS.0, NORMS.1, Ranks::alone(emulator));
    check(engine, 14, "launched");
    check(engine, 14, "captured");
    let before = replays.load(Ordering::Relaxed);
    check(engine, 14, "replayed");
    assert!(replays.load(Ordering::Relaxed) > before, "nothing was replayed");
}

/// Shows that the checks above can fail: other ancestors and the KV of another path change the bits.
#[test]
fn other_ancestors_and_another_path_give_other_bits() {
    let engine = &mut engine(NORMS.0, NORMS.1, alone());
    let text = text(20);
    let slot = engine.open();
    let rows = |engine: &mut Engine, parents: &[u32]| {
        engine.truncate(slot, 0);
        rows_of_tree(engine, slot, &text, &Tree::new(&[10, 20, 30, 40], parents))
    };
    let (right, wrong) = (rows(engine, &[0, 0, 1, 2]), rows(engine, &[0, 0, 2, 2]));
    assert!(right[..3] == wrong[..3] && right[4] == wrong[4] && right[3] != wrong[3]);
    let mut next = |path: &[usize]| {
        rows(engine, &[0, 0, 1, 2]);
        engine.keep_path(slot, 20, (path, &[10, 30])).unwrap();
        engine.forward(&[SequenceRows { slot, token_ids: &[50], num_logits: 1 }]).unwrap().row(0).to_vec()
    };
    let (kept, other_leaf, other_root) = (next(&[0, 2]), next(&[0, 3]), next(&[1, 2]));
    let fresh = engine.open();
    let whole = [&text[..], &[10, 30, 50]].concat();
    let alone = engine.forward(&[SequenceRows { slot: fresh, token_ids: &whole, num_logits: 1 }]).unwrap();
    assert!(kept == alone.row(0) && other_leaf != alone.row(0) && other_root != alone.row(0));
}

/// Sampling options of rows of a tree: penalties and bias, filters, logprobs.
fn specs() -> [SequenceSpec; 3] {
    let plain = SamplingParams::default();
    let penalized = SamplingParams {
        temperature: 0.8,
        frequency_penalty: 0.9,
        repetition_penalty: 1.3,
        logit_bias: vec![(17, 2.0)],
        ..plain.clone()
    };
    let filtered = SamplingParams { top_k: 9, top_p: 0.8, min_p: 0.01, ..penalized.clone() };
    let greedy = SamplingParams { temperature: 0.0, presence_penalty: 3.0, ..plain };
    let spec = |seed, sampling, logprobs| SequenceSpec {
        seed,
        prompt_len: 4,
        sampling,
        max_len: 100,
        logprobs,
        ..SequenceSpec::default()
    };
    [spec(3, penalized, None), spec(4, filtered, Some(3)), spec(5, greedy, Some(0))]
}

#[test]
fn rows_of_trees_are_drawn_as_the_host_draws_them() {
    let (text, tree) = (text(12), tree());
    let vocab_size = 100;
    for spec in specs() {
        let (mut drawing, mut reading) =
            (engine(NORMS.0, NORMS.1, alone()), engine(NORMS.0, NORMS.1, alone()));
        let slot = reading.open();
        let mut logits = rows_of_tree(&mut reading, slot, &text, &tree);
        logits.iter_mut().for_each(|row| row[vocab_size as usize..].fill(f32::NEG_INFINITY));

        let slot = drawing.open();
        let token_ids = [&text[..], &tree.ids].concat();
        let rows = SequenceRows { slot, token_ids: &token_ids, num_logits: 1 + tree.ids.len() };
        let request = DrawRequest {
            spec: &spec,
            prefix: &text,
            suffix: &tree.ids,
            vocab_size,
            logprobs: spec.logprobs,
            prompt: None,
            candidate_rows: 1 + tree.ids.len(),
        };
        let trees = [TreeRows { sequence: 0, num_stored: 0, parents: &tree.parents }];
        let outcome = drawing.forward_with_trees(&[rows], &[Some(request)], &trees).unwrap();

        let host = |row: Option<usize>| {
            let (rows, ids) = row.map_or_else(Default::default, |row| (tree.path(row), tree.ids_to(row)));
            let mut values =
                [&logits[..1], &rows.iter().map(|row| logits[1 + row].clone()).collect::<Vec<_>>()]
                    .concat()
                    .concat();
            let mut counts = TokenCounts::new(spec.prompt_len);
            text.iter().for_each(|&id| counts.push(id));
            *draw_rows(&spec, &mut counts, (text.len() as u32, &ids), &mut values).last().unwrap()
        };
        let expected: Vec<DrawResult> =
            std::iter::once(None).chain((0..tree.ids.len()).map(Some)).map(host).collect();
        assert_eq!(outcome.drawn, expected, "seed {}", spec.seed);
        let several = |row: Option<usize>| {
            let ids = [&text[..], &row.map_or_else(Vec::new, |row| tree.ids_to(row))].concat();
            let mut counts = TokenCounts::new(spec.prompt_len);
            ids.iter().for_each(|&id| counts.push(id));
            let mut values = logits[row.map_or(0, |row| 1 + row)].clone();
            guess_candidates(&spec, &counts, (ids.len() as u32, MAX_CANDIDATES), &mut values).unwrap()
        };
        let candidates: Vec<Candidates> =
            std::iter::once(None).chain((0..tree.ids.len()).map(Some)).map(several).collect();
        assert_eq!(outcome.candidates, candidates, "seed {}", spec.seed);
        let Some(top_n) = spec.logprobs else { continue };
        let tell = |(row, drawn): (&Vec<f32>, &DrawResult)| score(row, drawn.token(0).unwrap(), top_n);
        let expected: Vec<TokenLogprobs> = logits.iter().zip(&expected).map(tell).collect();
        assert_eq!(outcome.scores, expected, "seed {}", spec.seed);
    }
}
