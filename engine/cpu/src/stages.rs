//! Measures where the time of forwards goes: between operations the caller marks the kind of the last one.
//! Time is attributed without gaps, so the parts of a step add up to the step. It never changes what is
//! computed.

use std::time::{Duration, Instant};

/// Kind of work in a forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// GEMMs with weights and gates, except the vocabulary projection.
    Products,
    /// Writing keys and values, and attention.
    Attention,
    /// The vocabulary projection.
    Vocabulary,
    /// Embeddings, norms, rope, all-reduce.
    Rest,
}

/// Time per kind of work since start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageTimes {
    /// GEMMs with weights and gates, except the vocabulary projection.
    pub products: Duration,
    /// Writing keys and values, and attention.
    pub attention: Duration,
    /// The vocabulary projection.
    pub vocabulary: Duration,
    /// Embeddings, norms, rope, all-reduce.
    pub rest: Duration,
}

impl StageTimes {
    /// Time spent since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            products: self.products.saturating_sub(earlier.products),
            attention: self.attention.saturating_sub(earlier.attention),
            vocabulary: self.vocabulary.saturating_sub(earlier.vocabulary),
            rest: self.rest.saturating_sub(earlier.rest),
        }
    }
}

/// Accumulates time per stage.
#[derive(Debug)]
pub(crate) struct StageClock {
    since: Instant,
    pub(crate) times: StageTimes,
}

impl Default for StageClock {
    fn default() -> Self {
        Self { since: Instant::now(), times: StageTimes::default() }
    }
}

impl StageClock {
    /// Starts timing: time before this call belongs to no stage.
    pub(crate) fn begin(&mut self) {
        self.since = Instant::now();
    }

    /// Attributes the time since the last call to `stage`.
    pub(crate) fn mark(&mut self, stage: Stage) {
        let now = Instant::now();
        let spent = now - self.since;
        self.since = now;
        *match stage {
            Stage::Products => &mut self.times.products,
            Stage::Attention => &mut self.times.attention,
            Stage::Vocabulary => &mut self.times.vocabulary,
            Stage::Rest => &mut self.times.rest,
        } += spent;
    }
}
