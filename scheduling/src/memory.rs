//! How much of what was seen is remembered, where newer things count as much as older ones and all fade alike.

/// Rounds, forwards or proposals: of what changes with the load.
pub(crate) const MEMORY: f64 = 64.0;

/// Judged tokens or replies: of what lasts, as a kind of text and a wire do.
pub(crate) const LASTING_MEMORY: f64 = 256.0;

/// Judged tokens that is worth what is believed before any of them.
pub(crate) const PRIOR_WEIGHT: f64 = 4.0;
