//! What an operator settles for lanes, and a request for itself. Pure: a choice goes out. Where neither says a k, the lane
//! chooses: `speculation::draft_length`.

use std::collections::BTreeMap;
use std::str::FromStr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use service::config::Faults;
use speculation::AcceptanceMode;
use speculation::step::MAX_DRAFT_TOKENS;

use crate::generation::SpeculationRequest;

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

/// `[lanes."code"]` as written: the policy of one task type, whatever its model and temperature. Absent means as for all lanes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawLane {
    max_k: Option<u32>,
    min_acceptance: Option<f64>,
    max_batch_for_speculation: Option<u32>,
    weight: Option<f64>,
    acceptance: Option<String>,
}

/// The policy of one task type.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LanePolicy {
    /// k at most, also where a request names one.
    pub max_k: u32,
    /// Below this share of first guesses accepted the lane does not draft, whatever it promises; 0 leaves it to what pays.
    pub min_acceptance: f64,
    /// With more sequences than this at its target the lane does not draft, whatever it promises.
    pub max_batch_for_speculation: Option<u32>,
    /// Its share of turns, relative to other lanes', where sequences wait for room.
    pub weight: f64,
    /// How drafts are judged where a request does not say.
    #[serde(serialize_with = "by_name")]
    pub acceptance: AcceptanceMode,
}

/// What an operator sets.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyConfig {
    /// k where a request names none.
    pub draft_tokens: DraftTokens,
    /// k at most, also where a request names one.
    pub max_draft_tokens: u32,
    /// By task type.
    pub lanes: BTreeMap<String, LanePolicy>,
}

impl RawLane {
    /// Checks the policy of `task_type`.
    pub fn validate(&self, task_type: &str, max_draft_tokens: u32, faults: &mut Faults) -> LanePolicy {
        let field = |name: &str| format!("lanes.{task_type}.{name}");
        let most = max_draft_tokens.min(MAX_DRAFT_TOKENS as u32);
        let max_k = self.max_k.unwrap_or(most);
        faults.check(&field("max_k"), max_k <= most, || {
            format!("{max_k} is over max_draft_tokens, which is {most}")
        });
        let min_acceptance = self.min_acceptance.unwrap_or(0.0);
        faults.check(&field("min_acceptance"), (0.0..=1.0).contains(&min_acceptance), || {
            format!("{min_acceptance} is not between 0 and 1")
        });
        let weight = self.weight.unwrap_or(1.0);
        faults.check(&field("weight"), (0.01..=100.0).contains(&weight), || {
            format!("{weight} is not between 0.01 and 100")
        });
        let acceptance = self.acceptance.as_deref().unwrap_or("coupled");
        let mode = acceptance_of(acceptance);
        faults.check(&field("acceptance"), mode.is_some(), || {
            format!("`{acceptance}` is unknown, expected coupled, rejection or typical")
        });
        LanePolicy {
            max_k,
            min_acceptance,
            max_batch_for_speculation: self.max_batch_for_speculation,
            weight,
            acceptance: mode.unwrap_or_default(),
        }
    }
}

fn by_name<S: Serializer>(mode: &AcceptanceMode, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(mode.as_str())
}

/// The mode of that name.
pub fn acceptance_of(name: &str) -> Option<AcceptanceMode> {
    let all = [AcceptanceMode::Coupled, AcceptanceMode::Rejection, AcceptanceMode::Typical];
    all.into_iter().find(|mode| mode.as_str() == name)
}

impl PolicyConfig {
    /// The policy of a task type: its own, or that of all.
    pub fn lane(&self, task_type: &str) -> LanePolicy {
        self.lanes.get(task_type).copied().unwrap_or(LanePolicy {
            max_k: self.max_draft_tokens,
            min_acceptance: 0.0,
            max_batch_for_speculation: None,
            weight: 1.0,
            acceptance: AcceptanceMode::Coupled,
        })
    }

    /// k where it is settled by the request or the operator; `None` leaves it to the lane.
    pub fn settled_num_draft_tokens(&self, task_type: &str, request: &SpeculationRequest) -> Option<u32> {
        if request.enabled == Some(false) {
            return Some(0);
        }
        let fixed = match self.draft_tokens {
            DraftTokens::Auto => None,
            DraftTokens::Fixed(k) => Some(k),
        };
        let most = self.lane(task_type).max_k.min(self.max_draft_tokens);
        request.num_draft_tokens.or(fixed).map(|k| k.min(most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(draft_tokens: DraftTokens, lanes: &[(&str, RawLane)]) -> PolicyConfig {
        let mut faults = Faults::new();
        let checked =
            |(task, raw): &(&str, RawLane)| ((*task).to_owned(), raw.validate(task, 8, &mut faults));
        let lanes = lanes.iter().map(checked).collect();
        assert!(faults.is_empty(), "{faults:?}");
        PolicyConfig { draft_tokens, max_draft_tokens: 8, lanes }
    }

    #[test]
    fn a_request_pins_or_refuses_k_within_the_operators_limit() {
        let k = |draft_tokens, enabled, num_draft_tokens| {
            let request = SpeculationRequest { enabled, num_draft_tokens, ..Default::default() };
            config(draft_tokens, &[]).settled_num_draft_tokens("", &request)
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
    fn a_task_types_own_policy_bounds_its_k() {
        let code = RawLane { max_k: Some(3), weight: Some(2.0), ..RawLane::default() };
        let config = config(DraftTokens::Fixed(5), &[("code", code)]);
        let request = SpeculationRequest { num_draft_tokens: Some(6), ..Default::default() };
        assert_eq!(config.settled_num_draft_tokens("code", &request), Some(3));
        assert_eq!(config.settled_num_draft_tokens("chat", &request), Some(6));
        assert_eq!((config.lane("code").weight, config.lane("chat").weight), (2.0, 1.0));
    }

    #[test]
    fn every_fault_of_a_lane_is_named_by_its_field() {
        let mut faults = Faults::new();
        let raw = RawLane {
            max_k: Some(9),
            min_acceptance: Some(1.5),
            weight: Some(0.0),
            acceptance: Some("lossy".to_owned()),
            ..RawLane::default()
        };
        raw.validate("code", 8, &mut faults);
        let told = faults.finish().unwrap_err().to_string();
        for expected in [
            "lanes.code.max_k: 9 is over max_draft_tokens, which is 8",
            "lanes.code.min_acceptance: 1.5 is not between 0 and 1",
            "lanes.code.weight: 0 is not between 0.01 and 100",
            "lanes.code.acceptance: `lossy` is unknown, expected coupled, rejection or typical",
        ] {
            assert!(told.contains(expected), "{expected} is missing from {told}");
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
}
