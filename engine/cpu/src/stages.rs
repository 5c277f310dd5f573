//! Where the time of forwards goes: a device that keeps time is told, between two operations, what kind the
//! last one was. Measured where it is spent, so that shares of a step add up to the step. It never changes what is
//! computed.

use std::time::{Duration, Instant};

/// What a stretch of a forward was about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Products with weights, without that of the vocabulary.
    Products,
    /// Writing keys and values, and attending to them.
    Attention,
    /// The projection to the vocabulary.
    Vocabulary,
    /// Embeddings, norms, turning, gates, sums of ranks.
    Rest,
}

/// How long each kind of work has taken since start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageTimes {
    /// Products with weights, without that of the vocabulary.
    pub products: Duration,
    /// Writing keys and values, and attending to them.
    pub attention: Duration,
    /// The projection to the vocabulary.
    pub vocabulary: Duration,
    /// Embeddings, norms, turning, gates, sums of ranks.
    pub rest: Duration,
}

impl StageTimes {
    /// What was spent since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            products: self.products.saturating_sub(earlier.products),
            attention: self.attention.saturating_sub(earlier.attention),
            vocabulary: self.vocabulary.saturating_sub(earlier.vocabulary),
            rest: self.rest.saturating_sub(earlier.rest),
        }
    }
}

/// Adds up stages.
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
    /// What came before belongs to no stage.
    pub(crate) fn begin(&mut self) {
        self.since = Instant::now();
    }

    /// What came since the last call belongs to `stage`.
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
