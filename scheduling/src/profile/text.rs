//! Which tokens a synthetic model draws: a function of seed, choice and position alone.
//!
//! The ids before a position play no part, on purpose: what stands at a position can then be told without
//! anything that led there, so that a test compares a whole served text with `==`, and a token that was
//! committed at a wrong position shows. What a model's text does depend on, its prefix, is what workers check
//! by hash before they draw at all.

use speculation::TokenId;

/// The first ids of a generated vocabulary end texts and frame conversations.
pub const SPECIAL_TOKENS: [&str; 4] = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"];

/// The special tokens and the 256 single bytes that any prompt can be spelt with: a synthetic model draws
/// none of them, so that what it says is made of whole words and no text ends but by its length.
pub const RESERVED_IDS: u32 = SPECIAL_TOKENS.len() as u32 + 256;

/// What the draws of one sequence are keyed by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SyntheticText {
    /// The request's seed.
    pub seed: u64,
    /// Index among the n choices of one prompt.
    pub choice: u32,
    /// Ids of the profile.
    pub vocab_size: u32,
}

/// What a hash is for: hashes for one purpose say nothing of those for another.
#[derive(Clone, Copy)]
enum Purpose {
    Token = 1,
    Guess = 2,
    Sibling = 3,
}

/// Of the positions where a first guess is wrong, the share where each of the next best is right: as the bundled pair's at T = 1, about.
const SIBLING_RATES: [f64; 3] = [0.3, 0.15, 0.08];

impl SyntheticText {
    /// The id that the target draws at `position`.
    pub fn token(&self, position: u32) -> TokenId {
        let drawable = u64::from(self.vocab_size - RESERVED_IDS);
        RESERVED_IDS + (self.hash(position, Purpose::Token) % drawable) as TokenId
    }

    /// The id that a draft guesses at `position`, right with the chance `rate`.
    pub fn guess(&self, position: u32, rate: f64) -> TokenId {
        let token = self.token(position);
        if unit(self.hash(position, Purpose::Guess)) < rate {
            return token;
        }
        // The next one, around the end: whatever else it is, it is wrong.
        if token + 1 < self.vocab_size { token + 1 } else { RESERVED_IDS }
    }

    /// The next best guesses at `position`: where the first one is wrong, one of them may be right, the better the likelier.
    pub fn siblings(&self, position: u32, first: TokenId) -> [TokenId; SIBLING_RATES.len()] {
        let token = self.token(position);
        let drawable = self.vocab_size - RESERVED_IDS;
        // Wrong ones, each another, around the end.
        let wrong = |rank: usize| RESERVED_IDS + (token - RESERVED_IDS + 2 + rank as u32) % drawable;
        let chance = unit(self.hash(position, Purpose::Sibling));
        let mut below = 0.0;
        std::array::from_fn(|rank| {
            let is_right = first != token && (below..below + SIBLING_RATES[rank]).contains(&chance);
            below += SIBLING_RATES[rank];
            if is_right { token } else { wrong(rank) }
        })
    }

    fn hash(&self, position: u32, purpose: Purpose) -> u64 {
        let key = mix(self.seed ^ mix(u64::from(self.choice) << 32 | u64::from(position)));
        mix(key ^ purpose as u64)
    }
}

/// The finalizer of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA
/// 2014).
pub fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A chance in [0, 1) of a hash.
pub fn unit(hash: u64) -> f64 {
    (hash >> 11) as f64 / (1_u64 << 53) as f64
}
