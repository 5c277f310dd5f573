//! Progress of a run: a bar with an estimated end on a terminal, one line per condition elsewhere.

use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

use crate::output::note;

/// Progress shown on standard error.
pub(super) struct Progress {
    bar: ProgressBar,
    began: Instant,
}

impl Progress {
    pub(super) fn new(requests: usize) -> Self {
        let style =
            ProgressStyle::with_template("{bar:30} {pos}/{len} requests, {elapsed}, {eta} left: {msg}");
        let style = style.expect("the template is a constant that names known fields");
        Self { bar: ProgressBar::new(requests as u64).with_style(style), began: Instant::now() }
    }

    /// Counts one finished request.
    pub(super) fn on_request(&self) {
        self.bar.inc(1);
    }

    /// Sets the condition that is measured next.
    pub(super) fn on_condition(&self, what: String) {
        if self.bar.is_hidden() {
            let (done, all) = (self.bar.position(), self.bar.length().unwrap_or(0));
            let elapsed = self.began.elapsed().as_secs_f64();
            let left = match done {
                0 => String::new(),
                done => format!(", about {:.0} s left", elapsed * (all as f64 / done as f64 - 1.0)),
            };
            note(&format!("outrider: {done}/{all} requests after {elapsed:.0} s{left}: {what}"));
        }
        self.bar.set_message(what);
    }

    pub(super) fn end(&self) {
        self.bar.finish_and_clear();
    }
}
