//! The noise that couples draft and target (contract B3): a pure function of (seed, choice, position, token,
//! purpose), so that both sides, and every replay, perturb a token's logit by the same amount.
//!
//! Counter-based, so there is no generator state to keep, lose or advance once too often. Uniforms have 52
//! random bits: with the 24 bits of an f32 the Gumbel tail would end near 17, and rare tokens could never be
//! drawn. This module must not depend on logits.

use crate::TokenId;
use crate::math::ln;

/// Upper bound of [`Noise::gumbel`]; a token further than this below the best score needs no noise computed.
pub(crate) const GUMBEL_MAX: f64 = 36.75;

/// The purpose of a random number. Different purposes at one position and token are independent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Purpose {
    /// The target's draw, and the coupled draft's.
    Draw = 0,
    /// Acceptance of a drafted token in rejection mode.
    Accept = 1,
    /// The token that replaces a rejected one in rejection mode.
    Residual = 2,
    /// The draft's draw in rejection mode, which must be independent of the target's.
    Draft = 3,
}

/// The noise of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Noise {
    /// The request's seed.
    pub seed: u64,
    /// Index among the n choices of a request's prompt.
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

    /// The 52 bits m used by [`Noise::uniform`].
    pub(crate) fn bits(&self, position: u32, token: TokenId, purpose: Purpose) -> u64 {
        let words = philox4x32_10([position, token >> 1, self.choice, purpose as u32], self.key());
        let (low, high) = if token.is_multiple_of(2) { (words[0], words[1]) } else { (words[2], words[3]) };
        top_52_bits(low, high)
    }

    /// The top 32 bits for each of [`BLOCK`] consecutive tokens from `first` on, which must be even: those of
    /// the even tokens, then those of the odd ones, both in order. They nearly determine the noise
    /// ([`gumbel_bound`]), and half of the last Philox round need not be computed.
    #[inline(always)]
    pub(crate) fn high_words(&self, position: u32, first: TokenId, purpose: Purpose) -> [[u32; LANES]; 2] {
        debug_assert!(first.is_multiple_of(2), "a block starts with a pair");
        let mut words = [
            [u64::from(position); LANES],
            [u64::from(first >> 1); LANES],
            [u64::from(self.choice); LANES],
            [purpose as u64; LANES],
        ];
        for (lane, word) in words[1].iter_mut().enumerate() {
            *word += lane as u64;
        }
        philox_lanes(&mut words, self.key());
        let mut high = [[0; LANES]; 2];
        for lane in 0..LANES {
            high[0][lane] = words[1][lane] as u32;
            high[1][lane] = words[3][lane] as u32;
        }
        high
    }

    fn key(&self) -> [u32; 2] {
        [self.seed as u32, (self.seed >> 32) as u32]
    }
}

/// Number of Philox calls that [`Noise::high_words`] computes side by side; each serves a pair of tokens.
const LANES: usize = 32;

/// Number of tokens covered by one [`Noise::high_words`].
pub(crate) const BLOCK: usize = 2 * LANES;

fn top_52_bits(low: u32, high: u32) -> u64 {
    (u64::from(low) | u64::from(high) << 32) >> 12
}

fn uniform_from_bits(m: u64) -> f64 {
    // m + 0.5 has at most 53 significant bits, so neither step rounds.
    (m as f64 + 0.5) * (1.0 / (1_u64 << 52) as f64)
}

/// The Gumbel noise of the bits m.
pub(crate) fn gumbel_from_bits(m: u64) -> f64 {
    -ln(-ln(uniform_from_bits(m)))
}

/// An upper bound of [`gumbel_from_bits`] for every m whose top 32 bits are `high`, at most 0.1 above it if
/// that lies between 3 and 15. The bound never decreases as `high` increases, so the bound of the highest of
/// several words bounds them all.
///
/// With Y = 1 - U, G = -ln(-ln U) <= -ln Y, and log2 Y is at least the bits of Y read as a fixed-point
/// number. Y is computed for the largest such m, which makes Y smallest and the bound largest. Each step
/// below is monotone in `high`: rounding is, and so is reading a positive float's bits as an integer.
#[inline(always)]
pub(crate) fn gumbel_bound(high: u32) -> f64 {
    const ONE: u64 = 0x3ff0_0000_0000_0000;
    // 1 - U = (2^52 - 1 - m + 0.5) * 2^-52, where 2^52 - 1 - m is the inverse of 52 bits.
    let y = (f64::from_bits(ONE | u64::from(!high) << 20) - 1.0) + 0.5 / (1_u64 << 52) as f64;
    // The high word alone: dropping mantissa bits lowers Y, which raises the bound.
    let fixed_point = (ONE >> 32) as i32 - (y.to_bits() >> 32) as i32;
    // The last term is far larger than the rounding errors of ln and of this line.
    f64::from(fixed_point) * (std::f64::consts::LN_2 / (1_u64 << 20) as f64) + 1e-9
}

/// The top 32 of the 52 bits m, the input of [`gumbel_bound`].
pub(crate) fn high_word(m: u64) -> u32 {
    (m >> 20) as u32
}

const MULTIPLIERS: [u64; 2] = [0xd251_1f53, 0xcd9e_8d57];
const KEY_STEPS: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: u32 = 10;

/// Philox-4x32 with ten rounds (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3",
/// 2011).
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let mut words = counter.map(|word| [u64::from(word)]);
    philox_lanes(&mut words, key);
    words.map(|[word]| word as u32)
}

/// Philox of N counters side by side. A word is the low half of its u64, and the high half is arbitrary: the
/// product of two words is computed in place, and vector registers need neither widening nor shuffling.
#[inline(always)]
fn philox_lanes<const N: usize>(words: &mut [[u64; N]; 4], key: [u32; 2]) {
    const WORD: u64 = 0xffff_ffff;
    let mut key = key;
    for _ in 0..ROUNDS {
        #[expect(
            clippy::needless_range_loop,
            reason = "lanes run over the inner index, words over the outer one"
        )]
        for lane in 0..N {
            // 32 bits by 32 bits: neither product can overflow.
            let a = (words[0][lane] & WORD).wrapping_mul(MULTIPLIERS[0]);
            let b = (words[2][lane] & WORD).wrapping_mul(MULTIPLIERS[1]);
            words[0][lane] = (b >> 32) ^ words[1][lane] ^ u64::from(key[0]);
            words[1][lane] = b;
            words[2][lane] = (a >> 32) ^ words[3][lane] ^ u64::from(key[1]);
            words[3][lane] = a;
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
    fn a_block_holds_the_high_words_of_its_tokens() {
        let noise = Noise { seed: 0x0123_4567_89ab_cdef, choice: 5 };
        for (position, first, purpose) in [
            (0, 0, Purpose::Draw),
            (20_001, 151_920, Purpose::Residual),
            (u32::MAX, u32::MAX - 63, Purpose::Draft),
        ] {
            let words = noise.high_words(position, first, purpose);
            for i in 0..BLOCK {
                let token = first + i as u32;
                let expected = high_word(noise.bits(position, token, purpose));
                assert_eq!(words[i % 2][i / 2], expected, "token {token}");
            }
        }
    }

    #[test]
    fn the_bound_is_never_below_the_noise_and_close_to_it_where_it_matters() {
        let noise = Noise { seed: 1, choice: 0 };
        let random = (0..400_000).map(|token| noise.bits(0, token, Purpose::Draw));
        // Both ends, where U is close to 0 and 1, and every power of two of 1 - U with its neighbours.
        let corners = (0..52).flat_map(|e| [1 << e, (1 << e) - 1, (1 << e) + 1]).flat_map(|n| [n, LAST - n]);
        let mut all: Vec<u64> = random.chain(corners).collect();
        all.sort_unstable();
        let mut below = f64::NEG_INFINITY;
        for m in all {
            let (gumbel, bound) = (gumbel_from_bits(m), gumbel_bound(high_word(m)));
            assert!(bound >= gumbel, "m = {m}: {bound} under {gumbel}");
            assert!(
                !(3.0..15.0).contains(&gumbel) || bound < gumbel + 0.1,
                "m = {m}: {bound} far above {gumbel}"
            );
            assert!(bound >= below, "m = {m}: {bound} after {below}");
            below = bound;
        }
        assert!(below < 37.0, "the bound of the last word is {below}");
    }

    /// The noise of 24-bit uniforms: 23 bits plus one half, the finest that an f32 holds below 1.
    fn gumbel_with_f32_uniform(m: u64) -> f64 {
        let uniform = ((m >> 29) as f32 + 0.5) * (1.0 / (1_u32 << 23) as f32);
        -ln(-ln(f64::from(uniform)))
    }

    /// Noise from f32 uniforms ends at -ln(-ln(1 - 2^-24)) = 16.64. Of 2^28 true values 16 exceed it on
    /// average (Poisson): a count outside [2, 38] has probability 2e-6, and none at all probability 1e-7.
    #[test]
    fn the_tail_goes_on_where_f32_uniforms_end() {
        let f32_end = gumbel_with_f32_uniform(LAST);
        assert!((16.63..16.64).contains(&f32_end), "{f32_end}");
        let noise = Noise { seed: 2, choice: 0 };
        // Either noise can be that large only if the top 23 bits are all ones; the rest need no logarithm.
        let mut high = Vec::new();
        for first in (0..1_u32 << 28).step_by(BLOCK) {
            let words = noise.high_words(7, first, Purpose::Draw);
            if words.as_flattened().iter().any(|word| word >> 9 == (1 << 23) - 1) {
                high.extend((first..).take(BLOCK).map(|token| noise.bits(7, token, Purpose::Draw)));
            }
        }
        high.retain(|m| m >> 29 == (1 << 23) - 1);

        let looks_right = |gumbel: fn(u64) -> f64| {
            let above = high.iter().filter(|&&m| gumbel(m) > f32_end).count();
            (2..=38).contains(&above)
        };
        assert!(looks_right(gumbel_from_bits));
        assert!(!looks_right(gumbel_with_f32_uniform), "the planted mutant passes");
    }
}
