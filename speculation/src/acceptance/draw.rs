//! The argmax of logit plus Gumbel noise, which is a draw from the softmax: over a row of logits or over a
//! list of tokens.
//!
//! The rule is "highest score, lowest id among equals", with scores in f64. The scan is fast because a cheap
//! upper bound of a token's noise follows from its random bits, so only tokens that might win are scored. The
//! bits are computed for a block of tokens at a time in vector registers. The plain loop that scores every
//! token is the reference in the tests below. The scan must always pick the same token as the plain loop.

use crate::TokenId;
use crate::logits::{DrawError, apply_filters, check_row, highest};
use crate::noise::{BLOCK, GUMBEL_MAX, Noise, Purpose, gumbel_bound, gumbel_from_bits, high_word};

use super::DrawInput;

/// The draw of contract B4 from a processed row. The target commits it; the draft, with its own logits,
/// guesses it.
pub(super) fn draw_token(input: &DrawInput<'_>) -> Result<TokenId, DrawError> {
    let DrawInput { noise, position, sampling, logits } = *input;
    if sampling.is_greedy() {
        return check_row(logits, position);
    }
    if sampling.has_filters() {
        let kept = apply_filters(logits, sampling, position)?;
        return Ok(from_tokens(noise, position, Purpose::Draw, kept.tokens.iter().copied()));
    }
    let likeliest = check_row(logits, position)?;
    Ok(from_row(input, likeliest))
}

/// The best token so far.
struct Best {
    token_id: TokenId,
    score: f64,
}

impl Best {
    fn offer(&mut self, token_id: TokenId, score: f64) {
        if score > self.score || (score == self.score && token_id < self.token_id) {
            *self = Self { token_id, score };
        }
    }

    /// Not inlined: few tokens get here, and the scan's loop stays short.
    #[inline(never)]
    fn offer_token(&mut self, input: &DrawInput<'_>, token_id: TokenId) {
        let x = f64::from(input.logits[token_id as usize]) / f64::from(input.sampling.temperature);
        self.offer(token_id, x + input.noise.gumbel(input.position, token_id, Purpose::Draw));
    }
}

/// Argmax of `x + noise` over a list of tokens in any order; the list must not be empty.
pub(super) fn from_tokens(
    noise: Noise,
    position: u32,
    purpose: Purpose,
    tokens: impl Iterator<Item = (TokenId, f64)>,
) -> TokenId {
    let mut best = Best { token_id: TokenId::MAX, score: f64::NEG_INFINITY };
    for (token_id, x) in tokens {
        if x + GUMBEL_MAX < best.score {
            continue;
        }
        let bits = noise.bits(position, token_id, purpose);
        if x + gumbel_bound(high_word(bits)) < best.score {
            continue;
        }
        best.offer(token_id, x + gumbel_from_bits(bits));
    }
    best.token_id
}

/// Argmax of `logit / temperature + noise` over a whole row that has passed [`check_row`].
fn from_row(input: &DrawInput<'_>, likeliest: TokenId) -> TokenId {
    pulp::Arch::new().dispatch(Scan { input, likeliest })
}

/// The scan of a row.
///
/// Skips a block of tokens if its highest logit plus an upper bound of its noise is below the best score. No
/// winner is lost: let x be the largest x of the block and g the bound. Every token's score is
/// `fl(x_v + G_v)` with x_v <= x (division by one positive temperature is monotone after rounding) and G_v <=
/// g. Rounded addition is monotone too, so the score is at most `fl(x + g)`. A score strictly below the best
/// can neither win nor tie.
struct Scan<'a> {
    input: &'a DrawInput<'a>,
    likeliest: TokenId,
}

/// Compiled once for each vector register width; the version is chosen at run time. The width changes no
/// bits: integer arithmetic wraps the same way everywhere, floats are rounded one by one, and the compiler
/// never fuses a multiplication and an addition on its own. Functions called for every block must be
/// `inline(always)`, because a separate function would be compiled without those registers.
impl pulp::NullaryFnOnce for Scan<'_> {
    type Output = TokenId;

    #[inline(always)]
    fn call(self) -> TokenId {
        let DrawInput { noise, position, sampling, logits } = *self.input;
        let temperature = f64::from(sampling.temperature);
        // Starting with the likeliest token gives a score that most others cannot reach.
        let mut best = Best { token_id: self.likeliest, score: f64::NEG_INFINITY };
        best.offer_token(self.input, self.likeliest);
        for (block, row) in logits.chunks(BLOCK).enumerate() {
            let x_max = f64::from(highest(row)) / temperature;
            if x_max + GUMBEL_MAX < best.score {
                continue;
            }
            let first = (block * BLOCK) as TokenId;
            let words = noise.high_words(position, first, Purpose::Draw);
            if x_max + gumbel_bound(highest_word(&words)) < best.score {
                continue;
            }
            for (i, &logit) in row.iter().enumerate() {
                let bound = gumbel_bound(words[i % 2][i / 2]);
                // The first test avoids the division for most tokens.
                if x_max + bound >= best.score && f64::from(logit) / temperature + bound >= best.score {
                    best.offer_token(self.input, first + i as TokenId);
                }
            }
        }
        best.token_id
    }
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use pulp::NullaryFnOnce;

    use super::*;
    use crate::SamplingParams;

    /// The rule as defined: score everything, keep the first best.
    fn naive(input: &DrawInput<'_>) -> TokenId {
        let temperature = f64::from(input.sampling.temperature);
        let mut best = (0, f64::NEG_INFINITY);
        for (token_id, &logit) in (0..).zip(input.logits) {
            let gumbel = input.noise.gumbel(input.position, token_id, Purpose::Draw);
            let score = f64::from(logit) / temperature + gumbel;
            if score > best.1 {
                best = (token_id, score);
            }
        }
        best.0
    }

    fn check(logits: &[f32], temperature: f32, seeds: std::ops::Range<u64>) {
        let sampling = SamplingParams { temperature, ..SamplingParams::default() };
        for seed in seeds {
            let noise = Noise { seed, choice: 0 };
            let input = DrawInput { noise, position: 3, sampling: &sampling, logits };
            let expected = naive(&input);
            assert_eq!(draw_token(&input), Ok(expected), "seed {seed}, temperature {temperature}");
            // The list version, in reverse order to show that order does not matter.
            let x_of = |&logit: &f32| f64::from(logit) / f64::from(temperature);
            let tokens = (0..).zip(logits.iter().map(x_of)).collect::<Vec<_>>().into_iter().rev();
            assert_eq!(from_tokens(noise, 3, Purpose::Draw, tokens), expected, "seed {seed}, list");
        }
    }

    /// Rows like a language model's: Gumbel-tailed, so that few tokens lead.
    fn row(vocab_size: u32, spread: f64) -> Vec<f32> {
        let source = Noise { seed: 99, choice: 9 };
        (0..vocab_size).map(|id| (spread * source.gumbel(0, id, Purpose::Draft)) as f32).collect()
    }

    #[test]
    fn the_fast_scan_draws_what_the_plain_loop_draws() {
        for vocab_size in [1, 2, 15, 16, 17, 1_000, 4_096] {
            for spread in [0.0, 0.5, 2.0, 30.0] {
                for temperature in [1e-5, 0.3, 1.0, 50.0] {
                    check(&row(vocab_size, spread), temperature, 0..8);
                }
            }
        }
        check(&row(152_000, 2.0), 1.0, 0..8);
    }

    #[test]
    fn masked_and_huge_logits_change_nothing() {
        let mut logits = row(300, 1.0);
        for (i, logit) in logits.iter_mut().enumerate() {
            if i % 3 != 0 {
                *logit = f32::NEG_INFINITY;
            }
        }
        check(&logits, 1.0, 0..50);
        // So large that the noise is lost in rounding: scores tie, and the lowest id wins.
        check(&[-f32::MAX, 1e30, 1e30, 3e29, 1e30], 1.0, 0..50);
        check(&[f32::NEG_INFINITY; 40].map(|_| -1e30), 1.0, 0..50);
    }

    /// Results of the scan with each vector register width of this host, and as plain code.
    fn on_every_width(input: &DrawInput<'_>, likeliest: TokenId) -> Vec<TokenId> {
        let scan = || Scan { input, likeliest };
        let mut drawn = vec![scan().call(), pulp::Arch::new().dispatch(scan())];
        #[cfg(target_arch = "x86_64")]
        {
            drawn.extend(pulp::x86::V3::try_new().map(|simd| simd.vectorize(scan())));
            drawn.extend(pulp::x86::V4::try_new().map(|simd| simd.vectorize(scan())));
        }
        drawn
    }

    fn temperatures() -> impl Strategy<Value = f32> {
        prop_oneof![Just(1.0), Just(1e-5), Just(f32::MAX), 1e-5_f32..2.0, 2.0_f32..1e4]
    }

    /// Few distinct values so that many tie, masked logits, and finite logits of every magnitude.
    fn logits() -> impl Strategy<Value = f32> {
        prop_oneof![
            4 => (-8_i8..8).prop_map(|step| f32::from(step) / 2.0),
            2 => Just(f32::NEG_INFINITY),
            2 => -20.0_f32..20.0,
            1 => prop_oneof![Just(-0.0), Just(f32::MAX), Just(-f32::MAX), Just(f32::MIN_POSITIVE)],
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(600))]

        #[test]
        fn any_row_is_drawn_from_as_the_plain_loop_would(
            row in prop::collection::vec(logits(), 1..700),
            temperature in temperatures(),
            (seed, choice, position) in any::<(u64, u32, u32)>(),
        ) {
            let sampling = SamplingParams { temperature, ..SamplingParams::default() };
            let input = DrawInput { noise: Noise { seed, choice }, position, sampling: &sampling, logits: &row };
            if row.iter().all(|&logit| logit == f32::NEG_INFINITY) {
                prop_assert_eq!(draw_token(&input), Err(DrawError::NothingAllowed { position }));
                return Ok(());
            }
            let expected = naive(&input);
            prop_assert_eq!(draw_token(&input), Ok(expected));
            let likeliest = check_row(&row, position).unwrap();
            // Compared with `position`: the first of equals wins, regardless of the sign of a zero.
            let max = row.iter().fold(f32::NEG_INFINITY, |max, &logit| if logit > max { logit } else { max });
            prop_assert_eq!(Some(likeliest as usize), row.iter().position(|&logit| logit == max));
            for drawn in on_every_width(&input, likeliest) {
                prop_assert_eq!(drawn, expected);
            }
        }

        #[test]
        fn a_logit_that_is_no_number_is_refused_wherever_it_stands(
            row in prop::collection::vec(logits(), 1..700),
            at in any::<prop::sample::Index>(),
            bad in prop_oneof![Just(f32::NAN), Just(-f32::NAN), Just(f32::INFINITY)],
            temperature in temperatures(),
        ) {
            let mut row = row;
            let at = at.index(row.len());
            row[at] = bad;
            let sampling = SamplingParams { temperature, ..SamplingParams::default() };
            let input = DrawInput { noise: Noise { seed: 1, choice: 0 }, position: 5, sampling: &sampling, logits: &row };
            let refusal = DrawError::NotANumber { position: 5, token_id: at as TokenId };
            prop_assert_eq!(draw_token(&input), Err(refusal));
        }
    }
}
