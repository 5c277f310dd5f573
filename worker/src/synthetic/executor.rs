//! [`SyntheticExecutor`]: forwards that only take time.
//!
//! Batches are formed by the same function as in a model's worker ([`mod@scheduling::batch`]), and KV blocks
//! are counted, so that rollback, preemption and refusals happen as in a real worker. Replies come from
//! [`scheduling::profile::synthetic`].

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use scheduling::batch::{RowLimits, StepChunk, StepRows, form_batch};
use scheduling::profile::synthetic::{StepInProgress, SyntheticModel};
use scheduling::profile::text::{mix, unit};
use scheduling::profile::{ForwardRows, Profile};
use speculation::cached_sequence::WorkerLimits;
use speculation::{AcceptanceMode, Refusal, RefusalCause, ReplyBody, Role, SequenceSpec};

use crate::Task;
use crate::executor::{ExecutorStats, OutOfKvBlocks, StepExecutor};
use crate::task::{Slot, take_finished};

/// An executor that simulates a profile; see the module documentation.
#[derive(Debug)]
pub struct SyntheticExecutor {
    model: SyntheticModel,
    max_model_len: u32,
    /// Factor by which all times of the profile are multiplied.
    time_scale: f64,
    /// KV tokens per sequence.
    slots: HashMap<Slot, u32>,
    next_slot: u64,
    began: Instant,
    /// Time that sleeps exceeded their request so far; later sleeps are shortened by it.
    overslept: Duration,
    stats: ExecutorStats,
}

impl SyntheticExecutor {
    /// Creates the executor of a role's worker, with a maximum sequence length and a time scale.
    pub fn new(profile: Arc<Profile>, role: Role, (max_model_len, time_scale): (u32, f64)) -> Self {
        Self {
            model: SyntheticModel::new(profile, role),
            max_model_len,
            time_scale,
            slots: HashMap::new(),
            next_slot: 0,
            began: Instant::now(),
            overslept: Duration::ZERO,
            stats: ExecutorStats::default(),
        }
    }

    fn blocks(&self, tokens: u32) -> u64 {
        u64::from(tokens.div_ceil(self.model.pool().kv_block_size))
    }

    fn blocks_used(&self) -> u64 {
        self.slots.values().map(|tokens| self.blocks(*tokens)).sum()
    }

    fn plan(&self, tasks: &VecDeque<Task>, prompt_rows: u32) -> Vec<StepChunk> {
        let ready: Vec<StepRows> = tasks.iter().map(Task::rows_left).collect();
        let mut blocks_left = self.model.pool().kv_blocks.saturating_sub(self.blocks_used());
        let limits = RowLimits { all: self.model.pool().max_batch_rows, prompts: prompt_rows };
        form_batch(&ready, limits, |index, rows| {
            let held = self.slots[&tasks[index].slot];
            let blocks = self.blocks(held + rows) - self.blocks(held);
            let fits = blocks <= blocks_left;
            blocks_left -= if fits { blocks } else { 0 };
            fits
        })
    }

    /// Adds the rows to the KV accounting and sleeps for their time.
    fn forward(&mut self, tasks: &VecDeque<Task>, shares: &[StepChunk]) {
        let mut forward = ForwardRows::default();
        let mut rows = 0;
        for share in shares {
            let task = &tasks[share.index];
            let tail = share.rows(&task.rows_left()) - share.context;
            let held = self.slots.get_mut(&task.slot).expect("a task's slot is open");
            *held += share.context + tail;
            rows += u64::from(share.context + tail);
            forward.add((share.context, tail), *held);
        }
        self.stats.forwards += 1;
        self.stats.rows += rows;
        self.stats.sequences += shares.len() as u64;
        self.stats.kv_tokens += forward.kv_tokens;
        let micros = self.model.pool().curve.micros(forward);
        let chance = unit(mix(self.stats.forwards ^ (self.model.role() as u64) << 32));
        self.sleep(Duration::from_secs_f64(
            self.model.profile().with_noise(micros, chance) * self.time_scale / 1e6,
        ));
    }

    fn sleep(&mut self, time: Duration) {
        let due = time.saturating_sub(self.overslept);
        self.overslept = self.overslept.saturating_sub(time);
        let asleep = Instant::now();
        std::thread::sleep(due);
        self.overslept += asleep.elapsed().saturating_sub(due);
    }

    /// Processes a task's share; `None` while the task needs another forward.
    fn process_chunk(&mut self, task: &mut Task, share: &StepChunk) -> Option<ReplyBody> {
        let seconds = self.seconds();
        let body = self.model.advance(&mut in_progress(task), share, seconds);
        self.keep_candidates(task);
        let body = body?;
        self.truncate(task.slot, task.cached.len());
        Some(body)
    }

    /// Seconds since start, in the profile's time.
    fn seconds(&self) -> f64 {
        self.began.elapsed().as_secs_f64() / self.time_scale
    }

    /// Sets the alternatives at the positions guessed so far, for [`crate::ahead`].
    fn keep_candidates(&self, task: &mut Task) {
        let chain = &task.guesses.token_ids;
        task.candidates = self.model.candidates(task.spec(), task.step.start(), chain);
    }
}

fn in_progress(task: &mut Task) -> StepInProgress<'_> {
    StepInProgress {
        step: &task.step,
        cached: &mut task.cached,
        context_done: &mut task.context_done,
        drafted: &mut task.guesses,
        tree_rows: task.tree_rows,
        tree: &mut task.tree,
        agreed: &mut task.agreed,
    }
}

impl StepExecutor for SyntheticExecutor {
    fn limits(&self) -> WorkerLimits {
        WorkerLimits {
            role: self.model.role(),
            vocab_size: self.model.profile().vocab_size,
            max_model_len: self.max_model_len,
            max_tree_tokens: 0,
            grammars: false,
        }
    }

    fn open(&mut self) -> Slot {
        self.next_slot += 1;
        self.slots.insert(Slot(self.next_slot), 0);
        Slot(self.next_slot)
    }

    fn fork(&mut self, slot: Slot, len: u32) -> Option<Slot> {
        let held = self.slots.get(&slot).is_some_and(|held| len <= *held);
        held.then(|| {
            let fork = self.open();
            self.slots.insert(fork, len);
            fork
        })
    }

    fn resume(&mut self, task: &mut Task) -> Option<ReplyBody> {
        if !task.remaining_context().is_empty() {
            return None;
        }
        let seconds = self.seconds();
        let body = self.model.resume(&mut in_progress(task), seconds)?;
        self.truncate(task.slot, task.cached.len());
        self.keep_candidates(task);
        Some(body)
    }

    fn close(&mut self, slot: Slot) {
        self.slots.remove(&slot);
    }

    fn truncate(&mut self, slot: Slot, len: u32) {
        if let Some(held) = self.slots.get_mut(&slot) {
            *held = len.min(*held);
        }
    }

    fn advance(
        &mut self,
        tasks: &mut VecDeque<Task>,
        prompt_rows: u32,
    ) -> Result<Vec<(Task, ReplyBody)>, OutOfKvBlocks> {
        if let Some(index) = tasks.iter().position(|task| needs_model(task.spec())) {
            let mut task = tasks.remove(index).expect("it was found there");
            // No row of its context runs.
            task.cached.truncate(task.step.base_len);
            let reason = "the synthetic engine has no probabilities: request no logprobs, no excluded tokens, \
                          and coupled acceptance";
            let refusal = Refusal { cause: RefusalCause::Unsupported, reason: reason.to_owned() };
            return Ok(vec![(task, ReplyBody::Refused(refusal))]);
        }
        let shares = self.plan(tasks, prompt_rows);
        if shares.is_empty() {
            return Err(OutOfKvBlocks);
        }
        self.forward(tasks, &shares);
        let mut finished = Vec::new();
        for share in &shares {
            let task = &mut tasks[share.index];
            task.has_run = true;
            let body = self.process_chunk(task, share);
            finished.extend(body.map(|body| (share.index, body)));
        }
        Ok(take_finished(tasks, finished))
    }

    fn blocks_held(&self, slot: Slot) -> u64 {
        self.slots.get(&slot).map_or(0, |tokens| self.blocks(*tokens))
    }

    fn stats(&self) -> ExecutorStats {
        let (kv_blocks_used, kv_blocks_total) = (self.blocks_used(), self.model.pool().kv_blocks);
        ExecutorStats { kv_blocks_used, kv_blocks_total, ..self.stats }
    }
}

/// Whether a sequence requests something that requires a model.
fn needs_model(spec: &SequenceSpec) -> bool {
    spec.logprobs.is_some()
        || spec.prompt_logprobs.is_some()
        || spec.sampling.has_exclusions()
        || (spec.acceptance != AcceptanceMode::Coupled && !spec.sampling.is_greedy())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use speculation::cached_sequence::{Admission, CachedSequence};
    use speculation::{SamplingParams, SequenceId, Step, Work};

    use super::*;
    use crate::table::{RouterId, SequenceKey};

    /// A worker of the bundled pair's profile, in no time.
    fn worker(role: Role) -> SyntheticExecutor {
        let profile = Profile::parse(include_str!("../../../deploy/profiles/cpu-pair.toml")).unwrap();
        SyntheticExecutor::new(Arc::new(profile), role, (2_048, 1e-9))
    }

    /// A step that brings three ids of a new sequence.
    fn task(executor: &mut SyntheticExecutor, spec: SequenceSpec, work: Work) -> Task {
        let key = SequenceKey { router: RouterId(1), sequence: SequenceId(1) };
        let step = Step {
            sequence_id: key.sequence,
            epoch: 1,
            step_seq: 1,
            spec: Some(Arc::new(spec)),
            base_len: 0,
            prefix_hash: 0,
            append_ids: vec![5, 6, 7],
            work,
        };
        let mut cached = CachedSequence::default();
        assert_eq!(cached.admit(&step, &executor.limits()), Admission::Run);
        Task::new(key, executor.open(), step, cached, Instant::now())
    }

    /// The refused context counted as cached, without KV: a later step could build on it.
    #[test]
    fn what_needs_probabilities_is_refused_and_nothing_of_it_is_cached() {
        let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let sampled = SamplingParams::default();
        let excluding = SamplingParams { allowed_token_ids: vec![5], ..SamplingParams::default() };
        let typical = AcceptanceMode::Typical;
        let spec = |sampling: &SamplingParams, acceptance, logprobs, prompt_logprobs| SequenceSpec {
            sampling: sampling.clone(),
            acceptance,
            logprobs,
            prompt_logprobs,
            ..SequenceSpec::default()
        };
        for (spec, is_refused) in [
            (spec(&sampled, AcceptanceMode::Coupled, None, None), false),
            (spec(&excluding, AcceptanceMode::Coupled, None, None), true),
            (spec(&greedy, typical, None, None), false),
            (spec(&sampled, typical, None, None), true),
            (spec(&sampled, AcceptanceMode::Rejection, None, None), true),
            (spec(&greedy, AcceptanceMode::Coupled, Some(0), None), true),
            (spec(&greedy, AcceptanceMode::Coupled, None, Some(0)), true),
        ] {
            let mut executor = worker(Role::Target);
            let mut tasks = VecDeque::from([task(&mut executor, spec.clone(), Work::Feed)]);
            let finished = executor.advance(&mut tasks, u32::MAX).expect("there is room");
            let [(task, body)] = &finished[..] else { panic!("{spec:?} is not answered") };
            let cause = match body {
                ReplyBody::Refused(refusal) => Some(refusal.cause),
                _ => None,
            };
            assert_eq!(cause, is_refused.then_some(RefusalCause::Unsupported), "{spec:?}: {body:?}");
            let kv = executor.slots[&task.slot];
            assert_eq!((task.cached.len(), kv), if is_refused { (0, 0) } else { (3, 3) }, "{spec:?}");
        }
    }

    #[test]
    fn each_guess_has_alternatives_before_the_proposal_is_complete() {
        let mut executor = worker(Role::Draft);
        let spec = SequenceSpec { max_len: 100, prompt_len: 3, ..SequenceSpec::default() };
        let work = Work::Propose { num_draft_tokens: 3, num_tree_tokens: 0 };
        let mut tasks = VecDeque::from([task(&mut executor, spec, work)]);
        for num_guesses in 1..3 {
            assert!(executor.advance(&mut tasks, u32::MAX).expect("there is room").is_empty());
            let [task] = tasks.make_contiguous() else { panic!("it is not complete") };
            assert_eq!((task.guesses.token_ids.len(), task.candidates.len()), (num_guesses, num_guesses));
            assert!(task.candidates.iter().all(|at| at.token_ids.len() > 1));
        }
    }

    #[test]
    fn a_tree_has_branches_where_its_rows_can_run() {
        for (tree_rows, forwards) in [(0, 3), (4, 3)] {
            let mut executor = worker(Role::Draft);
            let spec = SequenceSpec { max_len: 100, prompt_len: 3, ..SequenceSpec::default() };
            let work = Work::Propose { num_draft_tokens: 3, num_tree_tokens: 16 };
            let mut tasks = VecDeque::from([task(&mut executor, spec, work)]);
            tasks[0].tree_rows = tree_rows;
            let mut done = Vec::new();
            while done.is_empty() {
                done = executor.advance(&mut tasks, u32::MAX).expect("there is room");
            }
            let (task, ReplyBody::Proposal(proposal)) = &done[0] else { panic!("{done:?}") };
            let draft = &proposal.draft;
            assert_eq!((draft.token_ids.len(), draft.check_shape()), (16, Ok(())));
            let first = draft.first_path();
            let parents: BTreeSet<usize> = (0..16).map(|i| draft.parent(i)).collect();
            let has_branches = parents.len() > first.len();
            assert_eq!((has_branches, executor.stats.forwards), (tree_rows > 0, forwards));
            // The sequence holds its context and the first path without its last token.
            let held = (3 + first.len() - 1) as u32;
            assert_eq!((task.cached.len(), executor.slots[&task.slot]), (held, held));
        }
    }
}
