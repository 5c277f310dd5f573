//! The naive twin of eight-bit floats (E4M3): their values by the format's definition, and rows quantized by
//! a search over all codes (docs/contract.md C1).

/// Number of finite codes with sign bit 0; code 0x7f is a NaN.
const CODES: u8 = 0x7f;
/// A row whose largest number is smaller is treated as zero.
const SMALLEST: f32 = 1e-30;

/// The value of an eight-bit float: a sign, four bits of exponent, three of fraction.
pub fn fp8_value(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7) / 8.0);
    let size = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => fraction * 2.0f32.powi(-6),
        _ => (1.0 + fraction) * 2.0f32.powi(exponent - 7),
    };
    if code < 128 { size } else { -size }
}

/// Quantizes a row: the values of its eight-bit floats, and the scale of the row.
pub fn fp8_row(row: &[f32]) -> (Vec<f32>, f32) {
    let largest = row.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    if row.iter().any(|x| !x.is_finite()) {
        return (vec![0.0; row.len()], f32::NAN);
    }
    if largest < SMALLEST {
        return (vec![0.0; row.len()], 0.0);
    }
    (row.iter().map(|x| nearest(x * (448.0 / largest))).collect(), largest / 448.0)
}

/// The nearest value, ties to even.
fn nearest(x: f32) -> f32 {
    let distance = |code: &u8| (f64::from(fp8_value(*code)) - f64::from(x.abs())).abs();
    let mut best = 0;
    for code in 1..CODES {
        let (now, before) = (distance(&code), distance(&best));
        if now < before || (now == before && code % 2 == 0) {
            best = code;
        }
    }
    fp8_value(best).copysign(x)
}
