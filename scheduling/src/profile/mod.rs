//! Description of a pool of workers in a file: forward times, acceptance of drafts, and network time.
//!
//! The simulator, the `synthetic` engine of the workers and `outrider plan` read it. The router and its
//! controller never read it; they must learn everything from what workers report. Pure: the text of a file is
//! passed in.
//!
//! Reading order: this module checks a file ([`raw`] is its format), [`curve`] has the times of forwards,
//! [`acceptance`] the acceptance of drafts, [`text`] the tokens that a synthetic model draws, and
//! [`synthetic`] its answers.

pub mod acceptance;
pub mod curve;
mod raw;
pub mod synthetic;
#[cfg(test)]
mod tests;
pub mod text;

use speculation::Role;
use speculation::step::MAX_DRAFT_TOKENS;

pub use acceptance::Acceptance;
pub use curve::{ForwardRows, StepCurve};

/// Upper limit on the vocabulary size; larger values are taken for typing errors.
const VOCAB_SIZE_MAX: u32 = 1 << 20;

/// Lower limit on the vocabulary size: the reserved tokens, which a model never draws, and as many others.
const VOCAB_SIZE_MIN: u32 = 2 * text::RESERVED_IDS;

/// Upper limit on the workers of a pool; larger values are taken for typing errors.
const WORKERS_MAX: u32 = 4_096;

/// An hour.
const MICROS_MAX: f64 = 3.6e9;

/// Context lengths, in tokens of one sequence, at which a worker profiles its step times: a short context,
/// and one long enough to show the cost of reading KV. A worker that cannot fill the long context within its
/// time budget uses the length that it reached.
pub const PROFILED_CONTEXTS: [u32; 2] = [16, 2_048];

/// Batches that a GPU worker profiles too, as a number of sequences and the tokens of each: what it serves.
/// Those that it has no KV for, and those that take too long, are left out.
pub const PROFILED_BATCHES: [(u32, u32); 4] = [(8, 2_048), (8, 8_192), (32, 2_048), (32, 8_192)];

/// Rows of each sequence in those batches: of a decode step, and of one that verifies four drafted ids. The
/// difference between the two is what draft lengths are chosen by.
pub const PROFILED_BATCH_ROWS: [u32; 2] = [1, 5];

/// Why a profile cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProfileError {
    /// Not TOML, or not the fields of a profile.
    #[error("the profile cannot be read: {0}")]
    Toml(String),
    /// A value is invalid.
    #[error("{field} {fault}")]
    Value {
        /// The field.
        field: String,
        /// The fault, and the expected value.
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
    /// Description in one line.
    pub name: String,
    /// Number of ids that the synthetic model draws from.
    pub vocab_size: u32,
    /// Maximum length of a sequence, prompt and output.
    pub max_model_len: u32,
    /// One-way delay of a message between router and worker, microseconds.
    pub wire_us: f64,
    /// Maximum relative deviation of a forward's time from its curve, evenly distributed.
    pub noise: f64,
    /// The target workers.
    pub target: PoolProfile,
    /// The draft workers.
    pub draft: PoolProfile,
    /// Acceptance of drafts.
    pub acceptance: Acceptance,
}

/// Workers of one role, all equal.
#[derive(Debug, Clone, PartialEq)]
pub struct PoolProfile {
    /// Description of the hardware.
    pub device: String,
    /// Number of workers.
    pub workers: u32,
    /// Maximum rows in one forward.
    pub max_batch_rows: u32,
    /// KV blocks per worker.
    pub kv_blocks: u64,
    /// Tokens per block.
    pub kv_block_size: u32,
    /// Forward times.
    pub curve: StepCurve,
}

impl Profile {
    /// Parses and checks the text of a file; an error names the field of the first fault.
    pub fn parse(text: &str) -> Result<Self, ProfileError> {
        let raw: raw::RawProfile =
            toml::from_str(text).map_err(|error| ProfileError::Toml(error.to_string().trim().to_owned()))?;
        raw.check()
    }

    /// The pool of a role.
    pub fn pool(&self, role: Role) -> &PoolProfile {
        match role {
            Role::Draft => &self.draft,
            Role::Target => &self.target,
        }
    }

    /// Applies noise to `micros` of a curve; `chance` lies in 0..1.
    pub fn with_noise(&self, micros: f64, chance: f64) -> f64 {
        micros * (1.0 + self.noise * (2.0 * chance - 1.0))
    }

    /// The same pools with a constant acceptance `rate` for all positions and task types: the axis of a map.
    pub fn with_acceptance(&self, rate: f64) -> Self {
        Self { acceptance: Acceptance::constant(rate.clamp(0.0, 1.0)), ..self.clone() }
    }
}

impl raw::RawProfile {
    fn check(self) -> Result<Profile, ProfileError> {
        between("vocab_size", self.vocab_size, (VOCAB_SIZE_MIN, VOCAB_SIZE_MAX))?;
        between("max_model_len", self.max_model_len, (1, u32::MAX))?;
        fraction("noise", self.noise)?;
        micros("wire_us", self.wire_us)?;
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
    fn check(self, role: &str) -> Result<PoolProfile, ProfileError> {
        between(&format!("{role}.workers"), self.workers, (1, WORKERS_MAX))?;
        // A verify step is never split, so one with the longest draft must fit.
        between(
            &format!("{role}.max_batch_rows"),
            self.max_batch_rows,
            (MAX_DRAFT_TOKENS as u32 + 1, 1 << 16),
        )?;
        between(&format!("{role}.kv_block_size"), self.kv_block_size, (1, 4_096))?;
        if self.kv_blocks == 0 {
            return Err(ProfileError::value(format!("{role}.kv_blocks"), "is 0, expected at least 1"));
        }
        Ok(PoolProfile {
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

/// Longer times are mistakes, and sums of them would be too large for a clock.
fn micros(field: &str, value: f64) -> Result<(), ProfileError> {
    if (0.0..=MICROS_MAX).contains(&value) {
        return Ok(());
    }
    Err(ProfileError::value(field, format!("is {value}, expected 0 to {MICROS_MAX}, an hour")))
}

fn non_negative(field: &str, value: f64) -> Result<(), ProfileError> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    Err(ProfileError::value(field, format!("is {value}, expected 0 or more")))
}
