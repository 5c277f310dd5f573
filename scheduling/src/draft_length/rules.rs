//! Parameters of the choice of k, as plain data ([`Rules`]) so that a simulation can measure the effect of
//! each. Routers use the defaults.

use super::residual_filter::ResidualRules;
use crate::acceptance_by_position::AcceptanceRules;
use crate::batch::groups::GroupRules;

/// Prior probability that a draft worker proposes as much as it is asked for.
pub(super) const PRIOR_SUPPLY: f64 = 0.98;

/// Maximum saved budget for probes, and for feeds, in lane rounds.
pub(super) const BUDGET_MAX: f64 = 4.0;

/// Parameters of a lane's controller.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rules {
    /// Prior acceptance rate of a new lane.
    pub prior_acceptance: f64,
    /// Minimum relative gain of a change. It covers the cost of changing k, when sequences with the old and the
    /// new k wait for each other for one or two lane rounds, and that of replacing a round by a lookup draft.
    /// Also the maximum delay that a lookup draft may cause to another lane, and that a lane that drafts may
    /// cause before it stops.
    pub hysteresis: f64,
    /// Minimum relative gain until the last change has been measured, and of a lane that begins to draft
    /// jointly with others; also the loss that it accepts before it stops.
    pub unconfirmed_hysteresis: f64,
    /// Lane rounds after a change that are not measured. Sequences that began before it delay the others, and
    /// after a change to k = 0 those that drafted have to join those that did not. Then the same number of
    /// lane rounds is measured before the next change ([`Rules::confirming_lane_rounds`]).
    pub settling_lane_rounds: u64,
    /// Maximum share of a lane's time that its predicted losses by probes take, and as much again that draft
    /// workers take that are fed at k = 0.
    pub evidence_share: f64,
    /// Lane rounds without a draft after which a lane probes if its draft workers compared nothing recently.
    /// Otherwise only the time of rounds with drafts is unknown, and it waits for `LONG_EWMA_WINDOW`. Also the
    /// lane rounds at k = 0 after which an estimate of poor supply is reset, since nothing measures supply there.
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

impl Rules {
    /// Lane rounds until a change has been measured. Also those from one choice to the next while acceptance is
    /// known and every draft length is clearly slower than k = 0: a choice takes time that a decode step would
    /// not.
    pub(super) fn confirming_lane_rounds(&self) -> u64 {
        2 * self.settling_lane_rounds
    }
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            prior_acceptance: 0.6,
            hysteresis: 0.02,
            unconfirmed_hysteresis: 0.1,
            settling_lane_rounds: 4,
            evidence_share: 0.005,
            probe_spacing: 12,
            idle_share: 0.1,
            groups_max: GroupRules::default().groups_max,
            residuals: ResidualRules::default(),
            acceptance: AcceptanceRules::default(),
        }
    }
}
