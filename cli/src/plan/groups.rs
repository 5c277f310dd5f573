//! The groups in which the sequences of one target go by turns, some drafted for while others are verified. Pure; [`super::round`] makes
//! times of it.
//!
//! What target workers would do is asked of their own rules ([`speculation::batch`]), with the step times that they would know. Two
//! things follow from what those rules are given:
//!
//! - Sequences that draft together come back together, and so stay together: a draft worker that is in one group drafts for all of its
//!   sequences at once, and for a part of them only where there are more groups than draft workers.
//! - Of sequences that begin together the first draft worker's part is verified first, alone. It stays apart unless somebody waits for it, or
//!   it for somebody ([`Returns::hold`]), and then a target that is always busy runs one forward more. Where groups are not made of whole
//!   parts of draft workers, parts are cut until they fit.

use std::time::Duration;

use speculation::batch::groups::{GROUPS_MAX, best_groups};
use speculation::batch::{Ready, Returns};

use super::round::{Drafting, Rounds};

/// Steps take so much more or less than usual: who is nearly waited for is waited for some day, and from then on all go together.
const UNSTEADY: f64 = 0.05;

/// How the sequences of a target go.
#[derive(Debug, Clone, PartialEq)]
pub struct Turns {
    /// Sequences of each group, in turns; the first is as large as any.
    pub sizes: Vec<f64>,
    /// Sequences that a draft worker drafts for at once.
    pub draft_batch: f64,
}

impl Turns {
    /// Those of so many sequences at one k.
    pub fn of(rounds: &Rounds<'_>, sequences: f64, k: u32) -> Self {
        let Drafting::Apart { workers, .. } = rounds.drafting else { return Self::together(sequences) };
        if k == 0 {
            return Self::together(sequences);
        }
        let batch = |groups: u32| (sequences / workers.max(f64::from(groups))).max(1.0);
        let away = |groups: u32| rounds.away_us(sequences / f64::from(groups), batch(groups), k);
        let of_groups = |groups: u32| rounds.known_us(sequences / f64::from(groups), k);
        let mut groups = 1;
        // Smaller groups may be drafted for faster, which may make for more groups; more than that there are not.
        for _ in 0..GROUPS_MAX {
            groups = best_groups(groups, sequences as u32, away(groups), of_groups);
        }
        let even =
            Self { sizes: vec![sequences / f64::from(groups); groups as usize], draft_batch: batch(groups) };
        let is_whole = workers % f64::from(groups) == 0.0;
        let astray = even.with_first_batch_apart(sequences).filter(|_| is_whole);
        astray.filter(|astray| astray.stays(rounds, (away(groups), k))).unwrap_or(even)
    }

    fn together(sequences: f64) -> Self {
        Self { sizes: vec![sequences], draft_batch: sequences }
    }

    /// The same where one batch of the last group goes by itself; nothing where that is the whole group.
    fn with_first_batch_apart(&self, sequences: f64) -> Option<Self> {
        let (batch, full) = (self.draft_batch.floor(), self.sizes[0].ceil());
        let mut sizes = vec![full; self.sizes.len() - 1];
        let rest = sequences - full * sizes.len() as f64 - batch;
        if rest < 1.0 {
            return None;
        }
        sizes.extend([rest, batch]);
        Some(Self { sizes, draft_batch: self.draft_batch })
    }

    /// Whether those that go apart stay so. A target that has time between its forwards is not slowed down by one more; one that has not
    /// runs it for ever if neither the rest of the group nor the next one is waited for.
    fn stays(&self, rounds: &Rounds<'_>, (away_us, k): (f64, u32)) -> bool {
        let forward_us = |sequences: f64| rounds.known_us(sequences, k);
        let all_us: f64 = self.sizes.iter().map(|size| forward_us(*size)).sum();
        if all_us <= away_us + forward_us(self.sizes[0]) {
            return false;
        }
        let num = self.sizes.len();
        [num - 2, num - 1].into_iter().all(|at| {
            let (ready, next) = (self.sizes[at], self.sizes[(at + 1) % num]);
            let due_us = (1.0 - UNSTEADY) * away_us - (all_us - forward_us(ready) - forward_us(next));
            let room = if num == 2 { u32::MAX } else { (self.sizes[0] - ready) as u32 };
            due_us > 0.0 && !is_waited_for(rounds, (ready, room), (next, due_us, away_us), k)
        })
    }
}

/// Whether the forward of `ready` sequences, with room for more, waits for some of the `next` ones, who stay away for `away_us` and are due in
/// `due_us`.
fn is_waited_for(
    rounds: &Rounds<'_>,
    (ready, room): (f64, u32),
    (next, due_us, away_us): (f64, f64, f64),
    k: u32,
) -> bool {
    let at = |micros: f64| Duration::from_secs_f64(micros / 1e6);
    let mut returns = Returns::default();
    for sequence in 0..next as u32 {
        returns.arrived(sequence, Duration::ZERO, k + 1);
        returns.answered(&sequence, Duration::ZERO);
        returns.arrived(sequence, at(away_us), k + 1);
        returns.answered(&sequence, at(away_us));
    }
    let now = at(away_us + (away_us - due_us));
    let ready =
        Ready { sequences: ready as u32, rows: ready as u32 * (k + 1), room, missing: 0, patience_us: 0.0 };
    let step_us = |rows: u32| rounds.known_us(f64::from(rows) / f64::from(k + 1), k);
    returns.hold(now, (ready, Duration::ZERO), step_us).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::step_time::{Forward, StepCost};

    /// So many microseconds up to so many rows, and so many more for each row past them.
    struct Knee(f64, f64, f64);

    impl StepCost for Knee {
        fn micros(&self, forward: Forward) -> f64 {
            self.0 + self.2 * (forward.sequences * forward.rows_each - self.1).max(0.0)
        }
    }

    fn turns(target: &Knee, draft_us: f64, workers: f64, (sequences, k): (f64, u32)) -> Turns {
        let draft = Knee(draft_us, f64::MAX, 0.0);
        let rounds = Rounds {
            target,
            known: target,
            target_wire_us: 0.0,
            router_us: 0.0,
            target_rows_max: 1024.0,
            drafting: Drafting::Apart { draft: &draft, workers, wire_us: 0.0 },
            acceptance: &[0.5],
            context: 0.0,
            prompt_us_per_token: 0.0,
        };
        Turns::of(&rounds, sequences, k)
    }

    #[test]
    fn a_draft_worker_drafts_for_all_its_sequences_unless_it_is_in_several_groups() {
        let steep = Knee(0.0, 0.0, 100.0);
        let of = |workers| turns(&steep, 3_200.0, workers, (60.0, 1));
        assert_eq!(of(1.0), Turns { sizes: vec![30.0; 2], draft_batch: 30.0 });
        assert_eq!(of(8.0), Turns { sizes: vec![30.0; 2], draft_batch: 7.5 });
        assert_eq!(turns(&steep, 3_200.0, 8.0, (60.0, 0)), Turns::together(60.0));
    }

    #[test]
    fn a_part_for_which_nobody_waits_stays_apart_where_the_target_has_no_time_for_it() {
        // Two groups of 384 rows past a knee at 295: the target would rest for a moment, too short to be waited for.
        let knee = Knee(9_140.0, 295.0, 31.0);
        assert_eq!(turns(&knee, 7_700.0, 8.0, (256.0, 2)).sizes, [128.0, 96.0, 32.0]);
        // Beside long drafts there is time for three forwards below the knee.
        assert_eq!(turns(&knee, 20_000.0, 8.0, (256.0, 2)).sizes.len(), 3);
        // Where rows are free it is waited for.
        let flat = Knee(9_140.0, 1_024.0, 0.0);
        assert_eq!(turns(&flat, 2_000.0, 8.0, (256.0, 2)).sizes, [256.0]);
    }
}
