//! What a round takes by tables and wires ([`crate::cost`]); what rounds took beyond this price is the caller's to learn (`belief.rs`).

use super::Load;
use crate::batch::groups::{GROUPS_MAX, round_us};
use crate::cost::{Forward, WorkerCost};

/// No wait for a draft is shorter, whatever the tables say.
const DRAFT_WAIT_MIN_MICROS: f64 = 50.0;

/// Microseconds of a round's draft, and from there to its verdict.
pub(super) type DraftAndVerify = (f64, f64);

/// A round at `k`, where each sequence brings `rows_each` to its verification.
///
/// A lane's sequences go in groups by turns, one drafting while another is verified: in as many as the target finds best
/// (`crate::batch::groups`). What a round takes then is the longest of its own steps one after the other, of all groups'
/// verifications, and of all groups' drafts.
pub(super) fn price(
    k: u32,
    rows_each: f64,
    load: &Load,
    workers: (&WorkerCost, &WorkerCost),
) -> DraftAndVerify {
    let most = if k == 0 { 1 } else { GROUPS_MAX.min(load.sequences.max(1)) };
    let rounds = (1..=most).map(|groups| in_groups(groups, (k, rows_each), load, workers));
    rounds.min_by(|a, b| (a.0 + a.1).total_cmp(&(b.0 + b.1))).expect("there is one group at least")
}

/// A round of a lane whose sequences go in so many groups.
fn in_groups(
    num_groups: u32,
    (k, rows_each): (u32, f64),
    load: &Load,
    (target, draft): (&WorkerCost, &WorkerCost),
) -> DraftAndVerify {
    let groups = f64::from(num_groups);
    let sequences = f64::from(load.sequences.max(1)) / groups;
    // Other lanes' rows are in every forward: their rounds are not this lane's.
    let others = f64::from(load.other_rows);
    let forward = Forward {
        rows: sequences * rows_each + others,
        sequences: sequences + f64::from(load.other_sequences),
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
    let round_us = round_us(num_groups, draft_us + target.wire_micros(), verify).max(groups * drafted);
    (draft_us, round_us - draft_us)
}
