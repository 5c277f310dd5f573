//! How a worker puts what waits into forwards: who takes part ([`form`]), in how many groups those that draft go by turns ([`groups`]), when
//! to wait a moment for more ([`late`]), when a lane goes first and alone ([`separate`]). The device thread of the workers and the simulator call these same functions.
//!
//! Decisions only: sequences, rows and predicted times come in. Nothing here knows KV, ids or a clock.

pub mod groups;
pub mod late;
pub mod separate;

pub use groups::{Group, GroupRules, Groups, Size};
pub use late::{Awaited, Drafting, Ready, Returns};
pub use separate::{LaneRows, by_lane, first_alone};

/// The part of a forward's rows that prompts may count on while others wait too; these may count on the rest.
pub const PREFILL_SHARE: f64 = 0.25;

/// Context ids of one sequence that a step of a round may bring: after full acceptance a draft worker gets two. More are a prompt's.
pub const ROUND_CONTEXT: u32 = 2;

/// What one sequence wants of the next forwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting {
    /// Context ids that were not run yet.
    pub context: u32,
    /// Rows that follow the context in the same forward, whole: drafted ids, or the last guess of a draft that goes on.
    pub tail: u32,
}

/// A sequence's part of one forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Which of those that wait.
    pub index: usize,
    /// Context ids in it.
    pub context: u32,
    /// Whether the context ends here, so that the tail is in it, too.
    pub ends_context: bool,
}

impl Waiting {
    /// Whether its context is so long that it would crowd out the others: a prompt, more or less.
    pub fn is_prompt(&self, rows_max: u32) -> bool {
        f64::from(self.context) > PREFILL_SHARE * f64::from(rows_max)
    }
}

impl Share {
    /// Rows that it takes.
    pub fn rows(&self, waiting: &Waiting) -> u32 {
        self.context + if self.ends_context { waiting.tail } else { 0 }
    }
}

/// Who takes part in the next forward, in order, with at most `rows_max` rows but for the last tail, which is never split.
///
/// Those that draw soonest go first, oldest first, up to what [`PREFILL_SHARE`] leaves them while a prompt waits; prompts share what is
/// left. `fits(index, rows)` says whether the KV of so many more rows can be held, and takes it if so.
pub fn form(waiting: &[Waiting], rows_max: u32, mut fits: impl FnMut(usize, u32) -> bool) -> Vec<Share> {
    let is_prompt = |&i: &usize| waiting[i].is_prompt(rows_max);
    let (prompts, soon): (Vec<usize>, Vec<usize>) = (0..waiting.len()).partition(is_prompt);
    let for_prompts = if prompts.is_empty() { 0 } else { (PREFILL_SHARE * f64::from(rows_max)) as u32 };
    let mut shares = Vec::new();
    let mut rows_left = rows_max;
    let turns = soon.into_iter().map(|i| (i, for_prompts)).chain(prompts.into_iter().map(|i| (i, 0)));
    for (index, reserved) in turns {
        let budget = rows_left.saturating_sub(reserved);
        if budget == 0 {
            continue;
        }
        let context = waiting[index].context.min(budget);
        let share = Share { index, context, ends_context: context == waiting[index].context };
        let rows = share.rows(&waiting[index]);
        if rows > 0 && fits(index, rows) {
            rows_left = rows_left.saturating_sub(rows);
            shares.push(share);
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(list: &[(u32, u32)]) -> Vec<Waiting> {
        list.iter().map(|&(context, tail)| Waiting { context, tail }).collect()
    }

    fn formed(list: &[(u32, u32)], rows_max: u32) -> Vec<(usize, u32, bool)> {
        let shares = form(&waiting(list), rows_max, |_, _| true);
        shares.iter().map(|share| (share.index, share.context, share.ends_context)).collect()
    }

    #[test]
    fn everything_that_fits_shares_the_forward_in_order_of_age() {
        assert_eq!(formed(&[(1, 4), (0, 1), (3, 0)], 64), [(0, 1, true), (1, 0, true), (2, 3, true)]);
    }

    #[test]
    fn a_prompt_is_run_in_portions_beside_what_draws_soon() {
        // A quarter of 64 rows is the prompt's, whoever came first; the rest goes to the others.
        assert_eq!(formed(&[(500, 0), (1, 4)], 64), [(1, 1, true), (0, 59, false)]);
        let many: Vec<(u32, u32)> = std::iter::repeat_n((1, 7), 8).chain([(500, 0)]).collect();
        let shares = formed(&many, 64);
        assert_eq!(shares.len(), 7, "six verifications of eight rows and the prompt");
        assert_eq!(shares[6], (8, 16, false));
    }

    #[test]
    fn a_tail_is_never_split_and_a_sequence_without_room_is_passed_over() {
        assert_eq!(formed(&[(1, 40)], 33), [(0, 1, true)]);
        let shares = form(&waiting(&[(1, 0), (1, 8), (1, 0)]), 64, |index, _| index != 1);
        assert_eq!(shares.iter().map(|share| share.index).collect::<Vec<_>>(), [0, 2]);
        assert!(form(&waiting(&[(0, 0)]), 64, |_, _| true).is_empty());
    }
}
