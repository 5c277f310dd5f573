//! Number of groups in which a target verifies drafting sequences: while one group drafts, another is
//! verified.
//!
//! Sequences that were verified together return together, so groups are stable once they exist. Whether more
//! groups are faster follows from values that the target measures: how long sequences are away between two
//! steps, and its forward times. Each forward then takes one group's share of the drafting sequences, the
//! oldest first and those of its lane before others. Rows of one lane return together because they have the
//! same draft length.
//!
//! The choice of k prices its rounds with the same function ([`crate::draft_length`]).

use super::{DraftingSequences, ReadyGroup, StepRows};

/// The shortest possible round with this many groups: one group's own steps in sequence, or the forwards of
/// all groups.
pub(crate) fn round_us(groups: u32, away_us: f64, forward_us: f64) -> f64 {
    (away_us + forward_us).max(f64::from(groups) * forward_us)
}

/// The number of groups, 1 to [`GroupRules::groups_max`], with the shortest round; `now` stays unless another
/// number is clearly better. `away_us` is how long a sequence is away; `forward_us(groups)` predicts the
/// forward of one of that many groups.
pub fn best_groups(now: u32, most: u32, away_us: f64, forward_us: impl Fn(u32) -> f64) -> u32 {
    best_by(&GroupRules::default(), (now, most), away_us, forward_us)
}

fn best_by(
    rules: &GroupRules,
    (now, most): (u32, u32),
    away_us: f64,
    forward_us: impl Fn(u32) -> f64,
) -> u32 {
    let most = most.clamp(1, rules.groups_max);
    let round = |groups: u32| round_us(groups, away_us, forward_us(groups));
    let now = now.clamp(1, most);
    let best = (1..=most).min_by(|a, b| round(*a).total_cmp(&round(*b))).unwrap_or(1);
    if round(best) < (1.0 - rules.regroup_margin) * round(now) { best } else { now }
}

/// Rules of forming groups.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupRules {
    /// Maximum number of groups; more gain little.
    pub groups_max: u32,
    /// Minimum relative gain in round time for another number of groups.
    pub regroup_margin: f64,
    /// Rounds for which complete groups are assumed to last; bounds the cost of completing them.
    pub regroup_rounds: f64,
    /// Whether steps of the oldest step's lane go before older ones of other lanes.
    pub by_lane: bool,
}

impl Default for GroupRules {
    fn default() -> Self {
        Self { groups_max: 4, regroup_margin: 0.03, regroup_rounds: 16.0, by_lane: true }
    }
}

/// One ready step, as needed to form a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LaneRows {
    /// Lane of the sequence.
    pub(crate) lane: u32,
    /// Rows of the step.
    pub(crate) rows: StepRows,
}

/// The number of groups at one target.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Groups {
    now: u32,
    rules: GroupRules,
}

/// Number of drafting sequences in a group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct GroupSize {
    /// Maximum.
    pub(crate) max: u32,
    /// Minimum of a complete group.
    pub(crate) min_complete: u32,
    /// How long waiting for completion pays, in microseconds.
    pub(crate) max_wait_us: f64,
    /// See [`GroupRules::by_lane`].
    pub(crate) by_lane: bool,
}

/// Which ready steps belong to the next forward.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Group {
    /// One entry per ready step.
    pub(crate) members: Vec<bool>,
    /// See [`ReadyGroup::capacity`].
    pub(crate) capacity: u32,
    /// See [`ReadyGroup::missing`].
    pub(crate) missing: u32,
    /// See [`ReadyGroup::max_wait_us`].
    pub(crate) max_wait_us: f64,
}

impl Default for Groups {
    fn default() -> Self {
        Self::with_rules(GroupRules::default())
    }
}

impl Groups {
    /// Starts with one group.
    pub(crate) fn with_rules(rules: GroupRules) -> Self {
        Self { now: 1, rules }
    }

    /// Number of drafting sequences that share a forward; `forward_us(rows, sequences)` predicts one.
    pub(crate) fn size(
        &mut self,
        drafting: DraftingSequences,
        forward_us: impl Fn(f64, f64) -> f64,
    ) -> GroupSize {
        let part = |count: u32, groups: u32| f64::from(count) / f64::from(groups);
        let of_groups = |groups| forward_us(part(drafting.rows, groups), part(drafting.sequences, groups));
        self.now = best_by(&self.rules, (self.now, drafting.sequences), drafting.away_us, of_groups);
        let most = drafting.sequences.div_ceil(self.now);
        let rest = drafting.sequences.saturating_sub(most * (self.now - 1));
        let round_us = round_us(self.now, drafting.away_us, of_groups(self.now));
        GroupSize {
            max: if self.now == 1 { u32::MAX } else { most },
            min_complete: rest.min(self.min_group_size(most)),
            max_wait_us: (self.rules.regroup_rounds * (drafting.round_us - round_us)).clamp(0.0, round_us),
            by_lane: self.rules.by_lane,
        }
    }

    /// Minimum size of a group: smaller ones would make more groups than wanted, all of them too small.
    /// Beyond [`GroupRules::groups_max`] that costs nothing worth waiting for.
    fn min_group_size(self, most: u32) -> u32 {
        if self.now == self.rules.groups_max {
            return 0;
        }
        let (now, next) = (f64::from(self.now), f64::from(self.now + 1));
        (f64::from(most) * (now / next + 1.0) / 2.0).ceil() as u32
    }
}

impl Group {
    /// Forms a group of ready steps with drafts up to the group's size (the oldest first, and its lane before
    /// others) and of all steps without. A decode step does not wait for drafts, because it would pay for
    /// another lane's choice. A prompt does not wait for a group to be complete.
    pub(crate) fn form(size: GroupSize, ready: &[LaneRows]) -> Self {
        let has_draft = |step: &LaneRows| step.rows.tail > 0;
        let first_lane = ready.iter().find(|step| has_draft(step)).map(|step| step.lane);
        let goes_later = |step: &LaneRows| size.by_lane && Some(step.lane) != first_lane;
        let mut drafting: Vec<usize> = (0..ready.len()).filter(|&index| has_draft(&ready[index])).collect();
        drafting.sort_by_key(|&index| goes_later(&ready[index]));
        drafting.truncate(size.max as usize);

        let mut members: Vec<bool> = ready.iter().map(|step| !has_draft(step)).collect();
        drafting.iter().for_each(|&index| members[index] = true);
        let taken = drafting.len() as u32;
        let is_decode = |step: &LaneRows| !has_draft(step) && step.rows.is_round();
        Self {
            members,
            capacity: if ready.iter().any(is_decode) { 0 } else { size.max - taken },
            missing: if ready.iter().all(has_draft) { size.min_complete.saturating_sub(taken) } else { 0 },
            max_wait_us: size.max_wait_us,
        }
    }

    /// A group of all ready steps.
    pub(crate) fn all(ready: usize) -> Self {
        Self { members: vec![true; ready], capacity: u32::MAX, missing: 0, max_wait_us: 0.0 }
    }

    /// The group's members among the `ready` steps it was formed of, away for `away_us` after the forward.
    pub(crate) fn ready(&self, ready: &[LaneRows], away_us: f64) -> ReadyGroup {
        let members = || ready.iter().zip(&self.members).filter(|(_, is_member)| **is_member);
        ReadyGroup {
            sequences: members().count() as u32,
            rows: members().map(|(step, _)| step.rows.rows()).sum(),
            away_us,
            capacity: self.capacity,
            missing: self.missing,
            max_wait_us: self.max_wait_us,
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
        assert_eq!(best_groups(1, 64, 100.0, steep), 1, "plain rounds return almost at once");
        assert_eq!(best_groups(1, 1, 6_000.0, steep), 1, "one sequence is one group");
        assert_eq!(best_groups(1, 64, 6_000.0, |_| 12_000.0), 1, "half the rows take as long as all of them");
        assert_eq!(best_groups(3, 64, 6_000.0, |_| 12_000.0), 1, "existing groups merge");
        let nearly = |groups: u32| 6_100.0 / f64::from(groups) + 3_000.0;
        assert_eq!((best_groups(1, 64, 3_000.0, nearly), best_groups(2, 64, 3_000.0, nearly)), (1, 2));
    }

    #[test]
    fn a_group_is_the_oldest_that_draft_and_all_that_do_not() {
        let waiting = [(1, 3), (1, 0), (1, 3), (1, 3)].map(|rows| in_lane(0, rows));
        let size = |most| GroupSize { max: most, min_complete: 4, max_wait_us: 1.0, by_lane: true };
        let group = Group::form(size(2), &waiting);
        assert_eq!(group.members, [true, true, true, false]);
        let ready =
            ReadyGroup { sequences: 3, rows: 9, away_us: 5.0, capacity: 0, missing: 0, max_wait_us: 1.0 };
        assert_eq!(group.ready(&waiting, 5.0), ready);
        let drafted = [waiting[0], waiting[2]];
        let group = Group::form(size(5), &drafted);
        assert_eq!((group.capacity, group.missing), (3, 2), "drafting steps wait for drafting steps");
        let group = Group::form(size(5), &waiting);
        assert_eq!((group.capacity, group.missing), (0, 0), "a plain step does not wait");
        let prompt = [waiting[0], in_lane(0, (100, 0))];
        assert_eq!(Group::form(size(5), &prompt).missing, 0, "a prompt does not wait for a complete group");
    }

    #[test]
    fn a_group_is_filled_from_the_lane_of_its_oldest_step_first() {
        let waiting = [(1, (1, 3)), (2, (1, 5)), (1, (1, 3)), (2, (1, 5)), (2, (1, 0))]
            .map(|(lane, rows)| in_lane(lane, rows));
        let members = |most, by_lane| {
            Group::form(GroupSize { max: most, min_complete: 0, max_wait_us: 0.0, by_lane }, &waiting).members
        };
        assert_eq!(members(2, true), [true, false, true, false, true], "decode steps are always members");
        assert_eq!(members(2, false), [true, true, false, false, true]);
        assert_eq!(
            members(3, true),
            [true, true, true, false, true],
            "the remaining place goes to the oldest step of another lane"
        );
        assert_eq!(members(u32::MAX, true), [true; 5]);
    }

    fn in_lane(lane: u32, (context, tail): (u32, u32)) -> LaneRows {
        LaneRows { lane, rows: StepRows { context, tail } }
    }

    #[test]
    fn what_runs_in_smaller_groups_than_it_should_waits_for_as_long_as_that_pays() {
        let size = |round_us, forward_us: fn(f64, f64) -> f64| {
            let drafting = DraftingSequences { sequences: 16, rows: 64, away_us: 6_000.0, round_us };
            Groups::default().size(drafting, forward_us)
        };
        let flat = |_, _| 12_000.0;
        // All together: 18 ms per round. In two alternating halves it takes 24, and one wait pays off.
        assert_eq!(
            size(24_000.0, flat),
            GroupSize { max: u32::MAX, min_complete: 12, max_wait_us: 18_000.0, by_lane: true }
        );
        assert_eq!(size(18_000.0, flat).max_wait_us, 0.0, "all sequences already share one forward");
        let with_a_floor = |rows: f64, _| (187.5 * rows).max(4_000.0);
        assert_eq!(
            size(12_000.0, with_a_floor),
            GroupSize { max: 8, min_complete: 7, max_wait_us: 0.0, by_lane: true }
        );
    }

    #[test]
    fn the_largest_number_of_groups_waits_for_nobody() {
        let min_complete = |groups_max, sequences| {
            let drafting =
                DraftingSequences { sequences, rows: 4 * sequences, away_us: 48_000.0, round_us: 0.0 };
            let mut groups = Groups::with_rules(GroupRules { groups_max, ..GroupRules::default() });
            let size = groups.size(drafting, |rows, _| 187.5 * rows);
            (groups.now, size.min_complete)
        };
        // Whatever the maximum is: every further group would shorten the round.
        assert_eq!([1, 2, 4, 5].map(|most| min_complete(most, 64)), [(1, 0), (2, 0), (4, 0), (5, 0)]);
        assert_eq!(min_complete(5, 4), (4, 1), "no more sequences, but another group is allowed");
    }
}
