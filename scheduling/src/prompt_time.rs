//! Prompts in a target's forwards. A round waits for its target's forwards, and those with prompt rows take
//! longer than the step times of the other rows.

use crate::smoothing::EWMA_WINDOW;

/// Prompts in the forwards of one worker: decayed means.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PromptTime {
    share: f64,
    rows: f64,
    log_ratio: f64,
    forwards: u64,
}

impl PromptTime {
    /// Records a forward without prompts.
    pub(crate) fn observe_none(&mut self) {
        self.share -= self.share / EWMA_WINDOW;
    }

    /// Records a forward with this number of prompt rows, and the ratio of its measured to its predicted time.
    pub(crate) fn observe(&mut self, rows: f64, ratio: f64) {
        if !(ratio.is_finite() && ratio > 0.0) {
            return;
        }
        self.forwards += 1;
        self.share += (1.0 - self.share) / EWMA_WINDOW;
        let weight = (self.forwards as f64).min(EWMA_WINDOW);
        self.rows += (rows - self.rows) / weight;
        self.log_ratio += (ratio.ln() - self.log_ratio) / weight;
    }

    /// Number of forwards with prompts so far.
    pub fn forwards(&self) -> u64 {
        self.forwards
    }

    /// Share of forwards with prompts.
    pub fn share(&self) -> f64 {
        self.share
    }

    /// Mean number of prompt rows in a forward with prompts.
    pub fn rows(&self) -> f64 {
        self.rows
    }

    /// Ratio of measured to predicted times of forwards with prompts.
    pub fn ratio(&self) -> f64 {
        self.log_ratio.exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_of_the_forwards_hold_a_prompt() {
        let mut prompts = PromptTime::default();
        for forward in 0..4_000 {
            match forward % 8 {
                0 => prompts.observe(64.0, 2.0),
                4 => prompts.observe(32.0, 0.5),
                _ => prompts.observe_none(),
            }
        }
        assert!((prompts.share() - 0.25).abs() < 0.01, "{}", prompts.share());
        assert!((prompts.rows() - 48.0).abs() < 0.5 && (prompts.ratio() - 1.0).abs() < 0.01, "{prompts:?}");
        assert_eq!(prompts.forwards(), 1_000);
    }
}
