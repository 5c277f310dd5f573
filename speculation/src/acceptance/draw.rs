//! The argmax of logit plus Gumbel noise, which is a draw from the softmax: over a row of logits or over a
//! list of tokens. The rule is "highest score, lowest id among equals", with scores in f64.

use crate::TokenId;
use crate::logits::{DrawError, apply_filters, check_row};
use crate::noise::{GUMBEL_MAX, Noise, Purpose, gumbel_bound, gumbel_from_bits, high_word};

use super::DrawInput;
use super::scan::{Winners, scan_row};

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
    let mut best = Best::NONE;
    scan_row(input, likeliest, &mut best);
    Ok(best.token_id)
}

/// The best token so far.
struct Best {
    token_id: TokenId,
    score: f64,
}

impl Best {
    const NONE: Self = Self { token_id: TokenId::MAX, score: f64::NEG_INFINITY };
}

impl Winners for Best {
    #[inline(always)]
    fn floor(&self) -> f64 {
        self.score
    }

    fn offer(&mut self, token_id: TokenId, score: f64) {
        if score > self.score || (score == self.score && token_id < self.token_id) {
            *self = Self { token_id, score };
        }
    }
}

/// Argmax of `x + noise` over a list of tokens in any order; the list must not be empty.
pub(super) fn from_tokens(
    noise: Noise,
    position: u32,
    purpose: Purpose,
    tokens: impl Iterator<Item = (TokenId, f64)>,
) -> TokenId {
    let mut best = Best::NONE;
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use pulp::NullaryFnOnce;

    use super::super::scan::Scan;
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
        let drawn_by = |scan: &dyn Fn(Scan<'_, Best>)| {
            let mut best = Best::NONE;
            scan(Scan { input, likeliest, winners: &mut best });
            best.token_id
        };
        let mut drawn =
            vec![drawn_by(&|scan| scan.call()), drawn_by(&|scan| pulp::Arch::new().dispatch(scan))];
        #[cfg(target_arch = "x86_64")]
        {
            drawn.extend(pulp::x86::V3::try_new().map(|simd| drawn_by(&|scan| simd.vectorize(scan))));
            drawn.extend(pulp::x86::V4::try_new().map(|simd| drawn_by(&|scan| simd.vectorize(scan))));
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
