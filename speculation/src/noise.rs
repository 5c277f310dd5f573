//! The noise that couples draft and target (contract B3): a pure function of (seed, choice, position, token, purpose), so
//! that both sides, and every replay, perturb a token's logit by the same amount.
//!
//! Counter-based, hence there is no generator state to carry, to lose or to advance once too often. Uniforms have 52 random
//! bits: with the 24 of an f32 the Gumbel tail would end near 17 and rare tokens could never be drawn. This file must
//! never know what a logit is.

use crate::TokenId;
use crate::math::ln;

/// No noise of [`Noise::gumbel`] is above this; what lies further below the best score needs no noise at all.
pub(crate) const GUMBEL_MAX: f64 = 36.75;

/// What a number is drawn for. Different purposes at one position and token are independent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Purpose {
    /// The target's own draw, and the coupled draft's.
    Draw = 0,
    /// Whether rejection mode accepts a drafted token.
    Accept = 1,
    /// The token that replaces a rejected one in rejection mode.
    Residual = 2,
    /// The draft's own draw in rejection mode, where it must be independent of the target's.
    Draft = 3,
}

/// The noise of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Noise {
    /// The request's seed.
    pub seed: u64,
    /// Index among the n choices of one prompt.
    pub choice: u32,
}

impl Noise {
    /// A number strictly inside (0, 1): `(m + 0.5) * 2^-52` with 52 random bits m.
    pub fn uniform(&self, position: u32, token: TokenId, purpose: Purpose) -> f64 {
        uniform_from_bits(self.bits(position, token, purpose))
    }

    /// Standard Gumbel noise `-ln(-ln U)`; lies in [-3.61, 36.74].
    pub fn gumbel(&self, position: u32, token: TokenId, purpose: Purpose) -> f64 {
        gumbel_from_bits(self.bits(position, token, purpose))
    }

    /// The 52 bits m behind [`Noise::uniform`].
    pub(crate) fn bits(&self, position: u32, token: TokenId, purpose: Purpose) -> u64 {
        let words = philox4x32_10([position, token >> 1, self.choice, purpose as u32], self.key());
        let (low, high) = if token.is_multiple_of(2) { (words[0], words[1]) } else { (words[2], words[3]) };
        top_52_bits(low, high)
    }

    /// [`Noise::bits`] of [`BLOCK`] consecutive tokens from `first` on, which must be even: two tokens share a Philox call,
    /// and the calls run side by side so that the compiler can use vector registers.
    pub(crate) fn bits_block(&self, position: u32, first: TokenId, purpose: Purpose) -> [u64; BLOCK] {
        debug_assert!(first.is_multiple_of(2), "a block starts with a pair");
        let mut counters =
            [[position; LANES], [first >> 1; LANES], [self.choice; LANES], [purpose as u32; LANES]];
        for (lane, word) in counters[1].iter_mut().enumerate() {
            *word += lane as u32;
        }
        philox_lanes(&mut counters, self.key());
        let mut bits = [0; BLOCK];
        for lane in 0..LANES {
            bits[2 * lane] = top_52_bits(counters[0][lane], counters[1][lane]);
            bits[2 * lane + 1] = top_52_bits(counters[2][lane], counters[3][lane]);
        }
        bits
    }

    fn key(&self) -> [u32; 2] {
        [self.seed as u32, (self.seed >> 32) as u32]
    }
}

/// Philox calls made side by side by [`Noise::bits_block`].
const LANES: usize = 8;

/// Tokens covered by one [`Noise::bits_block`].
pub(crate) const BLOCK: usize = 2 * LANES;

fn top_52_bits(low: u32, high: u32) -> u64 {
    (u64::from(low) | u64::from(high) << 32) >> 12
}

fn uniform_from_bits(m: u64) -> f64 {
    // m + 0.5 has at most 53 significant bits, so that neither step rounds.
    (m as f64 + 0.5) * (1.0 / (1_u64 << 52) as f64)
}

/// The noise that belongs to the bits m.
pub(crate) fn gumbel_from_bits(m: u64) -> f64 {
    -ln(-ln(uniform_from_bits(m)))
}

/// At least [`gumbel_from_bits`], at a fraction of its price and never more than 0.07 above it where that is over 3: with
/// Y = 1 - U, G = -ln(-ln U) <= -ln Y, and log2 Y is at least what the bits of Y say when read as a fixed-point number.
pub(crate) fn gumbel_bound(m: u64) -> f64 {
    const MANTISSA: u64 = (1 << 52) - 1;
    const ONE: u64 = 0x3ff0_0000_0000_0000;
    // 1 - U = (2^52 - 1 - m + 0.5) * 2^-52, without a conversion that vector registers of every host lack.
    let y = (f64::from_bits(ONE | (MANTISSA - m)) - 1.0) + 0.5 / (1_u64 << 52) as f64;
    // The high word alone: dropping mantissa bits lowers Y, which raises the bound.
    let fixed_point = (ONE >> 32) as i32 - (y.to_bits() >> 32) as i32;
    // The last term is far more than the rounding of ln and of this line.
    f64::from(fixed_point) * (std::f64::consts::LN_2 / (1_u64 << 20) as f64) + 1e-9
}

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const KEY_STEPS: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: u32 = 10;

/// Philox-4x32 with ten rounds (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011).
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let mut words = counter.map(|word| [word]);
    philox_lanes(&mut words, key);
    words.map(|[word]| word)
}

fn philox_lanes<const N: usize>(words: &mut [[u32; N]; 4], key: [u32; 2]) {
    let mut key = key;
    for _ in 0..ROUNDS {
        #[expect(
            clippy::needless_range_loop,
            reason = "lanes run over the inner index, words over the outer one"
        )]
        for lane in 0..N {
            let a = u64::from(words[0][lane]) * u64::from(MULTIPLIERS[0]);
            let b = u64::from(words[2][lane]) * u64::from(MULTIPLIERS[1]);
            words[0][lane] = (b >> 32) as u32 ^ words[1][lane] ^ key[0];
            words[1][lane] = b as u32;
            words[2][lane] = (a >> 32) as u32 ^ words[3][lane] ^ key[1];
            words[3][lane] = a as u32;
        }
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAST: u64 = (1 << 52) - 1;

    #[test]
    fn uniforms_stay_inside_the_unit_interval() {
        assert_eq!(uniform_from_bits(0), f64::from_bits(0x3ca0_0000_0000_0000), "2^-53");
        assert_eq!(uniform_from_bits(LAST), 1.0 - f64::EPSILON / 2.0);
        assert!(gumbel_from_bits(0) > -3.61 && gumbel_from_bits(LAST) < 36.74 && 36.74 < GUMBEL_MAX);
    }

    #[test]
    fn a_block_holds_the_bits_of_its_tokens() {
        let noise = Noise { seed: 0x0123_4567_89ab_cdef, choice: 5 };
        for (position, first, purpose) in [(0, 0, Purpose::Draw), (20_001, 151_920, Purpose::Residual)] {
            let block = noise.bits_block(position, first, purpose);
            for (token, bits) in (first..).zip(block) {
                assert_eq!(bits, noise.bits(position, token, purpose), "token {token}");
            }
        }
    }

    #[test]
    fn the_bound_is_never_below_the_noise_and_close_to_it_where_it_matters() {
        let noise = Noise { seed: 1, choice: 0 };
        let random = (0..400_000).map(|token| noise.bits(0, token, Purpose::Draw));
        // Both ends, where U is next to 0 and 1, and every power of two of 1 - U with its neighbours.
        let corners = (0..52).flat_map(|e| [1 << e, (1 << e) - 1, (1 << e) + 1]).flat_map(|n| [n, LAST - n]);
        for m in random.chain(corners) {
            let (gumbel, bound) = (gumbel_from_bits(m), gumbel_bound(m));
            assert!(bound >= gumbel, "m = {m}: {bound} under {gumbel}");
            assert!(gumbel < 3.0 || bound < gumbel + 0.1, "m = {m}: {bound} far above {gumbel}");
        }
    }

    /// The noise that 24-bit uniforms give: 23 bits and a half, the finest that an f32 holds below 1.
    fn gumbel_with_f32_uniform(m: u64) -> f64 {
        let uniform = ((m >> 29) as f32 + 0.5) * (1.0 / (1_u32 << 23) as f32);
        -ln(-ln(f64::from(uniform)))
    }

    /// Noise from f32 uniforms ends at -ln(-ln(1 - 2^-24)) = 16.64. Of 2^28 true values 16 lie above it on average
    /// (Poisson): outside [2, 38] with probability 2e-6, and none at all with probability 1e-7.
    #[test]
    fn the_tail_goes_on_where_f32_uniforms_end() {
        let f32_end = gumbel_with_f32_uniform(LAST);
        assert!((16.63..16.64).contains(&f32_end), "{f32_end}");
        let noise = Noise { seed: 2, choice: 0 };
        let blocks = (0..1_u32 << 28).step_by(BLOCK).map(|first| noise.bits_block(7, first, Purpose::Draw));
        // Only where the top 23 bits are all ones can either noise be that large; the rest need no logarithm.
        let high: Vec<u64> = blocks.flatten().filter(|m| m >> 29 == (1 << 23) - 1).collect();

        let looks_right = |gumbel: fn(u64) -> f64| {
            let above = high.iter().filter(|&&m| gumbel(m) > f32_end).count();
            (2..=38).contains(&above)
        };
        assert!(looks_right(gumbel_from_bits));
        assert!(!looks_right(gumbel_with_f32_uniform), "the planted mutant passes");
    }
}
