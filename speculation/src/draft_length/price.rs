//! What a round takes by tables and wires, one after the other and overlapped, and how much of the difference rounds show. Tables and
//! wires come from [`crate::cost`]; what rounds took beyond this price is the caller's to learn.

use super::Load;
use crate::cost::{Forward, WorkerCost};

/// No wait for a draft is shorter, whatever the tables say.
const DRAFT_WAIT_MIN_MICROS: f64 = 50.0;

/// More groups than this are never better by much.
const GROUPS_MAX: u32 = 4;

/// Lane rounds that the share of overlap remembers.
const OVERLAP_MEMORY: f64 = 8.0;

/// Overlap that would shorten a round by less than this part cannot be told from noise.
const GAIN_MIN: f64 = 0.02;

/// Overlap that would shorten a round by this part shows plainly: such a round counts in full.
const GAIN_PLAIN: f64 = 0.2;

/// Microseconds of a round's draft, and from there to its verdict.
type DraftAndVerify = (f64, f64);

/// A round by tables and wires.
#[derive(Debug, Clone, Copy)]
pub(super) struct Price {
    /// All sequences in lockstep: nothing is hidden.
    lockstep: DraftAndVerify,
    /// In the best number of groups.
    grouped: DraftAndVerify,
}

/// How much of what groups could hide is hidden, 0..=1.
#[derive(Debug, Clone, Copy)]
pub(super) struct Overlap(f64);

impl Default for Overlap {
    /// The hopeful side, on purpose: what looks too good is tried and seen, what looks too bad never is.
    fn default() -> Self {
        Self(1.0)
    }
}

impl Overlap {
    /// A round of this price took so long; `weight` is its part of a lane round.
    pub(super) fn observe(&mut self, price: &Price, measured_us: f64, weight: f64) {
        let total = |(draft_us, verify_us): DraftAndVerify| draft_us + verify_us;
        let (lockstep_us, grouped_us) = (total(price.lockstep), total(price.grouped));
        let hidden_us = lockstep_us - grouped_us;
        let gain = hidden_us / lockstep_us;
        if gain <= GAIN_MIN {
            return;
        }
        let seen = ((lockstep_us - measured_us) / hidden_us).clamp(0.0, 1.0);
        self.0 += (seen - self.0) * weight * (gain / GAIN_PLAIN).min(1.0) / OVERLAP_MEMORY;
    }
}

impl Price {
    /// A round at `k`, where each sequence brings `rows_each` to its verification.
    ///
    /// A lane's sequences may go in groups by turns, one drafting while another is verified. What a round takes then is the longest of
    /// its own steps one after the other, of all groups' verifications, and of all groups' drafts. Workers that can overlap fall into
    /// the best number of groups by themselves, more or less, for they wait for each other exactly where that pays (`crate::batch::late`).
    pub(super) fn of(k: u32, rows_each: f64, load: &Load, workers: (&WorkerCost, &WorkerCost)) -> Self {
        let lockstep = in_groups(1, (k, rows_each), load, workers);
        let grouped = (2..=GROUPS_MAX.min(load.sequences))
            .map(|groups| in_groups(groups, (k, rows_each), load, workers))
            .fold(lockstep, |best, at| if at.0 + at.1 < best.0 + best.1 { at } else { best });
        Self { lockstep, grouped }
    }

    /// With so much overlap.
    pub(super) fn at(&self, Overlap(share): Overlap) -> DraftAndVerify {
        let (lockstep, grouped) = (self.lockstep, self.grouped);
        (lockstep.0 + (grouped.0 - lockstep.0) * share, lockstep.1 + (grouped.1 - lockstep.1) * share)
    }
}

/// A round of a lane whose sequences go in so many groups.
fn in_groups(
    groups: u32,
    (k, rows_each): (u32, f64),
    load: &Load,
    (target, draft): (&WorkerCost, &WorkerCost),
) -> DraftAndVerify {
    let groups = f64::from(groups);
    let sequences = f64::from(load.sequences.max(1)) / groups;
    // Other lanes' rows are in every forward: their rounds are not this lane's.
    let others = f64::from(load.other_rows);
    let forward = Forward {
        rows: sequences * rows_each + others,
        sequences: sequences + others,
        context: load.context,
    };
    let verify = target.forward_micros(forward);
    let (drafted, draft_us) = match k {
        0 => (0.0, 0.0),
        _ => {
            let sequences = (f64::from(load.draft_sequences.max(1)) / groups).max(1.0);
            let steps = f64::from(k) * draft.step_micros(sequences, load.context);
            (steps, (draft.wire_micros() + steps).max(DRAFT_WAIT_MIN_MICROS))
        }
    };
    let alone = draft_us + target.wire_micros() + verify;
    (draft_us, alone.max(groups * verify).max(groups * drafted) - draft_us)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds of this price that took so long, until the share stands still.
    fn after(price: &Price, measured_us: f64) -> f64 {
        let mut overlap = Overlap::default();
        (0..200).for_each(|_| overlap.observe(price, measured_us, 1.0));
        let (draft_us, verify_us) = price.at(overlap);
        draft_us + verify_us
    }

    #[test]
    fn overlap_is_believed_as_far_as_rounds_show_it() {
        let price = Price { lockstep: (400.0, 600.0), grouped: (300.0, 400.0) };
        for (measured_us, believed_us) in
            [(1_000.0, 1_000.0), (850.0, 850.0), (700.0, 700.0), (2_000.0, 1_000.0)]
        {
            let got = after(&price, measured_us);
            assert!((got - believed_us).abs() < 1.0, "{measured_us}: {got}");
        }
    }

    #[test]
    fn a_round_that_groups_would_not_shorten_says_nothing_of_overlap() {
        let price = Price { lockstep: (400.0, 600.0), grouped: (400.0, 590.0) };
        assert!((after(&price, 1_000.0) - 990.0).abs() < 1e-9);
    }
}
