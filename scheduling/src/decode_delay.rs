//! Delayed batching of plain decode steps: whether steps that could leave now wait for the steps that the
//! target runs, so that all share the next forward. Used by the router and by the simulator; stateless and
//! without a clock.
//!
//! A target takes all waiting steps into its next forward. Two groups of sequences that have run separately
//! stay separate: one waits while the other runs. If a forward costs the same for half the rows, both run at
//! half the speed. Once joined, they stay together.

use std::time::Duration;

use crate::cost::{WorkerCost, duration_of_micros};

/// Whether `ready` sequences, with one row each, gain by waiting for the `in_flight` ones to be answered: one
/// larger forward and a network round trip compared with two alternating forwards.
pub(crate) fn delay_pays(ready: u32, in_flight: u32, context: f64, target: &WorkerCost) -> bool {
    if ready == 0 || in_flight == 0 {
        return false;
    }
    let step = |rows: u32| target.step_us(f64::from(rows), context);
    target.wire_us() + step(ready + in_flight) < step(ready) + step(in_flight)
}

/// Maximum wait for `in_flight` steps to be answered; a longer delay means a problem at the target, and the
/// step leaves.
pub(crate) fn max_delay(in_flight: u32, context: f64, target: &WorkerCost) -> Duration {
    let micros = target.wire_us() + target.step_us(f64::from(in_flight), context);
    duration_of_micros(2.0 * micros)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::StepTimes;

    fn target(times: [u64; 2]) -> WorkerCost {
        WorkerCost::new(StepTimes::of_rows(&[(1, times[0]), (64, times[1])]))
    }

    #[test]
    fn joining_pays_where_rows_are_cheap_and_not_where_each_costs_alike() {
        let (flat, steep) = (target([20_000, 20_000]), target([100, 6_400]));
        assert!(delay_pays(8, 8, 0.0, &flat));
        assert!(delay_pays(1, 63, 0.0, &flat));
        assert!(!delay_pays(8, 8, 0.0, &steep), "the delay adds a network round trip and saves nothing");
        assert!(!delay_pays(8, 0, 0.0, &flat) && !delay_pays(0, 8, 0.0, &flat));
        assert!(max_delay(8, 0.0, &flat) > Duration::from_millis(40));
    }
}
