//! [`SyntheticMethod`]: forwards that only take time.
//!
//! Who shares a forward is decided by the same function as at a model's worker (`speculation::batch`), and KV blocks are counted, so
//! that rollback, preemption and refusals happen as they do there. A target's draw and a draft's guess are functions of seed and position.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use speculation::batch::{Share, Waiting, form};
use speculation::holding::Limits;
use speculation::profile::text::{SyntheticText, mix, unit};
use speculation::profile::{ForwardRows, Pool, Profile};
use speculation::{
    AcceptanceMode, Draft, FinishReason, Proposal, ReplyBody, Role, SequenceSpec, TokenId, TokenSpan, Work,
};

use crate::Task;
use crate::method::{Method, MethodStats, NeedRoom};
use crate::task::Slot;

/// See the module's page.
#[derive(Debug)]
pub struct SyntheticMethod {
    profile: Arc<Profile>,
    role: Role,
    max_model_len: u32,
    /// Everything takes this many times as long as the profile says.
    time_scale: f64,
    /// KV tokens of each sequence.
    slots: HashMap<Slot, u32>,
    next_slot: u64,
    began: Instant,
    /// By how much sleeps were too long so far: the next ones are shorter by it.
    overslept: Duration,
    stats: MethodStats,
}

impl SyntheticMethod {
    /// A worker of a role; lengths are limited and times stretched.
    pub fn new(profile: Arc<Profile>, role: Role, (max_model_len, time_scale): (u32, f64)) -> Self {
        Self {
            profile,
            role,
            max_model_len,
            time_scale,
            slots: HashMap::new(),
            next_slot: 0,
            began: Instant::now(),
            overslept: Duration::ZERO,
            stats: MethodStats::default(),
        }
    }

    fn pool(&self) -> &Pool {
        match self.role {
            Role::Draft => &self.profile.draft,
            Role::Target => &self.profile.target,
        }
    }

    fn blocks(&self, tokens: u32) -> u64 {
        u64::from(tokens.div_ceil(self.pool().kv_block_size))
    }

    fn blocks_used(&self) -> u64 {
        self.slots.values().map(|tokens| self.blocks(*tokens)).sum()
    }

    fn plan(&self, tasks: &VecDeque<Task>) -> Vec<Share> {
        let waiting: Vec<Waiting> = tasks.iter().map(Task::waiting).collect();
        let mut blocks_left = self.pool().kv_blocks.saturating_sub(self.blocks_used());
        form(&waiting, self.pool().max_batch_rows, |index, rows| {
            let held = self.slots[&tasks[index].slot];
            let blocks = self.blocks(held + rows) - self.blocks(held);
            let fits = blocks <= blocks_left;
            blocks_left -= if fits { blocks } else { 0 };
            fits
        })
    }

    /// Holds the rows and takes their time.
    fn forward(&mut self, tasks: &VecDeque<Task>, shares: &[Share]) {
        let mut forward = ForwardRows::default();
        let mut rows = 0;
        for share in shares {
            let task = &tasks[share.index];
            let tail = share.rows(&task.waiting()) - share.context;
            let held = self.slots.get_mut(&task.slot).expect("a task's slot is open");
            *held += share.context + tail;
            rows += u64::from(share.context + tail);
            forward.add((share.context, tail), *held);
        }
        self.stats.forwards += 1;
        self.stats.rows += rows;
        self.stats.kv_tokens += forward.kv_tokens;
        let micros = self.pool().curve.micros(forward);
        let chance = unit(mix(self.stats.forwards ^ (self.role as u64) << 32));
        self.sleep(Duration::from_secs_f64(self.profile.with_noise(micros, chance) * self.time_scale / 1e6));
    }

    fn sleep(&mut self, time: Duration) {
        let due = time.saturating_sub(self.overslept);
        self.overslept = self.overslept.saturating_sub(time);
        let asleep = Instant::now();
        std::thread::sleep(due);
        self.overslept += asleep.elapsed().saturating_sub(due);
    }

    /// What a task's share leads to; `None` while it needs another forward.
    fn absorb(&mut self, task: &mut Task, share: &Share) -> Option<ReplyBody> {
        task.context_done += share.context as usize;
        if !share.ends_context {
            return None;
        }
        if self.role == Role::Draft && task.is_comparable() {
            task.agreed = self.agreed(task);
        }
        let (body, keep) = match &task.step.work {
            Work::Feed => {
                return Some(ReplyBody::Fed { have: task.step.start(), prompt_logprobs: None });
            }
            Work::Verify { .. } => self.verify(task),
            Work::Propose { num_draft_tokens } => {
                let k = *num_draft_tokens;
                self.propose(task, k)?
            }
        };
        self.truncate(task.slot, keep);
        Some(body)
    }

    /// Which ids of the context but the first it would have guessed.
    fn agreed(&self, task: &Task) -> Vec<bool> {
        let (text, lane) = (self.text_of(task), task.spec().lane);
        let seconds = self.began.elapsed().as_secs_f64() / self.time_scale;
        let mut in_a_row = 0;
        let agrees = |(position, id): (u32, &TokenId)| {
            let rate = self.profile.acceptance.rate(lane, in_a_row, seconds);
            let agrees = text.guess(position, rate) == *id;
            in_a_row = if agrees { in_a_row + 1 } else { 0 };
            agrees
        };
        (task.step.base_len..).zip(&task.step.context).skip(1).map(agrees).collect()
    }

    /// As `speculation::acceptance::verify` does, with tokens from the profile's text.
    fn verify(&self, task: &mut Task) -> (ReplyBody, u32) {
        let (start, spec, text) = (task.step.start(), Arc::clone(spec_of(task)), self.text_of(task));
        let mut span = TokenSpan { start, ..TokenSpan::default() };
        let drafted = task.drafted();
        for (position, i) in (start..).zip(0..=drafted.len()) {
            let token = text.token(position);
            let accepted = drafted.get(i) == Some(&token);
            span.token_ids.push(token);
            span.num_accepted += u32::from(accepted);
            span.finish = finish(&spec, position, token);
            if !accepted || span.finish.is_some() {
                break;
            }
        }
        task.holding.append(&span.token_ids[..span.num_accepted as usize]);
        let keep = start + span.num_accepted;
        (ReplyBody::Span(span), keep)
    }

    /// One guess more, as `draft-worker`'s model method makes them; `None` while there is another to make.
    fn propose(&self, task: &mut Task, k: u32) -> Option<(ReplyBody, u32)> {
        if let Some(&last) = task.guesses.token_ids.last() {
            task.holding.append(&[last]);
        }
        let (start, spec, text) = (task.step.start(), Arc::clone(spec_of(task)), self.text_of(task));
        let guesses = &mut task.guesses.token_ids;
        if k > 0 {
            let seconds = self.began.elapsed().as_secs_f64() / self.time_scale;
            let rate = self.profile.acceptance.rate(spec.lane, guesses.len(), seconds);
            guesses.push(text.guess(start + guesses.len() as u32, rate));
        }
        let num_guessed = guesses.len() as u32;
        let stopped = guesses.last().is_some_and(|id| spec.stop_token_ids.contains(id));
        if num_guessed < k && !stopped && start + num_guessed < spec.max_len {
            return None;
        }
        let draft: Draft = std::mem::take(&mut task.guesses);
        Some((ReplyBody::Proposal(Proposal { start, draft }), task.holding.len()))
    }

    fn text_of(&self, task: &Task) -> SyntheticText {
        let spec = task.spec();
        SyntheticText { seed: spec.seed, choice: spec.choice, vocab_size: self.profile.vocab_size }
    }
}

impl Method for SyntheticMethod {
    fn limits(&self) -> Limits {
        Limits { role: self.role, vocab_size: self.profile.vocab_size, max_model_len: self.max_model_len }
    }

    fn open(&mut self) -> Slot {
        self.next_slot += 1;
        self.slots.insert(Slot(self.next_slot), 0);
        Slot(self.next_slot)
    }

    fn close(&mut self, slot: Slot) {
        self.slots.remove(&slot);
    }

    fn truncate(&mut self, slot: Slot, len: u32) {
        if let Some(held) = self.slots.get_mut(&slot) {
            *held = len.min(*held);
        }
    }

    fn advance(&mut self, tasks: &mut VecDeque<Task>) -> Result<Vec<(Task, ReplyBody)>, NeedRoom> {
        if let Some(index) = tasks.iter().position(|task| asks_too_much(task.spec())) {
            let task = tasks.remove(index).expect("it was found there");
            let reason =
                "the synthetic engine has no probabilities: ask for no logprobs and for coupled acceptance";
            return Ok(vec![(task, ReplyBody::Refused { reason: reason.to_owned() })]);
        }
        let shares = self.plan(tasks);
        if shares.is_empty() {
            return Err(NeedRoom);
        }
        self.forward(tasks, &shares);
        let mut bodies: HashMap<usize, ReplyBody> = HashMap::new();
        for share in &shares {
            if let Some(body) = self.absorb(&mut tasks[share.index], share) {
                bodies.insert(share.index, body);
            }
        }
        let (mut finished, mut left) = (Vec::with_capacity(bodies.len()), VecDeque::new());
        for (index, task) in tasks.drain(..).enumerate() {
            match bodies.remove(&index) {
                Some(body) => finished.push((task, body)),
                None => left.push_back(task),
            }
        }
        *tasks = left;
        Ok(finished)
    }

    fn blocks_held(&self, slot: Slot) -> u64 {
        self.slots.get(&slot).map_or(0, |tokens| self.blocks(*tokens))
    }

    fn stats(&self) -> MethodStats {
        let (kv_blocks_used, kv_blocks_total) = (self.blocks_used(), self.pool().kv_blocks);
        MethodStats { kv_blocks_used, kv_blocks_total, ..self.stats }
    }
}

/// Whether a sequence wants something that only a model has.
fn asks_too_much(spec: &SequenceSpec) -> bool {
    spec.logprobs.is_some()
        || spec.prompt_logprobs.is_some()
        || (spec.acceptance != AcceptanceMode::Coupled && !spec.sampling.is_greedy())
}

fn spec_of(task: &Task) -> &Arc<SequenceSpec> {
    task.holding.spec().expect("an admitted step has a spec")
}

fn finish(spec: &SequenceSpec, position: u32, token: TokenId) -> Option<FinishReason> {
    if spec.stop_token_ids.contains(&token) {
        Some(FinishReason::Stop)
    } else if position.saturating_add(1) >= spec.max_len {
        Some(FinishReason::Length)
    } else {
        None
    }
}
