//! What an operator and a request say of k, and how long a round waits for its draft. Pure: times and counts come in, a
//! choice goes out. Where neither says a k, the lane chooses: `speculation::draft_length`.

use std::str::FromStr;
use std::time::Duration;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::generation::SpeculationRequest;

/// The wait before anything is known of a draft worker.
const FIRST_WAIT: Duration = Duration::from_millis(500);

/// Waits stay between these, whatever was measured.
const MIN_WAIT: Duration = Duration::from_millis(5);
const MAX_WAIT: Duration = Duration::from_secs(2);

/// The wait is this many times what a proposal took lately: a late draft costs a round its speed-up, a long wait only
/// costs where the worker is really gone.
const MARGIN: u32 = 4;

/// k where a request names none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftTokens {
    /// Each lane chooses by what it measures.
    Auto,
    /// This many, always.
    Fixed(u32),
}

impl FromStr for DraftTokens {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            number => {
                number.parse().map(Self::Fixed).map_err(|_| format!("`{text}` is neither auto nor a number"))
            }
        }
    }
}

impl Serialize for DraftTokens {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Fixed(k) => serializer.serialize_u32(*k),
        }
    }
}

impl<'de> Deserialize<'de> for DraftTokens {
    /// A number, or a word as on the command line.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected `auto` or a number of tokens")]
        enum Written {
            Number(u32),
            Word(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Number(k) => Ok(Self::Fixed(k)),
            Written::Word(word) => word.parse().map_err(D::Error::custom),
        }
    }
}

/// What an operator sets for all lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PolicyConfig {
    /// k where a request names none.
    pub draft_tokens: DraftTokens,
    /// k at most, also where a request names one.
    pub max_draft_tokens: u32,
}

/// k where it is settled by the request or the operator; `None` leaves it to the lane.
pub fn settled_num_draft_tokens(config: &PolicyConfig, request: &SpeculationRequest) -> Option<u32> {
    if request.enabled == Some(false) {
        return Some(0);
    }
    let fixed = match config.draft_tokens {
        DraftTokens::Auto => None,
        DraftTokens::Fixed(k) => Some(k),
    };
    request.num_draft_tokens.or(fixed).map(|k| k.min(config.max_draft_tokens))
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
        let k = |draft_tokens, enabled, num_draft_tokens| {
            let config = PolicyConfig { draft_tokens, max_draft_tokens: 8 };
            let request = SpeculationRequest { enabled, num_draft_tokens, ..Default::default() };
            settled_num_draft_tokens(&config, &request)
        };
        assert_eq!(k(DraftTokens::Fixed(4), None, None), Some(4));
        assert_eq!(k(DraftTokens::Auto, None, None), None);
        for operator in [DraftTokens::Fixed(4), DraftTokens::Auto] {
            assert_eq!(k(operator, Some(true), Some(2)), Some(2));
            assert_eq!(k(operator, None, Some(20)), Some(8));
            assert_eq!(k(operator, Some(false), Some(2)), Some(0));
            assert_eq!(k(operator, None, Some(0)), Some(0));
        }
    }

    #[test]
    fn draft_tokens_are_written_as_auto_or_a_number() {
        for (text, expected) in [
            ("\"auto\"", Some(DraftTokens::Auto)),
            ("4", Some(DraftTokens::Fixed(4))),
            ("\"4\"", Some(DraftTokens::Fixed(4))),
            ("\"many\"", None),
            ("-1", None),
        ] {
            assert_eq!(serde_json::from_str::<DraftTokens>(text).ok(), expected, "{text}");
        }
        assert_eq!(
            serde_json::to_string(&[DraftTokens::Auto, DraftTokens::Fixed(3)]).unwrap(),
            "[\"auto\",3]"
        );
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
