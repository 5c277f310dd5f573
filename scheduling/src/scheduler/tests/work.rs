//! Tests of what the scheduler holds, and of the work that an event causes: counted, never timed.

use super::*;
use crate::scheduler::policy::LanePolicy;

impl World {
    fn run(&mut self, line: &str) -> String {
        self.line(&Line::parse(line, line.to_owned()))
    }
}

/// Clients come while the only target is full, or drains, and leave again.
#[test]
fn sequences_that_left_wait_no_longer() {
    for is_draining in [false, true] {
        let mut world = World::new(DraftTokens::Fixed(0));
        world.run("target t1 blocks=10");
        world.run("submit first prompt=100 max=50");
        world.run("dispatch");
        if is_draining {
            world.run("drain t1 by operator");
        }
        world.run("submit waits max=100");
        for _ in 0..100 {
            world.run("submit leaves max=100");
            world.run("dispatch");
            world.run("cancel leaves");
        }
        world.run("dispatch");
        let waiting = world.scheduler.report().waiting_for_target;
        assert_eq!(
            (waiting, world.scheduler.state.unserved.len()),
            if is_draining { (0, 1) } else { (1, 0) }
        );
    }
}

/// Two targets with a step in flight and a delayed one each; then only one of them answers.
#[test]
fn delayed_steps_are_considered_where_something_changed() {
    let mut world = World::new(DraftTokens::Fixed(0));
    for (target, sequences) in [("t1", ["a", "c"]), ("t2", ["b", "d"])] {
        world.run(&format!("target {target} model={target} us=(1,20000,64,20000)"));
        for sequence in sequences {
            world.run(&format!("submit {sequence} model={target}"));
        }
    }
    world.run("dispatch");
    for line in ["reply a t1 accept=0 at=20ms", "reply b t2 accept=0", "dispatch"] {
        world.run(line);
    }
    for line in ["reply c t1 accept=0 at=25ms", "reply d t2 accept=0", "dispatch"] {
        world.run(line);
    }
    let considered = |world: &World| world.scheduler.state.delayed.num_considered;
    let before = considered(&world);
    (0..100).for_each(|_| drop(world.run("dispatch")));
    assert_eq!(considered(&world), before, "nothing happened");
    world.run("reply a t1 accept=0 at=30ms");
    let sent = world.run("dispatch");
    assert!(sent.contains("send t1: c") && sent.contains("send t1: a") && !sent.contains("t2"), "{sent}");
    assert_eq!(considered(&world), before + 1, "only t1 changed");
    // One that is delayed is preempted and gets the same target again: its step is sent once.
    let lines = ["preempt d t2", "dispatch", "reply b t2 accept=0 at=31ms", "dispatch"];
    let sent = lines.map(|line| world.run(line)).join("\n");
    assert_eq!(sent.matches("send t2: d").count(), 1, "{sent}");
}

/// Draft workers of which none fits: rounds look for one again only after something changed.
#[test]
fn a_round_without_a_draft_worker_does_not_look_for_one_again() {
    let mut world = World::new(DraftTokens::Auto);
    world.run("target t1 us=(1,20000,64,20000)");
    world.run("draft d1 blocks=10 us=(1,1000)");
    world.run("submit a prompt=100 max=50");
    world.run("submit b prompt=100 max=50");
    world.run("dispatch");
    let b = world.sequences["b"];
    let found_none_at = |world: &World| world.scheduler.sequences[&b].found_no_draft_at;
    let full = found_none_at(&world);
    assert!(full.is_some());
    world.run("reply b t1 accept=0 at=20ms");
    world.run("dispatch");
    assert_eq!(found_none_at(&world), full);
    world.run("cancel a");
    world.run("reply b t1 accept=0 at=40ms");
    let sent = world.run("dispatch");
    assert!(sent.contains("send d1: b"), "{sent}");
}

/// An operator allows no drafts for the task type of the only sequence, `a` at `t1`.
fn world_of_a_plain_task() -> World {
    let mut policy = PolicyConfig::new(DraftTokens::Auto, 8);
    let plain = LanePolicy { max_k: 0, ..policy.lane("plain") };
    policy.lanes.insert("plain".to_owned(), plain);
    let mut world = World::with_policy(policy);
    world.run("target t1 us=(1,20000,64,20000)");
    world.run("submit a prompt=100 max=50 task=plain");
    world
}

#[test]
fn a_lane_with_a_maximum_of_zero_neither_drafts_nor_feeds() {
    let mut world = world_of_a_plain_task();
    world.run("draft d1 us=(1,1000)");
    let mut commands = vec![world.run("dispatch")];
    for round in 1..=50 {
        commands.push(world.run(&format!("reply a t1 accept=0 at={}ms", 20 * round)));
        commands.push(world.run("dispatch"));
    }
    let commands = commands.join("\n");
    assert!(commands.contains("finish a Length, 50 rounds (policy)"), "{commands}");
    assert!(!commands.contains("send d1"), "{commands}");
    assert_eq!(world.scheduler.report().lanes[0].held_back, Some("policy"));
}

#[test]
fn sequences_that_may_not_draft_want_no_draft_worker() {
    let mut world = world_of_a_plain_task();
    world.run("dispatch");
    let drafts = |world: &World| world.scheduler.report().pools[0].wanted_draft_workers;
    assert_eq!(drafts(&world), 0.0);
    world.run("submit b prompt=100 max=50");
    assert_eq!(drafts(&world), 1.0, "its cost is unknown before one connects");
}

/// Whether draft workers propose in time is measured on those that stay.
#[test]
fn a_draft_worker_that_leaves_during_a_round_is_no_poor_supply() {
    for leaving in ["disconnect d1", "drain d1"] {
        let mut world = World::new(DraftTokens::Auto);
        world.run("target t1 us=(1,20000,64,20000)");
        world.run("draft d1 us=(1,1000)");
        world.run("submit a prompt=4 k=2");
        let sent = world.run("dispatch");
        assert!(sent.contains("send d1: a keep=0 append=4 propose k=2"), "{sent}");
        let supply = |world: &World| world.scheduler.report().lanes[0].choice.supply.clone();
        let before = supply(&world);
        let sent = world.run(leaving);
        assert!(sent.contains("send t1: a keep=0 append=4 verify []"), "{leaving}: {sent}");
        assert_eq!(supply(&world), before, "{leaving}");
    }
}
