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

/// For how many rounds groups stay as they are, once they are complete: what waiting for that may cost, in rounds that are so much shorter.
const REGROUP_ROUNDS: f64 = 16.0;

/// Sizes of a group that are looked at, below the one that is wanted.
const SMALLER: u32 = 8;

/// What a round of so many groups takes at best: the longest of one group's own steps one after the other, and of all groups' forwards.
pub fn round_us(groups: u32, away_us: f64, forward_us: f64) -> f64 {
    (away_us + forward_us).max(f64::from(groups) * forward_us)
}

/// The number of groups, 1 to [`GROUPS_MAX`], whose rounds are shortest; `now` stays unless another one is clearly better. `away_us` is how
/// long a sequence stays away, `forward_us(groups)` what the forward of one of so many groups takes.
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

/// When a target regroups: the constants above.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupRules {
    /// Groups at most.
    pub groups_max: u32,
    /// The part by which another number of groups must shorten a round.
    pub regroup_margin: f64,
    /// For how many rounds groups stay as they are.
    pub regroup_rounds: f64,
}

impl Default for GroupRules {
    fn default() -> Self {
        Self { groups_max: GROUPS_MAX, regroup_margin: REGROUP_MARGIN, regroup_rounds: REGROUP_ROUNDS }
    }
}

/// What one target knows of its groups.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Groups {
    now: u32,
    rules: GroupRules,
}

/// How many of the sequences that draft make a group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Size {
    /// At most.
    pub most: u32,
    /// With fewer it is not complete.
    pub least: u32,
    /// For how long it pays to wait until it is.
    pub patience_us: f64,
}

/// Who of those that wait belongs to the next forward.
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    /// By index of those that wait.
    pub members: Vec<bool>,
    /// How many more that draft it would wait for ([`super::Ready::room`]).
    pub room: u32,
    /// See [`super::Ready::missing`].
    pub missing: u32,
    /// See [`super::Ready::patience_us`].
    pub patience_us: f64,
}

impl Default for Groups {
    fn default() -> Self {
        Self::with_rules(GroupRules::default())
    }
}

impl Groups {
    /// All together, at first.
    pub fn with_rules(rules: GroupRules) -> Self {
        Self { now: 1, rules }
    }

    /// How many sequences that draft share a forward; `forward_us(rows, sequences)` is what one takes.
    pub fn size(&mut self, drafting: Drafting, forward_us: impl Fn(f64, f64) -> f64) -> Size {
        let part = |count: u32, groups: u32| f64::from(count) / f64::from(groups);
        let of_groups = |groups| forward_us(part(drafting.rows, groups), part(drafting.sequences, groups));
        self.now = best_by(&self.rules, (self.now, drafting.sequences), drafting.away_us, of_groups);
        let most = drafting.sequences.div_ceil(self.now);
        let rest = drafting.sequences.saturating_sub(most * (self.now - 1));
        let round_us = round_us(self.now, drafting.away_us, of_groups(self.now));
        // A target that is never idle gains nothing by waiting for more, where that many smaller ones by turns, the rest in one of its own, take
        // hardly longer.
        let is_never_idle = f64::from(self.now) * of_groups(self.now) >= round_us;
        let forward_of = |size: u32| match size {
            0 => 0.0,
            _ => forward_us(part(drafting.rows, drafting.sequences) * f64::from(size), f64::from(size)),
        };
        let in_groups_of = |size: u32| {
            let (full, rest) = (drafting.sequences / size, drafting.sequences % size);
            let forwards_us = f64::from(full) * forward_of(size) + forward_of(rest);
            forwards_us.max(drafting.away_us + forward_of(size))
        };
        let smallest = (1..=SMALLER).map(|part| (most * part).div_ceil(SMALLER)).find(|&size| {
            is_never_idle && size > 0 && in_groups_of(size) <= (1.0 + self.rules.regroup_margin) * round_us
        });
        let smallest = smallest.unwrap_or(most);
        Size {
            most: if self.now == 1 { u32::MAX } else { most },
            least: rest.min(self.least(most)).min(smallest),
            patience_us: (self.rules.regroup_rounds * (drafting.round_us - round_us)).clamp(0.0, round_us),
        }
    }

    /// With fewer than so many of `most` there would be more groups than are wanted, all of them too small. Past [`GROUPS_MAX`] that costs
    /// nothing worth waiting for.
    fn least(self, most: u32) -> u32 {
        let (now, next) = (f64::from(self.now), f64::from(self.now + 1));
        if self.now == GROUPS_MAX { 0 } else { (f64::from(most) * (now / next + 1.0) / 2.0).ceil() as u32 }
    }
}

impl Group {
    /// The oldest of those of `waiting` that bring drafts, and all others. A plain round waits for no draft: it would pay for what it
    /// did not choose; nor does a prompt wait until a group of drafts is complete.
    pub fn form(size: Size, waiting: &[Waiting]) -> Self {
        let mut room = size.most;
        let members = waiting
            .iter()
            .map(|waiting| {
                let is_member = waiting.tail == 0 || room > 0;
                room = room.saturating_sub(waiting.tail.min(1));
                is_member
            })
            .collect();
        let is_plain = |waiting: &Waiting| waiting.tail == 0 && waiting.context <= ROUND_CONTEXT;
        let is_draft = |waiting: &Waiting| waiting.tail > 0;
        let missing =
            if waiting.iter().all(is_draft) { size.least.saturating_sub(size.most - room) } else { 0 };
        Self {
            members,
            room: if waiting.iter().any(is_plain) { 0 } else { room },
            missing,
            patience_us: size.patience_us,
        }
    }

    /// All of them, as soon as they are there.
    pub fn all(waiting: &[Waiting]) -> Self {
        Self { members: vec![true; waiting.len()], room: u32::MAX, missing: 0, patience_us: 0.0 }
    }

    /// The part of `waiting` that belongs to it.
    pub fn ready(&self, waiting: &[Waiting]) -> Ready {
        let members = || waiting.iter().zip(&self.members).filter(|(_, is_member)| **is_member);
        Ready {
            sequences: members().count() as u32,
            rows: members().map(|(waiting, _)| waiting.context + waiting.tail).sum(),
            room: self.room,
            missing: self.missing,
            patience_us: self.patience_us,
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
        let size = |most| Size { most, least: 4, patience_us: 1.0 };
        let group = Group::form(size(2), &waiting);
        assert_eq!(group.members, [true, true, true, false]);
        let ready = Ready { sequences: 3, rows: 9, room: 0, missing: 0, patience_us: 1.0 };
        assert_eq!(group.ready(&waiting), ready);
        let drafted = [waiting[0], waiting[2]];
        let group = Group::form(size(5), &drafted);
        assert_eq!((group.room, group.missing), (3, 2), "drafts wait for drafts");
        let group = Group::form(size(5), &waiting);
        assert_eq!((group.room, group.missing), (0, 0), "a plain round waits for none");
        let prompt = [waiting[0], Waiting { context: 100, tail: 0 }];
        assert_eq!(Group::form(size(5), &prompt).missing, 0, "nor does a prompt until a group is complete");
    }

    #[test]
    fn what_runs_in_smaller_groups_than_it_should_waits_for_as_long_as_that_pays() {
        let size = |round_us, forward_us: fn(f64, f64) -> f64| {
            let drafting = Drafting { sequences: 16, rows: 64, away_us: 6_000.0, round_us };
            Groups::default().size(drafting, forward_us)
        };
        let flat = |_, _| 12_000.0;
        // All together: 18 ms a round. In two halves by turns it takes 24, and to wait once pays for itself.
        assert_eq!(size(24_000.0, flat), Size { most: u32::MAX, least: 12, patience_us: 18_000.0 });
        assert_eq!(size(18_000.0, flat).patience_us, 0.0, "they are together");
        let with_a_floor = |rows: f64, _| (187.5 * rows).max(4_000.0);
        assert_eq!(size(12_000.0, with_a_floor), Size { most: 8, least: 7, patience_us: 0.0 });
        let least = size(15_000.0, |rows, _| 187.5 * rows).least;
        assert_eq!(least, 1, "where each row costs its own time a smaller group is as good");
    }
}
