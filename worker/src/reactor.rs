//! The runtime that a worker's gRPC service lives on, and who drives it: the device thread itself, or a stand-in beside it.
//!
//! Where the device thread reads and writes frames itself, a step waits for no other thread to wake, twice each way; but while a forward runs nobody
//! reads. So that is for short forwards of few sequences. During all others the stand-in reads, writes and answers keep-alives
//! (docs/adr/0033). It must never touch the model, and handles no message.

mod alarm;

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

use self::alarm::Alarm;
use crate::device::Message;

/// Nobody reads during a forward of up to so long, if others of as many rows are known to be no longer. Some fifty times what it saves.
const SHORT_FORWARD: Duration = Duration::from_millis(4);

/// Frames of more sequences take longer to read and write than a thread to wake: they are, while the next forward runs.
const FEW_SEQUENCES: usize = 64;

/// What a forward is about to work on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForwardSize {
    /// Rows that wait for it; it may leave some of them for the next.
    pub rows: u32,
    /// Sequences that wait for it.
    pub sequences: usize,
}

/// See the module's page.
#[derive(Debug)]
pub struct Reactor {
    alarm: Alarm,
    runtime: Arc<Runtime>,
    /// Has the stand-in drive until the other end of what it is sent is dropped.
    stand_in: SyncSender<oneshot::Receiver<Infallible>>,
    /// While it drives.
    relief: Option<oneshot::Sender<Infallible>>,
    short: ShortForwards,
    lateness: Lateness,
}

impl Reactor {
    /// A runtime that nobody drives yet, and its stand-in, which ends with it.
    pub fn start(lifetime: &Lifetime) -> io::Result<Self> {
        let runtime = Arc::new(Builder::new_current_thread().enable_all().build()?);
        let alarm = {
            let _in_runtime = runtime.enter();
            Alarm::new()?
        };
        let (stand_in, asked) = sync_channel(1);
        let (hold, driven) = (lifetime.thread("grpc"), Arc::clone(&runtime));
        std::thread::Builder::new().name("grpc".to_owned()).spawn(move || {
            let _hold = hold;
            for relieved in asked {
                let Err(_) = driven.block_on(relieved);
            }
        })?;
        let lateness = Lateness::default();
        Ok(Self { alarm, runtime, stand_in, relief: None, short: ShortForwards::default(), lateness })
    }

    /// For what is to live on the runtime.
    pub fn handle(&self) -> Handle {
        self.runtime.handle().clone()
    }

    /// When a frame that is read now arrived.
    pub fn lateness(&self) -> Lateness {
        self.lateness.clone()
    }

    /// The next message; `None` once nobody can send one anymore.
    pub fn next(&self, mailbox: &mut mpsc::Receiver<Message>) -> Option<Message> {
        self.runtime.block_on(mailbox.recv())
    }

    /// The next message, if one comes within `wait`.
    pub fn next_within(&self, mailbox: &mut mpsc::Receiver<Message>, wait: Duration) -> Option<Message> {
        let message = self.runtime.block_on(async {
            tokio::select! {
                biased;
                // A closed mailbox is noticed where it is read without a limit.
                message = mailbox.recv() => message,
                () = self.alarm.rings_after(wait) => None,
            }
        });
        self.alarm.silence();
        message
    }

    /// Runs a forward; `forward` tells what it took on.
    pub fn during(&mut self, size: ForwardSize, forward: impl FnOnce() -> v1::StepTiming) -> v1::StepTiming {
        if self.short.covers(size) {
            self.relief = None;
        } else if self.relief.is_none() {
            let (relief, relieved) = oneshot::channel();
            // Full: it is not back from its last turns yet, and this forward goes without.
            self.relief = self.stand_in.try_send(relieved).is_ok().then_some(relief);
        }
        let began = Instant::now();
        let timing = forward();
        let took = began.elapsed();
        self.short.learn(timing.rows, took);
        if self.relief.is_none() {
            self.lateness.set(took / 2);
        }
        timing
    }

    /// Has written what `write` hands out, and read what came meanwhile.
    pub fn exchange(&mut self, write: impl FnOnce()) {
        if self.relief.is_some() {
            return write();
        }
        self.runtime.block_on(async {
            write();
            // Once to write, and to look for what came; once to read it.
            yield_now().await;
            yield_now().await;
        });
        self.lateness.set(Duration::ZERO);
    }
}

/// Which forwards are short, as far as was seen: of so many rows one was, and none of fewer was not.
#[derive(Debug, Default)]
struct ShortForwards {
    rows: u32,
}

impl ShortForwards {
    fn covers(&self, size: ForwardSize) -> bool {
        size.rows <= self.rows && size.sequences <= FEW_SEQUENCES
    }

    /// A forward of so many rows took so long; where none was run nothing is learned.
    fn learn(&mut self, rows: u32, took: Duration) {
        if rows > 0 {
            self.rows = if took <= SHORT_FORWARD { self.rows.max(rows) } else { self.rows.min(rows - 1) };
        }
    }
}

/// By how much frames are read too late: what came while nobody read counts as if it had come in the middle of that time. So the mean time that steps
/// wait, which routers tell from the wire's, is right.
#[derive(Debug, Clone, Default)]
pub struct Lateness(Arc<AtomicU64>);

impl Lateness {
    /// When a frame that is read now arrived.
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
        let is_short = |short: &ShortForwards, rows, sequences| short.covers(ForwardSize { rows, sequences });
        assert!(!is_short(&short, 1, 1), "nothing is known");
        short.learn(8, SHORT_FORWARD);
        assert!(is_short(&short, 8, 8) && !is_short(&short, 9, 1), "more rows than were seen");
        assert!(is_short(&short, 1, FEW_SEQUENCES) && !is_short(&short, 1, FEW_SEQUENCES + 1));
        short.learn(0, Duration::ZERO);
        short.learn(512, 2 * SHORT_FORWARD);
        assert!(is_short(&short, 8, 1), "a longer one of more rows says nothing of fewer");
        short.learn(4, 2 * SHORT_FORWARD);
        assert!(is_short(&short, 3, 1) && !is_short(&short, 4, 1));
    }

    /// A task on the runtime that passes on what it is sent.
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
        reactor.during(one, || {
            send.try_send(1).unwrap();
            assert_eq!(passed.recv_timeout(Duration::from_secs(10)), Ok(1), "the stand-in drives");
            ran
        });
        reactor.short.learn(rows, SHORT_FORWARD);
        reactor.during(one, || {
            send.try_send(2).unwrap();
            ran
        });
        // A stand-in that was relieved a moment ago may be in its last turns: then a later exchange drives.
        let (begun, mut second) = (Instant::now(), passed.try_recv());
        while second.is_err() && begun.elapsed() < Duration::from_secs(10) {
            reactor.exchange(|| ());
            second = passed.try_recv();
        }
        assert_eq!(second, Ok(2), "this thread drove it");
        let (messages, mut mailbox) = mpsc::channel(1);
        assert!(reactor.next_within(&mut mailbox, Duration::from_micros(200)).is_none(), "the alarm rang");
        let router = crate::table::RouterId(1);
        messages.try_send(Message::Closed { router, stream: crate::device::StreamId(1) }).unwrap();
        assert!(reactor.next_within(&mut mailbox, Duration::from_secs(3_600)).is_some());
        drop(messages);
        assert!(reactor.next(&mut mailbox).is_none());
    }
}
