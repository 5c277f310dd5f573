//! A target that draws on its device verifies token trees: with trees it commits the same ids with the same
//! log probabilities as without a draft, for sequences with different settings in one batch.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use engine::cuda::GpuOptions;
use engine::cuda::host_driver::HostDriver;
use engine::{Engine, LoadOptions, WeightFormat};
use speculation::cached_sequence::{Admission, CachedSequence};
use speculation::prefix::Prefix;
use speculation::{
    Draft, ReplyBody, Role, SamplingParams, SequenceId, SequenceSpec, Step, TokenId, TokenLogprobs,
    TokenSpan, Work,
};
use target_worker::verify::Verify;
use worker::executor::StepExecutor;
use worker::model::ModelExecutor;
use worker::table::{RouterId, SequenceKey};
use worker::{Task, task::Slot};

const PROMPT: [TokenId; 13] = [11, 245, 803, 17, 300, 64, 9, 1_200, 77, 5, 640, 31, 2];
const VOCAB: u32 = 4_096;
/// Output ids per sequence.
const WRITTEN: usize = 9;
/// Depth of a tree.
const DEPTH: usize = 4;

fn engine(kernels: &Path) -> Engine {
    let model_dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/draft");
    let options = LoadOptions::new(model_dir, WeightFormat::Bf16, 4 << 20);
    let gpus = GpuOptions { kernels: Some(kernels.to_owned()), ..GpuOptions::for_devices(&[0]) };
    Engine::load(&options.on_gpus(gpus)).expect("the bundled draft loads")
}

/// Specs of the sequences that share a forward.
fn specs() -> Vec<SequenceSpec> {
    let plain = SamplingParams::default();
    let penalized = SamplingParams { frequency_penalty: 0.8, repetition_penalty: 1.2, ..plain.clone() };
    let filtered = SamplingParams { temperature: 0.9, top_p: 0.8, top_k: 30, ..plain.clone() };
    let greedy = SamplingParams { temperature: 0.0, presence_penalty: 1.0, ..plain.clone() };
    let all = [(penalized, Some(2)), (filtered, None), (greedy, Some(0)), (plain, None)];
    let spec = |(number, (sampling, logprobs)): (u64, _)| SequenceSpec {
        seed: 40 + number,
        prompt_len: PROMPT.len() as u32,
        max_len: (PROMPT.len() + WRITTEN) as u32,
        logprobs,
        sampling,
        ..SequenceSpec::default()
    };
    (0..).zip(all).map(spec).collect()
}

/// Builds a tree with two ids per position: the second is the correct one, except at the last position; the
/// first has a leaf.
fn tree(right: &[TokenId]) -> Draft {
    let mut draft = Draft::default();
    let (mut wrong, mut parent) = (None, 0);
    for (depth, &id) in right.iter().enumerate() {
        let second = if depth == DEPTH - 1 { (id + 2) % VOCAB } else { id };
        let first = draft.token_ids.len() as u32 + 1;
        draft.token_ids.extend([(id + 1) % VOCAB, second]);
        draft.parents.extend([parent, parent]);
        draft.token_ids.extend(wrong.map(|_| id));
        draft.parents.extend(wrong);
        (wrong, parent) = (Some(first), first + 1);
    }
    draft
}

/// A sequence between two steps.
struct Running {
    slot: Slot,
    cached: CachedSequence,
    ids: Vec<TokenId>,
    logprobs: Vec<TokenLogprobs>,
    /// Number of ids with KV after the last step.
    held: u32,
    steps: u64,
    accepted: u32,
    is_done: bool,
}

/// Runs all sequences to their ends, with one step of each in every forward. `draft` returns the draft for a
/// sequence and its length.
fn run(executor: &mut ModelExecutor<Verify>, draft: impl Fn(usize, usize) -> Draft) -> Vec<Running> {
    let specs: Vec<Arc<SequenceSpec>> = specs().into_iter().map(Arc::new).collect();
    let begin = |_: &Arc<SequenceSpec>| Running {
        slot: executor.open(),
        cached: CachedSequence::default(),
        ids: PROMPT.to_vec(),
        logprobs: Vec::new(),
        held: 0,
        steps: 0,
        accepted: 0,
        is_done: false,
    };
    let mut running: Vec<Running> = specs.iter().map(begin).collect();
    while running.iter().any(|sequence| !sequence.is_done) {
        let mut queue = VecDeque::new();
        for (number, sequence) in running.iter_mut().enumerate().filter(|(_, sequence)| !sequence.is_done) {
            sequence.steps += 1;
            let base_len = sequence.held;
            let step = Step {
                sequence_id: SequenceId(number as u64),
                epoch: 1,
                step_seq: sequence.steps,
                spec: Some(Arc::clone(&specs[number])),
                base_len,
                prefix_hash: Prefix::new(&sequence.ids).hash_at(base_len).expect("it holds as many"),
                append_ids: sequence.ids[base_len as usize..].to_vec(),
                work: Work::Verify { draft: draft(number, sequence.ids.len()) },
            };
            let mut cached = std::mem::take(&mut sequence.cached);
            assert_eq!(cached.admit(&step, &executor.limits()), Admission::Run);
            let key = SequenceKey { router: RouterId(1), sequence: step.sequence_id };
            queue.push_back(Task::new(key, sequence.slot, step, cached, Instant::now()));
        }
        while !queue.is_empty() {
            for (task, body) in executor.advance(&mut queue, u32::MAX).expect("there is room") {
                let ReplyBody::Span(span) = body else { panic!("{body:?}") };
                running[task.key.sequence.0 as usize].take(task, span);
            }
        }
    }
    running.iter().for_each(|sequence| executor.close(sequence.slot));
    running
}

impl Running {
    fn take(&mut self, task: Task, span: TokenSpan) {
        assert_eq!(span.start as usize, self.ids.len());
        self.ids.extend(&span.token_ids);
        self.logprobs.extend(span.logprobs);
        self.held = span.start + span.num_accepted;
        self.accepted += span.num_accepted;
        self.is_done = span.finish.is_some();
        self.cached = task.cached;
    }
}

#[test]
fn trees_change_no_id_of_a_target_on_a_device() {
    let name = "trees::trees_change_no_id_of_a_target_on_a_device";
    let Some(driver) = HostDriver::for_test(name) else { return };
    let engine = engine(&driver.kernels);
    let mut executor = ModelExecutor::new(engine, Role::Target, VOCAB, 512, Verify);
    assert_eq!(executor.limits().max_tree_tokens, 64);
    let plain = run(&mut executor, |_, _| Draft::default());
    let drafted = run(&mut executor, |number, len| {
        let text = &plain[number].ids;
        // A draft leaves space for the draw after it.
        tree(&text[len..text.len().min(len + DEPTH).max(len + 1) - usize::from(text.len() <= len + DEPTH)])
    });
    for (number, (found, expected)) in drafted.iter().zip(&plain).enumerate() {
        assert_eq!(found.ids, expected.ids, "sequence {number}");
        assert_eq!(found.logprobs, expected.logprobs, "sequence {number}");
        assert_eq!(expected.steps as usize, WRITTEN);
        assert!(
            found.steps < expected.steps && found.accepted > 0,
            "sequence {number}: {} steps",
            found.steps
        );
    }
}
