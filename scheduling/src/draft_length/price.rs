//! What a round takes by tables and wires ([`crate::cost`]); what rounds took beyond this price is the caller's to learn (`residual_filter.rs`).

use super::Load;
use crate::batch::groups::round_us;
use crate::cost::{Forward, WorkerCost};

/// How often it is worked out how many groups a draft worker drafts for at once, and how long that takes.
const PASSES: u32 = 3;

/// The part of a draft step that a sequence waits for the one under way to end.
const BOUNDARY: f64 = 0.5;

/// Microseconds of a round's draft, and from there to its verdict.
pub(super) type DraftAndVerify = (f64, f64);

/// What rounds are priced by.
#[derive(Debug, Clone, Copy)]
pub(super) struct Prices<'a> {
    pub(super) load: &'a Load,
    /// The most groups of sequences that may alternate.
    pub(super) groups_max: u32,
    pub(super) target: &'a WorkerCost,
    pub(super) draft: &'a WorkerCost,
}

impl Prices<'_> {
    /// A round at `k`, where each sequence brings `rows_each` to its verification.
    ///
    /// A lane's sequences go in groups by turns, one drafting while another is verified: in as many as the target finds best
    /// (`crate::batch::groups`). What a round takes then is the longer of its own steps one after the other and of all groups'
    /// verifications; draft workers put groups that are there at once into one forward.
    pub(super) fn round(&self, k: u32, rows_each: f64) -> DraftAndVerify {
        let most = if k == 0 { 1 } else { self.groups_max.min(self.load.sequences.max(1)) };
        let rounds = (1..=most).map(|groups| self.in_groups(groups, k, rows_each));
        rounds.min_by(|a, b| (a.0 + a.1).total_cmp(&(b.0 + b.1))).expect("there is one group at least")
    }

    /// A round of a lane whose sequences are split into `num_groups` groups that alternate.
    fn in_groups(&self, num_groups: u32, k: u32, rows_each: f64) -> DraftAndVerify {
        let Self { load, target, draft, .. } = *self;
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
        let wires = target.wire_micros();
        if k == 0 {
            return (0.0, round_us(num_groups, wires, verify));
        }
        // A group is those that came back together: all sequences of a draft worker, or a part of them where there are more groups than workers.
        let at_worker = f64::from(load.draft_sequences.max(1));
        let num_workers = (f64::from(load.sequences) / at_worker).max(1.0);
        let groups_at_worker = (groups / num_workers).max(1.0);
        // Groups that are drafted for at once share their forwards, and begin where one ends.
        let mut at_once = 1.0_f64;
        let mut found = (0.0, 0.0);
        for _ in 0..PASSES {
            let step = draft.step_micros((at_worker * at_once / groups_at_worker).max(1.0), load.context);
            let steps = draft.drafted_ahead.forwards(k) + BOUNDARY * (at_once - 1.0).min(1.0);
            let draft_us = draft.wire_micros() + steps * step;
            let round_us = round_us(num_groups, draft_us + wires, verify);
            at_once = (groups_at_worker * steps * step / round_us).clamp(1.0, groups_at_worker);
            found = (draft_us, round_us - draft_us);
        }
        found
    }
}
