//! Which rows share a worker's next forward: the split of rows ([`form_batch`]), the number of groups of
//! drafting sequences ([`groups`]), and the delay of a forward for more sequences ([`delay`]).
//! [`crate::batch_former`] combines these rules for workers and simulator.
//!
//! Decisions only: sequences, rows and predicted times are passed in. No KV, ids or clock.

mod delay;
pub mod groups;

use speculation::tree::TreeGrowth;
use speculation::{Step, Work};

pub(crate) use delay::{DraftingSequences, ReadyGroup, ReturnTimes};
pub use groups::GroupRules;
pub(crate) use groups::{Group, Groups, LaneRows};

/// Share of a forward's rows reserved for prefill while decodes are also waiting, and share of the prefill
/// rows reserved for long prompts.
const PREFILL_SHARE: f64 = 0.25;

/// Maximum context ids in a step of a round: a draft worker gets two after full acceptance. A longer context
/// belongs to a prompt or a replay.
pub const MAX_ROUND_CONTEXT: u32 = 2;

/// Remaining rows of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepRows {
    /// Context ids that have not run yet.
    pub context: u32,
    /// Rows after the context in the same forward, never split: drafted ids, or the latest token of an
    /// unfinished draft.
    pub tail: u32,
}

/// A step's part of one forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepChunk {
    /// Index of the step.
    pub index: usize,
    /// Number of context ids.
    pub context: u32,
    /// Whether it includes the end of the context, and therefore the tail.
    pub ends_context: bool,
}

impl StepRows {
    /// Remaining rows of a step after `context_done` context ids; `num_drafted` is the number of tokens that
    /// a draft worker has drafted so far.
    pub fn remaining(step: &Step, context_done: usize, num_drafted: usize) -> Self {
        let context = step.append_ids.len().saturating_sub(context_done) as u32;
        let drafted = match &step.work {
            Work::Verify { draft } => draft.token_ids.len() as u32,
            Work::Feed | Work::Propose { .. } => 0,
        };
        // An unfinished draft runs its latest token.
        let goes_on = context == 0 && num_drafted > 0;
        Self { context, tail: drafted + u32::from(goes_on) }
    }

    /// Rows of the next forward of a draft that grows a tree.
    pub fn of_tree(tree: &TreeGrowth) -> Self {
        Self { context: 0, tail: tree.num_next() as u32 }
    }

    /// Total number of rows.
    pub fn rows(&self) -> u32 {
        self.context + self.tail
    }

    /// Whether the context is no longer than a round's.
    pub fn is_round(&self) -> bool {
        self.context <= MAX_ROUND_CONTEXT
    }

    /// Whether the context is so long that it would crowd out other prompts.
    fn is_long(&self, rows_max: u32) -> bool {
        f64::from(self.context) > PREFILL_SHARE * f64::from(rows_max)
    }
}

impl StepChunk {
    /// Number of its rows.
    pub fn rows(&self, step: &StepRows) -> u32 {
        self.context + if self.ends_context { step.tail } else { 0 }
    }
}

/// Row limits of a forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowLimits {
    /// All rows.
    pub all: u32,
    /// Context ids of prompts and replays.
    pub prompts: u32,
}

/// Number of context ids of prompts and replays among `steps`.
pub fn prefill_rows(steps: impl Iterator<Item = StepRows>) -> u32 {
    steps.filter(|step| !step.is_round()).map(|step| step.context).sum()
}

/// Returns the chunks of the next forward, in order. Their rows are within `limits` except for the last tail,
/// which is never split.
///
/// Steps of a round come first, then short prompts, then long ones, each kind oldest first. While a later
/// kind waits, [`PREFILL_SHARE`] of the rows are reserved for it. `fits(index, rows)` reserves KV for that
/// many more rows, or returns false if there is none.
pub fn form_batch(
    ready: &[StepRows],
    limits: RowLimits,
    mut fits: impl FnMut(usize, u32) -> bool,
) -> Vec<StepChunk> {
    let (rounds, prompts): (Vec<usize>, Vec<usize>) = (0..ready.len()).partition(|&i| ready[i].is_round());
    let (short, long): (Vec<usize>, Vec<usize>) =
        prompts.into_iter().partition(|&i| !ready[i].is_long(limits.all));
    let kept = |rows: u32, later: bool| if later { (PREFILL_SHARE * f64::from(rows)) as u32 } else { 0 };
    let mut chunks = Vec::new();
    let mut left = limits;
    let kinds = [
        (&rounds, kept(limits.all.min(limits.prompts), !short.is_empty() || !long.is_empty()), 0),
        (&short, 0, kept(limits.prompts, !long.is_empty())),
        (&long, 0, 0),
    ];
    for (kind, kept_of_all, kept_of_prompts) in kinds {
        for &index in kind {
            let step = &ready[index];
            let mut budget = left.all.saturating_sub(kept_of_all);
            if !step.is_round() {
                budget = budget.min(left.prompts.saturating_sub(kept_of_prompts));
            }
            if budget == 0 {
                continue;
            }
            let context = step.context.min(budget);
            let chunk = StepChunk { index, context, ends_context: context == step.context };
            let rows = chunk.rows(step);
            if rows > 0 && fits(index, rows) {
                left.all = left.all.saturating_sub(rows);
                left.prompts -= if step.is_round() { 0 } else { context };
                chunks.push(chunk);
            }
        }
    }
    chunks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(list: &[(u32, u32)]) -> Vec<StepRows> {
        list.iter().map(|&(context, tail)| StepRows { context, tail }).collect()
    }

    fn formed(list: &[(u32, u32)], all: u32) -> Vec<(usize, u32, bool)> {
        formed_within(list, RowLimits { all, prompts: u32::MAX })
    }

    fn formed_within(list: &[(u32, u32)], limits: RowLimits) -> Vec<(usize, u32, bool)> {
        let chunks = form_batch(&ready(list), limits, |_, _| true);
        chunks.iter().map(|chunk| (chunk.index, chunk.context, chunk.ends_context)).collect()
    }

    #[test]
    fn everything_that_fits_shares_the_forward_in_order_of_age() {
        assert_eq!(formed(&[(1, 4), (0, 1), (3, 0)], 64), [(0, 1, true), (1, 0, true), (2, 3, true)]);
    }

    #[test]
    fn a_prompt_is_run_in_portions_beside_what_draws_soon() {
        // A quarter of 64 rows is reserved for the prompt, regardless of order; the rest is for the others.
        assert_eq!(formed(&[(500, 0), (1, 4)], 64), [(1, 1, true), (0, 59, false)]);
        let many: Vec<(u32, u32)> = std::iter::repeat_n((1, 7), 8).chain([(500, 0)]).collect();
        let chunks = formed(&many, 64);
        assert_eq!(chunks.len(), 7, "six verify steps of eight rows, and the prompt");
        assert_eq!(chunks[6], (8, 16, false));
    }

    #[test]
    fn prompts_take_no_more_rows_than_they_are_given_and_the_oldest_gets_them() {
        let limits = RowLimits { all: 64, prompts: 12 };
        let steps = [(10, 0), (1, 4), (9, 3), (2, 0)];
        assert_eq!(formed_within(&steps, limits), [(1, 1, true), (3, 2, true), (0, 10, true), (2, 2, false)]);
        // A quarter of 12 rows is reserved for the long prompt.
        let steps = [(500, 0), (10, 0), (9, 0), (1, 4)];
        assert_eq!(formed_within(&steps, limits), [(3, 1, true), (1, 9, false), (0, 3, false)]);
    }

    #[test]
    fn a_tail_is_never_split_and_a_sequence_without_room_is_passed_over() {
        assert_eq!(formed(&[(1, 40)], 33), [(0, 1, true)]);
        let limits = RowLimits { all: 64, prompts: 64 };
        let chunks = form_batch(&ready(&[(1, 0), (1, 8), (1, 0)]), limits, |index, _| index != 1);
        assert_eq!(chunks.iter().map(|chunk| chunk.index).collect::<Vec<_>>(), [0, 2]);
        assert!(form_batch(&ready(&[(0, 0)]), limits, |_, _| true).is_empty());
    }
}
