//! Limits how long the peer may leave data unread: a write without progress for that long fails, which ends
//! the connection. Otherwise a peer that reads nothing would keep a connection, and everything its responses
//! hold, forever.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

/// Number of bytes within the timeout that count as progress. One byte would not do: a peer could read it
/// just in time, again and again.
const PROGRESS_BYTES: usize = 4 << 10;

/// Time since when writes have been blocked.
#[derive(Debug, Default)]
struct Stall {
    since: Option<Instant>,
    /// Bytes written since then.
    progress: usize,
}

impl Stall {
    /// Records written bytes.
    fn wrote(&mut self, num_bytes: usize) {
        self.progress += num_bytes;
        if self.progress >= PROGRESS_BYTES {
            self.since = None;
        }
    }

    /// Records that everything was written.
    fn flushed(&mut self) {
        self.since = None;
    }

    /// Records that the peer accepts nothing now; returns since when.
    fn blocked(&mut self, now: Instant) -> Instant {
        if self.since.is_none() {
            self.progress = 0;
        }
        *self.since.get_or_insert(now)
    }
}

/// A connection with a write timeout.
pub(super) struct WriteTimeout<I> {
    io: I,
    timeout: Duration,
    timer: Pin<Box<Sleep>>,
    stall: Stall,
    /// Total bytes written.
    written: Arc<AtomicU64>,
}

impl<I> WriteTimeout<I> {
    /// Counts written bytes in `written`.
    pub(super) fn new(io: I, timeout: Duration, written: Arc<AtomicU64>) -> Self {
        Self { io, timeout, timer: Box::pin(sleep(timeout)), stall: Stall::default(), written }
    }

    fn wrote(&mut self, num_bytes: usize) {
        self.written.fetch_add(num_bytes as u64, Ordering::Relaxed);
        self.stall.wrote(num_bytes);
    }

    /// Called when a write is blocked. Ready once the timeout has passed.
    fn poll_stalled(&mut self, context: &mut Context<'_>) -> Poll<io::Error> {
        let due = self.stall.blocked(Instant::now()) + self.timeout;
        if self.timer.deadline() != due {
            self.timer.as_mut().reset(due);
        }
        ready!(self.timer.as_mut().poll(context));
        let message = format!("the peer read nothing for {} s", self.timeout.as_secs_f64());
        Poll::Ready(io::Error::new(io::ErrorKind::TimedOut, message))
    }

    fn watch<T>(&mut self, polled: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if polled.is_pending() { self.poll_stalled(context).map(Err) } else { polled }
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for WriteTimeout<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(context, buffer)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.io).poll_write(context, bytes);
        if let Poll::Ready(Ok(num_bytes)) = polled {
            self.wrote(num_bytes);
        }
        self.watch(polled, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.io).poll_write_vectored(context, slices);
        if let Poll::Ready(Ok(num_bytes)) = polled {
            self.wrote(num_bytes);
        }
        self.watch(polled, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.io).poll_flush(context);
        // A completed flush means that all data was written.
        if polled.is_ready() {
            self.stall.flushed();
        }
        self.watch(polled, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.io).poll_shutdown(context);
        self.watch(polled, context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    #[tokio::test]
    async fn a_peer_that_reads_nothing_is_given_up() {
        let (here, _there) = duplex(16);
        let mut here = WriteTimeout::new(here, Duration::from_millis(20), Arc::default());
        let error = here.write_all(&[7; 17]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        assert_eq!(here.written.load(Ordering::Relaxed), 16);
    }

    #[tokio::test]
    async fn a_byte_now_and_then_is_no_progress() {
        let (here, mut there) = duplex(16);
        let mut here = WriteTimeout::new(here, Duration::from_millis(20), Arc::default());
        let reader = async {
            loop {
                there.read_u8().await.unwrap();
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            written = async { here.write_all(&[7; PROGRESS_BYTES]).await } => {
                assert_eq!(written.unwrap_err().kind(), io::ErrorKind::TimedOut);
            }
            () = reader => {}
        }
    }

    #[test]
    fn only_progress_or_the_end_of_what_is_to_be_written_ends_a_stall() {
        let (mut stall, now) = (Stall::default(), Instant::now());
        let later = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(stall.blocked(now), now);
        stall.wrote(PROGRESS_BYTES - 1);
        assert_eq!(stall.blocked(later(9)), now, "not enough");
        stall.wrote(1);
        assert_eq!(stall.blocked(later(20)), later(20), "enough: the clock begins again");
        stall.wrote(1);
        stall.flushed();
        assert_eq!(stall.blocked(later(3_600)), later(3_600), "silence is no stall");
    }
}
