//! Advice from acceptance and cost: the best k and its speedup, computed by the controller that a router's
//! lanes use ([`scheduling::draft_length`]) from the measured verdicts. Pure.

use std::time::Duration;

use scheduling::cost::{StepTimes, WorkerCost};
use scheduling::draft_length::{DraftLength, Load};
use serde::Serialize;

use super::cost::Costs;
use super::local::VerifiedRound;

/// The largest k considered.
const MAX_K: u32 = 10;
/// Number of messages after which the wire estimate has converged.
const WIRE_MESSAGES: usize = 200;

/// Where the draft runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// On the target's machine, alternating with it: no wire.
    Colocated,
    /// On a separate, equal machine, over a wire.
    Apart,
}

/// The configuration that advice is given for.
#[derive(Debug, Clone, Copy)]
pub struct Deployment {
    /// Where the draft runs.
    pub placement: Placement,
    /// Concurrent sequences.
    pub sequences: u32,
    /// Mean number of tokens in a sequence.
    pub context: f64,
    /// Round-trip time to the draft worker, if the draft runs apart.
    pub wire: Duration,
}

/// The best k at one load.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Advice {
    /// Where the draft runs.
    pub placement: Placement,
    /// Concurrent sequences.
    pub sequences: u32,
    /// The k that commits the most tokens per second; 0 means no speculation.
    pub k: u32,
    /// Tokens per second relative to k = 0.
    pub speedup: f64,
    /// Expected tokens committed per round.
    pub expected_tokens: f64,
}

/// Returns the best k for text with these verdicts; `None` if nothing was drafted, because the controller
/// would then answer from its assumptions.
pub fn advise(rounds: &[VerifiedRound], costs: &Costs, deployment: Deployment) -> Option<Advice> {
    let Deployment { placement, sequences, context, wire } = deployment;
    let mut lane = DraftLength::new(MAX_K);
    let mut drafted = rounds.iter().filter(|round| round.drafted > 0).peekable();
    drafted.peek()?;
    for round in drafted {
        lane.observe_verification(round.drafted, round.accepted);
        // A short proposal is not the worker's fault: the sequence or the text ended.
        lane.observe_proposal(round.drafted, round.drafted);
    }
    let wire = if placement == Placement::Colocated { Duration::ZERO } else { wire };
    let (target, draft) = (worker(&costs.target, wire), worker(&costs.draft, wire));
    let load = Load::alone(sequences, context);
    lane.choose(load, &target, &draft);
    let outlook = lane.explain().outlook;
    let plain = outlook.first()?.tokens_per_second;
    let best = outlook.iter().max_by(|a, b| a.tokens_per_second.total_cmp(&b.tokens_per_second))?;
    Some(Advice {
        placement,
        sequences,
        k: best.k,
        speedup: best.tokens_per_second / plain,
        expected_tokens: best.expected_tokens,
    })
}

fn worker(points: &[scheduling::cost::StepTimePoint], wire: Duration) -> WorkerCost {
    let mut cost = WorkerCost::new(StepTimes::new(points));
    for _ in 0..WIRE_MESSAGES {
        cost.observe_wire(wire, Duration::ZERO);
    }
    cost
}

#[cfg(test)]
mod tests {
    use scheduling::cost::StepTimePoint;

    use super::*;

    fn costs(target: u64, draft: u64) -> Costs {
        let flat = |micros| [1, 64].map(|rows| StepTimePoint { rows, context: 0, micros }).to_vec();
        Costs { target: flat(target), draft: flat(draft) }
    }

    fn best(accepted: [u32; 4], costs: &Costs, placement: Placement, wire_us: u64) -> Advice {
        let rounds: Vec<VerifiedRound> =
            (0..200).map(|i| VerifiedRound { drafted: 4, accepted: accepted[i % 4] }).collect();
        let wire = Duration::from_micros(wire_us);
        advise(&rounds, costs, Deployment { placement, sequences: 1, context: 0.0, wire }).unwrap()
    }

    #[test]
    fn good_cheap_drafts_pay_and_bad_dear_ones_do_not() {
        let cheap = best([4, 4, 3, 4], &costs(20_000, 1_000), Placement::Colocated, 0);
        assert!(cheap.k >= 6 && cheap.speedup > 3.0, "{cheap:?}");
        let dear = best([0, 0, 1, 0], &costs(20_000, 10_000), Placement::Colocated, 0);
        assert_eq!((dear.k, dear.speedup), (0, 1.0));
    }

    #[test]
    fn nothing_is_advised_without_a_draft() {
        let deployment =
            Deployment { placement: Placement::Colocated, sequences: 1, context: 0.0, wire: Duration::ZERO };
        let plain = [VerifiedRound { drafted: 0, accepted: 0 }];
        assert_eq!(advise(&plain, &costs(20_000, 1_000), deployment), None);
    }

    #[test]
    fn a_wire_is_part_of_the_price_apart_and_not_colocated() {
        let (costs, accepted) = (costs(2_000, 200), [2, 1, 4, 3]);
        let near = best(accepted, &costs, Placement::Colocated, 20_000);
        let far = best(accepted, &costs, Placement::Apart, 20_000);
        assert!(near.speedup > 1.5 && far.speedup < near.speedup, "{near:?} {far:?}");
    }
}
