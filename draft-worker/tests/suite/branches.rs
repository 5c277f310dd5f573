//! Trees with branches, compared with `==`: each tree equals what [`TreeGrowth`] produces from rows that
//! another engine ran as chains, one path at a time, whatever else ran in the batch, was accepted before, or
//! remains of an earlier tree in the KV.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use draft_worker::propose::Propose;
use engine::cuda::GpuOptions;
use engine::cuda::host_driver::HostDriver;
use engine::{Engine, LoadOptions, SequenceRows, SlotId, WeightFormat};
use speculation::acceptance::guess_candidates;
use speculation::cached_sequence::{Admission, CachedSequence};
use speculation::logits::TokenCounts;
use speculation::prefix::Prefix;
use speculation::tree::{Candidates, MAX_CANDIDATES, TreeGrowth, with_leaves};
use speculation::{Draft, ReplyBody, Role, SamplingParams, SequenceId, SequenceSpec, Step, TokenId, Work};
use worker::Task;
use worker::executor::StepExecutor;
use worker::model::ModelExecutor;
use worker::table::{RouterId, SequenceKey};
use worker::task::Slot;

use crate::bundled_draft::{self, model_dir};
use crate::random::Random;

const STOP: TokenId = 0;
const VOCAB: u32 = 4_096;
const TREE_ROWS: usize = 3;

fn executor(more: &[&str]) -> ModelExecutor<Propose> {
    bundled_draft::executor(Propose { keeps_candidates: false }, more)
}

fn options(weights: WeightFormat) -> LoadOptions {
    LoadOptions::new(model_dir(), weights, 16 << 20)
}

fn engine() -> Engine {
    Engine::load(&options(WeightFormat::AsStored)).expect("the bundled draft loads")
}

/// The same model on an emulated GPU.
fn engine_on_device(driver: &HostDriver) -> Engine {
    let gpus = GpuOptions { kernels: Some(driver.kernels.clone()), ..GpuOptions::for_devices(&[0]) };
    Engine::load(&options(WeightFormat::Bf16).on_gpus(gpus)).expect("the bundled draft loads")
}

fn executor_on_device(driver: &HostDriver, keeps_candidates: bool) -> ModelExecutor<Propose> {
    ModelExecutor::new(engine_on_device(driver), Role::Draft, VOCAB, 512, Propose { keeps_candidates })
}

/// Best tokens behind `ids`, from a sequence that holds a part of them.
fn candidates(engine: &mut Engine, (slot, spec): (SlotId, &SequenceSpec), ids: &[TokenId]) -> Candidates {
    let token_ids = &ids[engine.len(slot) as usize..];
    let mut logits =
        engine.forward(&[SequenceRows { slot, token_ids, num_logits: 1 }]).expect("there is room");
    let mut counts = TokenCounts::new(spec.prompt_len);
    ids.iter().for_each(|&id| counts.push(id));
    let at = (ids.len() as u32, MAX_CANDIDATES);
    guess_candidates(spec, &counts, at, logits.rows_mut(0..1)).expect("numbers")
}

/// Expected tree behind `ids`: every path runs alone behind the context, as a chain.
fn expected(
    engine: &mut Engine,
    spec: &SequenceSpec,
    ids: &[TokenId],
    (positions, tokens): (u32, u32),
) -> Draft {
    let mut tree = TreeGrowth::new(positions as usize, tokens as usize, TREE_ROWS);
    let slot = engine.open();
    loop {
        let paths = tree.next_paths();
        if paths.is_empty() {
            engine.close(slot);
            return tree.draft();
        }
        let mut found = Vec::new();
        for path in &paths {
            found.push(candidates(engine, (slot, spec), &[ids, path].concat()));
            // The row of the context's last id runs again with every path.
            engine.truncate(slot, ids.len() as u32 - 1);
        }
        tree.add_candidates(&found, |id| spec.stop_token_ids.contains(&id));
    }
}

/// One sequence from its router's point of view, and its state at the worker.
struct Sequence {
    spec: Arc<SequenceSpec>,
    ids: Vec<TokenId>,
    /// Number of ids known to be cached at the worker.
    held: usize,
    step_seq: u64,
    slot: Slot,
    cached: CachedSequence,
}

impl Sequence {
    fn new(executor: &mut ModelExecutor<Propose>, seed: u64, sampling: SamplingParams) -> Self {
        let ids: Vec<TokenId> = (0..5 + seed as TokenId * 7).map(|i| 11 + i * 245 % 2_000).collect();
        let prompt_len = ids.len() as u32;
        let spec = SequenceSpec {
            seed,
            prompt_len,
            max_len: prompt_len + 220,
            sampling,
            stop_token_ids: vec![STOP],
            ..SequenceSpec::default()
        };
        let (slot, cached) = (executor.open(), CachedSequence::default());
        Self { spec: Arc::new(spec), ids, held: 0, step_seq: 0, slot, cached }
    }

    /// Creates the admitted task of a step that requests a tree.
    fn task(
        &mut self,
        executor: &mut ModelExecutor<Propose>,
        (num_draft_tokens, num_tree_tokens): (u32, u32),
    ) -> Task {
        self.step_seq += 1;
        let step = Step {
            sequence_id: SequenceId(self.spec.seed),
            epoch: 1,
            step_seq: self.step_seq,
            spec: (self.step_seq == 1).then(|| Arc::clone(&self.spec)),
            base_len: self.held as u32,
            prefix_hash: Prefix::new(&self.ids[..self.held]).hash_at(self.held as u32).expect("within"),
            append_ids: self.ids[self.held..].to_vec(),
            work: Work::Propose { num_draft_tokens, num_tree_tokens },
        };
        let mut cached = std::mem::take(&mut self.cached);
        assert_eq!(cached.admit(&step, &executor.limits()), Admission::Run);
        executor.truncate(self.slot, step.base_len);
        let key = SequenceKey { router: RouterId(1), sequence: step.sequence_id };
        let mut task = Task::new(key, self.slot, step, cached, Instant::now());
        task.tree_rows = TREE_ROWS;
        task
    }

    /// Commits a random path of a draft, often not the path of first children, then `next`. `held` follows
    /// the contract.
    fn commit(&mut self, draft: &Draft, random: &mut Random, next: TokenId) {
        let (start, mut row) = (self.ids.len(), 0);
        while random.below(4) > 0 {
            let children: Vec<usize> =
                (0..draft.token_ids.len()).filter(|&i| draft.parent(i) == row).collect();
            if children.is_empty() {
                break;
            }
            let i = children[random.below(2).min(children.len() - 1)];
            self.ids.push(draft.token_ids[i]);
            row = i + 1;
        }
        let first = draft.first_path();
        let leading = first.iter().zip(&self.ids[start..]).take_while(|(a, b)| a == b).count();
        self.held = start + leading.min(first.len() - 1);
        self.ids.push(next);
    }
}

/// Runs tasks in shared forwards until all are answered; returns their drafts.
fn run(executor: &mut ModelExecutor<Propose>, tasks: Vec<Task>) -> Vec<(Task, Draft)> {
    let mut tasks = VecDeque::from(tasks);
    let mut done = Vec::new();
    while !tasks.is_empty() {
        for (task, body) in executor.advance(&mut tasks, u32::MAX).expect("there is room") {
            let ReplyBody::Proposal(proposal) = body else { panic!("{body:?}") };
            assert_eq!(proposal.start, task.step.start());
            done.push((task, proposal.draft));
        }
    }
    done.sort_by_key(|(task, _)| task.key.sequence);
    done
}

#[test]
fn every_tree_is_made_of_the_bits_of_chains() {
    let (with_branches, beside_the_chain) = check_trees(executor(&[]), engine(), 24);
    assert!(with_branches > 40, "{with_branches} of 96 trees have branches");
    assert!(beside_the_chain < 90);
}

#[test]
fn a_device_lists_the_candidates_of_the_same_trees() {
    let name = "branches::a_device_lists_the_candidates_of_the_same_trees";
    let Some(driver) = HostDriver::for_test(name) else { return };
    let (with_branches, _) = check_trees(executor_on_device(&driver, false), engine_on_device(&driver), 3);
    assert!(with_branches > 3, "{with_branches} of 12 trees have branches");

    // A worker that drafts ahead proposes a chain with leaves from the same candidates.
    let (mut executor, mut engine) = (executor_on_device(&driver, true), engine_on_device(&driver));
    let mut sequence = Sequence::new(&mut executor, 2, SamplingParams::default());
    let mut task = sequence.task(&mut executor, (4, 12));
    task.tree_rows = 0;
    let (task, draft) = run(&mut executor, vec![task]).remove(0);
    let (slot, mut ids) = (engine.open(), sequence.ids.clone());
    let listed: Vec<Candidates> = (0..4)
        .map(|_| {
            let several = candidates(&mut engine, (slot, &sequence.spec), &ids);
            ids.push(several.token_ids[0]);
            several
        })
        .collect();
    assert_eq!((&task.candidates, draft), (&listed, with_leaves(&listed, 12)));
}

/// Compares the trees of several sequences over `rounds` rounds with the expected ones. Returns how many have
/// branches, and in how many rounds the committed path left the first path.
fn check_trees(mut executor: ModelExecutor<Propose>, mut engine: Engine, rounds: u32) -> (usize, usize) {
    let mut random = Random(3);
    let plain = SamplingParams::default();
    let mut sequences: Vec<Sequence> = [
        plain.clone(),
        SamplingParams { temperature: 0.0, ..plain.clone() },
        SamplingParams { frequency_penalty: 0.7, ..plain.clone() },
        SamplingParams { temperature: 0.7, top_p: 0.95, ..plain },
    ]
    .into_iter()
    .zip(1..)
    .map(|(sampling, seed)| Sequence::new(&mut executor, seed, sampling))
    .collect();
    let (mut with_branches, mut beside_the_chain) = (0, 0);
    for round in 0..rounds {
        let shapes: Vec<(u32, u32)> = (0..sequences.len())
            .map(|_| {
                let positions = 1 + random.below(7) as u32;
                (positions, positions + 1 + random.below(20) as u32)
            })
            .collect();
        let tasks =
            sequences.iter_mut().zip(&shapes).map(|(s, &shape)| s.task(&mut executor, shape)).collect();
        for ((sequence, (task, draft)), shape) in
            sequences.iter_mut().zip(run(&mut executor, tasks)).zip(shapes)
        {
            let what = format!("round {round}, sequence {}, {shape:?}", sequence.spec.seed);
            let expected = expected(&mut engine, &sequence.spec, &sequence.ids, shape);
            assert_eq!(draft, expected, "{what}");
            assert_eq!(draft.check_shape(), Ok(()), "{what}");
            let first = draft.first_path();
            let held = [&sequence.ids[..], &first[..first.len() - 1]].concat();
            assert_eq!(task.cached.ids(), held, "{what}");
            assert_eq!(executor.blocks_held(task.slot), (held.len() as u64).div_ceil(16), "{what}");
            sequence.cached = task.cached;
            let is_beside =
                |i: &usize| draft.parent(*i) > 0 && !first.contains(&draft.token_ids[draft.parent(*i) - 1]);
            with_branches += usize::from((0..draft.token_ids.len()).any(|i| is_beside(&i)));
            let before = sequence.held;
            sequence.commit(&draft, &mut random, 300 + round);
            beside_the_chain += usize::from(sequence.held == before);
        }
    }
    sequences.iter().for_each(|sequence| executor.close(sequence.slot));
    assert_eq!(executor.stats().kv_blocks_used, 0);
    (with_branches, beside_the_chain)
}

/// Checks that the test above can fail: KV of a different path changes the proposal.
#[test]
fn the_kv_of_another_path_is_noticed() {
    let (mut executor, mut engine) = (executor(&[]), engine());
    let noticed = |seed: u64| {
        let mut sequence = Sequence::new(&mut executor, seed, SamplingParams::default());
        let prompt = sequence.ids.clone();
        let task = sequence.task(&mut executor, (4, 12));
        let (task, draft) = run(&mut executor, vec![task]).remove(0);
        let (first, other) = (draft.first_path(), draft.token_ids[1]);
        sequence.cached = task.cached;
        sequence.ids.extend([if first[0] == other { draft.token_ids[0] } else { other }, 500]);
        // Pretend that the other id's row had been moved to the first one's position.
        sequence.cached.truncate(prompt.len() as u32);
        sequence.cached.append(&sequence.ids[prompt.len()..][..1]);
        sequence.held = prompt.len() + 1;
        let task = sequence.task(&mut executor, (4, 12));
        let (_, found) = run(&mut executor, vec![task]).remove(0);
        executor.close(sequence.slot);
        found != expected(&mut engine, &sequence.spec, &sequence.ids, (4, 12))
    };
    let num_noticed = (1..9).map(noticed).filter(|noticed| *noticed).count();
    assert!(num_noticed >= 6, "{num_noticed} of 8");
}

/// Without space for tree rows, in the window or in the KV, the chain gets leaves, whose rows never run.
#[test]
fn without_room_for_branches_there_are_leaves() {
    for more in [["--max-model-len", "32"], ["--kv-memory", "64KiB"]] {
        let mut executor = executor(&more);
        let mut sequence = Sequence::new(&mut executor, 2, SamplingParams::default());
        // Otherwise the chain might end early.
        sequence.spec =
            Arc::new(SequenceSpec { stop_token_ids: vec![], ..SequenceSpec::clone(&sequence.spec) });
        let window = executor.limits().max_model_len.min(executor.stats().kv_blocks_total as u32 * 16);
        let filler = (sequence.ids.len() as TokenId..window - 6).map(|i| 20 + i);
        sequence.ids.extend(filler);
        let task = sequence.task(&mut executor, (6, 20));
        let (task, draft) = run(&mut executor, vec![task]).remove(0);
        let first = draft.first_path();
        let is_leaf = |i: usize| {
            let parent = draft.parent(i);
            parent == 0 || first[draft.depths()[parent - 1] as usize - 1] == draft.token_ids[parent - 1]
        };
        assert!(draft.token_ids.len() == 20 && (0..20).all(is_leaf), "{more:?}: {draft:?}");
        assert!(first.len() == 6 && task.tree.is_none(), "{more:?}");
    }
}

/// A stop token ends its branch, and the sequence's end ends every branch.
#[test]
fn nothing_follows_the_end() {
    let mut executor = executor(&[]);
    let mut engine = engine();
    for room in 1..6 {
        let mut sequence =
            Sequence::new(&mut executor, 5, SamplingParams { temperature: 1.8, ..SamplingParams::default() });
        let max_len = sequence.ids.len() as u32 + room;
        sequence.spec = Arc::new(SequenceSpec {
            max_len,
            stop_token_ids: (0..2_000).collect(),
            ..(*sequence.spec).clone()
        });
        let task = sequence.task(&mut executor, (8, 24));
        let (_, draft) = run(&mut executor, vec![task]).remove(0);
        assert_eq!(draft, expected(&mut engine, &sequence.spec, &sequence.ids, (room.min(8), 24)));
        assert!(draft.depth() <= room, "{draft:?}");
        let is_over = |i: usize| sequence.spec.stop_token_ids.contains(&draft.token_ids[i]);
        let inner = (0..draft.token_ids.len()).filter_map(|i| draft.parent(i).checked_sub(1));
        assert!(inner.into_iter().all(|i| !is_over(i)), "{draft:?}");
        executor.close(sequence.slot);
    }
}
