//! Names of the numeric rules, for `--rule NAME=VALUE`.

use simulator::Experiment;

/// One numeric rule.
pub(crate) struct Rule {
    pub(crate) name: &'static str,
    set: fn(&mut Experiment, f64),
}

macro_rules! rules {
    ($($name:literal: $($field:ident).+ as $kind:ty,)*) => {
        &[$(Rule {
            name: $name,
            set: |experiment, value| experiment.$($field).+ = value as $kind,
        },)*]
    };
}

/// All rules that can be set.
pub(crate) const RULES: &[Rule] = rules![
    "prior_acceptance": rules.prior_acceptance as f64,
    "hysteresis": rules.hysteresis as f64,
    "unconfirmed_hysteresis": rules.unconfirmed_hysteresis as f64,
    "settling_lane_rounds": rules.settling_lane_rounds as u64,
    "evidence_share": rules.evidence_share as f64,
    "probe_spacing": rules.probe_spacing as u64,
    "idle_share": rules.idle_share as f64,
    "price_groups_max": rules.groups_max as u32,
    "residual_deviation": rules.residuals.deviation as f64,
    "residual_neighbour": rules.residuals.neighbour as f64,
    "lane_round_noise": rules.residuals.lane_round_noise as f64,
    "residual_memory": rules.residuals.memory as f64,
    "prior_weight": rules.acceptance.prior_weight as f64,
    "change_deviations": rules.acceptance.change_deviations as f64,
    "bucket_drafts": rules.acceptance.bucket_drafts as f64,
    "groups_max": groups.groups_max as u32,
    "regroup_margin": groups.regroup_margin as f64,
    "regroup_rounds": groups.regroup_rounds as f64,
];

impl Rule {
    pub(crate) fn set(&self, experiment: &mut Experiment, value: f64) {
        (self.set)(experiment, value);
    }
}

/// Sets the rule of `NAME=VALUE`.
pub(crate) fn set(experiment: &mut Experiment, word: &str) -> Result<(), String> {
    let names = || RULES.iter().map(|rule| rule.name).collect::<Vec<_>>().join(", ");
    let fault = || {
        format!(
            "--rule requires NAME=VALUE, not {word}; NAME is reports_agreement (VALUE 0 or 1) or one of {}",
            names()
        )
    };
    let (name, value) = word.split_once('=').ok_or_else(fault)?;
    let value: f64 = value.parse().map_err(|_| fault())?;
    if name == "reports_agreement" {
        experiment.reports_agreement = value != 0.0;
        return Ok(());
    }
    let rule = RULES.iter().find(|rule| rule.name == name).ok_or_else(fault)?;
    let least = if name.ends_with("groups_max") { 1.0 } else { 0.0 };
    if !value.is_finite() || value < least {
        return Err(format!("--rule {word}: the value must be a number of at least {least}"));
    }
    rule.set(experiment, value);
    Ok(())
}
