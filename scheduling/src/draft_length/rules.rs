//! The numbers of the choice of k, each with what it is for; together as plain data ([`Rules`]), so that a simulation can ask what each of them is
//! worth. Routers take the defaults.

use super::residual_filter::ResidualRules;
use crate::acceptance_by_position::AcceptanceRules;
use crate::batch::groups::GROUPS_MAX;

/// A draft worker is believed to propose as much as it is asked for.
pub(super) const PRIOR_SUPPLY: f64 = 0.98;

/// While k = 0 nobody hears whether drafts would come in time: a poor opinion of that is given up after so many lane rounds, and each time it
/// proves right again after twice as many.
pub(super) const SUPPLY_MEMORY: u64 = 16;

/// What is faster by a smaller part than this is not worth a change: of k, where for a lane round or two sequences of the old k
/// and of the new one are in each other's way, of a round to a lookup draft. Nor does a lane mind to wait so much longer for one.
pub(super) const WORTHWHILE: f64 = 0.02;

/// What was not spent on probes is kept up to so many rounds.
pub(super) const PROBE_CREDIT_MAX: f64 = 4.0;

/// What a lane goes by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rules {
    /// The acceptance rate that a fresh lane is believed to have.
    pub prior_acceptance: f64,
    /// What a move must be worth, as a part of what the lane has.
    pub hysteresis: f64,
    /// What it must be worth as long as the last one was not measured.
    pub rash_hysteresis: f64,
    /// After a move so many lane rounds are not measured: sequences that began before it are in the way of the others, and after
    /// one to k = 0 those that drafted have to join those that did not. After that it is measured for as many before the next
    /// one.
    pub settling_lane_rounds: u64,
    /// By what part a lane may make the rounds of others that share its target longer, against drafting nothing: they did not choose its k.
    pub others_delay_max: f64,
    /// The share of a lane's time that probes may cost, by their predicted loss.
    pub probe_share: f64,
    /// A lane of which nobody told for so many lane rounds how often its drafts would be right probes.
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
            prior_acceptance: 0.6,
            hysteresis: WORTHWHILE,
            rash_hysteresis: 0.1,
            settling_lane_rounds: 4,
            others_delay_max: 0.0,
            probe_share: 0.015,
            probe_spacing: 12,
            groups_max: GROUPS_MAX,
            residuals: ResidualRules::default(),
            acceptance: AcceptanceRules::default(),
        }
    }
}
