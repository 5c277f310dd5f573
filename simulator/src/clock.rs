//! The virtual clock: an event queue. Simultaneous events run in the order in which they were added.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use scheduling::scheduler::WorkerKey;
use scheduling::scheduler::events::Frame;
use speculation::{SequenceId, Step};

/// An event of the simulation.
#[derive(Debug)]
pub(super) enum SimEvent {
    /// A request arrives.
    Arrival,
    /// A frame from the router reaches a worker.
    ToWorker(WorkerKey, RouterFrame),
    /// A worker's forward is complete.
    ForwardDone(WorkerKey),
    /// The delay of a worker's forward has ended.
    DelayOver(WorkerKey),
    /// A frame from a worker reaches the router.
    ToRouter(WorkerKey, Frame),
    /// The scheduler's requested wakeup is due.
    Wakeup,
}

/// A frame from the router to one worker.
#[derive(Debug, Default)]
pub(super) struct RouterFrame {
    pub(super) steps: Vec<Step>,
    /// Sequences to drop, each with the epoch of the assignment that ended.
    pub(super) closes: Vec<(SequenceId, u32)>,
}

/// The clock and its event queue.
#[derive(Debug, Default)]
pub(super) struct Clock {
    pub(super) now: Duration,
    queue: BinaryHeap<Reverse<(Duration, u64)>>,
    events: BTreeMap<u64, SimEvent>,
    num_scheduled: u64,
}

impl Clock {
    pub(super) fn schedule_at(&mut self, at: Duration, event: SimEvent) {
        self.num_scheduled += 1;
        self.queue.push(Reverse((at, self.num_scheduled)));
        self.events.insert(self.num_scheduled, event);
    }

    pub(super) fn schedule_after(&mut self, wait: Duration, event: SimEvent) {
        self.schedule_at(self.now + wait, event);
    }

    /// Moves to the time of the next event, and takes all events of that time, in order.
    pub(super) fn advance(&mut self) -> Option<Vec<SimEvent>> {
        let Reverse((at, _)) = *self.queue.peek()?;
        self.now = at;
        let mut events = Vec::new();
        while let Some(Reverse((_, number))) =
            self.queue.peek().copied().filter(|Reverse((next, _))| *next == at)
        {
            self.queue.pop();
            events.extend(self.events.remove(&number));
        }
        Some(events)
    }
}
