//! Scans a row of logits for the highest scores, logit plus Gumbel noise: those of a draw or of a draft's
//! candidates.
//!
//! The scan is fast because a cheap upper bound of a token's noise follows from its random bits, so only
//! tokens that might win are scored. The bits are computed for a block of tokens at a time in vector
//! registers. The plain loops that score every token are the references in the tests of [`super::draw`] and
//! [`super::best_tokens`]. The scan must always pick the same tokens as they do.

use crate::TokenId;
use crate::logits::highest;
use crate::noise::{BLOCK, GUMBEL_MAX, Purpose, gumbel_bound};

use super::DrawInput;

/// The tokens with the highest scores so far.
pub(super) trait Winners {
    /// Scores below this cannot be among them.
    fn floor(&self) -> f64;

    /// Offers a token. Must not depend on the order of offers: equal scores are decided by token id.
    fn offer(&mut self, token_id: TokenId, score: f64);
}

/// Offers every token that might be among the winners, once. The row must have passed
/// [`crate::logits::check_row`], which returned `likeliest`; the sequence must sample, without filters.
pub(super) fn scan_row(input: &DrawInput<'_>, likeliest: TokenId, winners: &mut impl Winners) {
    pulp::Arch::new().dispatch(Scan { input, likeliest, winners });
}

/// The scan of a row.
///
/// Skips a block of tokens if its highest logit plus an upper bound of its noise is below the floor. No
/// winner is lost: let x be the largest x of the block and g the bound. Every token's score is
/// `fl(x_v + G_v)` with x_v <= x (division by one positive temperature is monotone after rounding) and G_v <=
/// g. Rounded addition is monotone too, so the score is at most `fl(x + g)`. A score strictly below the floor
/// can neither win nor tie.
pub(super) struct Scan<'a, W> {
    pub(super) input: &'a DrawInput<'a>,
    pub(super) likeliest: TokenId,
    pub(super) winners: &'a mut W,
}

/// Compiled once for each vector register width; the version is chosen at run time. The width changes no
/// bits: integer arithmetic wraps the same way everywhere, floats are rounded one by one, and the compiler
/// never fuses a multiplication and an addition on its own. Functions called for every block must be
/// `inline(always)`, because a separate function would be compiled without those registers.
impl<W: Winners> pulp::NullaryFnOnce for Scan<'_, W> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { input, likeliest, winners } = self;
        let DrawInput { noise, position, sampling, logits } = *input;
        let temperature = f64::from(sampling.temperature);
        // Starting with the likeliest token gives a score that most others cannot reach.
        offer(input, likeliest, winners);
        for (block, row) in logits.chunks(BLOCK).enumerate() {
            let x_max = f64::from(highest(row)) / temperature;
            if x_max + GUMBEL_MAX < winners.floor() {
                continue;
            }
            let first = (block * BLOCK) as TokenId;
            let words = noise.high_words(position, first, Purpose::Draw);
            if x_max + gumbel_bound(highest_word(&words)) < winners.floor() {
                continue;
            }
            for (i, &logit) in row.iter().enumerate() {
                let bound = gumbel_bound(words[i % 2][i / 2]);
                let floor = winners.floor();
                // The first test avoids the division for most tokens.
                if x_max + bound >= floor && f64::from(logit) / temperature + bound >= floor {
                    let token_id = first + i as TokenId;
                    if token_id != likeliest {
                        offer(input, token_id, winners);
                    }
                }
            }
        }
    }
}

/// Not inlined: few tokens get here, and the scan's loop stays short.
#[inline(never)]
fn offer(input: &DrawInput<'_>, token_id: TokenId, winners: &mut impl Winners) {
    let x = f64::from(input.logits[token_id as usize]) / f64::from(input.sampling.temperature);
    winners.offer(token_id, x + input.noise.gumbel(input.position, token_id, Purpose::Draw));
}

/// The highest of a block's words. Words past the end of the row may raise it, which only costs time.
#[inline(always)]
fn highest_word(words: &[[u32; BLOCK / 2]; 2]) -> u32 {
    let mut highest = 0;
    for (&even, &odd) in words[0].iter().zip(&words[1]) {
        highest = highest.max(even).max(odd);
    }
    highest
}
