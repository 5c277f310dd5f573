//! A draft worker's agreement bits for committed tokens that it is fed are exact: each bit tells whether the
//! token equals the first guess of a proposal at that position. Tested with the bundled draft, greedy and
//! sampled.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use clap::Parser;
use draft_worker::config::{Flags, RawDraft};
use draft_worker::propose::Propose;
use engine::cuda::host_driver::HostDriver;
use speculation::cached_sequence::{Admission, CachedSequence};
use speculation::prefix::Prefix;
use speculation::{ReplyBody, Role, SamplingParams, SequenceId, SequenceSpec, Step, TokenId, Work};
use worker::Task;
use worker::executor::StepExecutor;
use worker::model::ModelExecutor;
use worker::table::{RouterId, SequenceKey};

const PROMPT: [TokenId; 5] = [11, 245, 803, 17, 300];

fn executor(more: &[&str]) -> ModelExecutor<Propose> {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/draft");
    let flags = ["outrider-draft-worker", "--model", &model.to_string_lossy()];
    let flags = Flags::parse_from(flags.iter().chain(more));
    let config =
        service::config::load::<RawDraft>(&flags, None, "OUTRIDER_NOWHERE_").expect("the flags suffice");
    worker::serve::load(&config.worker, Role::Draft, Propose { keeps_candidates: false })
        .expect("the bundled draft loads")
        .executor
}

/// Runs steps of one sequence, each with the context up to the given number of `ids`; returns the replies and
/// their agreement bits.
fn step(
    executor: &mut ModelExecutor<Propose>,
    spec: &SequenceSpec,
    ids: &[TokenId],
    feeds: &[(usize, Work)],
) -> Vec<(ReplyBody, Vec<bool>)> {
    let (slot, mut cached, mut base) = (executor.open(), CachedSequence::default(), 0);
    let key = SequenceKey { router: RouterId(1), sequence: SequenceId(1) };
    let mut answers = Vec::new();
    for (step_seq, (until, work)) in (1..).zip(feeds) {
        let step = Step {
            sequence_id: SequenceId(1),
            epoch: 1,
            step_seq,
            spec: (step_seq == 1).then(|| Arc::new(spec.clone())),
            base_len: base as u32,
            prefix_hash: Prefix::new(&ids[..base]).hash_at(base as u32).expect("it holds so many"),
            append_ids: ids[base..*until].to_vec(),
            work: work.clone(),
        };
        assert_eq!(cached.admit(&step, &executor.limits()), Admission::Run);
        let mut tasks =
            VecDeque::from([Task::new(key, slot, step, std::mem::take(&mut cached), Instant::now())]);
        let (task, body) = loop {
            if let Some(done) = executor.advance(&mut tasks, u32::MAX).expect("there is room").pop() {
                break done;
            }
        };
        answers.push((body, task.reply(ReplyBody::Fed { cached_len: 0, prompt_logprobs: None }).agreed));
        (cached, base) = (task.cached, *until);
    }
    executor.close(slot);
    answers
}

/// Feeds a sequence of the worker's own guesses with every third id changed, and checks every bit. Returns
/// the ids and all agreement bits.
fn check(
    executor: &mut ModelExecutor<Propose>,
    sampling: &SamplingParams,
    num_ids: usize,
) -> (Vec<TokenId>, Vec<Vec<bool>>) {
    let spec = SequenceSpec {
        seed: 7,
        prompt_len: PROMPT.len() as u32,
        max_len: 100,
        sampling: sampling.clone(),
        ..SequenceSpec::default()
    };
    let mut ids = PROMPT.to_vec();
    let mut guessed = Vec::new();
    for at in 0..num_ids {
        let propose = [(ids.len(), Work::Propose { num_draft_tokens: 1, num_tree_tokens: 0 })];
        let answers = step(executor, &spec, &ids, &propose);
        let ReplyBody::Proposal(proposal) = &answers[0].0 else { panic!("{answers:?}") };
        let guess = proposal.draft.token_ids[0];
        guessed.push(guess);
        ids.push(if at % 3 == 2 { (guess + 1) % 1_000 } else { guess });
    }
    let prompt = PROMPT.len();
    let expected: Vec<bool> = guessed.iter().zip(&ids[prompt..]).map(|(guess, id)| guess == id).collect();
    let feeds = [(prompt, Work::Feed), (prompt + 10, Work::Feed), (ids.len(), Work::Feed)];
    let fed = step(executor, &spec, &ids, &feeds);
    assert!(fed[0].1.is_empty(), "a prompt is nobody's draw");
    // The first id of a context cannot be compared: the logits before it were discarded.
    assert_eq!(fed[1].1, expected[1..10]);
    assert_eq!(fed[2].1, expected[11..]);
    assert!(expected.contains(&true) && expected.contains(&false));
    // A proposal reports the same bits for its context, and reporting does not change its guesses.
    let work = Work::Propose { num_draft_tokens: 2, num_tree_tokens: 0 };
    let told = step(executor, &spec, &ids, &[(prompt + 10, Work::Feed), (ids.len(), work.clone())]);
    assert_eq!(told[1].1, expected[11..]);
    assert_eq!(told[1].0, step(executor, &spec, &ids, &[(ids.len(), work)])[0].0);
    (ids, told.into_iter().map(|(_, agreed)| agreed).collect())
}

#[test]
fn each_bit_is_the_guess_that_a_proposal_would_have_begun_with() {
    let mut executor = executor(&[]);
    for temperature in [0.0, 1.0] {
        check(&mut executor, &SamplingParams { temperature, ..SamplingParams::default() }, 24);
    }
}

/// The same with draws on the worker's GPU, for the context's rows and for the guesses, with and without
/// filters.
#[test]
fn a_worker_that_draws_on_its_device_says_what_the_cpus_says() {
    let name = "agreement::a_worker_that_draws_on_its_device_says_what_the_cpus_says";
    let Some(driver) = HostDriver::for_test(name) else { return };
    let kernels = driver.kernels.to_string_lossy();
    let device = ["--device", "cuda:0", "--cuda-kernels", &kernels, "--kv-memory", "4MiB"];
    let mut on_device = executor(&[&device[..], &["--profile-steps", "false"]].concat());
    let mut on_cpu = executor(&["--weights", "bf16"]);
    let plain = SamplingParams::default();
    for sampling in [
        SamplingParams { temperature: 0.0, ..plain.clone() },
        SamplingParams { min_tokens: 40, logit_bias: vec![(700, 2.0)], ..plain.clone() },
        SamplingParams { top_p: 0.9, ..plain },
    ] {
        let found = check(&mut on_device, &sampling, 14);
        assert_eq!(found, check(&mut on_cpu, &sampling, 14), "{sampling:?}");
    }
}

#[test]
fn nothing_is_said_where_draws_depend_on_what_was_drawn() {
    let mut executor = executor(&[]);
    let sampling = SamplingParams { presence_penalty: 0.5, ..SamplingParams::default() };
    let spec = SequenceSpec { prompt_len: 5, max_len: 100, sampling, ..SequenceSpec::default() };
    let ids: Vec<TokenId> = PROMPT.into_iter().cycle().take(20).collect();
    let feeds = [(5, Work::Feed), (20, Work::Feed)];
    assert!(step(&mut executor, &spec, &ids, &feeds)[1].1.is_empty());
}
