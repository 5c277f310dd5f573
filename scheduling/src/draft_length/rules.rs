//! The numbers of the choice of k, each with what it is for; together as plain data ([`Rules`]), so that a simulation can ask what each of them is
//! worth. Routers take the defaults.

use super::residual_filter::ResidualRules;
use crate::acceptance_by_position::AcceptanceRules;
use crate::batch::groups::GROUPS_MAX;

/// The acceptance rate that a fresh lane is believed to have.
pub const PRIOR_ACCEPTANCE: f64 = 0.6;

/// A draft worker is believed to propose as much as it is asked for.
pub(super) const PRIOR_SUPPLY: f64 = 0.98;

/// While k = 0 nobody hears whether drafts would come in time: a poor opinion of that is given up after so many lane rounds, and each time it
/// proves right again after twice as many, up to the second number.
pub(super) const SUPPLY_MEMORY: u64 = 16;
pub(super) const SUPPLY_MEMORY_MAX: u64 = 1024;

/// A move must be worth this part of what the lane has: for a lane round or two sequences of the old k and of the new one are in each other's way.
pub(super) const HYSTERESIS: f64 = 0.02;

/// And this much as long as the last move was not measured.
pub(super) const RASH_HYSTERESIS: f64 = 0.1;

/// So many times that where others share the target: each move costs them, too.
pub(super) const RASH_BESIDE_OTHERS: f64 = 2.0;

/// After a move so many lane rounds are not measured: sequences that began before it are in the way of the others, and after one to k = 0
/// those that drafted have to join those that did not.
pub(super) const SETTLING_LANE_ROUNDS: u64 = 3;

/// After that a move is measured for so many lane rounds before the next one.
pub(super) const MEASURING_LANE_ROUNDS: u64 = 4;

/// The share of a lane's time that probes may cost, by their predicted loss.
pub(super) const PROBE_SHARE: f64 = 0.015;

/// A lane of which nobody told for so many lane rounds how often its drafts would be right probes.
pub const PROBE_SPACING: u64 = 12;

/// What was not spent on probes is kept up to so many rounds.
pub(super) const PROBE_CREDIT_MAX: f64 = 4.0;

/// What a lane goes by: the constants above, each beside what it is for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rules {
    /// The acceptance rate that a fresh lane is believed to have.
    pub prior_acceptance: f64,
    /// What a move must be worth.
    pub hysteresis: f64,
    /// What it must be worth as long as the last one was not measured.
    pub rash_hysteresis: f64,
    /// Lane rounds after a move that are not measured.
    pub settling_lane_rounds: u64,
    /// Lane rounds in which a move is measured.
    pub measuring_lane_rounds: u64,
    /// By what part a lane may make the rounds of others that share its target longer, against drafting nothing: they did not choose its k.
    pub others_delay_max: f64,
    /// The share of the time that probes may cost.
    pub probe_share: f64,
    /// Lane rounds without news of acceptance until a probe.
    pub probe_spacing: u64,
    /// Groups by turns that a round is priced in, at most.
    pub groups_max: u32,
    /// Of what rounds take beyond their price.
    pub residuals: ResidualRules,
    /// Of how far drafts survive.
    pub acceptance: AcceptanceRules,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            prior_acceptance: PRIOR_ACCEPTANCE,
            hysteresis: HYSTERESIS,
            rash_hysteresis: RASH_HYSTERESIS,
            settling_lane_rounds: SETTLING_LANE_ROUNDS,
            measuring_lane_rounds: MEASURING_LANE_ROUNDS,
            others_delay_max: 0.0,
            probe_share: PROBE_SHARE,
            probe_spacing: PROBE_SPACING,
            groups_max: GROUPS_MAX,
            residuals: ResidualRules::default(),
            acceptance: AcceptanceRules::default(),
        }
    }
}
