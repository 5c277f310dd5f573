//! Progress of training and the remaining time, as lines on standard error.

use std::time::{Duration, Instant};

use distill::training::StepReport;

use crate::output::note;

/// Minimum time between two lines.
const PRINT_INTERVAL: Duration = Duration::from_secs(10);

/// Progress of a training run.
pub(super) struct Progress {
    steps: usize,
    began: Instant,
    last_printed_at: Instant,
    tokens: usize,
}

impl Progress {
    pub(super) fn new(steps: usize) -> Self {
        let now = Instant::now();
        Self { steps, began: now, last_printed_at: now, tokens: 0 }
    }

    /// Records a finished step.
    pub(super) fn step(&mut self, StepReport { steps: done, loss, tokens }: StepReport) {
        self.tokens += tokens;
        if self.last_printed_at.elapsed() < PRINT_INTERVAL && done != self.steps {
            return;
        }
        self.last_printed_at = Instant::now();
        let seconds = self.began.elapsed().as_secs_f64();
        let left = seconds / done as f64 * (self.steps - done) as f64;
        note(&format!(
            "step {done} of {} ({:.0}%), loss {loss:.3}, {:.0} tokens/s, {} left",
            self.steps,
            100.0 * done as f64 / self.steps as f64,
            self.tokens as f64 / seconds,
            clock(left),
        ));
    }
}

fn clock(seconds: f64) -> String {
    let seconds = seconds.round() as u64;
    format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    #[test]
    fn times_are_spelt_in_hours() {
        assert_eq!(super::clock(3_725.4), "1:02:05");
    }
}
