//! Splits frames so that none exceeds [`MAX_FRAME_BYTES`], unless a single step or reply does.

use prost::Message as _;

use crate::{MAX_FRAME_BYTES, v1};

/// Splits a worker's frame; replies keep their order.
pub fn split_worker_frame(frame: v1::WorkerFrame) -> Vec<v1::WorkerFrame> {
    if frame.encoded_len() <= MAX_FRAME_BYTES || frame.replies.len() < 2 {
        return vec![frame];
    }
    let v1::WorkerFrame { hello, mut replies, preempted, credits, timing, draining, ahead } = frame;
    let rest = replies.split_off(replies.len() / 2);
    let first = v1::WorkerFrame { hello, replies, preempted, credits, timing, draining, ahead: Vec::new() };
    let second = v1::WorkerFrame { replies: rest, timing, ahead, ..v1::WorkerFrame::default() };
    let mut parts = split_worker_frame(first);
    parts.extend(split_worker_frame(second));
    parts
}

/// Splits a router's frame; steps keep their order, closes come last.
pub fn split_router_frame(frame: v1::RouterFrame) -> Vec<v1::RouterFrame> {
    if frame.encoded_len() <= MAX_FRAME_BYTES || frame.steps.len() < 2 {
        return vec![frame];
    }
    let v1::RouterFrame { hello, mut steps, closes } = frame;
    let rest = steps.split_off(steps.len() / 2);
    let mut parts = split_router_frame(v1::RouterFrame { hello, steps, ..v1::RouterFrame::default() });
    parts.extend(split_router_frame(v1::RouterFrame { steps: rest, closes, ..v1::RouterFrame::default() }));
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_frames_are_split_and_keep_every_reply_in_order() {
        let reply = |i| v1::Reply {
            sequence_id: i,
            body: Some(v1::reply::Body::Refused(v1::Refused { reason: "x".repeat(300_000), cause: 0 })),
            ..v1::Reply::default()
        };
        let frame = v1::WorkerFrame { replies: (0..9).map(reply).collect(), ..v1::WorkerFrame::default() };
        let parts = split_worker_frame(frame);
        assert!(parts.iter().all(|part| part.encoded_len() <= MAX_FRAME_BYTES));
        let ids: Vec<u64> =
            parts.iter().flat_map(|part| &part.replies).map(|reply| reply.sequence_id).collect();
        assert_eq!(ids, (0..9).collect::<Vec<_>>());
    }

    #[test]
    fn router_frames_are_split_and_closes_come_last() {
        let step = |i| v1::Step { sequence_id: i, append_ids: vec![u32::MAX; 60_000], ..v1::Step::default() };
        let closes = vec![v1::CloseSequence { sequence_id: 1, epoch: 1 }];
        let frame =
            v1::RouterFrame { steps: (0..9).map(step).collect(), closes, ..v1::RouterFrame::default() };
        let parts = split_router_frame(frame);
        assert!(parts.iter().all(|part| part.encoded_len() <= MAX_FRAME_BYTES));
        let ids: Vec<u64> = parts.iter().flat_map(|part| &part.steps).map(|step| step.sequence_id).collect();
        assert_eq!(ids, (0..9).collect::<Vec<_>>());
        assert_eq!(parts.iter().position(|part| !part.closes.is_empty()), Some(parts.len() - 1));
    }
}
