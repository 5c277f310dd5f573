//! A step's reply does not depend on how its rows are split into forwards or on other rows in the batch.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use engine::{Engine, LoadOptions, WeightFormat};
use speculation::cached_sequence::{Admission, CachedSequence, WorkerLimits};
use speculation::{
    Draft, Refusal, ReplyBody, Role, SamplingParams, SequenceId, SequenceSpec, Step, TokenId, Work,
};
use target_worker::verify::Verify;
use worker::executor::StepExecutor;
use worker::model::ModelExecutor;
use worker::table::{RouterId, SequenceKey};
use worker::{Task, task::Slot};

fn executor(max_batch_rows: usize) -> ModelExecutor<Verify> {
    let model_dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/target");
    let engine = Engine::load(&LoadOptions::new(model_dir, WeightFormat::AsStored, 64 << 20))
        .expect("the bundled target loads");
    ModelExecutor::new(engine, Role::Target, 4_096, max_batch_rows, Verify)
}

fn prompt(len: u32, salt: u32) -> Vec<TokenId> {
    (0..len).map(|i| (i * i * 31 + i * 7 + salt) % 4_096).collect()
}

/// A step that scores its prompt and verifies a draft after it.
fn task(slot: Slot, sequence: u64, prompt: &[TokenId], draft: &[TokenId]) -> Task {
    let spec = SequenceSpec {
        seed: 5,
        prompt_len: prompt.len() as u32,
        max_len: prompt.len() as u32 + 40,
        logprobs: Some(2),
        prompt_logprobs: Some(2),
        sampling: SamplingParams { repetition_penalty: 1.2, top_p: 0.9, ..SamplingParams::default() },
        ..SequenceSpec::default()
    };
    let step = Step {
        sequence_id: SequenceId(sequence),
        epoch: 1,
        step_seq: 1,
        spec: Some(Arc::new(spec)),
        base_len: 0,
        prefix_hash: 0,
        append_ids: prompt.to_vec(),
        work: Work::Verify { draft: Draft::chain(draft.to_vec()) },
    };
    let mut cached = CachedSequence::default();
    let limits = WorkerLimits {
        role: Role::Target,
        vocab_size: 4_096,
        max_model_len: 2_048,
        grammars: false,
        max_tree_tokens: 0,
    };
    assert_eq!(cached.admit(&step, &limits), Admission::Run);
    let key = SequenceKey { router: RouterId(1), sequence: SequenceId(sequence) };
    Task::new(key, slot, step, cached, Instant::now())
}

/// Runs the tasks until all are answered; returns them by sequence id.
fn run(
    executor: &mut ModelExecutor<Verify>,
    tasks: Vec<(u64, Vec<TokenId>, Vec<TokenId>)>,
) -> Vec<(Task, ReplyBody)> {
    run_within(executor, u32::MAX, tasks)
}

/// Like `run`, with at most `prompt_rows` rows of prompts per forward.
fn run_within(
    executor: &mut ModelExecutor<Verify>,
    prompt_rows: u32,
    tasks: Vec<(u64, Vec<TokenId>, Vec<TokenId>)>,
) -> Vec<(Task, ReplyBody)> {
    let mut queue: VecDeque<Task> =
        tasks.iter().map(|(id, prompt, draft)| task(executor.open(), *id, prompt, draft)).collect();
    let mut done = Vec::new();
    while !queue.is_empty() {
        done.extend(executor.advance(&mut queue, prompt_rows).expect("the KV pool is ample"));
    }
    done.sort_by_key(|(task, _)| task.key.sequence);
    done
}

#[test]
fn answers_do_not_depend_on_how_rows_are_cut() {
    let whole = &mut executor(512);
    let ids = prompt(90, 1);
    let (_, alone) = run(whole, vec![(1, ids.clone(), vec![])]).remove(0);
    let ReplyBody::Span(first) = &alone else { panic!("{alone:?}") };
    // The draft starts with the id that was drawn; its two equal ids after that cannot both be correct.
    let draft = vec![first.token_ids[0], 17, 17];
    let (_, expected) = run(whole, vec![(2, ids.clone(), draft.clone())]).remove(0);
    let ReplyBody::Span(span) = &expected else { panic!("{expected:?}") };
    assert!(span.num_accepted >= 1, "{span:?}");
    let scores = span.prompt_logprobs.as_ref().unwrap();
    assert_eq!((scores.start, scores.entries.len()), (1, 89), "every prompt id but the first is scored");

    for (max_batch_rows, prompt_rows) in [(1, u32::MAX), (7, u32::MAX), (64, u32::MAX), (64, 5)] {
        let executor = &mut executor(max_batch_rows);
        let others = (10..14).map(|id| (id, prompt(30 + id as u32 * 9, id as u32), vec![3, 4]));
        let tasks = std::iter::once((2, ids.clone(), draft.clone())).chain(others).collect();
        let done = run_within(executor, prompt_rows, tasks);
        assert_eq!(done[0].1, expected, "at most {max_batch_rows} rows a forward, {prompt_rows} of prompts");
        assert_eq!(done[0].0.cached.len(), 90 + span.num_accepted, "what is held is what was accepted");
        for (task, _) in done {
            executor.close(task.slot);
        }
        assert_eq!(executor.stats().kv_blocks_used, 0);
    }
}

/// Replies are equal with and without shared prefixes, and sharing saves rows.
#[test]
fn answers_do_not_depend_on_what_others_have_computed() {
    let plain = |sequence: u64, prompt: &[TokenId], isolation_key: u64| {
        let mut task = task(Slot(0), sequence, prompt, &[3]);
        let spec = SequenceSpec { prompt_logprobs: None, isolation_key, ..task.spec().clone() };
        task.step.spec = Some(Arc::new(spec));
        task.step
    };
    let run = |executor: &mut ModelExecutor<Verify>, steps: &[Step]| -> Vec<ReplyBody> {
        let limits = WorkerLimits {
            role: Role::Target,
            vocab_size: 4_096,
            max_model_len: 2_048,
            grammars: false,
            max_tree_tokens: 0,
        };
        let mut queue: VecDeque<Task> = steps
            .iter()
            .map(|step| {
                let mut cached = CachedSequence::default();
                assert_eq!(cached.admit(step, &limits), Admission::Run);
                let key = SequenceKey { router: RouterId(1), sequence: step.sequence_id };
                Task::new(key, executor.open(), step.clone(), cached, Instant::now())
            })
            .collect();
        let mut done = Vec::new();
        while !queue.is_empty() {
            done.extend(executor.advance(&mut queue, u32::MAX).expect("the KV pool is ample"));
        }
        done.sort_by_key(|(task, _)| task.key.sequence);
        done.into_iter().map(|(_, body)| body).collect()
    };
    let long = prompt(200, 1);
    // Two equal prompts, one with a different id in the middle, and one with a different isolation key.
    let mut other = long.clone();
    other[150] += 1;
    let steps = [plain(1, &long, 7), plain(2, &long, 7), plain(3, &other, 7), plain(4, &long, 8)];
    let expected: Vec<ReplyBody> =
        steps.iter().flat_map(|step| run(&mut executor(512), std::slice::from_ref(step))).collect();

    let shared = &mut executor(512);
    assert_eq!(run(shared, &steps), expected);
    // The first and the fourth run in full, the second runs its last 8 ids, the third runs from the first
    // different block.
    assert_eq!(shared.stats().prefix_hit_tokens, 192 + 144);
    assert_eq!(shared.stats().rows, (201 + 201) + 9 + (200 - 144 + 1));
    assert_eq!(run(shared, &steps[..1]), expected[..1], "and once more, of what is kept");
    assert_eq!(shared.stats().prefix_query_tokens, 5 * 200);
}

/// A task that cannot run is refused; tasks in the same forward get the same replies as alone.
#[test]
fn a_task_that_fails_its_forward_fails_alone() {
    let executor = &mut executor(512);
    let (first, third) = ((1, prompt(40, 1), vec![]), (3, prompt(50, 3), vec![5]));
    let expected: Vec<ReplyBody> =
        run(executor, vec![first.clone(), third.clone()]).into_iter().map(|(_, body)| body).collect();
    let [first, broken, third] = [first, (2, prompt(30, 2), vec![]), third]
        .map(|(id, prompt, draft)| task(executor.open(), id, &prompt, &draft));
    let mut broken = broken;
    broken.step.append_ids[20] = u32::MAX;
    let mut queue = VecDeque::from([first, broken, third]);
    let mut done = Vec::new();
    while !queue.is_empty() {
        done.extend(executor.advance(&mut queue, u32::MAX).expect("the KV pool is ample"));
    }
    let bodies: Vec<ReplyBody> = done.into_iter().map(|(_, body)| body).collect();
    let [first, ReplyBody::Refused(Refusal { reason, .. }), third] = &bodies[..] else {
        panic!("{bodies:?}")
    };
    assert!(reason.contains("4294967295"), "{reason}");
    assert_eq!([first, third], [&expected[0], &expected[1]]);
}
