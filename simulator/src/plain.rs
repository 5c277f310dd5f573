//! A server without lanes, drafts, controllers or delayed batches, for comparison: one loop with every
//! sequence in every forward.
//!
//! It shares only the profile with the rest, so that no fault can affect both sides of a comparison.

use super::Rng;
use scheduling::profile::text::mix;
use scheduling::profile::{ForwardRows, Profile};

/// Committed tokens per second of `sequences` endless sequences over this number of forwards at one target of
/// the profile. Each sequence holds `context` tokens at first, and one more after each forward.
pub fn tokens_per_second(
    profile: &Profile,
    (sequences, context): (u32, u32),
    forwards: u32,
    seed: u64,
) -> f64 {
    let mut rng = Rng { state: mix(seed) };
    let mut micros = 0.0;
    for before in 0..forwards {
        // Sequences that exceed one forward run in several consecutive forwards.
        let mut left = sequences;
        while left > 0 {
            let rows = left.min(profile.target.max_batch_rows);
            let forward = ForwardRows::even(rows, 1, context + before);
            micros += profile.with_noise(profile.target.curve.micros(forward), rng.next());
            left -= rows;
        }
        micros += 2.0 * profile.wire_us;
    }
    f64::from(forwards) * f64::from(sequences) * 1e6 / micros
}
