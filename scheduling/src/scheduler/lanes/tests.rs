//! Tests of lanes: learning, policies and limits.

use super::*;
use crate::cost::StepTimes;
use crate::scheduler::policy::DraftTokens;

fn key(task_type: &str) -> LaneKey {
    LaneKey { model: "m".to_owned(), task_type: task_type.to_owned(), temperature: TemperatureBand::Greedy }
}

fn flat(micros: u64) -> WorkerCost {
    WorkerCost::new(StepTimes::of_rows(&[(1, micros), (64, micros)]))
}

fn policy(lanes: &[(&str, LanePolicy)]) -> PolicyConfig {
    let lanes = lanes.iter().map(|(task, policy)| ((*task).to_owned(), *policy)).collect();
    PolicyConfig { lanes, ..PolicyConfig::new(DraftTokens::Auto, 8) }
}

fn lanes(policy: PolicyConfig) -> Lanes {
    Lanes::new(policy, Rules::default())
}

fn workers<'a>(target: &'a WorkerCost, draft: &'a WorkerCost) -> LaneWorkers<'a> {
    LaneWorkers {
        target,
        draft,
        target_sequences: 2,
        draft_sequences: 2,
        shares_cores: false,
        max_tree_tokens: 0,
    }
}

/// Chooses for a sequence of this lane if all lanes have all their sequences at one target.
fn choose(lanes: &mut Lanes, lane: LaneId, workers: &LaneWorkers<'_>, draft_lag: u32) -> LaneChoice {
    let running = (0..).zip(&lanes.lanes).map(|(id, lane)| (LaneId(id), lane.running));
    let loads: LaneLoads = running.collect();
    lanes.choose(lane, workers, || Some(&loads), draft_lag)
}

/// Runs 200 rounds that accept the tokens of `accepted` in a cycle.
fn run(lanes: &mut Lanes, lane: LaneId, workers: &LaneWorkers<'_>, accepted: &[u32]) -> Vec<LaneChoice> {
    let round = |i: usize| {
        let chosen = choose(lanes, lane, workers, 0);
        let (k, accepted) = (chosen.num_draft_tokens, accepted[i % accepted.len()]);
        let judged = DraftOutcome { num_positions: k, num_first: accepted.min(k), mismatch: None };
        lanes.on_verified(lane, &judged, 100);
        chosen
    };
    (0..200).map(round).collect()
}

#[test]
fn each_lane_learns_for_itself_and_is_explained() {
    let mut lanes = lanes(policy(&[]));
    let (good, bad) = (lanes.join(key("code")).0.id, lanes.join(key("chat")).0.id);
    let (target, draft) = (flat(20_000), flat(1_000));
    for (lane, accepted) in [(good, [8]), (bad, [0])] {
        run(&mut lanes, lane, &workers(&target, &draft), &accepted);
    }
    let explained = lanes.explain();
    let k_of = |task: &str| explained.iter().find(|lane| lane.task_type == task).map(|lane| lane.choice.k);
    assert_eq!(k_of("code"), Some(8));
    assert_eq!(k_of("chat"), Some(0));
    assert!((explained[0].choice.load.unwrap().context - 96.0).abs() < 5.0);
}

#[test]
fn a_probe_asks_only_draft_workers_that_have_the_prompt() {
    let mut lanes = lanes(policy(&[]));
    let lane = lanes.join(key("code")).0.id;
    (0..2).for_each(|_| lanes.began_running(lane, false));
    let (target, draft) = (flat(10_000), flat(8_000));
    let workers = workers(&target, &draft);
    // Two sequences take turns; one of them was fed.
    let chosen: Vec<[LaneChoice; 2]> =
        (0..100).map(|_| [0, FEED_LAG + 1].map(|lag| choose(&mut lanes, lane, &workers, lag))).collect();
    let drafted = |turn: usize| chosen.iter().filter(|chosen| chosen[turn].num_draft_tokens > 0).count();
    assert!(drafted(0) > 0, "no probe came");
    assert_eq!(drafted(1), 0);
}

#[test]
fn those_that_wait_for_a_target_share_no_forward() {
    let mut lanes = lanes(policy(&[]));
    let (busy, waiting) = (lanes.join(key("code")).0.id, lanes.join(key("chat")).0.id);
    (0..100).for_each(|_| drop(lanes.join(key("code"))));
    (0..3).for_each(|_| lanes.began_running(busy, false));
    lanes.stopped_running(busy, false);
    let (target, draft) = (flat(20_000), flat(1_000));
    for lane in [busy, waiting] {
        choose(&mut lanes, lane, &workers(&target, &draft), 0);
    }
    let explained = lanes.explain();
    let loads = explained.iter().map(|lane| lane.choice.load.expect("the lane has chosen a draft length"));
    let seen: Vec<_> =
        loads.map(|load| (load.sequences, load.lane_sequences, load.other_sequences)).collect();
    assert_eq!(seen, [(1, 1, 2), (2, 2, 0)], "chat, then code");
}

#[test]
fn others_do_not_draft_jointly_beside_requests_that_refuse_drafts() {
    let (target, draft) = (flat(20_000), flat(1_000));
    // Whether the lanes may draft jointly as far as the second one goes, whose sequence refuses drafts or not.
    let may_draft_jointly = |refuses_drafts| {
        let mut lanes = lanes(policy(&[]));
        let (own, other) = (lanes.join(key("code")).0.id, lanes.join(key("chat")).0.id);
        lanes.began_running(own, false);
        lanes.began_running(other, refuses_drafts);
        choose(&mut lanes, own, &workers(&target, &draft), 0);
        lanes.stopped_running(other, refuses_drafts);
        lanes.began_running(other, false);
        choose(&mut lanes, other, &workers(&target, &draft), 0);
        let explained = lanes.explain();
        let least_gain = |task: &str| {
            let lane = explained.iter().find(|lane| lane.task_type == task).expect("it chose");
            lane.choice.load.expect("it chose").joint.least_gain
        };
        assert!(least_gain("chat") > 0.0, "no sequence refuses drafts any more");
        least_gain("code") > 0.0
    };
    assert!(may_draft_jointly(false));
    assert!(!may_draft_jointly(true));
}

#[test]
fn only_lanes_at_the_same_target_share_its_forwards() {
    let mut lanes = lanes(policy(&[]));
    let (own, elsewhere, beside) =
        (lanes.join(key("code")).0.id, lanes.join(key("chat")).0.id, lanes.join(key("qa")).0.id);
    for (lane, running) in [(own, 5), (elsewhere, 4), (beside, 3)] {
        (0..running).for_each(|_| lanes.began_running(lane, false));
    }
    let (target, draft) = (flat(20_000), flat(1_000));
    // Four of the lane's sequences are at this target.
    let loads = LaneLoads::from([(own, 4), (beside, 3)]);
    lanes.choose(own, &workers(&target, &draft), || Some(&loads), 0);
    let load = lanes.explain().iter().find_map(|lane| lane.choice.load).expect("one lane chose");
    assert_eq!((load.sequences, load.lane_sequences, load.other_sequences), (4, 5, 3));
}

#[test]
fn a_lane_that_lost_most_of_its_sequences_soon_decides_anew() {
    let mut lanes = lanes(policy(&[]));
    let lane = lanes.join(key("code")).0.id;
    (0..512).for_each(|_| lanes.began_running(lane, false));
    let (target, draft) = (flat(20_000), flat(1_000));
    choose(&mut lanes, lane, &workers(&target, &draft), 0);
    (0..510).for_each(|_| lanes.stopped_running(lane, false));
    for _ in 0..4 {
        choose(&mut lanes, lane, &workers(&target, &draft), 0);
    }
    assert_eq!(lanes.explain()[0].choice.lane_rounds, 2, "two of the first round were left");
}

#[test]
fn policy_keeps_a_lane_from_drafting_but_for_probes() {
    let all = policy(&[]).lane("");
    let (target, draft) = (flat(20_000), flat(1_000));
    let poor = LanePolicy { min_acceptance: 0.9, ..all };
    let crowded = LanePolicy { max_batch_for_speculation: Some(1), ..all };
    let short = LanePolicy { max_k: 2, ..all };
    let mut lanes = lanes(policy(&[("poor", poor), ("crowded", crowded), ("short", short)]));
    let workers = workers(&target, &draft);
    for (task, least, most, reason) in [
        ("poor", 8, 80, Some(DisabledReason::LaneMinAcceptance)),
        ("crowded", 0, 0, Some(DisabledReason::LaneMaxBatch)),
        ("short", 190, 200, None),
    ] {
        let lane = lanes.join(key(task)).0.id;
        let chosen = run(&mut lanes, lane, &workers, &[8, 8, 8, 8, 0]);
        let drafted = chosen.iter().filter(|chosen| chosen.num_draft_tokens > 0).count();
        assert!((least..=most).contains(&drafted), "{task}: {drafted} of 200 rounds drafted");
        assert_eq!(chosen.iter().rev().find_map(|chosen| chosen.held_back), reason, "{task}");
        assert!(chosen.iter().all(|chosen| task != "short" || chosen.num_draft_tokens <= 2));
        lanes.leave(lane);
    }
}

#[test]
fn reservations_follow_the_output_lengths_of_the_lane() {
    let mut lanes = lanes(policy(&[]));
    let lane = lanes.join(key("code")).0.id;
    let expected =
        |lanes: &Lanes, now, max| lanes.expected_len(lane, SequenceLengths { now, prompt: 10, max });
    assert_eq!(expected(&lanes, 10, 1_000), 1_008, "no output has ended, so the maximum is reserved");
    (0..50).for_each(|_| lanes.on_output(lane, 30));
    assert_eq!(expected(&lanes, 10, 1_000), 48);
    assert_eq!(expected(&lanes, 70, 1_000), 78, "it is already longer than expected");
    assert_eq!(expected(&lanes, 10, 20), 28, "its maximum is shorter than expected");
}

#[test]
fn clients_cannot_open_lanes_without_end() {
    let careful = LanePolicy { max_k: 2, ..policy(&[]).lane("") };
    let mut lanes = lanes(policy(&[("careful", careful)]));
    let join = |lanes: &mut Lanes, task: &str| {
        let (lane, is_new) = lanes.join(key(task));
        (lane.id, lane.key.task_type.clone(), is_new)
    };
    for task in 0..2 * MAX_LANES {
        let (lane, ..) = join(&mut lanes, &format!("idle-{task}"));
        lanes.leave(lane);
    }
    assert_eq!(lanes.explain().len(), MAX_LANES);
    let newest = format!("idle-{}", 2 * MAX_LANES - 1);
    assert_eq!(join(&mut lanes, &newest), (LaneId(MAX_LANES as u32 - 1), newest.clone(), false));
    for task in 1..MAX_LANES {
        let (.., is_new) = join(&mut lanes, &format!("busy-{task}"));
        assert!(is_new, "idle lanes are replaced, the least recently used one first");
    }
    assert_eq!(join(&mut lanes, &newest), (LaneId(MAX_LANES as u32 - 1), newest, false));
    let shared = (LaneId(MAX_LANES as u32), String::new());
    assert_eq!(join(&mut lanes, "more"), (shared.0, shared.1.clone(), true));
    assert_eq!(join(&mut lanes, "other"), (shared.0, shared.1, false));
    let (id, task_type, _) = join(&mut lanes, "careful");
    assert_eq!((task_type.as_str(), lanes.lanes[id.0 as usize].policy), ("careful", careful));
}
