//! What happens next on the virtual clock; at one moment, in the order in which it was said.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use super::router::Reply;
use super::worker::Task;
use crate::Role;

/// Something that happens.
#[derive(Debug)]
pub(super) enum Event {
    /// A request comes.
    Arrival,
    /// A frame of steps reaches a worker.
    Steps(Role, usize, Vec<Task>),
    /// A worker's forward is done.
    Done(Role, usize),
    /// A forward was held back for so long.
    Wake(Role, usize),
    /// A frame of replies reaches the router.
    Replies(Reply),
    /// Plain rounds were held back for so long.
    RouterWake,
}

/// The queue.
#[derive(Debug, Default)]
pub(super) struct Events {
    heap: BinaryHeap<Reverse<(Duration, u64)>>,
    events: BTreeMap<u64, Event>,
    said: u64,
    /// Steps that leave in one frame.
    outgoing: Vec<(Duration, (Role, usize), Task)>,
}

impl Events {
    pub(super) fn push(&mut self, at: Duration, event: Event) {
        self.said += 1;
        self.heap.push(Reverse((at, self.said)));
        self.events.insert(self.said, event);
    }

    /// A step that leaves with all others to the same worker that are said before [`Self::flush_steps`].
    pub(super) fn push_step(&mut self, at: Duration, worker: (Role, usize), task: Task) {
        self.outgoing.push((at, worker, task));
    }

    pub(super) fn flush_steps(&mut self) {
        let mut outgoing = std::mem::take(&mut self.outgoing);
        outgoing.sort_by_key(|(at, (role, worker), _)| (*at, *role == Role::Draft, *worker));
        let mut frame: Option<(Duration, (Role, usize), Vec<Task>)> = None;
        for (at, worker, task) in outgoing {
            match &mut frame {
                Some((same_at, same, tasks)) if *same_at == at && *same == worker => tasks.push(task),
                _ => {
                    let full = frame.replace((at, worker, vec![task]));
                    self.push_frame(full);
                }
            }
        }
        self.push_frame(frame);
    }

    fn push_frame(&mut self, frame: Option<(Duration, (Role, usize), Vec<Task>)>) {
        if let Some((at, (role, worker), tasks)) = frame {
            self.push(at, Event::Steps(role, worker, tasks));
        }
    }

    pub(super) fn next_at(&self) -> Option<Duration> {
        self.heap.peek().map(|Reverse((at, _))| *at)
    }

    pub(super) fn pop(&mut self) -> Option<(Duration, Event)> {
        let Reverse((at, said)) = self.heap.pop()?;
        Some((at, self.events.remove(&said).expect("every queued number has its event")))
    }
}
