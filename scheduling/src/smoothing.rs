//! Memories of exponentially decayed means, in observations.

/// In rounds, forwards, proposals or judged positions: for values that change with the load.
pub(crate) const EWMA_WINDOW: f64 = 64.0;

/// In judged tokens, replies, outputs or lane rounds: for lasting values, such as the kind of text or the network
/// delay.
pub(crate) const LONG_EWMA_WINDOW: f64 = 256.0;

/// Weight of prior beliefs, in judged tokens.
pub(crate) const PRIOR_WEIGHT: f64 = 4.0;
