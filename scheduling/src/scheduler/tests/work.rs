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
