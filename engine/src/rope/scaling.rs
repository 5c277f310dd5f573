//! Inverse frequencies under each kind of context scaling. The formulas are the papers'; rounding happens
//! where transformers rounds.

use speculation::math::{exp, ln};

/// How frequencies are scaled for a context longer than the one trained on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Scaling {
    /// No scaling.
    None,
    /// All frequencies alike (position interpolation).
    Linear { factor: f64 },
    /// Long wavelengths only, with a ramp between (Llama 3.1).
    Llama3 { factor: f64, low_freq_factor: f64, high_freq_factor: f64, original_len: f64 },
    /// A ramp over dimensions (YaRN, Peng et al. 2023).
    Yarn { factor: f64, original_len: f64, beta_fast: f64, beta_slow: f64, truncate: bool },
}

impl Scaling {
    /// Its name in config.json; `None` without scaling.
    pub(crate) fn name(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Linear { .. } => Some("linear"),
            Self::Llama3 { .. } => Some("llama3"),
            Self::Yarn { .. } => Some("yarn"),
        }
    }
}

/// `[head_dim / 2]` radians per position, f32.
pub(crate) fn inverse_frequencies(scaling: Scaling, theta: f64, head_dim: usize) -> Vec<f32> {
    // theta^(2i / d), one f32 per pair. The exponent is rounded to f32, which matters unless d is a power of
    // two.
    let wavelengths = (0..head_dim / 2).map(|i| {
        let exponent = (2 * i) as f32 / head_dim as f32;
        exp(f64::from(exponent) * ln(theta)) as f32
    });
    match scaling {
        Scaling::None => wavelengths.map(|w| 1.0 / w).collect(),
        Scaling::Linear { factor } => wavelengths.map(|w| 1.0 / w / factor as f32).collect(),
        Scaling::Llama3 { .. } => wavelengths.map(|w| llama3(scaling, 1.0 / w)).collect(),
        Scaling::Yarn { .. } => {
            let ramp = yarn_ramp(scaling, theta, head_dim);
            wavelengths.zip(ramp).map(|(w, ramp)| yarn(scaling, w, ramp)).collect()
        }
    }
}

/// Keeps short wavelengths, divides the frequency of long ones by the factor, and blends between.
fn llama3(scaling: Scaling, frequency: f32) -> f32 {
    let Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_len } = scaling else {
        return frequency;
    };
    // A number by a tensor is the number times the rounded reciprocal there.
    let wavelength = 1.0 / frequency * (2.0 * std::f64::consts::PI) as f32;
    if wavelength < (original_len / high_freq_factor) as f32 {
        return frequency;
    }
    if wavelength > (original_len / low_freq_factor) as f32 {
        return frequency / factor as f32;
    }
    let smooth = (1.0 / wavelength * original_len as f32 - low_freq_factor as f32)
        / (high_freq_factor - low_freq_factor) as f32;
    (1.0 - smooth) * frequency / factor as f32 + smooth * frequency
}

/// Blends the original frequency (extrapolation) and the frequency divided by the factor (interpolation).
fn yarn(scaling: Scaling, wavelength: f32, ramp: f32) -> f32 {
    let Scaling::Yarn { factor, .. } = scaling else { return 1.0 / wavelength };
    let kept = 1.0 - ramp;
    1.0 / (factor as f32 * wavelength) * (1.0 - kept) + 1.0 / wavelength * kept
}

/// Ramp from 0 (keep) to 1 (divide) over the pairs between the two correction dimensions.
fn yarn_ramp(scaling: Scaling, theta: f64, head_dim: usize) -> Vec<f32> {
    let Scaling::Yarn { original_len, beta_fast, beta_slow, truncate, .. } = scaling else {
        return Vec::new();
    };
    let d = head_dim as f64;
    // The pair that turns `rotations` times over the original context.
    let correction =
        |rotations: f64| d * ln(original_len / (rotations * 2.0 * std::f64::consts::PI)) / (2.0 * ln(theta));
    let (mut low, mut high) = (correction(beta_fast), correction(beta_slow));
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(d - 1.0));
    if low == high {
        high += 0.001;
    }
    (0..head_dim / 2).map(|i| ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0)).collect()
}

/// YaRN's factor of cosine and sine: 0.1 m ln(factor) + 1.
pub(crate) fn yarn_mscale(factor: f64, m: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * m * ln(factor) + 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of transformers 5.23 for heads of 12 and theta 10,000.
    #[test]
    fn frequencies_are_those_of_transformers_where_heads_are_no_power_of_two() {
        let original_len = 64.0;
        let llama3 =
            Scaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_len };
        let yarn =
            Scaling::Yarn { factor: 4.0, original_len, beta_fast: 32.0, beta_slow: 1.0, truncate: true };
        for (scaling, expected) in [
            (Scaling::None, [1.0, 0.21544345, 0.046415884, 0.01, 0.0021544343, 0.00046415895]),
            (
                Scaling::Linear { factor: 3.0 },
                [0.33333334, 0.071814485, 0.015471961, 0.0033333332, 0.00071814476, 0.00015471964],
            ),
            (llama3, [1.0, 0.10198934, 0.0058019855, 0.00125, 0.0002693043, 0.00005801987]),
            (yarn, [1.0, 0.13465215, 0.011603971, 0.0025, 0.0005386086, 0.00011603974]),
        ] {
            let expected: [f32; 6] = expected;
            assert_eq!(inverse_frequencies(scaling, 10_000.0, 12), expected, "{scaling:?}");
        }
    }
}
