//! Progress of a measurement on standard error: a bar with an estimated end on a terminal, one line for each
//! part elsewhere.

use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

use crate::output::note;

/// Progress shown on standard error.
pub(crate) struct Progress {
    bar: ProgressBar,
    unit: &'static str,
    began: Instant,
}

impl Progress {
    /// Starts a measurement of `total` units; `unit` is their name in the plural.
    pub(crate) fn new(total: usize, unit: &'static str) -> Self {
        let template = format!("{{bar:30}} {{pos}}/{{len}} {unit}, {{elapsed}}, {{eta}} left: {{msg}}");
        let style = ProgressStyle::with_template(&template);
        let style = style.expect("the template names known fields, and a unit is a word");
        Self { bar: ProgressBar::new(total as u64).with_style(style), unit, began: Instant::now() }
    }

    /// Counts one finished unit.
    pub(crate) fn finish_unit(&self) {
        self.bar.inc(1);
    }

    /// Sets the part that is measured next.
    pub(crate) fn begin_part(&self, part: String) {
        if self.bar.is_hidden() {
            let (done, all) = (self.bar.position(), self.bar.length().unwrap_or(0));
            let elapsed = self.began.elapsed().as_secs_f64();
            let left = match done {
                0 => String::new(),
                done => format!(", about {:.0} s left", elapsed * (all as f64 / done as f64 - 1.0)),
            };
            note(&format!("outrider: {done}/{all} {} after {elapsed:.0} s{left}: {part}", self.unit));
        }
        self.bar.set_message(part);
    }

    /// Removes the bar.
    pub(crate) fn end(&self) {
        self.bar.finish_and_clear();
    }
}
