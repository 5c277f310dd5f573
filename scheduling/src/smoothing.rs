//! Exponentially decayed means and sums, and their memories in observations.

/// In rounds, forwards, proposals or judged positions: for values that change with the load.
pub(crate) const EWMA_WINDOW: f64 = 64.0;

/// In judged tokens, replies, outputs or lane rounds: for lasting values, such as the kind of text or the network
/// delay.
pub(crate) const LONG_EWMA_WINDOW: f64 = 256.0;

/// Weight of prior beliefs, in judged tokens.
pub(crate) const PRIOR_WEIGHT: f64 = 4.0;

/// Moves a decayed mean over `window` observations towards a new one.
pub(crate) fn toward(mean: &mut f64, value: f64, window: f64) {
    *mean += (value - *mean) / window;
}

/// Adds to a sum of which each observation forgets one part in `window`.
pub(crate) fn add_decayed(sum: &mut f64, value: f64, window: f64) {
    *sum += value - *sum / window;
}
