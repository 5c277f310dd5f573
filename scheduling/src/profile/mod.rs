//! A pool of workers as a file describes it: what forwards take, how often drafts are right, how far apart
//! the processes are.
//!
//! The simulator, the `synthetic` engine of the workers and `outrider plan` read it. The router and its
//! controller never do: they see what workers tell, and must find out the rest. Pure: the text of a file
//! comes in.
//!
//! Reading order: this page checks a file ([`raw`] is its shape), [`curve`] says what a forward takes,
//! [`acceptance`] how often a draft is right, [`text`] which tokens a synthetic model draws, [`synthetic`]
//! what it answers.

pub mod acceptance;
pub mod curve;
mod raw;
pub mod synthetic;
#[cfg(test)]
mod tests;
pub mod text;

use speculation::step::MAX_DRAFT_TOKENS;

pub use acceptance::Acceptance;
pub use curve::{ForwardRows, StepCurve};

/// Vocabularies larger than this are a slip of the finger.
const VOCAB_SIZE_MAX: u32 = 1 << 20;

/// A generated vocabulary has the tokens that a model never draws, and as many that it does.
const VOCAB_SIZE_MIN: u32 = 2 * text::RESERVED_IDS;

/// More workers than this in one pool is a slip of the finger.
const WORKERS_MAX: u32 = 4_096;

/// Tokens that the one sequence holds with which a worker profiles its step times: a short context, and one
/// long enough to tell what reading the KV costs. A worker that cannot fill the long one within its time
/// budget takes what it reached.
pub const PROFILED_CONTEXTS: [u32; 2] = [16, 2_048];

/// Why a profile cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProfileError {
    /// Not TOML, or not the fields that a profile has.
    #[error("the profile cannot be read: {0}")]
    Toml(String),
    /// A value makes no sense.
    #[error("{field} {fault}")]
    Value {
        /// Where it stands.
        field: String,
        /// What is wrong with it, and what is expected.
        fault: String,
    },
}

impl ProfileError {
    fn value(field: impl Into<String>, fault: impl Into<String>) -> Self {
        Self::Value { field: field.into(), fault: fault.into() }
    }
}

/// A checked profile.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    /// What it describes, in a line.
    pub name: String,
    /// Ids that the synthetic model draws from.
    pub vocab_size: u32,
    /// Longest sequence, prompt and output.
    pub max_model_len: u32,
    /// Microseconds that a message takes from a router to a worker, or back.
    pub wire_us: f64,
    /// Forwards take up to this part more or less than their curve says, evenly spread.
    pub noise: f64,
    /// Those that check drafts.
    pub target: Pool,
    /// Those that guess.
    pub draft: Pool,
    /// How often guesses are right.
    pub acceptance: Acceptance,
}

/// Equal workers of one role.
#[derive(Debug, Clone, PartialEq)]
pub struct Pool {
    /// The hardware, in words.
    pub device: String,
    /// How many workers.
    pub workers: u32,
    /// Most rows in one forward.
    pub max_batch_rows: u32,
    /// KV blocks of one worker.
    pub kv_blocks: u64,
    /// Tokens in a block.
    pub kv_block_size: u32,
    /// What a forward takes.
    pub curve: StepCurve,
}

impl Profile {
    /// Reads and checks the text of a file; the first fault is named with its field.
    pub fn parse(text: &str) -> Result<Self, ProfileError> {
        let raw: raw::RawProfile =
            toml::from_str(text).map_err(|error| ProfileError::Toml(error.to_string().trim().to_owned()))?;
        raw.check()
    }

    /// `micros` of a curve as one forward takes it; `chance` lies in 0..1.
    pub fn with_noise(&self, micros: f64, chance: f64) -> f64 {
        micros * (1.0 + self.noise * (2.0 * chance - 1.0))
    }

    /// The same pools where every guess is right at `rate`, whatever its position and task type: the axis of
    /// a map.
    pub fn with_acceptance(&self, rate: f64) -> Self {
        Self { acceptance: Acceptance::constant(rate.clamp(0.0, 1.0)), ..self.clone() }
    }
}

impl raw::RawProfile {
    fn check(self) -> Result<Profile, ProfileError> {
        between("vocab_size", self.vocab_size, (VOCAB_SIZE_MIN, VOCAB_SIZE_MAX))?;
        between("max_model_len", self.max_model_len, (1, u32::MAX))?;
        fraction("noise", self.noise)?;
        at_least_zero("wire_us", self.wire_us)?;
        Ok(Profile {
            name: self.name,
            vocab_size: self.vocab_size,
            max_model_len: self.max_model_len,
            wire_us: self.wire_us,
            noise: self.noise,
            target: self.target.check("target")?,
            draft: self.draft.check("draft")?,
            acceptance: Acceptance::check(self.acceptance)?,
        })
    }
}

impl raw::RawPool {
    fn check(self, role: &str) -> Result<Pool, ProfileError> {
        between(&format!("{role}.workers"), self.workers, (1, WORKERS_MAX))?;
        // A verification is never split: one of the longest drafts has to fit.
        between(
            &format!("{role}.max_batch_rows"),
            self.max_batch_rows,
            (MAX_DRAFT_TOKENS as u32 + 1, 1 << 16),
        )?;
        between(&format!("{role}.kv_block_size"), self.kv_block_size, (1, 4_096))?;
        if self.kv_blocks == 0 {
            return Err(ProfileError::value(format!("{role}.kv_blocks"), "is 0, expected at least 1"));
        }
        Ok(Pool {
            device: self.device,
            workers: self.workers,
            max_batch_rows: self.max_batch_rows,
            kv_blocks: self.kv_blocks,
            kv_block_size: self.kv_block_size,
            curve: StepCurve::check(role, self.step)?,
        })
    }
}

fn between(field: &str, value: u32, (low, high): (u32, u32)) -> Result<(), ProfileError> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(ProfileError::value(field, format!("is {value}, expected {low} to {high}")))
}

fn fraction(field: &str, value: f64) -> Result<(), ProfileError> {
    if (0.0..=1.0).contains(&value) {
        return Ok(());
    }
    Err(ProfileError::value(field, format!("is {value}, expected 0 to 1")))
}

fn at_least_zero(field: &str, value: f64) -> Result<(), ProfileError> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    Err(ProfileError::value(field, format!("is {value}, expected a number that is not negative")))
}
