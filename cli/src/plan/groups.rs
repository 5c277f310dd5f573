//! The groups into which the sequences of one target are divided: some are drafted for while others are
//! verified. Pure; [`super::round`] computes the times.
//!
//! The number of groups follows the target workers' own rule ([`best_groups`]) with the step times that they
//! would know; targets keep groups complete. Sequences that are drafted together return together: a draft
//! worker drafts for all of its sequences at once or, if there are more groups than draft workers, for the
//! sequences of one group at a time. The sequences of other targets at a shared draft worker are counted in
//! [`super::round`].

use scheduling::batch::groups::{GroupRules, best_groups};

use super::round::{Drafting, RoundModel};

/// Grouping of a target's sequences.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Groups {
    /// Number of groups that alternate.
    pub groups: f64,
    /// Sequences per group.
    pub size: f64,
    /// This target's sequences per draft batch.
    pub draft_batch: f64,
}

impl Groups {
    /// Returns the grouping for a number of sequences at one k.
    pub fn of(rounds: &RoundModel<'_>, sequences: f64, k: u32) -> Self {
        let together = Self { groups: 1.0, size: sequences, draft_batch: sequences };
        let Drafting::Apart { workers, .. } = rounds.drafting else { return together };
        if k == 0 {
            return together;
        }
        // There is at least one group, so targets that share a draft worker count as having a whole one.
        let batch = |groups: u32| (sequences / workers.max(f64::from(groups))).max(1.0);
        let away = |groups: u32| rounds.away_us(sequences / f64::from(groups), batch(groups), k);
        let of_groups = |groups: u32| rounds.profiled_us(sequences / f64::from(groups), k);
        let mut groups = 1;
        // Smaller groups may be drafted faster, which may allow more groups.
        for _ in 0..GroupRules::default().groups_max {
            groups = best_groups(groups, sequences as u32, away(groups), of_groups);
        }
        Self { groups: f64::from(groups), size: sequences / f64::from(groups), draft_batch: batch(groups) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::step_time::{ForwardBatch, StepCost};

    /// Step time in microseconds, number of rows up to which it is constant, and microseconds for each
    /// further row.
    struct Knee(f64, f64, f64);

    impl StepCost for Knee {
        fn micros(&self, forward: ForwardBatch) -> f64 {
            self.0 + self.2 * (forward.sequences * forward.rows_each - self.1).max(0.0)
        }
    }

    fn turns(target: &Knee, draft_us: f64, workers: f64, (sequences, k): (f64, u32)) -> Groups {
        let draft = Knee(draft_us, f64::MAX, 0.0);
        let rounds = RoundModel {
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
        Groups::of(&rounds, sequences, k)
    }

    #[test]
    fn a_draft_worker_drafts_for_all_its_sequences_unless_it_is_in_several_groups() {
        let steep = Knee(0.0, 0.0, 100.0);
        let of = |workers| turns(&steep, 3_200.0, workers, (60.0, 1));
        assert_eq!(of(1.0), Groups { groups: 2.0, size: 30.0, draft_batch: 30.0 });
        assert_eq!(of(8.0), Groups { groups: 2.0, size: 30.0, draft_batch: 7.5 });
        let plain = Groups { groups: 1.0, size: 60.0, draft_batch: 60.0 };
        assert_eq!(turns(&steep, 3_200.0, 8.0, (60.0, 0)), plain);
    }

    #[test]
    fn long_drafts_make_for_more_groups_and_free_rows_for_one() {
        let groups = |target: &Knee, draft_us| turns(target, draft_us, 8.0, (256.0, 2)).groups;
        let knee = Knee(9_140.0, 295.0, 31.0);
        assert_eq!((groups(&knee, 7_700.0), groups(&knee, 20_000.0)), (2.0, 3.0));
        assert_eq!(groups(&Knee(9_140.0, 1_024.0, 0.0), 2_000.0), 1.0);
    }
}
