//! The virtual clock: an event queue. Simultaneous events run in the order in which they were added.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use scheduling::scheduler::WorkerKey;
use scheduling::scheduler::events::Frame;
use speculation::{SequenceId, Step};

/// An event of the simulation.
#[derive(Debug)]
pub(super) enum Happening {
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
    happenings: BTreeMap<u64, Happening>,
    num_said: u64,
}

impl Clock {
    pub(super) fn at(&mut self, at: Duration, happening: Happening) {
        self.num_said += 1;
        self.queue.push(Reverse((at, self.num_said)));
        self.happenings.insert(self.num_said, happening);
    }

    pub(super) fn after(&mut self, wait: Duration, happening: Happening) {
        self.at(self.now + wait, happening);
    }

    /// Moves to the time of the next event, and takes all events of that time, in order.
    pub(super) fn advance(&mut self) -> Option<Vec<Happening>> {
        let Reverse((at, _)) = *self.queue.peek()?;
        self.now = at;
        let mut happening = Vec::new();
        while let Some(Reverse((_, said))) =
            self.queue.peek().copied().filter(|Reverse((next, _))| *next == at)
        {
            self.queue.pop();
            happening.extend(self.happenings.remove(&said));
        }
        Some(happening)
    }
}
