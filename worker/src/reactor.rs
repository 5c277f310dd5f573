//! The runtime of a worker's gRPC service, driven either by the device thread or by a separate I/O thread
//! (the I/O thread).
//!
//! If the device thread reads and writes frames itself, a step saves two thread wake-ups in each direction,
//! but no I/O happens while a forward runs. So the device thread drives the runtime only between short
//! forwards of few sequences. During all other forwards the I/O thread reads, writes and answers keep-alives
//! (docs/adr/0033). The I/O thread must never access the model, and handles no messages.

mod timer;

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};

use proto::v1;
use service::shutdown::Lifetime;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{mpsc, oneshot};
use tokio::task::yield_now;

use self::timer::SubMillisTimer;
use crate::step_loop::Message;

/// Longest forward during which no thread drives I/O, provided that forwards of as many rows are known to be
/// this short. About fifty times the time saved.
const MAX_SHORT_FORWARD: Duration = Duration::from_millis(4);

/// For more sequences, reading and writing frames takes longer than waking a thread, so the I/O overlaps the
/// next forward.
const MAX_INLINE_IO_SEQUENCES: usize = 64;

/// Pending work of a forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForwardSize {
    /// Rows waiting for it; it may leave some of them to the next one.
    pub rows: u32,
    /// Sequences waiting for it.
    pub sequences: usize,
}

/// The runtime and its driver; see the module documentation.
#[derive(Debug)]
pub struct Reactor {
    timer: SubMillisTimer,
    runtime: Arc<Runtime>,
    /// Makes the I/O thread drive the runtime until the sender of the channel's message is dropped.
    io_thread: SyncSender<oneshot::Receiver<Infallible>>,
    /// Set while the I/O thread drives; dropping it stops the I/O thread.
    stop_io_thread: Option<oneshot::Sender<Infallible>>,
    short: ShortForwards,
    read_delay: ReadDelay,
}

impl Reactor {
    /// Creates the runtime, not driven yet, and its I/O thread, which ends with the `Reactor`.
    pub fn start(lifetime: &Lifetime) -> io::Result<Self> {
        let runtime = Arc::new(Builder::new_current_thread().enable_all().build()?);
        let timer = {
            let _in_runtime = runtime.enter();
            SubMillisTimer::new()?
        };
        let (io_thread, requests) = sync_channel(1);
        let driven = Arc::clone(&runtime);
        lifetime.spawn_essential_thread("grpc", move || {
            for stopped in requests {
                let Err(_) = driven.block_on(stopped);
            }
        })?;
        let read_delay = ReadDelay::default();
        Ok(Self {
            timer,
            runtime,
            io_thread,
            stop_io_thread: None,
            short: ShortForwards::default(),
            read_delay,
        })
    }

    /// Handle to spawn tasks on the runtime.
    pub fn handle(&self) -> Handle {
        self.runtime.handle().clone()
    }

    /// Estimates when a frame that is read now arrived.
    pub fn read_delay(&self) -> ReadDelay {
        self.read_delay.clone()
    }

    /// Waits for the next message; `None` once all senders are dropped.
    pub fn recv(&self, mailbox: &mut mpsc::Receiver<Message>) -> Option<Message> {
        self.runtime.block_on(mailbox.recv())
    }

    /// Waits up to `wait` for the next message.
    pub fn recv_timeout(&self, mailbox: &mut mpsc::Receiver<Message>, wait: Duration) -> Option<Message> {
        let message = self.runtime.block_on(async {
            tokio::select! {
                biased;
                // A closed mailbox is detected by `recv`.
                message = mailbox.recv() => message,
                () = self.timer.sleep(wait) => None,
            }
        });
        self.timer.disarm();
        message
    }

    /// Runs a forward, with the I/O thread driving I/O unless the forward is expected to be short. `forward`
    /// returns its timing.
    pub fn run_forward(
        &mut self,
        size: ForwardSize,
        forward: impl FnOnce() -> v1::StepTiming,
    ) -> v1::StepTiming {
        if self.short.includes(size) {
            self.stop_io_thread = None;
        } else if self.stop_io_thread.is_none() {
            let (stop_io_thread, stopped) = oneshot::channel();
            // If the channel is full, the I/O thread is still finishing its last drive; this forward runs
            // without it.
            self.stop_io_thread = self.io_thread.try_send(stopped).is_ok().then_some(stop_io_thread);
        }
        let began = Instant::now();
        let timing = forward();
        let took = began.elapsed();
        self.short.record(timing.rows, took);
        if self.stop_io_thread.is_none() {
            self.read_delay.set(took / 2);
        }
        timing
    }

    /// Calls `write` to queue frames; unless the I/O thread drives, also performs the pending writes and
    /// reads.
    pub fn write_and_read(&mut self, write: impl FnOnce()) {
        if self.stop_io_thread.is_some() {
            return write();
        }
        self.runtime.block_on(async {
            write();
            // The first yield writes and polls for input, the second reads it.
            yield_now().await;
            yield_now().await;
        });
        self.read_delay.set(Duration::ZERO);
    }
}

/// The largest number of rows known to be short: a forward of that many rows was short, and no forward of
/// fewer rows was long.
#[derive(Debug, Default)]
struct ShortForwards {
    rows: u32,
}

impl ShortForwards {
    fn includes(&self, size: ForwardSize) -> bool {
        size.rows <= self.rows && size.sequences <= MAX_INLINE_IO_SEQUENCES
    }

    /// Records the duration of a forward of `rows` rows; 0 rows are ignored.
    fn record(&mut self, rows: u32, took: Duration) {
        if rows > 0 {
            self.rows = if took <= MAX_SHORT_FORWARD { self.rows.max(rows) } else { self.rows.min(rows - 1) };
        }
    }
}

/// Estimated delay between the arrival and the reading of a frame. A frame that arrived while no thread drove
/// I/O counts as having arrived in the middle of that time. This keeps the mean queue time of steps correct,
/// which routers subtract to get the network time.
#[derive(Debug, Clone, Default)]
pub struct ReadDelay(Arc<AtomicU64>);

impl ReadDelay {
    /// Estimates when a frame that is read now arrived.
    pub fn arrival(&self) -> Instant {
        let now = Instant::now();
        now.checked_sub(Duration::from_micros(self.0.load(Ordering::Relaxed))).unwrap_or(now)
    }

    fn set(&self, late: Duration) {
        self.0.store(late.as_micros() as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forward_is_short_where_one_as_large_was() {
        let mut short = ShortForwards::default();
        let is_short =
            |short: &ShortForwards, rows, sequences| short.includes(ForwardSize { rows, sequences });
        assert!(!is_short(&short, 1, 1), "nothing is known");
        short.record(8, MAX_SHORT_FORWARD);
        assert!(is_short(&short, 8, 8) && !is_short(&short, 9, 1), "more rows than were seen");
        assert!(
            is_short(&short, 1, MAX_INLINE_IO_SEQUENCES) && !is_short(&short, 1, MAX_INLINE_IO_SEQUENCES + 1)
        );
        short.record(0, Duration::ZERO);
        short.record(512, 2 * MAX_SHORT_FORWARD);
        assert!(is_short(&short, 8, 1), "a longer one of more rows says nothing of fewer");
        short.record(4, 2 * MAX_SHORT_FORWARD);
        assert!(is_short(&short, 3, 1) && !is_short(&short, 4, 1));
    }

    /// Spawns a task on the runtime that forwards numbers.
    fn relay(reactor: &Reactor, lifetime: &Lifetime) -> (mpsc::Sender<u32>, std::sync::mpsc::Receiver<u32>) {
        let ((send, mut sent), (pass, passed)) = (mpsc::channel(1), std::sync::mpsc::sync_channel(1));
        let _in_runtime = reactor.runtime.enter();
        lifetime.spawn("relay", async move {
            while let Some(number) = sent.recv().await {
                pass.send(number).unwrap();
            }
        });
        (send, passed)
    }

    #[test]
    fn the_runtime_is_driven_during_long_forwards_and_between_short_ones() {
        let lifetime = Lifetime::new();
        let mut reactor = Reactor::start(&lifetime).unwrap();
        let (send, passed) = relay(&reactor, &lifetime);
        let (rows, one) = (4, ForwardSize { rows: 4, sequences: 1 });
        let ran = v1::StepTiming { rows, ..v1::StepTiming::default() };
        reactor.run_forward(one, || {
            send.try_send(1).unwrap();
            assert_eq!(passed.recv_timeout(Duration::from_secs(10)), Ok(1), "the I/O thread drives");
            ran
        });
        reactor.short.record(rows, MAX_SHORT_FORWARD);
        reactor.run_forward(one, || {
            send.try_send(2).unwrap();
            ran
        });
        // An I/O thread that was just stopped may still be finishing; then a later exchange drives.
        let (begun, mut second) = (Instant::now(), passed.try_recv());
        while second.is_err() && begun.elapsed() < Duration::from_secs(10) {
            reactor.write_and_read(|| ());
            second = passed.try_recv();
        }
        assert_eq!(second, Ok(2), "this thread drove it");
        let (messages, mut mailbox) = mpsc::channel(1);
        assert!(reactor.recv_timeout(&mut mailbox, Duration::from_micros(200)).is_none(), "the alarm rang");
        let router = crate::table::RouterId(1);
        messages.try_send(Message::Closed { router, stream: crate::step_loop::StreamId(1) }).unwrap();
        assert!(reactor.recv_timeout(&mut mailbox, Duration::from_secs(3_600)).is_some());
        drop(messages);
        assert!(reactor.recv(&mut mailbox).is_none());
    }
}
