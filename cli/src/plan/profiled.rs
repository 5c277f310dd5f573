//! Rounds over the step times of a profile ([`scheduling::profile`]) instead of data sheets. It allows
//! comparing the closed form of `round` with the simulator and a cluster, which use the same times.

use scheduling::cost::StepTimes;
use scheduling::profile::{ForwardRows, Profile, StepCurve};

use super::round::{Drafting, RoundModel};
use super::step_time::{ForwardBatch, StepCost};

impl StepCost for StepCurve {
    fn micros(&self, forward: ForwardBatch) -> f64 {
        let kv_tokens = forward.sequences * forward.context;
        StepCurve::micros(
            self,
            ForwardRows {
                rows: (forward.sequences * forward.rows_each).ceil() as u32,
                prefill_rows: 0,
                kv_tokens: kv_tokens.ceil() as u64,
                row_kv_tokens: (kv_tokens * forward.rows_each).ceil() as u64,
            },
        )
    }
}

/// The rounds of one target of `profile`, whose sequences hold `context` tokens each. Without prompts, with
/// sequences that start together and without router time, as in the simulator's closed traffic. `known` are
/// the step times that such a target measures for itself.
pub fn rounds<'a>(
    (profile, known): (&'a Profile, &'a StepTimes),
    acceptance: &'a [f64],
    context: u32,
) -> RoundModel<'a> {
    let wire_us = 2.0 * profile.wire_us;
    let workers = f64::from(profile.draft.workers) / f64::from(profile.target.workers);
    RoundModel {
        target: &profile.target.curve,
        known,
        target_wire_us: wire_us,
        router_us: 0.0,
        target_rows_max: f64::from(profile.target.max_batch_rows),
        drafting: Drafting::Apart { draft: &profile.draft.curve, workers, wire_us },
        acceptance,
        context: f64::from(context),
        prompt_us_per_token: 0.0,
    }
}
