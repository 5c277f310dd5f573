//! Sending times of requests: as soon as a slot is free, or at times drawn in advance.

use std::time::Duration;

use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt as _, SeedableRng as _};

/// Order and timing of a run's requests.
#[derive(Debug, Clone, PartialEq)]
pub enum Schedule {
    /// A fixed number of users; each sends the next request when the last is answered. A slow server receives
    /// fewer requests.
    Closed {
        /// Requests in flight.
        concurrency: usize,
    },
    /// Each request at its time, whether or not others were answered. A slow server accumulates a queue.
    Open {
        /// Times after the start of the run, ascending, one per request.
        send_after: Vec<Duration>,
    },
}

impl Schedule {
    /// Poisson arrivals: gaps between the `count` requests are exponentially distributed with mean `1 / rate`
    /// seconds.
    pub fn poisson(rate: f64, count: usize, seed: u64) -> Self {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut at = 0.0;
        let mut next = || {
            // 1 - u is in (0, 1].
            at += -(1.0 - random.random::<f64>()).ln() / rate;
            Duration::from_secs_f64(at)
        };
        Self::Open { send_after: (0..count).map(|_| next()).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_exponential_and_follow_the_seed() {
        let (rate, count) = (8.0, 20_000);
        let Schedule::Open { send_after } = Schedule::poisson(rate, count, 7) else { unreachable!() };
        assert_eq!(Schedule::poisson(rate, count, 7), Schedule::Open { send_after: send_after.clone() });
        assert_ne!(Schedule::poisson(rate, count, 8), Schedule::Open { send_after: send_after.clone() });
        let seconds: Vec<f64> = send_after.iter().map(Duration::as_secs_f64).collect();
        let gaps: Vec<f64> = seconds.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        assert!((mean * rate - 1.0).abs() < 0.02, "mean gap {mean}");
        // In an exponential distribution, a share of 1 - 1/e is below the mean; with even gaps it would be 0
        // or 1.
        let under = gaps.iter().filter(|gap| **gap < 1.0 / rate).count() as f64 / gaps.len() as f64;
        assert!((under - 0.632).abs() < 0.01, "{under} under the mean");
    }
}
