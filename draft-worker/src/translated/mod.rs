//! The method of a draft whose tokenizer differs from the target's. The wire, the sequence table and all
//! decisions use the target's ids; the engine runs the draft's own ids ([`text::translation`]).
//!
//! Guesses follow the same rule as without translation ([`crate::propose`]), on a row of the target's
//! vocabulary size that holds the draft's logits at the target's ids. So noise, penalties, filters, masks,
//! trees and rejection mode work as for any draft. The one difference: guesses are never drawn on a device.

mod absorb;
mod load;
mod rows;

use std::collections::{HashMap, VecDeque};

use engine::{Engine, SequenceRows, SlotId};
use scheduling::batch::MAX_ROUND_CONTEXT;
use speculation::cached_sequence::Limits;
use speculation::{Proposal, ReplyBody, Role, TokenId, Work};
use text::translation::{TranslatedSequence, Translation};
use worker::Decide as _;
use worker::failed_forward::{advance_one_by_one, refuse};
use worker::grammars::Grammars;
use worker::method::{Method, MethodStats, NeedRoom, WorkCounts};
use worker::task::{PrefixLookup, Slot, Task, take_tasks};

use self::rows::Portion;
use crate::propose::Propose;

pub use load::load;

/// Runs steps in the target's ids on an engine with different ids.
#[derive(Debug)]
pub struct TranslatedMethod {
    engine: Engine,
    /// Boxed because tokenizers are large.
    translation: Box<Translation>,
    decide: Propose,
    grammars: Grammars,
    max_batch_rows: usize,
    /// Cores that compute threads are pinned to; `None`: not pinned.
    cores: Option<Vec<usize>>,
    sequences: HashMap<Slot, Held>,
    next_slot: u64,
    /// One row of logits, in the target's ids.
    row: Vec<f32>,
    counts: WorkCounts,
}

/// One cached sequence. The engine holds the KV of a prefix of its draft ids.
#[derive(Debug)]
struct Held {
    slot: SlotId,
    text: TranslatedSequence,
}

impl TranslatedMethod {
    /// Updates the sequence of `task` to the task's ids including its latest guess, and drops the KV of all
    /// draft ids that changed.
    fn align(&mut self, task: &Task) {
        let held = self.sequences.get_mut(&task.slot).expect("tasks run on open slots");
        let guess = task.guesses.token_ids.last().copied();
        let wanted: Vec<TokenId> = task.cached.ids().iter().copied().chain(guess).collect();
        let is_same = |(held, wanted): &(&TokenId, &TokenId)| held == wanted;
        let same = held.text.target_ids().iter().zip(&wanted).take_while(is_same).count();
        held.text.truncate(same);
        let kept = match &wanted[same..] {
            [] => held.text.draft_ids().len(),
            new => held.text.extend(&self.translation, new),
        };
        self.engine.truncate(held.slot, kept as u32);
    }

    /// Draft ids of `task` without KV.
    fn pending(&self, task: &Task) -> &[TokenId] {
        let held = &self.sequences[&task.slot];
        &held.text.draft_ids()[self.engine.len(held.slot) as usize..]
    }

    /// Aligns every task and answers those that need no forward.
    fn answer_at_once(&mut self, tasks: &mut VecDeque<Task>) -> Vec<(Task, ReplyBody)> {
        let (mut indices, mut bodies) = (Vec::new(), Vec::new());
        for (index, task) in tasks.iter_mut().enumerate() {
            self.align(task);
            if let Some(body) = self.answer_without_rows(task) {
                indices.push(index);
                bodies.push(body);
            }
        }
        take_tasks(tasks, indices).into_iter().zip(bodies).collect()
    }

    /// Answers a task that needs no row, whose draft ids exceed the draft's window, or whose draft ids do not
    /// end where the text ends.
    fn answer_without_rows(&mut self, task: &mut Task) -> Option<ReplyBody> {
        let held = &self.sequences[&task.slot];
        let has_room = held.text.draft_ids().len() <= self.engine.info().max_model_len as usize;
        let is_run = self.pending(task).is_empty();
        let start = task.step.start();
        let body = match task.step.work {
            Work::Propose { .. } if !has_room || !held.text.is_covered() => {
                ReplyBody::Proposal(Proposal { start, draft: task.guesses.clone() })
            }
            Work::Propose { .. } => {
                if is_run {
                    // The last id must run again, because only its row predicts the next id.
                    self.engine.truncate(held.slot, self.engine.len(held.slot) - 1);
                }
                return None;
            }
            Work::Feed | Work::Verify { .. } if has_room && !is_run => return None,
            Work::Feed | Work::Verify { .. } => ReplyBody::Fed { cached_len: start, prompt_logprobs: None },
        };
        task.context_done = task.step.append_ids.len();
        self.truncate(task.slot, task.cached.len());
        Some(body)
    }

    /// Looks up new tasks' draft ids in the prefix cache and shares the KV found there.
    fn find_prefixes(&mut self, tasks: &mut VecDeque<Task>) {
        for task in tasks.iter_mut().filter(|task| task.prefix != PrefixLookup::Done) {
            if task.step.base_len > 0 && task.step.append_ids.len() <= MAX_ROUND_CONTEXT as usize {
                task.prefix = PrefixLookup::Done;
                continue;
            }
            let held = &self.sequences[&task.slot];
            let ids = held.text.draft_ids();
            let len = self.engine.len(held.slot);
            if task.prefix == PrefixLookup::Wanted {
                self.counts.prefix_query_tokens += ids.len() as u64 - u64::from(len);
            }
            let key = task.cached.spec().map_or(0, |spec| spec.isolation_key);
            let found = self.engine.share(held.slot, key, ids);
            self.counts.prefix_hit_tokens += u64::from(found.len - len);
            let covered = held.text.num_covered(found.len as usize) as u32;
            task.num_cached = covered.saturating_sub(task.step.base_len);
            task.prefix = if found.wait { PrefixLookup::Waiting } else { PrefixLookup::Done };
        }
        // A task waits for another task of the queue. If all of them wait, none would ever run, so the first
        // runs.
        if tasks.iter().all(|task| task.prefix == PrefixLookup::Waiting)
            && let Some(first) = tasks.front_mut()
        {
            first.prefix = PrefixLookup::Done;
        }
    }

    /// Requests the masks of all portions that are decided on after the next forward.
    fn begin_masks(&mut self, tasks: &VecDeque<Task>, plan: &[Portion]) {
        for portion in plan.iter().filter(|portion| portion.decides) {
            let task = &tasks[portion.task];
            self.grammars.begin(task, task.guesses.token_ids.last().copied());
        }
    }

    /// Runs one forward of `plan` and returns the finished tasks with their replies.
    fn run(&mut self, tasks: &mut VecDeque<Task>, plan: &[Portion]) -> Vec<(Task, ReplyBody)> {
        let sequence_rows = |portion: &Portion| self.sequences[&tasks[portion.task].slot].slot;
        let slots: Vec<SlotId> = plan.iter().map(sequence_rows).collect();
        let batch: Vec<SequenceRows<'_>> = plan
            .iter()
            .zip(&slots)
            .map(|(portion, &slot)| SequenceRows {
                slot,
                token_ids: &portion.draft_ids,
                num_logits: portion.num_logits(),
            })
            .collect();
        let logits = match self.engine.forward(&batch) {
            Ok(logits) => logits,
            // The device is unusable: panic to end the device thread, which marks the process as failed.
            Err(error) if error.is_fatal() => panic!("{error}"),
            Err(error) if plan.len() > 1 => {
                tracing::warn!(%error, "a forward pass failed: running its sequences one by one to find the cause");
                return advance_one_by_one(self, tasks, indices(plan));
            }
            Err(error) => return refuse(self, tasks, indices(plan), &error),
        };
        self.counts.sequences += plan.len() as u64;
        let (mut finished, mut bodies, mut row) = (Vec::new(), Vec::new(), 0);
        for portion in plan {
            let first_row = row;
            row += portion.num_logits();
            if let Some(body) = self.absorb(&mut tasks[portion.task], portion, (&logits, first_row)) {
                finished.push((portion.task, body));
            }
        }
        // Replies are returned in order of age.
        finished.sort_by_key(|(task, _)| *task);
        let indices: Vec<usize> = finished
            .into_iter()
            .map(|(task, body)| {
                bodies.push(body);
                task
            })
            .collect();
        take_tasks(tasks, indices).into_iter().zip(bodies).collect()
    }
}

/// Task indices of these portions.
fn indices(plan: &[Portion]) -> Vec<usize> {
    plan.iter().map(|portion| portion.task).collect()
}

impl Method for TranslatedMethod {
    fn begin(&mut self) {
        if let Some(cores) = &self.cores
            && let Err(error) = self.engine.pin_threads(cores)
        {
            tracing::warn!(%error, "cannot pin the compute threads: they run unpinned");
        }
    }

    /// In the target's ids and positions.
    fn limits(&self) -> Limits {
        Limits {
            role: Role::Draft,
            vocab_size: self.translation.num_target_ids() as u32,
            max_model_len: self.engine.info().max_model_len,
            max_tree_tokens: 0,
            grammars: true,
        }
    }

    fn open(&mut self) -> Slot {
        let held = Held { slot: self.engine.open(), text: TranslatedSequence::default() };
        self.insert(held)
    }

    fn fork(&mut self, slot: Slot, len: u32) -> Option<Slot> {
        let held = self.sequences.get(&slot).filter(|held| held.text.target_ids().len() >= len as usize)?;
        let mut text = held.text.clone();
        text.truncate(len as usize);
        let kv_len = self.engine.len(held.slot).min(text.draft_ids().len() as u32);
        let slot = self.engine.fork(held.slot, kv_len)?;
        Some(self.insert(Held { slot, text }))
    }

    fn resume(&mut self, task: &mut Task) -> Option<ReplyBody> {
        let decision = self.decide.resume(task)?;
        self.conclude(task, decision)
    }

    fn close(&mut self, slot: Slot) {
        self.grammars.close(slot);
        if let Some(held) = self.sequences.remove(&slot) {
            self.engine.close(held.slot);
        }
    }

    fn truncate(&mut self, slot: Slot, len: u32) {
        let held = self.sequences.get_mut(&slot).expect("only open slots are truncated");
        held.text.truncate(len as usize);
        self.engine.truncate(held.slot, held.text.draft_ids().len() as u32);
    }

    fn advance(
        &mut self,
        tasks: &mut VecDeque<Task>,
        prompt_rows: u32,
    ) -> Result<Vec<(Task, ReplyBody)>, NeedRoom> {
        let mut finished = self.answer_at_once(tasks);
        self.find_prefixes(tasks);
        let mut plan = self.plan(tasks, prompt_rows);
        if plan.is_empty() && finished.is_empty() && self.grammars.wait(tasks) {
            plan = self.plan(tasks, prompt_rows);
        }
        if plan.is_empty() {
            return if finished.is_empty() { Err(NeedRoom) } else { Ok(finished) };
        }
        self.begin_masks(tasks, &plan);
        finished.extend(self.run(tasks, &plan));
        Ok(finished)
    }

    fn blocks_held(&self, slot: Slot) -> u64 {
        self.sequences.get(&slot).map_or(0, |held| self.engine.blocks_held(held.slot))
    }

    fn stats(&self) -> MethodStats {
        MethodStats::of_engine(&self.engine, self.counts, self.grammars.stats())
    }
}

impl TranslatedMethod {
    fn insert(&mut self, held: Held) -> Slot {
        let slot = Slot(self.next_slot);
        self.next_slot += 1;
        self.sequences.insert(slot, held);
        slot
    }
}
