//! What a lane learns from the times of rounds.

use std::time::Duration;

use super::tests::duration;
use super::*;
use crate::cost::StepTimes;
use crate::prompt_time::PromptTime;

/// Correction factor of a plain round that a lane of four sequences learns from one lane round of about twice
/// the price.
fn learned(forward_sequences: [u32; 2], other_sequences: u32) -> f64 {
    learned_from(&RoundTimes { forward_sequences, ..LONG_ROUND }, other_sequences, PromptTime::default())
}

const LONG_ROUND: RoundTimes = RoundTimes {
    num_draft_tokens: 0,
    draft_rows: 0,
    draft_wait: Duration::ZERO,
    verify: Duration::from_millis(20),
    committed: 1,
    num_leaves: 0,
    forward_sequences: [4; 2],
    met_prompts: false,
};

fn learned_from(round: &RoundTimes, other_sequences: u32, prompts: PromptTime) -> f64 {
    let mut worker = WorkerCost::new(StepTimes::of_rows(&[(1, 10_000), (64, 10_000)]));
    worker.prompts = prompts;
    let load = Load { other_rows: other_sequences, other_sequences, ..Load::alone(4, 0.0) };
    let mut lane = DraftLength::new(0);
    for _ in 0..4 {
        lane.choose(load, &worker, &worker);
        lane.observe_round(round, &worker, &worker);
    }
    lane.choose(load, &worker, &worker);
    let at = lane.explain().outlook[0];
    at.verify_us / at.table_verify_us
}

#[test]
fn rounds_that_met_prompts_do_not_count() {
    let met_prompts = RoundTimes { met_prompts: true, ..LONG_ROUND };
    for other_sequences in [0, 4] {
        let learned = |round| learned_from(round, other_sequences, PromptTime::default());
        assert!(learned(&LONG_ROUND) > 1.5, "{other_sequences}");
        assert_eq!(learned(&met_prompts), 1.0, "{other_sequences}");
    }
}

#[test]
fn rounds_that_met_no_prompts_are_compared_with_a_price_without_them() {
    let mut prompts = PromptTime::default();
    (0..1_000).for_each(|_| prompts.observe(10_000.0, Some(10_000.0)));
    // A forward of 10 ms, and the network time that is assumed.
    let round = RoundTimes { verify: duration(10_300.0), ..LONG_ROUND };
    let learned = learned_from(&round, 0, prompts);
    assert!((learned - 1.0).abs() < 0.01, "{learned}");
}

#[test]
fn rounds_in_which_groups_join_or_part_count_only_beside_other_lanes() {
    assert!(learned([4, 4], 0) > 1.5 && learned([4, 5], 0) > 1.5);
    for joining_or_parting in [[4, 2], [2, 4], [4, 0]] {
        assert_eq!(learned(joining_or_parting, 0), 1.0, "{joining_or_parting:?}");
        assert!(learned(joining_or_parting, 4) > 1.5, "{joining_or_parting:?}");
    }
}

#[test]
fn rounds_are_compared_with_the_price_that_they_were_chosen_by() {
    let worker = |micros| {
        let mut cost = WorkerCost::new(StepTimes::of_rows(&[(1, micros), (64, micros)]));
        (0..5).for_each(|_| cost.observe_wire(Duration::ZERO, Duration::ZERO));
        cost
    };
    let (target, draft) = (worker(10_000), worker(300));
    // The router still sees seven other lanes without drafts, but all gain by one token each. So they draft at
    // the same time, and a round takes one forward. Beside plain steps it would take two.
    let joint = JointLoad { draft_sequences: 8, least_one_token_gain: Some(2.0), ..JointLoad::default() };
    let joint = JointLoad { least_gain: 0.0, ..joint };
    let others = Load { other_rows: 7, other_sequences: 7, other_plain_sequences: 7, ..Load::alone(1, 0.0) };
    let mut lane = DraftLength::new(1);
    lane.choose(Load { joint, ..others }, &target, &draft);
    for _ in 0..40 {
        let k = lane.choose(Load { joint, ..others }, &target, &draft).num_draft_tokens;
        assert_eq!((k, lane.drafting), (1, Drafting::OneToken));
        let round = RoundTimes {
            num_draft_tokens: 1,
            draft_rows: 2,
            draft_wait: duration(300.0),
            verify: duration(10_000.0),
            forward_sequences: [8; 2],
            ..LONG_ROUND
        };
        lane.observe_round(&round, &target, &draft);
    }
    let at = lane.outlook[1];
    let learned = (at.draft_wait_us + at.verify_us) / (at.table_draft_us + at.table_verify_us);
    assert!((learned - 1.0).abs() < 0.01, "{learned}");
}

#[test]
fn ids_that_a_draft_worker_lacked_do_not_make_a_draft_length_look_slow() {
    let worker = |micros: fn(u32) -> u64| {
        let mut cost = WorkerCost::new(StepTimes::of_rows(&[1, 64].map(|rows| (rows, micros(rows)))));
        (0..5).for_each(|_| cost.observe_wire(Duration::ZERO, Duration::ZERO));
        cost
    };
    let (target, draft) = (worker(|_| 10_000), worker(|rows| 1_000 * u64::from(rows)));
    // Drafts of 1 ms per token, after 30 ids at 1 ms each beyond those that a round commits.
    let learned = |draft_rows: fn(u32) -> u32| {
        let mut lane = DraftLength::new(4);
        for _ in 0..20 {
            let k = lane.choose(Load::alone(1, 0.0), &target, &draft).num_draft_tokens;
            let round = RoundTimes {
                num_draft_tokens: k,
                draft_rows: draft_rows(k),
                draft_wait: duration(1_000.0 * f64::from(k + 30)),
                verify: duration(10_000.0),
                forward_sequences: [1; 2],
                ..LONG_ROUND
            };
            lane.observe_round(&round, &target, &draft);
        }
        assert!(lane.k > 0, "a lane that always drafts");
        lane.outlook[lane.k as usize].draft_wait_us / lane.outlook[lane.k as usize].table_draft_us
    };
    let caught_up = learned(|k| k + 31);
    assert!((caught_up - 1.0).abs() < 0.01, "{caught_up}");
    assert!(learned(|k| k + 1) > 1.5, "time that nothing explains counts");
}
