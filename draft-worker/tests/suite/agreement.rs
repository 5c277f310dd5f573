//! A draft worker's agreement bits for committed tokens that it is fed are exact: each bit tells whether the
//! token equals the first guess of a proposal at that position. Tested with the bundled draft, greedy and
//! sampled.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use draft_worker::propose::Propose;
use engine::cuda::host_driver::HostDriver;
use speculation::cached_sequence::{Admission, CachedSequence};
use speculation::prefix::Prefix;
use speculation::{ReplyBody, SamplingParams, SequenceId, SequenceSpec, Step, TokenId, Work};
use worker::Task;
use worker::executor::StepExecutor;
use worker::model::ModelExecutor;
use worker::table::{RouterId, SequenceKey};
use worker::task::Slot;

use crate::bundled_draft;

const PROMPT: [TokenId; 5] = [11, 245, 803, 17, 300];

fn executor(more: &[&str]) -> ModelExecutor<Propose> {
    bundled_draft::executor(Propose { keeps_candidates: false }, more)
}

/// One sequence, and its state at the worker.
struct Sequence {
    spec: Arc<SequenceSpec>,
    slot: Slot,
    cached: CachedSequence,
    /// Number of ids that the worker has been sent.
    sent: usize,
    step_seq: u64,
}

impl Sequence {
    fn open(executor: &mut ModelExecutor<Propose>, spec: &SequenceSpec) -> Self {
        let (slot, cached) = (executor.open(), CachedSequence::default());
        Self { spec: Arc::new(spec.clone()), slot, cached, sent: 0, step_seq: 0 }
    }

    /// Runs a step with all of `ids` as the context; returns the reply and its agreement bits.
    fn step(
        &mut self,
        executor: &mut ModelExecutor<Propose>,
        ids: &[TokenId],
        work: Work,
    ) -> (ReplyBody, Vec<bool>) {
        self.step_seq += 1;
        let base_len = self.sent as u32;
        let step = Step {
            sequence_id: SequenceId(1),
            epoch: 1,
            step_seq: self.step_seq,
            spec: (self.step_seq == 1).then(|| Arc::clone(&self.spec)),
            base_len,
            prefix_hash: Prefix::new(&ids[..self.sent])
                .hash_at(base_len)
                .expect("the sequence has base_len ids"),
            append_ids: ids[self.sent..].to_vec(),
            work,
        };
        let mut cached = std::mem::take(&mut self.cached);
        assert_eq!(cached.admit(&step, &executor.limits()), Admission::Run);
        executor.truncate(self.slot, base_len);
        let key = SequenceKey { router: RouterId(1), sequence: step.sequence_id };
        let mut tasks = VecDeque::from([Task::new(key, self.slot, step, cached, Instant::now())]);
        let (task, body) = loop {
            if let Some(done) = executor.advance(&mut tasks, u32::MAX).expect("there is room").pop() {
                break done;
            }
        };
        let agreed = task.reply(ReplyBody::Fed { cached_len: 0, prompt_logprobs: None }).agreed;
        (self.cached, self.sent) = (task.cached, ids.len());
        (body, agreed)
    }
}

/// Runs steps of one new sequence, each with the context up to the given number of `ids`; returns the replies
/// and their agreement bits.
fn steps(
    executor: &mut ModelExecutor<Propose>,
    spec: &SequenceSpec,
    ids: &[TokenId],
    feeds: &[(usize, Work)],
) -> Vec<(ReplyBody, Vec<bool>)> {
    let mut sequence = Sequence::open(executor, spec);
    let step = |(until, work): &(usize, Work)| sequence.step(executor, &ids[..*until], work.clone());
    let answers = feeds.iter().map(step).collect();
    executor.close(sequence.slot);
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
    let mut sequence = Sequence::open(executor, &spec);
    for at in 0..num_ids {
        let work = Work::Propose { num_draft_tokens: 1, num_tree_tokens: 0 };
        let (body, _) = sequence.step(executor, &ids, work);
        let ReplyBody::Proposal(proposal) = &body else { panic!("{body:?}") };
        let guess = proposal.draft.token_ids[0];
        guessed.push(guess);
        ids.push(if at % 3 == 2 { (guess + 1) % 1_000 } else { guess });
    }
    executor.close(sequence.slot);
    let prompt = PROMPT.len();
    let expected: Vec<bool> = guessed.iter().zip(&ids[prompt..]).map(|(guess, id)| guess == id).collect();
    let feeds = [(prompt, Work::Feed), (prompt + 10, Work::Feed), (ids.len(), Work::Feed)];
    let fed = steps(executor, &spec, &ids, &feeds);
    assert!(fed[0].1.is_empty(), "a prompt is nobody's draw");
    // The first id of a context cannot be compared: the logits before it were discarded.
    assert_eq!(fed[1].1, expected[1..10]);
    assert_eq!(fed[2].1, expected[11..]);
    assert!(expected.contains(&true) && expected.contains(&false));
    // A proposal reports the same bits for its context, and reporting does not change its guesses: those of a
    // sequence that the worker has not seen before.
    let work = Work::Propose { num_draft_tokens: 2, num_tree_tokens: 0 };
    let told = steps(executor, &spec, &ids, &[(prompt + 10, Work::Feed), (ids.len(), work.clone())]);
    assert_eq!(told[1].1, expected[11..]);
    assert_eq!(told[1].0, steps(executor, &spec, &ids, &[(ids.len(), work)])[0].0);
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
    let mut on_device = executor(&["--device", "cuda:0", "--cuda-kernels", &kernels, "--kv-memory", "4MiB"]);
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
    assert!(steps(&mut executor, &spec, &ids, &feeds)[1].1.is_empty());
}
