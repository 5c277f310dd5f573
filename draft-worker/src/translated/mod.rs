//! The method of a draft whose tokenizer is not the target's: on the wire, in the table of sequences and in all that decides it speaks
//! the target's ids; the engine runs the draft's own ([`text::translation`]).
//!
//! What the draft guesses comes from the same rule as without translation ([`crate::propose`]), on a row of the target's width in which
//! the draft's logits stand at the target's ids. So noise, penalties, filters, masks, trees and rejection mode work as they do for any
//! draft. One thing does not: guesses are never drawn on a device.

mod absorb;
mod load;
mod rows;

use std::collections::{HashMap, VecDeque};

use engine::{Engine, SequenceRows, SlotId};
use scheduling::batch::ROUND_CONTEXT;
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

/// Runs steps in the target's ids on an engine with other ids.
#[derive(Debug)]
pub struct TranslatedMethod {
    engine: Engine,
    /// Boxed: tokenizers are large.
    translation: Box<Translation>,
    decide: Propose,
    grammars: Grammars,
    max_batch_rows: usize,
    /// Where computing threads are kept, if anywhere.
    cores: Option<Vec<usize>>,
    sequences: HashMap<Slot, Held>,
    next_slot: u64,
    /// One row of scores, in the target's ids.
    row: Vec<f32>,
    counts: WorkCounts,
}

/// One sequence. The engine holds the KV of a prefix of its draft ids.
#[derive(Debug)]
struct Held {
    slot: SlotId,
    text: TranslatedSequence,
}

impl TranslatedMethod {
    /// Makes the sequence of `task` say what the task does, its latest guess included, and forgets the KV of all draft ids that changed.
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

    /// Draft ids of `task` whose KV is not there yet.
    fn pending(&self, task: &Task) -> &[TokenId] {
        let held = &self.sequences[&task.slot];
        &held.text.draft_ids()[self.engine.len(held.slot) as usize..]
    }

    /// Aligns every task, and answers those that no forward helps.
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

    /// The answer to a task that needs no row, or whose draft ids do not fit the draft's window or end elsewhere than the text does.
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
                    // Only the row of the last id says what comes next.
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

    /// Gives new tasks the KV that equal sequences have computed.
    fn find_prefixes(&mut self, tasks: &mut VecDeque<Task>) {
        for task in tasks.iter_mut().filter(|task| task.prefix != PrefixLookup::Done) {
            if task.step.base_len > 0 && task.step.append_ids.len() <= ROUND_CONTEXT as usize {
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
        // Whom a task waits for is one of the others; were none of them to run, all would wait for ever.
        if tasks.iter().all(|task| task.prefix == PrefixLookup::Waiting)
            && let Some(first) = tasks.front_mut()
        {
            first.prefix = PrefixLookup::Done;
        }
    }

    /// Begins the masks of all portions that are decided on behind the next forward.
    fn begin_masks(&mut self, tasks: &VecDeque<Task>, plan: &[Portion]) {
        for portion in plan.iter().filter(|portion| portion.decides) {
            let task = &tasks[portion.task];
            self.grammars.begin(task, task.guesses.token_ids.last().copied());
        }
    }

    /// One forward of `plan`, and what it leads to.
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
            // Nothing can be computed any more: the device thread ends, and the process says that it has failed.
            Err(error) if error.is_fatal() => panic!("{error}"),
            Err(error) if plan.len() > 1 => {
                tracing::warn!(%error, "a forward failed: its sequences are run one by one");
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
        // Answers are given back in order of age.
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

/// The tasks of these portions.
fn indices(plan: &[Portion]) -> Vec<usize> {
    plan.iter().map(|portion| portion.task).collect()
}

impl Method for TranslatedMethod {
    fn begin(&mut self) {
        if let Some(cores) = &self.cores
            && let Err(error) = self.engine.pin_threads(cores)
        {
            tracing::warn!(%error, "computing threads are not pinned");
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
        let held = self.sequences.get_mut(&slot).expect("only open slots are cut");
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
