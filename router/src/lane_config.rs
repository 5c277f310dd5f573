//! `[lanes."code"]` in the router's configuration file, with its checks.

use scheduling::scheduler::policy::LanePolicy;
use serde::{Deserialize, Serialize};
use service::config::Faults;
use speculation::AcceptanceMode;
use speculation::step::MAX_DRAFT_TOKENS;

/// `[lanes."code"]` as written: the policy of one task type, for all models and temperatures. Absent fields
/// use the settings of all lanes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawLane {
    max_k: Option<u32>,
    min_acceptance: Option<f64>,
    max_batch_for_speculation: Option<u32>,
    weight: Option<f64>,
    acceptance: Option<String>,
}

impl RawLane {
    /// Checks the policy of `task_type`. A maximum over `max_draft_tokens` is no fault: the smaller one
    /// applies, and an operator can turn off all drafts with one setting.
    pub fn validate(&self, task_type: &str, faults: &mut Faults) -> LanePolicy {
        let field = |name: &str| format!("lanes.{task_type}.{name}");
        let limit = MAX_DRAFT_TOKENS as u32;
        let max_k = self.max_k.unwrap_or(limit);
        faults.check(&field("max_k"), max_k <= limit, || format!("{max_k} is over the limit of {limit}"));
        let min_acceptance = self.min_acceptance.unwrap_or(0.0);
        faults.check_between(&field("min_acceptance"), min_acceptance, 0.0..=1.0);
        let weight = self.weight.unwrap_or(1.0);
        faults.check_between(&field("weight"), weight, 0.01..=100.0);
        let acceptance = self.acceptance.as_deref().unwrap_or("coupled");
        let mode = parse_acceptance_mode(acceptance);
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

/// Returns the mode with this name.
pub fn parse_acceptance_mode(name: &str) -> Option<AcceptanceMode> {
    let all = [AcceptanceMode::Coupled, AcceptanceMode::Rejection, AcceptanceMode::Typical];
    all.into_iter().find(|mode| mode.as_str() == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_of_a_lane_is_reported_with_its_field() {
        let mut faults = Faults::new();
        let raw = RawLane {
            max_k: Some(33),
            min_acceptance: Some(1.5),
            weight: Some(0.0),
            acceptance: Some("lossy".to_owned()),
            ..RawLane::default()
        };
        raw.validate("code", &mut faults);
        let message = faults.finish().unwrap_err().to_string();
        for expected in [
            "lanes.code.max_k: 33 is over the limit of 32",
            "lanes.code.min_acceptance: 1.5 is not between 0 and 1",
            "lanes.code.weight: 0 is not between 0.01 and 100",
            "lanes.code.acceptance: `lossy` is unknown, expected coupled, rejection or typical",
        ] {
            assert!(message.contains(expected), "{expected} is missing from {message}");
        }
    }
}
