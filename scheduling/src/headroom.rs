//! Headroom: throughput that a target could add to its present one. Pure. It follows from the target's step
//! times and the tokens that rounds commit, so a target whose drafts are accepted has more headroom than one
//! whose drafts are rejected.

use crate::cost::{ForwardShape, WorkerCost};

/// Mean round of a target's sequences.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct MeanRound {
    /// Tokens committed per round.
    pub(crate) tokens: f64,
    /// Rows verified: the drafted tokens and the target's own.
    pub(crate) rows: f64,
    /// Duration in microseconds; 0 before the first round.
    pub(crate) micros: f64,
    /// Ids per sequence.
    pub(crate) context: f64,
}

impl Default for MeanRound {
    /// One token from one row, as without drafts.
    fn default() -> Self {
        Self { tokens: 1.0, rows: 1.0, micros: 0.0, context: 0.0 }
    }
}

/// Capacity of a target, in sequences.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct SequenceSlots {
    /// Sequences there now.
    pub(crate) used: u32,
    /// Sequences that fit in its KV, as far as is known.
    pub(crate) max: u32,
}

/// Largest number of sequences that is evaluated; no gain is expected beyond it.
const SEQUENCES_MAX: u32 = 1 << 12;

/// Tokens per second that more sequences would add at this target; 0 if it is full or more sequences add
/// none.
pub(crate) fn headroom(target: &WorkerCost, round: MeanRound, slots: SequenceSlots) -> f64 {
    let verify = |sequences: u32| {
        let sequences = f64::from(sequences);
        target.forward_us(ForwardShape { rows: sequences * round.rows, sequences, context: round.context })
    };
    // Assume that times for drafting and the network do not depend on the number of sequences.
    let beside = (round.micros - verify(slots.used.max(1))).max(0.0);
    let speed = |sequences: u32| {
        let micros = beside + verify(sequences);
        if sequences > 0 && micros > 0.0 { f64::from(sequences) * round.tokens * 1e6 / micros } else { 0.0 }
    };
    let now = speed(slots.used);
    let most = slots.max.min(SEQUENCES_MAX);
    let more = std::iter::successors(Some(slots.used + 1), |sequences| sequences.checked_mul(2));
    let tried = more.take_while(|sequences| *sequences < most).chain((most > slots.used).then_some(most));
    tried.map(speed).fold(now, f64::max) - now
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::StepTimes;

    /// Constant up to 16 rows, then proportional to the rows.
    fn target() -> WorkerCost {
        WorkerCost::new(StepTimes::of_rows(&[(1, 10_000), (16, 10_000), (64, 40_000), (128, 80_000)]))
    }

    fn at(round: MeanRound, taken: u32, most: u32) -> f64 {
        headroom(&target(), round, SequenceSlots { used: taken, max: most })
    }

    #[test]
    fn an_idle_target_has_most_and_a_full_one_none() {
        let plain = MeanRound::default();
        assert_eq!(at(plain, 0, 16), 1_600.0);
        assert_eq!(at(plain, 4, 16), 1_200.0);
        assert_eq!((at(plain, 16, 16), at(plain, 20, 16)), (0.0, 0.0));
        assert!(at(plain, 16, 64) < 1.0, "time is proportional to rows here, so more sequences add nothing");
        assert!(at(plain, 0, 1_000) > at(plain, 8, 1_000));
    }

    #[test]
    fn accepted_drafts_are_headroom_and_drafts_that_are_not_accepted_are_none() {
        let drafted = |tokens| MeanRound { tokens, rows: 4.0, ..MeanRound::default() };
        assert!(at(drafted(3.0), 2, 64) > at(drafted(1.2), 2, 64));
        assert!(at(drafted(1.2), 0, 64) < at(MeanRound::default(), 0, 64), "rejected drafts cost rows");
        let slow = MeanRound { micros: 30_000.0, ..drafted(3.0) };
        assert!(at(slow, 0, 64) < at(drafted(3.0), 0, 64), "time spent on drafting reduces the headroom");
    }

    #[test]
    fn a_target_of_which_nothing_is_known_is_no_infinity() {
        let unknown = WorkerCost::new(StepTimes::new(&[]));
        assert_eq!(headroom(&unknown, MeanRound::default(), SequenceSlots { used: 0, max: u32::MAX }), 0.0);
    }
}
