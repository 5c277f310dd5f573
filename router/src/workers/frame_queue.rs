//! Limits how many frames of one worker wait for the scheduler's driver. All workers' frames share one queue,
//! which a single worker must not fill: its own stream is then not read, and no other's waits.

use std::sync::Arc;

use futures::{Stream, TryStreamExt as _};
use proto::v1;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;

use crate::workers::QUEUED_FRAMES;

/// Places for the frames of one worker. A frame's place is free again once the driver has dropped its permit.
#[derive(Debug)]
pub(super) struct FrameQueue(Arc<Semaphore>);

impl FrameQueue {
    pub(super) fn new() -> Self {
        Self(Arc::new(Semaphore::new(QUEUED_FRAMES)))
    }

    /// Reads the worker's next frame once there is a place for it. `None` at the end of the stream.
    ///
    /// Cancel safety: no frame is lost.
    pub(super) async fn read(
        &self,
        frames: &mut (impl Stream<Item = Result<v1::WorkerFrame, Status>> + Unpin),
    ) -> Result<Option<(v1::WorkerFrame, OwnedSemaphorePermit)>, Status> {
        let place = Arc::clone(&self.0).acquire_owned().await.expect("the semaphore is never closed");
        Ok(frames.try_next().await?.map(|frame| (frame, place)))
    }
}

#[cfg(test)]
mod tests {
    use futures::{FutureExt as _, stream};

    use super::*;

    /// Reads a frame and returns its place; `None` if there is none.
    fn next_place(
        queue: &FrameQueue,
        frames: &mut (impl Stream<Item = Result<v1::WorkerFrame, Status>> + Unpin),
    ) -> Option<OwnedSemaphorePermit> {
        let read = queue.read(frames).now_or_never()?;
        let (_, place) = read.expect("no error").expect("the stream has no end");
        Some(place)
    }

    #[test]
    fn a_worker_that_floods_waits_for_its_own_places() {
        let mut flood = stream::repeat_with(|| Ok(v1::WorkerFrame::default()));
        let mut calm = stream::repeat_with(|| Ok(v1::WorkerFrame::default()));
        let (flooding, other) = (FrameQueue::new(), FrameQueue::new());
        let mut places: Vec<_> =
            (0..QUEUED_FRAMES).map_while(|_| next_place(&flooding, &mut flood)).collect();
        assert_eq!(places.len(), QUEUED_FRAMES);
        assert!(next_place(&flooding, &mut flood).is_none(), "the driver has handled none of its frames");
        assert!(next_place(&other, &mut calm).is_some(), "the other worker's frames have their own places");
        places.pop();
        assert!(next_place(&flooding, &mut flood).is_some(), "the driver has handled a frame");
    }

    #[test]
    fn the_end_of_a_stream_and_its_error_are_passed_on() {
        let queue = FrameQueue::new();
        let read = |items: Vec<Result<v1::WorkerFrame, Status>>| {
            let read = queue.read(&mut stream::iter(items)).now_or_never();
            read.expect("a stream of items does not wait")
        };
        assert!(read(Vec::new()).expect("no error").is_none());
        let error = read(vec![Err(Status::aborted("gone"))]).expect_err("an error");
        assert_eq!(error.message(), "gone");
    }
}
