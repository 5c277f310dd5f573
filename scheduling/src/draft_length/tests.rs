//! Tests of the controller in a model with even rounds, whose best fixed k is known in closed form.

use std::time::Duration;

use speculation::sequence::{DueFeed, FEED_LAG};

use super::*;
use crate::agreement::Agreement;
use crate::cost::{ForwardShape, StepTimes};
use crate::smoothing::LONG_EWMA_WINDOW;

/// A pool whose sequences draft and verify in alternating groups, with 5% noise on every time.
pub(super) struct World {
    acceptance: f64,
    sequences: u32,
    target: fn(f64) -> f64,
    draft: fn(f64) -> f64,
    wire: f64,
    chance: Chance,
}

/// A fixed pseudorandom sequence.
pub(super) struct Chance(pub(super) u64);

impl Chance {
    pub(super) fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 11) as f64) / ((1_u64 << 53) as f64)
    }
}

impl World {
    /// Draft time of a round, and the rest of it, in the best number of alternating groups.
    fn round_micros(&self, k: u32) -> (f64, f64) {
        let in_groups = |groups: u32| {
            let (n, groups) = (f64::from(self.sequences) / f64::from(groups), f64::from(groups));
            let drafted = f64::from(k) * (self.draft)(n);
            let draft = if k == 0 { 0.0 } else { self.wire + drafted };
            let verify = (self.target)(n * f64::from(k + 1));
            let round = (draft + self.wire + verify).max(groups * verify).max(groups * drafted);
            (draft, round - draft)
        };
        let most = if k == 0 { 1 } else { self.sequences.min(4) };
        let rounds = (1..=most).map(in_groups);
        rounds.min_by(|a, b| (a.0 + a.1).total_cmp(&(b.0 + b.1))).unwrap()
    }

    /// Committed tokens per microsecond at a fixed k.
    fn goodput(&self, k: u32) -> f64 {
        let expected: f64 = (0..=k).map(|depth| self.acceptance.powi(depth as i32)).sum();
        let (draft, verify) = self.round_micros(k);
        f64::from(self.sequences) * expected / (draft + verify)
    }

    fn best(&self) -> f64 {
        (0..=10).map(|k| self.goodput(k)).fold(0.0, f64::max)
    }

    pub(super) fn cost(times: impl Fn(f64) -> f64) -> WorkerCost {
        let point = |rows: u32| (rows, times(f64::from(rows)) as u64);
        WorkerCost::new(StepTimes::of_rows(&[1, 2, 4, 8, 16, 32, 64].map(point)))
    }
}

/// Load of this number of sequences with exclusive workers.
fn alone(sequences: u32) -> Load {
    Load::alone(sequences, 0.0)
}

/// A lane in a world, with its estimates of the workers.
struct Run {
    lane: DraftLength,
    target: WorkerCost,
    draft: WorkerCost,
    /// One per sequence; empty if draft workers do not report agreement.
    agreements: Vec<Agreement>,
}

impl Run {
    fn new(world: &World) -> Self {
        Self {
            lane: DraftLength::new(10),
            target: World::cost(world.target),
            draft: World::cost(world.draft),
            agreements: Vec::new(),
        }
    }

    /// A run in which draft workers report agreement with the tokens that they are fed.
    fn told(world: &World) -> Self {
        Self { agreements: vec![Agreement::default(); world.sequences as usize], ..Self::new(world) }
    }

    /// Runs one round of all sequences. Returns the mean number of committed tokens at this k, and the
    /// duration.
    fn round(&mut self, world: &mut World) -> (f64, f64) {
        let n = world.sequences;
        let load = alone(n);
        let mut k = 0;
        for _ in 0..n {
            k = self.lane.choose(load, &self.target, &self.draft).num_draft_tokens;
        }
        let noise = |chance: &mut Chance| 0.95 + 0.1 * chance.next();
        let (draft, verify) = world.round_micros(k);
        let (draft, verify) = (draft * noise(&mut world.chance), verify * noise(&mut world.chance));
        let forward = (world.target)(f64::from(n * (k + 1))) * noise(&mut world.chance);
        self.target.observe_step(n * (k + 1), 0.0, duration(forward));
        self.target.observe_wire(duration(world.wire), Duration::ZERO);
        if k > 0 {
            self.draft.observe_step(n, 0.0, duration((world.draft)(f64::from(n))));
            self.draft.observe_wire(duration(world.wire), Duration::ZERO);
        }
        for _ in 0..n {
            let accepted = (0..k).take_while(|_| world.chance.next() < world.acceptance).count() as u32;
            let (draft_wait, verify) = (duration(draft), duration(verify));
            let round = RoundTimes {
                num_draft_tokens: k,
                draft_rows: 1,
                draft_wait,
                verify,
                committed: accepted + 1,
                num_leaves: 0,
                forward_sequences: [n; 2],
                met_prompts: false,
            };
            if k > 0 {
                self.lane.observe_proposal(k, k);
            }
            self.lane.observe_verification(k, accepted);
            self.lane.observe_round(&round, &self.target, &self.draft);
        }
        for agreement in self.agreements.iter_mut().filter(|_| k == 0) {
            let (positions, accepted) = agreement.advance(world.chance.next() < world.acceptance);
            self.lane.observe_agreement(positions, accepted);
        }
        let tokens = world.goodput(k) * world.round_micros(k).0 + world.goodput(k) * world.round_micros(k).1;
        (tokens, draft + verify)
    }

    /// Tokens per microsecond over many rounds.
    fn goodput(&mut self, world: &mut World, rounds: u32) -> f64 {
        let (tokens, micros) =
            (0..rounds).map(|_| self.round(world)).fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
        tokens / micros
    }
}

pub(super) fn duration(micros: f64) -> Duration {
    Duration::from_secs_f64(micros.max(0.0) / 1e6)
}

type Shape = (&'static str, fn(f64) -> f64, fn(f64) -> f64);

const SHAPES: [Shape; 4] = [
    ("stairs", |rows| 5_000.0 + 2_000.0 * (rows / 32.0).ceil(), |rows| 400.0 + 100.0 * (rows / 64.0).ceil()),
    ("knee", |rows| 20_000.0 * (rows / 256.0).max(1.0), |rows| 900.0 + 2.0 * rows),
    ("compute bound", |rows| 2_000.0 + 700.0 * rows, |rows| 300.0 + 80.0 * rows),
    ("expensive draft", |rows| 9_000.0 + 20.0 * rows, |rows| 5_000.0 + 10.0 * rows),
];

fn world(shape: &Shape, acceptance: f64, sequences: u32) -> World {
    let seed = u64::from(sequences) * 1_000 + (acceptance * 100.0) as u64;
    World { acceptance, sequences, target: shape.1, draft: shape.2, wire: 300.0, chance: Chance(seed) }
}

#[test]
fn on_average_within_four_percent_of_the_best_fixed_k_and_never_worse_than_none() {
    for shape in &SHAPES {
        for sequences in [1, 8, 64, 512] {
            for acceptance in [0.2, 0.4, 0.6, 0.8, 0.95] {
                // A single run may stay at another k for long: by the hysteresis, or after a falsely detected
                // change of the text.
                let runs: Vec<(f64, f64)> = (0..5)
                    .map(|seed| {
                        let mut world = world(shape, acceptance, sequences);
                        world.chance.0 += seed;
                        let mut run = Run::new(&world);
                        let all = run.goodput(&mut world, 100);
                        let settled = run.goodput(&mut world, 500);
                        (settled / world.best(), (100.0 * all + 500.0 * settled) / 600.0 / world.goodput(0))
                    })
                    .collect();
                let mean = |of: fn(&(f64, f64)) -> f64| runs.iter().map(of).sum::<f64>() / runs.len() as f64;
                let (of_best, of_none) = (mean(|run| run.0), mean(|run| run.1));
                let place =
                    format!("{} at acceptance {acceptance}, {sequences} sequences: {runs:?}", shape.0);
                assert!(of_best >= 0.96, "{of_best:.3} of the best fixed k: {place}");
                assert!(of_none >= 0.97, "{of_none:.3} of k = 0: {place}");
            }
        }
    }
}

#[test]
fn k_stands_still_where_nothing_changes() {
    for shape in &SHAPES {
        for sequences in [1, 64] {
            let mut world = world(shape, 0.7, sequences);
            let mut run = Run::new(&world);
            run.goodput(&mut world, 200);
            let before = run.lane.changes.back().map_or(0, |change| change.lane_round);
            let mut moves = 0;
            let mut k = run.lane.k;
            for _ in 0..500 {
                run.round(&mut world);
                moves += u32::from(run.lane.k != k);
                k = run.lane.k;
            }
            assert!(moves <= 10, "{} at {sequences}: {moves} moves in 500 rounds since {before}", shape.0);
        }
    }
}

#[test]
fn a_step_of_acceptance_is_followed_within_twenty_rounds() {
    for shape in &SHAPES[..3] {
        let mut world = world(shape, 0.8, 32);
        let mut run = Run::told(&world);
        run.goodput(&mut world, 300);
        for acceptance in [0.3, 0.8] {
            world.acceptance = acceptance;
            run.goodput(&mut world, 20);
            let now = run.goodput(&mut world, 10);
            assert!(now >= 0.95 * world.best(), "{} to {acceptance}: {:.3}", shape.0, now / world.best());
            run.goodput(&mut world, 300);
        }
    }
}

#[test]
fn k_shrinks_as_the_load_grows() {
    let mut ks = Vec::new();
    for sequences in [1, 16, 128, 512] {
        let mut world = world(&SHAPES[1], 0.7, sequences);
        let mut run = Run::new(&world);
        run.goodput(&mut world, 200);
        ks.push(run.lane.k);
    }
    // Left of the knee, neighbouring k differ by half a percent at most.
    assert!(ks.windows(2).all(|pair| pair[1] <= pair[0] + 1) && ks[0] > ks[2] && ks[2] >= ks[3], "{ks:?}");
}

#[test]
fn probes_keep_to_their_share_and_few_changes_are_kept() {
    let mut world = world(&SHAPES[3], 0.2, 8);
    let mut run = Run::new(&world);
    for round in 0..1_000 {
        world.acceptance = if round % 200 < 100 { 0.9 } else { 0.2 };
        run.round(&mut world);
    }
    let explanation = run.lane.explain();
    assert!(
        explanation.probes * Rules::default().probe_spacing <= explanation.lane_rounds,
        "{}",
        explanation.probes
    );
    assert_eq!(explanation.outlook.len(), 11);
    assert!(explanation.changes.len() <= CHANGES_KEPT && !explanation.changes.is_empty());
}

#[test]
fn a_lane_round_is_over_when_each_sequence_had_its_turn_at_whichever_target() {
    let world = world(&SHAPES[0], 0.8, 4);
    let mut run = Run::new(&world);
    let load = Load { lane_sequences: 64, ..alone(4) };
    for turn in 0..256 {
        run.lane.choose(load, &run.target, &run.draft);
        assert_eq!(run.lane.explain().lane_rounds, 1 + turn / 64);
    }
}

#[test]
fn probes_that_take_longer_than_predicted_become_rare() {
    let probes = |slower: f64| {
        let mut world = world(&SHAPES[3], 0.2, 8);
        let mut run = Run::new(&world);
        for _ in 0..2_000 {
            run.round(&mut world);
            // As if the draft worker had been busy with other work: one more report per sequence.
            let Some(probe) = run.lane.probe.filter(|_| slower > 0.0) else { continue };
            let late = RoundTimes {
                num_draft_tokens: probe,
                draft_rows: 1,
                draft_wait: duration(slower * 10_000.0),
                verify: duration(10_000.0),
                committed: 1,
                num_leaves: 0,
                forward_sequences: [8; 2],
                met_prompts: false,
            };
            (0..8).for_each(|_| run.lane.observe_round(&late, &run.target, &run.draft));
        }
        run.lane.explain().probes
    };
    let (in_time, late) = (probes(0.0), probes(20.0));
    assert!(late > 0 && 3 * late < in_time, "{late} late, {in_time} in time");
}

#[test]
fn rows_that_would_slow_other_lanes_down_are_not_free() {
    let world = world(&SHAPES[2], 0.9, 1);
    let mut ks = Vec::new();
    // Three cases: no other lane waits for the rows; other lanes have just moved and do not know their round
    // time; other lanes know it.
    for (other_sequences, others_round_us) in [(0, 0.0), (16, 0.0), (16, 10_000.0)] {
        let mut run = Run::new(&world);
        let load = Load {
            other_rows: 16,
            other_sequences,
            other_plain_sequences: other_sequences,
            others_round_us,
            ..alone(1)
        };
        for _ in 0..100 {
            let k = run.lane.choose(load, &run.target, &run.draft).num_draft_tokens;
            run.lane.observe_verification(k, k);
        }
        ks.push(run.lane.k);
    }
    assert!(ks[0] > ks[1] && ks[0] > ks[2], "{ks:?}");
}

#[test]
fn a_draft_that_only_a_moment_allows_is_not_begun() {
    // Six rows take half as long as seven.
    let times = [(1, 10_000), (6, 10_000), (7, 20_000), (64, 191_000)];
    let (target, draft) = (WorkerCost::new(StepTimes::of_rows(&times)), World::cost(|_| 300.0));
    let beside = |others: u32| Load {
        other_rows: others,
        other_sequences: others,
        other_plain_sequences: others,
        joint: JointLoad { least_gain: 0.0, ..JointLoad::default() },
        ..alone(1)
    };
    let mut lane = DraftLength::new(4);
    let mut drafts = |others| lane.choose(beside(others), &target, &draft).num_draft_tokens > 0;
    assert_eq!([7, 7, 6, 7, 7].map(&mut drafts), [false; 5], "a request ended, and another began");
    assert_eq!([6, 6].map(drafts), [false, true]);
}

#[test]
fn a_draft_worker_that_seldom_proposes_is_not_taken_for_one_that_is_wrong() {
    let world = world(&SHAPES[0], 0.9, 1);
    let mut run = Run::new(&world);
    let load = alone(1);
    for round in 0..200 {
        run.lane.choose(load, &run.target, &run.draft);
        let supplied = if round % 4 == 0 { 3 } else { 0 };
        run.lane.observe_proposal(3, supplied);
        run.lane.observe_verification(supplied, supplied);
    }
    let explanation = run.lane.explain();
    assert!(explanation.acceptance[0] > 0.9, "{:?}", explanation.acceptance);
    assert!((explanation.supply[0] - 0.25).abs() < 0.1, "{:?}", explanation.supply);
}

/// A lane of eight whose drafts are late in the lane rounds of `is_late`. Returns the lane rounds that
/// drafted.
fn drafting_rounds(lane_rounds: u64, is_late: impl Fn(u64) -> bool) -> Vec<u64> {
    let world = World { sequences: 8, ..world(&SHAPES[0], 0.9, 1) };
    let mut run = Run::told(&world);
    let load = alone(8);
    let mut drafting = Vec::new();
    for lane_round in 0..lane_rounds {
        for _ in 0..8 {
            let k = run.lane.choose(load, &run.target, &run.draft).num_draft_tokens;
            if k == 0 {
                // Fed tokens are answered, and are evidence about acceptance only.
                run.lane.observe_agreement(0..1, 1);
                continue;
            }
            let supplied = if is_late(lane_round) { 0 } else { k };
            run.lane.observe_proposal(k, supplied);
            run.lane.observe_verification(supplied, supplied);
        }
        if run.lane.explain().k > 0 {
            drafting.push(lane_round);
        }
    }
    drafting
}

#[test]
fn drafts_that_were_late_once_are_asked_for_again() {
    let drafting = drafting_rounds(100, |lane_round| lane_round < 20);
    let stopped = (0..100).find(|lane_round| !drafting.contains(lane_round));
    assert!(stopped.is_some_and(|at| at < 20), "the lane never stopped drafting: {drafting:?}");
    assert!((60..100).all(|lane_round| drafting.contains(&lane_round)), "{drafting:?}");
}

#[test]
fn drafts_that_are_late_for_ever_are_asked_for_ever_more_seldom() {
    let drafting = drafting_rounds(1_000, |_| true);
    let late_part = drafting.iter().filter(|lane_round| **lane_round >= 500).count();
    assert!(drafting.len() < 60 && late_part < 20, "{drafting:?}");
}

#[test]
fn a_lane_that_hardly_drafts_feeds_rarely_once_it_knows_its_acceptance() {
    let rules = Rules::default();
    let world = world(&SHAPES[3], 0.2, 1);
    let mut run = Run::new(&world);
    assert!(run.lane.keeps_drafts_fed());
    let choose = |lane: &mut DraftLength, rounds: u64, is_compared: bool| {
        for _ in 0..rounds {
            lane.choose(alone(1), &run.target, &run.draft);
            if is_compared {
                lane.observe_agreement(0..1, 0);
            }
        }
        lane.explain().probes
    };
    for _ in 0..EWMA_WINDOW as u32 {
        run.lane.observe_agreement(0..1, 0);
    }
    assert!(!run.lane.keeps_drafts_fed());
    run.lane.drafting_share = rules.idle_share;
    assert!(run.lane.keeps_drafts_fed(), "it drafts now and then");
    run.lane.drafting_share = 0.0;
    // Feeds tell the acceptance, so it probes only rarely, to measure the time of such rounds.
    let probes = run.lane.explain().probes;
    assert_eq!(choose(&mut run.lane, LONG_EWMA_WINDOW as u64 - 2, true), probes);
    assert_eq!(choose(&mut run.lane, 20, true), probes + 1);
    // A draft worker that lacks the prompt is fed first.
    let unfed = Load { draft_lag: FEED_LAG + 1, ..alone(1) };
    (0..2 * LONG_EWMA_WINDOW as u32).for_each(|_| _ = run.lane.choose(unfed, &run.target, &run.draft));
    assert_eq!(run.lane.explain().probes, probes + 1);
    // Nothing has been compared for long, so only probes tell the acceptance.
    assert!(choose(&mut run.lane, 100, false) >= probes + 4);
}

#[test]
fn feeds_keep_to_their_share_of_the_time() {
    let world = world(&SHAPES[3], 0.2, 1);
    let mut run = Run::new(&world);
    let mut feeds = |rows: u32, others: u32| {
        let load =
            Load { other_rows: others, other_sequences: others, other_plain_sequences: others, ..alone(1) };
        let fed = |run: &mut Run| {
            run.lane.choose(load, &run.target, &run.draft);
            run.lane.pays_for_feed(DueFeed { num_ids: rows, is_first: true }, &run.draft)
        };
        // Lane rounds at first spend the budget of a new lane.
        (0..20_000).for_each(|_| _ = fed(&mut run));
        (0..20_000).filter(|_| fed(&mut run)).count() as f64
    };
    let price = |rows: u32| {
        let rows_us = World::cost(world.draft).forward_us(ForwardShape::plain(f64::from(rows), 0.0));
        rows_us / World::cost(world.target).step_us(1.0, 0.0)
    };
    for rows in [30, FEED_LAG + 1, 400] {
        let share = feeds(rows, 0) * price(rows) / 20_000.0;
        assert!((0.5..1.1).contains(&(share / Rules::default().evidence_share)), "{rows} rows: {share}");
    }
    assert!(feeds(200, 7) < 0.3 * feeds(200, 0), "the sequences of other lanes wait too");
}
