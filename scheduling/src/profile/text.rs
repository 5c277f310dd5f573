//! Tokens that a synthetic model draws: a function of seed, choice and position only.
//!
//! On purpose, the ids before a position do not matter. The token at a position is then known without its
//! context, so a test can compare a whole served text with `==`, and a token committed at a wrong position is
//! detected. A real model depends on the prefix; that part is covered by the workers, which check the prefix
//! by hash before they draw.

use speculation::TokenId;
use speculation::tree::MAX_CANDIDATES;

/// The first ids of a generated vocabulary: end of text, and roles of a conversation.
pub const SPECIAL_TOKENS: [&str; 4] = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"];

/// Number of special tokens plus the 256 single bytes, with which any prompt can be spelt. A synthetic model
/// draws none of them, so its text consists of whole words and ends only by its length.
pub const RESERVED_IDS: u32 = SPECIAL_TOKENS.len() as u32 + 256;

/// Key of the draws of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SyntheticText {
    /// The request's seed.
    pub seed: u64,
    /// Index among the n choices of one prompt.
    pub choice: u32,
    /// Vocabulary size of the profile.
    pub vocab_size: u32,
}

/// Purpose of a hash; hashes for different purposes are independent.
#[derive(Clone, Copy)]
enum Purpose {
    Token = 1,
    Guess = 2,
    Sibling = 3,
}

/// Number of candidates after the first.
const NUM_SIBLINGS: usize = MAX_CANDIDATES - 1;

/// Share of positions with a wrong first token at which each of the next candidates is right: measured on the
/// bundled pair at T = 1 over 11,698 positions, as in tests/examples/tree_shapes.
pub(super) const SIBLING_RATES: [f64; NUM_SIBLINGS] = [0.345, 0.157, 0.094, 0.058, 0.043, 0.036, 0.022];

impl SyntheticText {
    /// The token that the target draws at `position`.
    pub fn token(&self, position: u32) -> TokenId {
        let drawable = u64::from(self.vocab_size - RESERVED_IDS);
        RESERVED_IDS + (self.hash(position, Purpose::Token) % drawable) as TokenId
    }

    /// The token that a draft proposes at `position`; correct with probability `rate`.
    pub fn draft_token(&self, position: u32, rate: f64) -> TokenId {
        let token = self.token(position);
        if unit(self.hash(position, Purpose::Guess)) < rate {
            return token;
        }
        // The next id, with wraparound; always wrong.
        if token + 1 < self.vocab_size { token + 1 } else { RESERVED_IDS }
    }

    /// The next candidates at `position`. If the first token is wrong, one of them may be right, earlier ones
    /// more often.
    pub fn siblings(&self, position: u32, first: TokenId) -> [TokenId; NUM_SIBLINGS] {
        let token = self.token(position);
        let drawable = self.vocab_size - RESERVED_IDS;
        // Distinct wrong ids, with wraparound.
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

/// Maps a hash to a number in [0, 1).
pub fn unit(hash: u64) -> f64 {
    (hash >> 11) as f64 / (1_u64 << 53) as f64
}
