//! Tests of what the scheduler holds, and of the work that an event causes: counted, never timed.

use super::*;

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
