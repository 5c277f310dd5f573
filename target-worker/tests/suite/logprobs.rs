//! A target that draws on its device reports the same log probabilities as one on the CPU, for the drawn ids
//! and for the top tokens, also beside sequences that do not request them.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use engine::cuda::GpuOptions;
use engine::cuda::host_driver::HostDriver;
use engine::{Engine, LoadOptions, WeightFormat};
use speculation::cached_sequence::{Admission, CachedSequence};
use speculation::{
    Draft, ReplyBody, Role, SamplingParams, SequenceId, SequenceSpec, Step, TokenId, TokenLogprobs,
    TokenSpan, Work,
};
use target_worker::verify::Verify;
use worker::Task;
use worker::executor::StepExecutor;
use worker::model::ModelExecutor;
use worker::table::{RouterId, SequenceKey};

const PROMPT: [TokenId; 6] = [11, 245, 803, 17, 300, 64];

fn executor(kernels: Option<&Path>, max_batch_rows: usize) -> ModelExecutor<Verify> {
    let model_dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/draft");
    let options = LoadOptions::new(model_dir, WeightFormat::Bf16, 4 << 20);
    let engine = match kernels {
        None => Engine::load(&options),
        Some(dir) => {
            let gpus = GpuOptions { kernels: Some(dir.to_owned()), ..GpuOptions::for_devices(&[0]) };
            Engine::load(&options.on_gpus(gpus))
        }
    };
    ModelExecutor::new(engine.expect("the bundled draft loads"), Role::Target, 4_096, max_batch_rows, Verify)
}

/// The sequences of one forward by their settings: (number of top tokens, temperature, whether the prompt is
/// scored).
const ASKED: [(Option<u32>, f32, bool); 5] = [
    (None, 1.0, false),
    (Some(3), 0.0, false),
    (None, 0.0, false),
    (Some(0), 1.0, false),
    (Some(20), 0.7, true),
];

fn step(number: usize, drafted: &[TokenId]) -> Step {
    let (logprobs, temperature, scores_prompt) = ASKED[number];
    let sampling = SamplingParams { temperature, presence_penalty: 0.3, ..SamplingParams::default() };
    let spec = SequenceSpec {
        seed: 5 + number as u64,
        prompt_len: PROMPT.len() as u32,
        max_len: 60,
        logprobs,
        prompt_logprobs: scores_prompt.then_some(2),
        sampling,
        ..SequenceSpec::default()
    };
    Step {
        sequence_id: SequenceId(number as u64),
        epoch: 1,
        step_seq: 1,
        spec: Some(Arc::new(spec)),
        base_len: 0,
        prefix_hash: 0,
        append_ids: PROMPT.to_vec(),
        work: Work::Verify { draft: Draft::chain(drafted.to_vec()) },
    }
}

/// Spans that the sequences commit in their first round with these drafts, all in one forward.
fn spans(executor: &mut ModelExecutor<Verify>, drafts: &[Vec<TokenId>; 5]) -> Vec<TokenSpan> {
    let limits = executor.limits();
    let task = |(number, drafted): (usize, &Vec<TokenId>)| {
        let (step, mut cached) = (step(number, drafted), CachedSequence::default());
        assert_eq!(cached.admit(&step, &limits), Admission::Run);
        let key = SequenceKey { router: RouterId(1), sequence: step.sequence_id };
        Task::new(key, executor.open(), step, cached, Instant::now())
    };
    let mut queue: VecDeque<Task> = drafts.iter().enumerate().map(task).collect();
    let mut done = Vec::new();
    while !queue.is_empty() {
        done.extend(executor.advance(&mut queue, u32::MAX).expect("there is room"));
    }
    done.sort_by_key(|(task, _)| task.key.sequence);
    let span = |(task, body): (Task, ReplyBody)| {
        executor.close(task.slot);
        let ReplyBody::Span(span) = body else { panic!("{body:?}") };
        span
    };
    done.into_iter().map(span).collect()
}

/// Checks that lengths and `top_n` match and that the values differ by no more than bf16 logits do between
/// device and CPU.
fn check_near(found: &[TokenLogprobs], expected: &[TokenLogprobs], top_n: usize) {
    assert_eq!(found.len(), expected.len());
    let near = |a: f32, b: f32| (a - b).abs() < 0.05;
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.top.len(), top_n);
        assert!(near(found.logprob, expected.logprob), "{found:?} and {expected:?}");
        assert!(found.top.iter().zip(&expected.top).all(|(a, b)| near(a.1, b.1)), "{found:?}");
    }
}

#[test]
fn a_device_tells_probabilities_beside_sequences_that_want_none() {
    let name = "logprobs::a_device_tells_probabilities_beside_sequences_that_want_none";
    let Some(driver) = HostDriver::for_test(name) else { return };
    let mut on_cpu = executor(None, 512);
    let first = spans(&mut on_cpu, &Default::default());
    // Drafts with a correct first id and a second id that is mostly wrong.
    let drafts: [Vec<TokenId>; 5] = std::array::from_fn(|i| vec![first[i].token_ids[0], 7]);
    // In the second case prompts are split over several forwards.
    for (drafts, rows) in [(Default::default(), 512), (Default::default(), 4), (drafts, 512)] {
        let mut on_device = executor(Some(&driver.kernels), rows);
        let (expected, found) = (spans(&mut on_cpu, &drafts), spans(&mut on_device, &drafts));
        for (number, (expected, found)) in expected.iter().zip(&found).enumerate() {
            let (logprobs, _, scores_prompt) = ASKED[number];
            assert_eq!(found.token_ids, expected.token_ids, "sequence {number}");
            assert_eq!(found.num_accepted as usize, found.token_ids.len() - 1);
            let of_prompt =
                |span: &TokenSpan| span.prompt_logprobs.clone().map_or(vec![], |told| told.entries);
            let (told, expected_of_prompt) = (of_prompt(found), of_prompt(expected));
            assert_eq!(told.len(), if scores_prompt { PROMPT.len() - 1 } else { 0 });
            check_near(&told, &expected_of_prompt, 2);
            let told = if logprobs.is_some() { found.token_ids.len() } else { 0 };
            assert_eq!(found.logprobs.len(), told, "sequence {number}");
            check_near(&found.logprobs, &expected.logprobs, logprobs.unwrap_or(0) as usize);
        }
    }
}
