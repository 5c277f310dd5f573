//! What went into the scheduler during a run, and what came out: the log by which a test shows that another
//! driver of the same events gets the same commands.

use std::time::Duration;

use scheduling::scheduler::{Command, Event, Scheduler, SchedulerConfig};

/// The scheduler's side of a run.
#[derive(Debug, Clone)]
pub struct Recording {
    /// With what it was made.
    pub config: SchedulerConfig,
    /// Its events, in order.
    pub entries: Vec<Entry>,
}

/// One event.
#[derive(Debug, Clone)]
pub struct Entry {
    /// When it was passed in.
    pub at: Duration,
    /// What happened.
    pub event: Event,
    /// What the scheduler commanded.
    pub commands: Vec<Command>,
}

impl Recording {
    /// The commands of a fresh scheduler that is passed the same events at the same times.
    pub fn replay(&self) -> Vec<Vec<Command>> {
        let mut scheduler = Scheduler::new(self.config.clone());
        let step = |entry: &Entry| {
            // A driver asks after each dispatch; the answer moves entries of the timers.
            let commands = scheduler.on_event(entry.at, entry.event.clone()).collect();
            if matches!(entry.event, Event::Dispatch) {
                scheduler.next_wakeup();
            }
            commands
        };
        self.entries.iter().map(step).collect()
    }
}
