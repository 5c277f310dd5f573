//! The virtual clock: what happens next; at one moment, in the order in which it was said.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use scheduling::scheduler::WorkerKey;
use scheduling::scheduler::events::Frame;
use speculation::{SequenceId, Step};

/// Something that happens.
#[derive(Debug)]
pub(super) enum Happening {
    /// A request comes.
    Arrival,
    /// A frame of the router reaches a worker.
    ToWorker(WorkerKey, RouterFrame),
    /// A worker's forward is done.
    ForwardDone(WorkerKey),
    /// The delay of a worker's forward is over.
    DelayOver(WorkerKey),
    /// A frame of a worker reaches the router.
    ToRouter(WorkerKey, Frame),
    /// The scheduler asked to be woken.
    Wakeup,
}

/// What a router sends to one worker at one time.
#[derive(Debug, Default)]
pub(super) struct RouterFrame {
    pub(super) steps: Vec<Step>,
    /// Sequences to forget, with the assignment that is over.
    pub(super) closes: Vec<(SequenceId, u32)>,
}

/// The clock and its queue.
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

    /// Moves to the next moment at which something happens, and takes all that happens then, in order.
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
