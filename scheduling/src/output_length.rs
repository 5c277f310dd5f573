//! Distribution of a lane's output lengths. KV is reserved by it when a request's `max_tokens` is far above
//! the usual length. Pure.

use std::collections::VecDeque;

use crate::smoothing::LONG_EWMA_WINDOW;

/// One in this many outputs may exceed the percentile; also the minimum number of observations.
const ONE_IN: usize = 10;

/// The latest output lengths of one lane.
#[derive(Debug, Clone, Default)]
pub(crate) struct OutputLengths {
    latest: VecDeque<u32>,
}

impl OutputLengths {
    /// Records the length of an output that ended by itself, at a stop string, or at its limit. Outputs whose
    /// client left tell nothing.
    pub(crate) fn observe(&mut self, tokens: u32) {
        if self.latest.len() == LONG_EWMA_WINDOW as usize {
            self.latest.pop_front();
        }
        self.latest.push_back(tokens);
    }

    /// 90th percentile; `None` before [`ONE_IN`] outputs ended.
    pub(crate) fn p90(&self) -> Option<u32> {
        let num_longer = self.latest.len().div_ceil(ONE_IN);
        if self.latest.len() < ONE_IN {
            return None;
        }
        let mut lengths: Vec<u32> = self.latest.iter().copied().collect();
        let at = lengths.len() - num_longer;
        Some(*lengths.select_nth_unstable(at).1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nine_in_ten_of_the_latest_are_no_longer() {
        let mut lengths = OutputLengths::default();
        (1..ONE_IN as u32).for_each(|tokens| lengths.observe(tokens));
        assert_eq!(lengths.p90(), None);
        (0..100).for_each(|tokens| lengths.observe(tokens));
        (0..1_000).for_each(|i| lengths.observe(i % 100));
        let p90 = lengths.p90().unwrap();
        assert!((85..=95).contains(&p90), "{p90}");
        (0..300).for_each(|_| lengths.observe(7));
        assert_eq!(lengths.p90(), Some(7), "only the latest outputs count");
    }
}
