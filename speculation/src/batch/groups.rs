//! In how many groups the sequences that draft go by turns at a target, one group drafting while another is verified.
//!
//! Sequences that were verified together are back together, and so on for ever: lockstep keeps itself up, and so do groups. Which of them is
//! faster does not depend on where one came from, so a target works it out from what it knows of itself: how long sequences stay
//! away between two steps, and what its forwards take. Then each forward takes its part of them, the oldest first.
//!
//! The choice of k prices its rounds by this same function (`crate::draft_length`).

use super::{Drafting, ROUND_CONTEXT, Ready, Waiting};

/// More groups than this are never better by much.
pub const GROUPS_MAX: u32 = 4;

/// Another number of groups must shorten a round by this part.
const REGROUP_MARGIN: f64 = 0.03;

/// What a round of so many groups takes at best: the longest of one group's own steps one after the other, and of all groups' forwards.
pub fn round_us(groups: u32, away_us: f64, forward_us: f64) -> f64 {
    (away_us + forward_us).max(f64::from(groups) * forward_us)
}

/// The number of groups, 1 to [`GROUPS_MAX`], whose rounds are shortest; `now` stays unless another one is clearly better. `away_us` is how
/// long a sequence stays away, `forward_us(groups)` what the forward of one of so many groups takes.
pub fn best_groups(now: u32, most: u32, away_us: f64, forward_us: impl Fn(u32) -> f64) -> u32 {
    let most = most.clamp(1, GROUPS_MAX);
    let round = |groups: u32| round_us(groups, away_us, forward_us(groups));
    let now = now.clamp(1, most);
    let best = (1..=most).min_by(|a, b| round(*a).total_cmp(&round(*b))).unwrap_or(1);
    if round(best) < (1.0 - REGROUP_MARGIN) * round(now) { best } else { now }
}

/// What one target knows of its groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    now: u32,
}

/// Who of those that wait belongs to the next forward.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// By index of those that wait.
    pub members: Vec<bool>,
    /// How many more that draft it would wait for ([`super::Ready::room`]).
    pub room: u32,
}

impl Default for Groups {
    fn default() -> Self {
        Self { now: 1 }
    }
}

impl Groups {
    /// How many sequences that draft share a forward; `forward_us(rows, sequences)` is what one takes.
    pub fn size(&mut self, drafting: Drafting, forward_us: impl Fn(f64, f64) -> f64) -> u32 {
        let part = |count: u32, groups: u32| f64::from(count) / f64::from(groups);
        let of_groups = |groups| forward_us(part(drafting.rows, groups), part(drafting.sequences, groups));
        self.now = best_groups(self.now, drafting.sequences, drafting.away_us, of_groups);
        if self.now == 1 { u32::MAX } else { drafting.sequences.div_ceil(self.now) }
    }
}

impl Group {
    /// The oldest `size` of those of `waiting` that bring drafts, and all others. A plain round waits for no draft: it would pay for what it
    /// did not choose.
    pub fn form(size: u32, waiting: &[Waiting]) -> Self {
        let mut room = size;
        let members = waiting
            .iter()
            .map(|waiting| {
                let is_member = waiting.tail == 0 || room > 0;
                room = room.saturating_sub(waiting.tail.min(1));
                is_member
            })
            .collect();
        let is_plain = |waiting: &Waiting| waiting.tail == 0 && waiting.context <= ROUND_CONTEXT;
        Self { members, room: if waiting.iter().any(is_plain) { 0 } else { room } }
    }

    /// The part of `waiting` that belongs to it.
    pub fn ready(&self, waiting: &[Waiting]) -> Ready {
        let members = || waiting.iter().zip(&self.members).filter(|(_, is_member)| **is_member);
        Ready {
            sequences: members().count() as u32,
            rows: members().map(|(waiting, _)| waiting.context + waiting.tail).sum(),
            room: self.room,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_pay_where_forwards_shrink_with_their_rows_and_drafts_take_a_while() {
        let steep = |groups: u32| 12_000.0 / f64::from(groups);
        assert_eq!(best_groups(1, 64, 6_000.0, steep), 2, "one drafts while the other is verified");
        assert_eq!(best_groups(1, 64, 24_000.0, steep), 4);
        assert_eq!(best_groups(1, 64, 100.0, steep), 1, "plain rounds are hardly away");
        assert_eq!(best_groups(1, 1, 6_000.0, steep), 1, "a sequence is not split");
        assert_eq!(best_groups(1, 64, 6_000.0, |_| 12_000.0), 1, "half the rows cost as much");
        assert_eq!(best_groups(3, 64, 6_000.0, |_| 12_000.0), 1, "and what groups there are join");
        let nearly = |groups: u32| 6_100.0 / f64::from(groups) + 3_000.0;
        assert_eq!((best_groups(1, 64, 3_000.0, nearly), best_groups(2, 64, 3_000.0, nearly)), (1, 2));
    }

    #[test]
    fn a_group_is_the_oldest_that_draft_and_all_that_do_not() {
        let waiting = [(1, 3), (1, 0), (1, 3), (1, 3)].map(|(context, tail)| Waiting { context, tail });
        let group = Group::form(2, &waiting);
        assert_eq!(group.members, [true, true, true, false]);
        assert_eq!(group.ready(&waiting), Ready { sequences: 3, rows: 9, room: 0 });
        let drafted = [waiting[0], waiting[2]];
        assert_eq!(Group::form(5, &drafted).room, 3, "drafts wait for drafts");
        assert_eq!(Group::form(5, &waiting).room, 0, "a plain round waits for none");
        let drafting = Drafting { sequences: 4, rows: 16, away_us: 6_000.0 };
        assert_eq!(Groups::default().size(drafting, |rows, _| 750.0 * rows), 2);
        assert_eq!(Groups::default().size(drafting, |_, _| 12_000.0), u32::MAX);
    }
}
