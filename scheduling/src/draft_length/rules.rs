//! Parameters of the choice of k, as plain data ([`Rules`]) so that a simulation can measure the effect of
//! each. Routers use the defaults.

use super::residual_filter::ResidualRules;
use crate::acceptance_by_position::AcceptanceRules;
use crate::batch::groups::GroupRules;

/// Prior probability that a draft worker proposes as much as it is asked for.
pub(super) const PRIOR_SUPPLY: f64 = 0.98;

/// Lane rounds at k = 0 after which an estimate of poor supply is reset, since nothing measures supply there.
/// Doubles each time the estimate is confirmed.
pub(super) const SUPPLY_MEMORY: u64 = 16;

/// Lane rounds without a draft after which a lane probes although draft workers compare what they are fed: the
/// comparison tells nothing about the time of rounds with drafts. Also the number of lane rounds for which a
/// comparison counts.
pub(super) const FED_PROBE_SPACING: u64 = 256;

/// Maximum saved credit for probes, and for feeds, in lane rounds.
pub(super) const CREDIT_MAX: f64 = 4.0;

/// Parameters of a lane's controller.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rules {
    /// Prior acceptance rate of a new lane.
    pub prior_acceptance: f64,
    /// Minimum relative gain of a change. It covers the cost of changing k, when sequences with the old and the
    /// new k wait for each other for one or two lane rounds, and that of replacing a round by a lookup draft.
    /// Also the maximum delay that a lookup draft may cause to another lane, and what a lane that drafts may
    /// delay others by beyond `others_delay_max` before it stops.
    pub hysteresis: f64,
    /// Minimum relative gain until the last change has been measured.
    pub unconfirmed_hysteresis: f64,
    /// Lane rounds after a change that are not measured. Sequences that began before it delay the others, and
    /// after a change to k = 0 those that drafted have to join those that did not. Then the same number of
    /// lane rounds is measured before the next change.
    pub settling_lane_rounds: u64,
    /// Lane rounds between two choices while acceptance is known and every draft length is slower than k = 0 by
    /// `unconfirmed_hysteresis`: a choice takes time that a decode step would not.
    pub plain_lane_rounds: u32,
    /// Maximum relative delay of other lanes that share the target, compared with k = 0; they did not choose
    /// this lane's k.
    pub others_delay_max: f64,
    /// Maximum share of a lane's time that its predicted losses by probes take, and as much again that draft
    /// workers take that are fed at k = 0.
    pub evidence_share: f64,
    /// Lane rounds without a draft after which a lane probes if its draft workers compared nothing recently.
    pub probe_spacing: u64,
    /// Share of recent lane rounds with drafts below which a lane with known acceptance feeds draft workers
    /// rarely. Prompts and tokens take time of draft workers, and of targets on the same machine.
    pub idle_share: f64,
    /// Maximum number of alternating groups in the price of a round.
    pub groups_max: u32,
    /// Parameters of the residual filter.
    pub residuals: ResidualRules,
    /// Parameters of acceptance by position.
    pub acceptance: AcceptanceRules,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            prior_acceptance: 0.6,
            hysteresis: 0.02,
            unconfirmed_hysteresis: 0.1,
            settling_lane_rounds: 4,
            plain_lane_rounds: 7,
            others_delay_max: 0.0,
            evidence_share: 0.005,
            probe_spacing: 12,
            idle_share: 0.1,
            groups_max: GroupRules::default().groups_max,
            residuals: ResidualRules::default(),
            acceptance: AcceptanceRules::default(),
        }
    }
}
