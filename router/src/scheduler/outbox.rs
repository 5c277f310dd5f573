//! Queues of frames for workers. All steps of one dispatch to one worker are sent in one frame; a slow worker
//! delays only its own frames.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use proto::frame::split_router_frame;
use proto::v1;
use scheduling::scheduler::WorkerKey;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

/// Delay before a full outbox is tried again.
const RETRY_AFTER: Duration = Duration::from_millis(2);

/// Outboxes of all connected workers.
#[derive(Debug, Default)]
pub(super) struct Outboxes {
    outboxes: BTreeMap<WorkerKey, Outbox>,
}

#[derive(Debug)]
struct Outbox {
    sender: mpsc::Sender<v1::RouterFrame>,
    /// Frame for the next flush; sent after `stuck`.
    next: v1::RouterFrame,
    stuck: VecDeque<v1::RouterFrame>,
}

impl Outboxes {
    pub(super) fn join(&mut self, worker: WorkerKey, sender: mpsc::Sender<v1::RouterFrame>) {
        let outbox = Outbox { sender, next: v1::RouterFrame::default(), stuck: VecDeque::new() };
        self.outboxes.insert(worker, outbox);
    }

    pub(super) fn leave(&mut self, worker: WorkerKey) {
        self.outboxes.remove(&worker);
    }

    pub(super) fn step(&mut self, worker: WorkerKey, step: v1::Step) {
        if let Some(outbox) = self.outboxes.get_mut(&worker) {
            outbox.next.steps.push(step);
        }
    }

    pub(super) fn close(&mut self, worker: WorkerKey, close: v1::CloseSequence) {
        if let Some(outbox) = self.outboxes.get_mut(&worker) {
            outbox.next.closes.push(close);
        }
    }

    /// Sends the queued frames in order. Returns when to retry if a worker does not keep up.
    pub(super) fn flush(&mut self) -> Option<Duration> {
        let mut is_stuck = false;
        for outbox in self.outboxes.values_mut() {
            is_stuck |= outbox.flush();
        }
        is_stuck.then_some(RETRY_AFTER)
    }
}

impl Outbox {
    /// Returns true if the worker does not accept all frames now.
    fn flush(&mut self) -> bool {
        if !self.next.steps.is_empty() || !self.next.closes.is_empty() {
            // The next frame has about the same length, so reserve its memory at once.
            let steps = Vec::with_capacity(self.next.steps.len());
            let empty = v1::RouterFrame { steps, ..v1::RouterFrame::default() };
            self.stuck.extend(split_router_frame(std::mem::replace(&mut self.next, empty)));
        }
        while let Some(frame) = self.stuck.pop_front() {
            match self.sender.try_send(frame) {
                Ok(()) => {}
                Err(TrySendError::Full(frame)) => {
                    self.stuck.push_front(frame);
                    return true;
                }
                // The connection has ended; its `Down` event follows.
                Err(TrySendError::Closed(_)) => self.stuck.clear(),
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_leave_in_order_whatever_is_full() {
        let (sender, mut sent) = mpsc::channel(1);
        let mut outboxes = Outboxes::default();
        outboxes.join(WorkerKey(1), sender);
        let mut received = Vec::new();
        for id in 0..9_u64 {
            // Large enough that each step gets its own frame.
            for sequence_id in [2 * id, 2 * id + 1] {
                let append_ids = vec![u32::MAX; 110_000];
                let step = v1::Step { sequence_id, append_ids, ..v1::Step::default() };
                outboxes.step(WorkerKey(1), step);
            }
            assert!(outboxes.flush().is_some());
            if id % 3 == 0 {
                received.push(sent.try_recv().unwrap());
            }
        }
        while outboxes.flush().is_some() || !sent.is_empty() {
            received.push(sent.try_recv().unwrap());
        }
        let ids: Vec<u64> = received.iter().flat_map(|f| &f.steps).map(|step| step.sequence_id).collect();
        assert_eq!(ids, (0..18).collect::<Vec<_>>());
    }
}
