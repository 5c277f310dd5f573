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
    /// Frame for the next flush; sent after `backlog`.
    next: v1::RouterFrame,
    backlog: VecDeque<v1::RouterFrame>,
}

impl Outboxes {
    pub(super) fn insert(&mut self, worker: WorkerKey, sender: mpsc::Sender<v1::RouterFrame>) {
        let outbox = Outbox { sender, next: v1::RouterFrame::default(), backlog: VecDeque::new() };
        self.outboxes.insert(worker, outbox);
    }

    pub(super) fn remove(&mut self, worker: WorkerKey) {
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
        let mut has_backlog = false;
        for outbox in self.outboxes.values_mut() {
            has_backlog |= outbox.flush();
        }
        has_backlog.then_some(RETRY_AFTER)
    }
}

impl Outbox {
    /// Returns true if the worker does not accept all frames now.
    fn flush(&mut self) -> bool {
        if !self.next.steps.is_empty() || !self.next.closes.is_empty() {
            // The next frame has about the same length, so reserve its memory at once.
            let steps = Vec::with_capacity(self.next.steps.len());
            let empty = v1::RouterFrame { steps, ..v1::RouterFrame::default() };
            self.backlog.extend(split_router_frame(std::mem::replace(&mut self.next, empty)));
        }
        while let Some(frame) = self.backlog.pop_front() {
            match self.sender.try_send(frame) {
                Ok(()) => {}
                Err(TrySendError::Full(frame)) => {
                    self.backlog.push_front(frame);
                    return true;
                }
                // The connection has ended; its `Down` event follows.
                Err(TrySendError::Closed(_)) => self.backlog.clear(),
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_keep_their_order_when_the_outbox_is_full() {
        let (sender, mut sent) = mpsc::channel(1);
        let mut outboxes = Outboxes::default();
        outboxes.insert(WorkerKey(1), sender);
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
