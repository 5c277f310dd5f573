//! Rotary position embedding: from the configuration to the cosine and sine of an angle at a position. Values
//! are rounded to f32 at the same points as in transformers (exponent, wavelength, inverse frequency, angle,
//! cosine), so that far positions agree with what the model was trained on. The computation in between uses
//! our own f64 functions, so that every machine gets the same bits.

mod config;
mod scaling;
mod sin_cos;

pub(crate) use config::rope_field;
pub(crate) use sin_cos::sin_cos;

/// Rotation of queries and keys by position.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rope {
    /// `[head_dim / 2]`, radians per position.
    inverse_frequencies: Vec<f32>,
    /// Factor of cosine and sine (yarn's temperature).
    attention_factor: f32,
    /// Base of the frequencies before scaling.
    pub(crate) theta: f64,
    /// Name of their scaling, if they are scaled.
    pub(crate) scaling: Option<&'static str>,
}

impl Rope {
    /// Number of rotated pairs per head.
    pub(crate) fn half_dim(&self) -> usize {
        self.inverse_frequencies.len()
    }

    /// Writes the cosines and sines of a position, `[head_dim / 2]` each.
    pub(crate) fn angles(&self, position: u32, cos: &mut [f32], sin: &mut [f32]) {
        for ((&frequency, cos), sin) in self.inverse_frequencies.iter().zip(cos).zip(sin) {
            let (s, c) = sin_cos(f64::from(position as f32 * frequency));
            *cos = c as f32 * self.attention_factor;
            *sin = s as f32 * self.attention_factor;
        }
    }
}
