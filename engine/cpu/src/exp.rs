//! Our own f32 e^x: a libm may differ between hosts, and plain arithmetic without branches compiles to vector
//! code. Within 2 ulp of the correctly rounded value (tested below).

/// ln 2 cut to 15 bits, so that its product with an integer up to 2^8 is exact, and the remainder.
const LN_2_HIGH: f32 = 0.693_145_75;
const LN_2_LOW: f32 = 1.428_606_8e-6;

/// 1/n! for n = 2..8: with |r| <= ln(2)/2 the first omitted term is below 2^-27.
const INVERSE_FACTORIALS: [f32; 6] =
    [1.0 / 2.0, 1.0 / 6.0, 1.0 / 24.0, 1.0 / 120.0, 1.0 / 720.0, 1.0 / 5_040.0];

/// Below this the result is 0, instead of close to the subnormals.
const SMALLEST: f32 = -87.0;
/// Above this the result is infinity, slightly before f32 overflows.
const LARGEST: f32 = 88.0;

/// Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
const ROUNDER: f32 = 12_582_912.0;

/// Returns e^x; 0 below -87, infinity above 88, NaN for NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUNDER);
    let n = shifted - ROUNDER;
    let r = n.mul_add(-LN_2_LOW, n.mul_add(-LN_2_HIGH, x));
    let mut series = INVERSE_FACTORIALS[5];
    series = series.mul_add(r, INVERSE_FACTORIALS[4]);
    series = series.mul_add(r, INVERSE_FACTORIALS[3]);
    series = series.mul_add(r, INVERSE_FACTORIALS[2]);
    series = series.mul_add(r, INVERSE_FACTORIALS[1]);
    series = series.mul_add(r, INVERSE_FACTORIALS[0]);
    let mantissa = (r * r).mul_add(series, r) + 1.0;
    // The low bits of `shifted` are n: put into the exponent they make 2^n.
    let power = f32::from_bits(shifted.to_bits().wrapping_sub(ROUNDER.to_bits()).wrapping_add(127) << 23);
    let value = mantissa * power;
    let value = if x < SMALLEST { 0.0 } else { value };
    if x > LARGEST { f32::INFINITY } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn within_two_ulp_of_the_exact_value() {
        let mut worst = (0.0f64, 0.0f32);
        for i in 0..3_500_000 {
            let x = -87.0 + i as f32 * 5e-5;
            let exact = f64::from(x).exp();
            let ulp = f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
            let error = (f64::from(exp(x)) - exact).abs() / ulp;
            if error > worst.0 {
                worst = (error, x);
            }
        }
        assert!(worst.0 < 2.0, "{} ulp at {}", worst.0, worst.1);
    }

    #[test]
    fn special_values_and_range_limits() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(-88.0), 0.0);
        assert_eq!(exp(89.0), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }
}
