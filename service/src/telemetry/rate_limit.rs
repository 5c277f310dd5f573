//! Limits warnings and errors per place in the code, so that a misbehaving worker or a flood of connections
//! cannot fill the log. Dropped lines are counted, and the count is logged.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Context, Filter};

use super::writer::LogWriter;

/// Maximum number of lines from one place per window.
const LINES_MAX: u64 = 20;
const WINDOW: Duration = Duration::from_secs(10);

/// Drops an event if its place has logged too many.
pub(super) struct RateLimit {
    writer: LogWriter,
    places: Mutex<HashMap<Identifier, Budget>>,
}

/// Lines of one place in the current window.
#[derive(Debug)]
struct Budget {
    began: Instant,
    num_passed: u64,
    num_left_out: u64,
}

impl Budget {
    fn new(now: Instant) -> Self {
        Self { began: now, num_passed: 0, num_left_out: 0 }
    }

    /// Returns `None` to drop a line; otherwise the number of lines dropped in the previous window.
    fn take(&mut self, now: Instant) -> Option<u64> {
        let mut left_out = 0;
        if now.saturating_duration_since(self.began) >= WINDOW {
            left_out = self.num_left_out;
            *self = Self::new(now);
        }
        if self.num_passed < LINES_MAX {
            self.num_passed += 1;
            return Some(left_out);
        }
        self.num_left_out += 1;
        None
    }
}

impl RateLimit {
    pub(super) fn new(writer: LogWriter) -> Self {
        Self { writer, places: Mutex::default() }
    }
}

impl<S: Subscriber> Filter<S> for RateLimit {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    // Every level may pass. Without this hint the filter might enable spans of any level, and then libraries'
    // spans would be created and dropped for every frame.
    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::TRACE)
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        let metadata = event.metadata();
        if *metadata.level() > Level::WARN {
            return true;
        }
        let now = Instant::now();
        let taken = {
            let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
            places.entry(metadata.callsite()).or_insert_with(|| Budget::new(now)).take(now)
        };
        if let Some(left_out @ 1..) = taken {
            let (file, line) = (metadata.file().unwrap_or("?"), metadata.line().unwrap_or(0));
            self.writer
                .note(&format!("{left_out} lines from {file}:{line} were left out before the next one"));
        }
        taken.is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _};

    use tracing_subscriber::Layer as _;
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;
    use crate::telemetry::LogFormat;

    #[test]
    fn a_place_has_a_budget_for_each_window() {
        let now = Instant::now();
        let mut budget = Budget::new(now);
        let passed = (0..100).filter(|_| budget.take(now).is_some()).count() as u64;
        assert_eq!(passed, LINES_MAX);
        assert_eq!(budget.take(now + WINDOW), Some(100 - LINES_MAX), "told with the next one");
        assert_eq!(budget.take(now + WINDOW), Some(0));
    }

    #[test]
    fn one_loud_place_does_not_silence_the_others() {
        let mut file = tempfile::tempfile().unwrap();
        let writer = LogWriter::start(file.try_clone().unwrap(), LogFormat::Text).unwrap();
        let limited = tracing_subscriber::fmt::layer()
            .with_writer(writer.clone())
            .with_filter(RateLimit::new(writer.clone()));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(limited), || {
            for round in 0..1_000 {
                tracing::warn!(round, "a loud worker");
            }
            tracing::warn!("a quiet one");
            (0..100).for_each(|_| tracing::info!("as often as it is asked for"));
        });
        assert!(writer.flush());
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        let count = |what: &str| text.lines().filter(|line| line.contains(what)).count() as u64;
        assert_eq!(
            (count("a loud worker"), count("a quiet one"), count("as often")),
            (LINES_MAX, 1, 100),
            "{text}"
        );
    }
}
