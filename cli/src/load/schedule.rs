//! When requests should be sent: as soon as a place is free, or at moments drawn beforehand.

use std::time::Duration;

use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt as _, SeedableRng as _};

/// How a run's requests follow each other.
#[derive(Debug, Clone, PartialEq)]
pub enum Schedule {
    /// So many users, each of whom sends the next request when the last is answered. A slow server gets fewer requests.
    Closed {
        /// Requests in flight.
        concurrency: usize,
    },
    /// Each request at its moment, whether or not others were answered. A slow server gets a queue.
    Open {
        /// After the run's beginning, ascending, one for each request.
        send_after: Vec<Duration>,
    },
}

impl Schedule {
    /// Poisson arrivals: the gaps between `count` requests are drawn from an exponential distribution with mean `1 / rate` seconds.
    pub fn poisson(rate: f64, count: usize, seed: u64) -> Self {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut at = 0.0;
        let mut next = || {
            // 1 - u lies in (0, 1].
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
        // Of an exponential distribution, 1 - 1/e lies under the mean; of even gaps, nothing or all would.
        let under = gaps.iter().filter(|gap| **gap < 1.0 / rate).count() as f64 / gaps.len() as f64;
        assert!((under - 0.632).abs() < 0.01, "{under} under the mean");
    }
}
