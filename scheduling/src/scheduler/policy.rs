//! Policies that an operator sets for lanes, and settings of a request. If neither fixes a draft length, the
//! lane chooses it: [`crate::draft_length`].

use std::collections::BTreeMap;
use std::str::FromStr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use speculation::AcceptanceMode;

/// A client's settings for speculation. In `coupled` mode none of them changes the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpeculationRequest {
    /// `Some(false)` turns drafting off; `None` leaves it to the lane.
    pub enabled: Option<bool>,
    /// A fixed draft length; `None` leaves it to the lane.
    pub num_draft_tokens: Option<u32>,
    /// Maximum tokens of a tree, including siblings; the draft is a chain unless this exceeds the draft
    /// length.
    pub num_tree_tokens: Option<u32>,
    /// Acceptance mode; `None` leaves it to the lane.
    pub acceptance: Option<AcceptanceMode>,
}

impl SpeculationRequest {
    /// Whether the client disabled drafting.
    pub fn disables_drafting(&self) -> bool {
        self.enabled == Some(false) || self.num_draft_tokens == Some(0)
    }
}

/// Draft length of requests that set none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftTokens {
    /// Each lane chooses by its measurements.
    Auto,
    /// Always this many.
    Fixed(u32),
}

impl DraftTokens {
    fn fixed(self) -> Option<u32> {
        match self {
            Self::Auto => None,
            Self::Fixed(tokens) => Some(tokens),
        }
    }
}

impl FromStr for DraftTokens {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            number => number
                .parse()
                .map(Self::Fixed)
                .map_err(|_| format!("expected `auto` or a number of tokens, not `{text}`")),
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
    /// Accepts a number, or a string as on the command line.
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

/// The policy of one task type.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LanePolicy {
    /// Upper limit on the draft length, including lengths that a request sets; 0: the lane does not draft.
    pub max_k: u32,
    /// Minimum share of first tokens accepted; below it the lane does not draft. 0: no minimum.
    pub min_acceptance: f64,
    /// Maximum number of sequences at a lane's target; above it the lane does not draft.
    pub max_batch_for_speculation: Option<u32>,
    /// Weight in the queue for targets, relative to other lanes.
    pub weight: f64,
    /// Acceptance mode of requests that set none.
    #[serde(serialize_with = "by_name")]
    pub acceptance: AcceptanceMode,
}

fn by_name<S: Serializer>(mode: &AcceptanceMode, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(mode.as_str())
}

/// Policy settings of the operator.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyConfig {
    /// Draft length of requests that set none.
    pub draft_tokens: DraftTokens,
    /// Upper limit on the draft length, including lengths that a request sets.
    pub max_draft_tokens: u32,
    /// Maximum tokens of a tree for requests that set none; 0: chains only. If a draft length is fixed and
    /// this is not, drafts are chains.
    pub tree_tokens: DraftTokens,
    /// Whether drafts are looked up in the sequences themselves. Text that a client predicts is always used.
    pub suffix_drafts: bool,
    /// Policies by task type.
    pub lanes: BTreeMap<String, LanePolicy>,
}

impl PolicyConfig {
    /// Creates a policy without suffix drafts and without policies by task type.
    pub fn new(draft_tokens: DraftTokens, max_draft_tokens: u32) -> Self {
        Self {
            draft_tokens,
            max_draft_tokens,
            tree_tokens: DraftTokens::Auto,
            suffix_drafts: false,
            lanes: BTreeMap::new(),
        }
    }

    /// Returns the policy of a task type, or the default. Its maximum is at most that of all lanes.
    pub fn lane(&self, task_type: &str) -> LanePolicy {
        let lane = self.lanes.get(task_type).copied().unwrap_or(LanePolicy {
            max_k: self.max_draft_tokens,
            min_acceptance: 0.0,
            max_batch_for_speculation: None,
            weight: 1.0,
            acceptance: AcceptanceMode::Coupled,
        });
        LanePolicy { max_k: lane.max_k.min(self.max_draft_tokens), ..lane }
    }

    /// Tree size fixed by the request or the operator; `None` leaves it to the lane.
    pub fn pinned_tree_tokens(&self, request: &SpeculationRequest) -> Option<u32> {
        request.num_tree_tokens.or(self.tree_tokens.fixed())
    }

    /// Draft length fixed by the request or the operator, who may also allow none; `None` leaves it to the
    /// lane.
    pub fn pinned_draft_tokens(&self, task_type: &str, request: &SpeculationRequest) -> Option<u32> {
        let max_k = self.lane(task_type).max_k;
        if request.enabled == Some(false) || max_k == 0 {
            return Some(0);
        }
        request.num_draft_tokens.or(self.draft_tokens.fixed()).map(|k| k.min(max_k))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_pins_or_refuses_the_draft_length_within_the_operators_limit() {
        let k = |draft_tokens, enabled, num_draft_tokens| {
            let request = SpeculationRequest { enabled, num_draft_tokens, ..Default::default() };
            PolicyConfig::new(draft_tokens, 8).pinned_draft_tokens("", &request)
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
    fn a_task_types_own_policy_bounds_its_draft_length() {
        let mut config = PolicyConfig::new(DraftTokens::Fixed(5), 8);
        let code = LanePolicy { max_k: 3, weight: 2.0, ..config.lane("code") };
        config.lanes.insert("code".to_owned(), code);
        let request = SpeculationRequest { num_draft_tokens: Some(6), ..Default::default() };
        assert_eq!(config.pinned_draft_tokens("code", &request), Some(3));
        assert_eq!(config.pinned_draft_tokens("chat", &request), Some(6));
        assert_eq!((config.lane("code").weight, config.lane("chat").weight), (2.0, 1.0));
        config.draft_tokens = DraftTokens::Auto;
        config.lanes.insert("plain".to_owned(), LanePolicy { max_k: 0, ..code });
        for task_type in ["code", "plain"] {
            let pinned = config.pinned_draft_tokens(task_type, &SpeculationRequest::default());
            assert_eq!(pinned, (task_type == "plain").then_some(0), "{task_type}");
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
