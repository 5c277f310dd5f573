//! How far a round drafts, and how long it waits for the draft. Pure: times and counts come in, a choice goes out.
//!
//! One fixed k for every lane, unless the request pins its own; the wait follows what the draft worker took lately. This is
//! the seam where a lane's own choice of k belongs.

use std::time::Duration;

use crate::generation::SpeculationRequest;

/// The wait before anything is known of a draft worker.
const FIRST_WAIT: Duration = Duration::from_millis(500);

/// Waits stay between these, whatever was measured.
const MIN_WAIT: Duration = Duration::from_millis(20);
const MAX_WAIT: Duration = Duration::from_secs(2);

/// The wait is this many times what a proposal took lately: a late draft costs a round its speed-up, a long wait only
/// costs where the worker is really gone.
const MARGIN: u32 = 4;

/// What an operator sets for all lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PolicyConfig {
    /// k where a request names none.
    pub num_draft_tokens: u32,
    /// k at most, also where a request names one.
    pub max_draft_tokens: u32,
}

/// k for the next round of a sequence.
pub fn num_draft_tokens(config: &PolicyConfig, request: &SpeculationRequest) -> u32 {
    if request.enabled == Some(false) {
        return 0;
    }
    request.num_draft_tokens.unwrap_or(config.num_draft_tokens).min(config.max_draft_tokens)
}

/// How long one draft worker takes for a proposal, smoothed.
#[derive(Debug, Clone, Copy, Default)]
pub struct DraftTime {
    smoothed: Option<Duration>,
}

impl DraftTime {
    /// A proposal took this long, wire and queue included.
    pub fn observe(&mut self, took: Duration) {
        self.smoothed = Some(match self.smoothed {
            None => took,
            // Slower is believed at once by half, faster only slowly.
            Some(before) if took > before => (before + took) / 2,
            Some(before) => (before * 15 + took) / 16,
        });
    }

    /// A proposal did not come within the wait.
    pub fn missed(&mut self) {
        self.smoothed = Some(self.wait() / (MARGIN / 2));
    }

    /// How long the next round may wait.
    pub fn wait(&self) -> Duration {
        self.smoothed.map_or(FIRST_WAIT, |smoothed| smoothed * MARGIN).clamp(MIN_WAIT, MAX_WAIT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_pins_or_refuses_k_within_the_operators_limit() {
        let config = PolicyConfig { num_draft_tokens: 4, max_draft_tokens: 8 };
        let k = |enabled, num_draft_tokens| {
            num_draft_tokens_of(&config, SpeculationRequest { enabled, num_draft_tokens, ..Default::default() })
        };
        assert_eq!(k(None, None), 4);
        assert_eq!(k(Some(true), Some(2)), 2);
        assert_eq!(k(None, Some(20)), 8);
        assert_eq!(k(Some(false), Some(2)), 0);
        assert_eq!(k(None, Some(0)), 0);
    }

    fn num_draft_tokens_of(config: &PolicyConfig, request: SpeculationRequest) -> u32 {
        num_draft_tokens(config, &request)
    }

    #[test]
    fn the_wait_follows_the_worker_and_grows_when_it_is_missed() {
        let mut time = DraftTime::default();
        assert_eq!(time.wait(), FIRST_WAIT);
        for _ in 0..200 {
            time.observe(Duration::from_millis(10));
        }
        assert_eq!(time.wait(), Duration::from_millis(40));
        time.missed();
        assert_eq!(time.wait(), Duration::from_millis(80), "twice the wait that was too short");
        time.observe(Duration::from_millis(60));
        assert!(time.wait() > Duration::from_millis(100));
        for _ in 0..20 {
            time.missed();
        }
        assert_eq!(time.wait(), MAX_WAIT);
    }
}
