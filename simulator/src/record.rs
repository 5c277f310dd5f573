//! Records the scheduler's events and commands during a run. With it a test shows that another driver of the
//! same events gets the same commands.

use std::time::Duration;

use scheduling::scheduler::{Command, Event, Scheduler, SchedulerConfig};

/// The scheduler's events and commands in a run.
#[derive(Debug, Clone)]
pub struct Recording {
    /// The scheduler's configuration.
    pub config: SchedulerConfig,
    /// Its events, in order.
    pub entries: Vec<Entry>,
}

/// One event.
#[derive(Debug, Clone)]
pub struct Entry {
    /// When it was passed in.
    pub at: Duration,
    /// The event.
    pub event: Event,
    /// The scheduler's commands.
    pub commands: Vec<Command>,
}

impl Recording {
    /// Returns the commands of a new scheduler for the same events at the same times.
    pub fn replay(&self) -> Vec<Vec<Command>> {
        let mut scheduler = Scheduler::new(self.config.clone());
        let step = |entry: &Entry| {
            // A driver calls this after each dispatch, and it moves timer entries.
            let commands = scheduler.on_event(entry.at, entry.event.clone()).collect();
            if matches!(entry.event, Event::Dispatch) {
                scheduler.next_wakeup();
            }
            commands
        };
        self.entries.iter().map(step).collect()
    }
}
