//! What it is worth to move to another k: what it promises, and what there is to learn from being there.
//!
//! A k that looks a little worse may be better by as much as it is uncertain. Trying it costs a few lane rounds; if it is better, the lane
//! stays for as long as things are as they are. That is the value of information of one trial, and all the probing that k > 0 needs.

/// For how many lane rounds a k that was found better is better, and how many a trial takes.
pub(super) const HORIZON_LANE_ROUNDS: f64 = 64.0;
/// See [`HORIZON_LANE_ROUNDS`].
pub(super) const TRIAL_LANE_ROUNDS: f64 = 4.0;

/// The value of a move, as a part of what the lane has now, of a gain (logarithm) that is believed to be `gain` give or take `doubt`;
/// `trial` is what part of the time that it would be better a trial takes.
pub(super) fn value_of_move(gain: f64, doubt: f64, trial: f64) -> f64 {
    let won = expected_above_zero(gain, doubt);
    let lost = won - gain;
    won - trial * lost
}

/// The mean of what is above zero of a normal distribution.
fn expected_above_zero(mean: f64, deviation: f64) -> f64 {
    if deviation < 1e-9 {
        return mean.max(0.0);
    }
    let z = mean / deviation;
    let density = (-z * z / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    mean * below(z) + deviation * density
}

/// The part of a normal distribution below `z` deviations, to 1e-7 (Abramowitz and Stegun 26.2.17).
fn below(z: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * z.abs());
    let series = t
        * (0.319_381_530
            + t * (-0.356_563_782 + t * (1.781_477_937 + t * (-1.821_255_978 + t * 1.330_274_429))));
    let above = (-z * z / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt() * series;
    if z >= 0.0 { 1.0 - above } else { above }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value_of_move(gain: f64, doubt: f64) -> f64 {
        super::value_of_move(gain, doubt, TRIAL_LANE_ROUNDS / HORIZON_LANE_ROUNDS)
    }

    #[test]
    fn what_is_certain_is_worth_what_it_gains_and_doubt_makes_a_trial_worth_it() {
        assert!((value_of_move(0.05, 0.0) - 0.05).abs() < 1e-9);
        assert!(value_of_move(-0.05, 0.0) < 0.0);
        assert!((value_of_move(-0.05, 0.1) - 0.0154).abs() < 1e-3, "{}", value_of_move(-0.05, 0.1));
        assert!(value_of_move(-0.3, 0.1) < 0.0, "too far below to be worth a look");
    }

    #[test]
    fn the_normal_distribution_is_as_tables_have_it() {
        for (z, part) in [(0.0, 0.5), (1.0, 0.841_344_7), (-1.0, 0.158_655_3), (2.5, 0.993_790_3)] {
            assert!((below(z) - part).abs() < 1e-6, "{z}: {}", below(z));
        }
    }
}
