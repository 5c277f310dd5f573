//! [`ConnectionMonitor`]: decides from its requests, its timeouts and the phase of the process when a
//! connection ends. The connection's task (`connection`) does the I/O.

use std::error::Error;
use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::config::Timeouts;
use super::state::{ConnectionState, Traffic};
use crate::shutdown::Lifetime;

/// An idle connection on which this many bytes are written per idle timeout is still delivering a response.
const DELIVERING_BYTES: u64 = 64 << 10;

/// Time for a connection to end after it was told to.
const CLOSE_GRACE: Duration = Duration::from_secs(3);

/// A connection is old before the maximum age by at most this part of it.
const AGE_SPREAD: f64 = 0.1;

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CloseReason {
    /// Closed by the peer, protocol error, or closed after the last response.
    Finished,
    /// No request head arrived in time.
    HeaderTimeout,
    /// No request arrived for too long.
    IdleTimeout,
    /// The peer did not read.
    WriteTimeout,
    /// The process stops.
    Stopped,
}

impl CloseReason {
    /// Name in metrics.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::HeaderTimeout => "header_timeout",
            Self::IdleTimeout => "idle_timeout",
            Self::WriteTimeout => "write_timeout",
            Self::Stopped => "stopped",
        }
    }
}

/// Events besides the connection's own I/O.
#[derive(Debug, Clone, Copy)]
pub(super) enum Event {
    /// A request began or ended, a response must be cut, or a timeout may have expired.
    Check,
    Leaving,
    Draining,
    Cancelled,
}

/// What to do with a connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ConnectionAction {
    Continue,
    /// Accept no further requests and end after those in flight.
    Close,
    End(CloseReason),
}

/// Timeouts and shutdown state of a connection.
pub(super) struct ConnectionMonitor {
    state: Arc<ConnectionState>,
    timeouts: Timeouts,
    /// When the peer connected; a TLS handshake is part of its time.
    accepted: Instant,
    /// When an HTTP/2 client is asked to open another connection; `None`: never.
    old_at: Option<Instant>,
    /// Bytes written, and the time, when an idle peer was last seen to be still receiving.
    delivering: (u64, Instant),
    leaving: bool,
    draining: bool,
    stopped: bool,
    /// The connection was told to close.
    closing: bool,
    /// When the connection ends regardless of requests in flight, and why.
    end_at: Option<(Instant, CloseReason)>,
}

impl ConnectionMonitor {
    /// Monitors a connection of this peer that was accepted at this time.
    pub(super) fn new(
        state: Arc<ConnectionState>,
        timeouts: Timeouts,
        peer: SocketAddr,
        accepted: Instant,
    ) -> Self {
        Self {
            state,
            timeouts,
            accepted,
            old_at: timeouts.max_age.map(|max_age| accepted + age_of(peer, max_age)),
            delivering: (0, accepted),
            leaving: false,
            draining: false,
            stopped: false,
            closing: false,
            end_at: None,
        }
    }

    /// Returns the next event. Cancel safety: safe.
    pub(super) fn next_event(&self, lifetime: Lifetime) -> impl Future<Output = Event> + use<> {
        let wake = Arc::clone(&self.state.wake);
        let (leaving, draining, stopped) = (self.leaving, self.draining, self.stopped);
        let check_at = self.next_check(Instant::now());
        async move {
            tokio::select! {
                biased;
                // A request began or ended, or a response must be cut.
                () = wake.notified() => Event::Check,
                // The phases of the process, in their order, each once.
                () = lifetime.leaving(), if !leaving => Event::Leaving,
                () = lifetime.draining(), if !draining => Event::Draining,
                () = lifetime.cancelled(), if !stopped => Event::Cancelled,
                // A timeout may have expired.
                () = sleep_until(check_at) => Event::Check,
            }
        }
    }

    /// Records an event; [`check`](Self::check) then says what follows from it.
    pub(super) fn on_event(&mut self, event: Event) {
        match event {
            Event::Check => {}
            Event::Leaving => self.leaving = true,
            Event::Draining => self.draining = true,
            Event::Cancelled => {
                self.stopped = true;
                self.end_at = Some((Instant::now() + CLOSE_GRACE, CloseReason::Stopped));
            }
        }
    }

    /// Latest time of the next check.
    fn next_check(&self, now: Instant) -> Instant {
        if let Some((at, _)) = self.end_at {
            return at;
        }
        let old_at = self.old_at().filter(|_| !self.closing);
        let check_at = match self.state.traffic() {
            Traffic { any_begun: false, .. } => return self.accepted + self.timeouts.header,
            Traffic { idle_since: Some(since), .. } => self.idle_from(since) + self.timeouts.idle,
            Traffic { idle_since: None, .. } => now + self.timeouts.write / 2,
        };
        old_at.map_or(check_at, |old_at| check_at.min(old_at))
    }

    /// When the client is asked to open another connection: over HTTP/1 never, because a client that sends
    /// its next request at that moment would lose it.
    fn old_at(&self) -> Option<Instant> {
        self.old_at.filter(|_| !self.state.is_http1())
    }

    fn idle_from(&self, since: Instant) -> Instant {
        since.max(self.delivering.1)
    }

    /// Decides what to do with the connection now.
    pub(super) fn check(&mut self, now: Instant) -> ConnectionAction {
        if let Some((at, reason)) = self.end_at
            && at <= now
        {
            let is_idle = self.state.traffic().idle_since.is_some();
            if is_idle || reason != CloseReason::IdleTimeout {
                return ConnectionAction::End(reason);
            }
            // A request crossed with the notice to go, and HTTP/2 promises to process it.
            self.end_at = Some((now + CLOSE_GRACE, reason));
        }
        let unread = now.checked_sub(self.timeouts.write).unwrap_or(self.accepted);
        if self.state.cut_unread(unread) && self.state.is_http1() {
            return ConnectionAction::End(CloseReason::WriteTimeout);
        }
        match self.state.traffic() {
            Traffic { any_begun: false, .. } if now >= self.accepted + self.timeouts.header => {
                return ConnectionAction::End(CloseReason::HeaderTimeout);
            }
            Traffic { any_begun: true, idle_since: Some(since) }
                if self.end_at.is_none()
                    && now >= self.idle_from(since) + self.timeouts.idle
                    && !self.is_delivering(now) =>
            {
                if self.state.is_http1() {
                    return ConnectionAction::End(CloseReason::IdleTimeout);
                }
                self.end_at = Some((now + CLOSE_GRACE, CloseReason::IdleTimeout));
                return self.close();
            }
            _ => {}
        }
        // Before the first request has been answered, the peer is not told to close.
        let may_close = self.state.traffic().any_begun || self.stopped;
        let is_old = self.old_at().is_some_and(|old_at| now >= old_at);
        let must_close = self.draining || self.stopped || is_old || (self.leaving && !self.state.is_http1());
        if may_close && must_close { self.close() } else { ConnectionAction::Continue }
    }

    fn close(&mut self) -> ConnectionAction {
        if std::mem::replace(&mut self.closing, true) {
            ConnectionAction::Continue
        } else {
            ConnectionAction::Close
        }
    }

    /// Whether the last response of an idle connection is still being delivered.
    fn is_delivering(&mut self, now: Instant) -> bool {
        let written = self.state.written.load(Ordering::Relaxed);
        let delivers = written - self.delivering.0 >= DELIVERING_BYTES;
        self.delivering = (written, if delivers { now } else { self.delivering.1 });
        delivers
    }

    /// Why the connection ended by itself, from the HTTP server's result.
    pub(super) fn close_reason(&self, ended: Result<(), Box<dyn Error + Send + Sync>>) -> CloseReason {
        let Err(error) = ended else {
            return self.end_at.map_or(CloseReason::Finished, |(_, reason)| reason);
        };
        let timed_out = |io: &std::io::Error| io.kind() == std::io::ErrorKind::TimedOut;
        let mut causes = anyhow::Chain::new(error.as_ref());
        if causes.any(|cause| cause.downcast_ref::<std::io::Error>().is_some_and(timed_out)) {
            return CloseReason::WriteTimeout;
        }
        tracing::debug!(%error, "a connection broke");
        CloseReason::Finished
    }
}

/// The age at which a connection of this peer is old. Peers differ, so that connections that were opened
/// together do not all end at once.
fn age_of(peer: SocketAddr, max_age: Duration) -> Duration {
    let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(peer);
    max_age.mul_f64(1.0 - AGE_SPREAD * (hash as f64 / u64::MAX as f64))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::convert::Infallible;
    use std::task::{Context, Waker};

    use axum::body::{Body, Bytes, HttpBody as _};
    use futures::stream;
    use http::Version;

    use super::super::response::ResponseBody;
    use super::*;

    fn timeouts() -> Timeouts {
        let seconds = Duration::from_secs;
        Timeouts {
            header: seconds(10),
            body: seconds(30),
            idle: seconds(120),
            write: seconds(30),
            keep_alive: seconds(20),
            max_age: None,
        }
    }

    fn peer(port: u16) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, 7], port))
    }

    fn monitor_with(timeouts: Timeouts, accepted: Instant) -> ConnectionMonitor {
        ConnectionMonitor::new(Arc::new(ConnectionState::new()), timeouts, peer(40_000), accepted)
    }

    fn monitor() -> ConnectionMonitor {
        monitor_with(timeouts(), Instant::now())
    }

    fn after(seconds: u64) -> Instant {
        Instant::now() + Duration::from_secs(seconds)
    }

    /// A body that yields one chunk and then stays pending.
    fn talking() -> Body {
        let first = stream::once(async { Ok::<_, Infallible>(Bytes::from_static(b"text")) });
        Body::from_stream(futures::StreamExt::chain(first, stream::pending()))
    }

    fn poll(body: &mut ResponseBody) -> bool {
        let mut context = Context::from_waker(Waker::noop());
        std::pin::Pin::new(body).poll_frame(&mut context).is_ready()
    }

    #[test]
    fn a_request_head_is_waited_for_once() {
        let mut monitor = monitor();
        assert_eq!(monitor.check(after(9)), ConnectionAction::Continue);
        assert_eq!(monitor.check(after(10)), ConnectionAction::End(CloseReason::HeaderTimeout));
        let (_slot, body) = monitor.state.begin(Version::HTTP_11);
        assert_eq!(monitor.check(after(3_600)), ConnectionAction::Continue, "an answer may take its time");
        drop(body);
        assert_eq!(monitor.check(after(119)), ConnectionAction::Continue);
        assert_eq!(monitor.check(after(121)), ConnectionAction::End(CloseReason::IdleTimeout));
    }

    #[test]
    fn the_tls_handshake_takes_from_the_time_for_the_head() {
        let accepted = after(20);
        let mut monitor = monitor_with(timeouts(), accepted);
        assert_eq!(monitor.next_check(after(27)), accepted + timeouts().header);
        assert_eq!(monitor.check(after(27)), ConnectionAction::Continue, "the handshake took 7 s");
        assert_eq!(monitor.check(after(31)), ConnectionAction::End(CloseReason::HeaderTimeout));
    }

    #[test]
    fn an_answer_that_is_read_or_has_nothing_to_say_is_not_cut() {
        let mut monitor = monitor();
        let (slot, mut body) = monitor.state.begin(Version::HTTP_11);
        body.fill(talking());
        assert!(poll(&mut body));
        assert_eq!(monitor.check(after(29)), ConnectionAction::Continue);
        assert!(!poll(&mut body), "it was read, and waits for text");
        assert_eq!(monitor.check(after(3_600)), ConnectionAction::Continue);
        assert!(!slot.is_cut());
    }

    #[test]
    fn an_unread_answer_takes_a_connection_of_http1_along_and_of_http2_only_itself() {
        for (version, expected) in [
            (Version::HTTP_11, ConnectionAction::End(CloseReason::WriteTimeout)),
            (Version::HTTP_2, ConnectionAction::Continue),
        ] {
            let mut monitor = monitor();
            let (slot, mut body) = monitor.state.begin(version);
            body.fill(talking());
            let (read_slot, mut read) = monitor.state.begin(version);
            read.fill(talking());
            assert!(poll(&mut body) && poll(&mut read) && !poll(&mut read));
            assert_eq!(monitor.check(after(31)), expected);
            assert!(slot.is_cut() && !read_slot.is_cut());
            assert!(poll(&mut body), "an error, should it be asked for more");
        }
    }

    #[test]
    fn a_last_answer_that_is_still_written_is_waited_for() {
        let mut monitor = monitor();
        drop(monitor.state.begin(Version::HTTP_2));
        monitor.state.written.fetch_add(DELIVERING_BYTES, Ordering::Relaxed);
        assert_eq!(monitor.check(after(121)), ConnectionAction::Continue);
        assert_eq!(monitor.check(after(240)), ConnectionAction::Continue);
        monitor.state.written.fetch_add(17, Ordering::Relaxed);
        assert_eq!(monitor.check(after(242)), ConnectionAction::Close, "a ping is no answer");
        assert_eq!(monitor.check(after(246)), ConnectionAction::End(CloseReason::IdleTimeout));
    }

    /// HTTP/2 processes requests that crossed with the notice to go.
    #[test]
    fn a_request_that_crosses_with_the_end_of_an_idle_connection_is_answered() {
        let mut monitor = monitor();
        drop(monitor.state.begin(Version::HTTP_2));
        assert_eq!(monitor.check(after(121)), ConnectionAction::Close);
        let (_slot, body) = monitor.state.begin(Version::HTTP_2);
        assert_eq!(monitor.check(after(124)), ConnectionAction::Continue, "it is being answered");
        assert_eq!(monitor.check(after(3_600)), ConnectionAction::Continue, "however long that takes");
        drop(body);
        assert_eq!(monitor.check(after(3_604)), ConnectionAction::End(CloseReason::IdleTimeout));
    }

    #[test]
    fn who_has_not_asked_yet_is_answered_before_it_is_told_to_go() {
        let mut monitor = monitor();
        monitor.leaving = true;
        monitor.draining = true;
        assert_eq!(monitor.check(after(0)), ConnectionAction::Continue);
        let _request = monitor.state.begin(Version::HTTP_11);
        assert_eq!(monitor.check(after(0)), ConnectionAction::Close);
        assert_eq!(monitor.check(after(0)), ConnectionAction::Continue, "it is told once");
    }

    #[test]
    fn only_an_old_http2_connection_is_told_to_go_and_its_answers_are_finished() {
        for (version, expected) in
            [(Version::HTTP_11, ConnectionAction::Continue), (Version::HTTP_2, ConnectionAction::Close)]
        {
            let max_age = Some(Duration::from_secs(5));
            let accepted = Instant::now();
            let mut monitor = monitor_with(Timeouts { max_age, ..timeouts() }, accepted);
            assert_eq!(monitor.check(after(6)), ConnectionAction::Continue, "it has not asked yet");
            assert_eq!(monitor.next_check(after(6)), accepted + timeouts().header);
            let _request = monitor.state.begin(version);
            assert_eq!(monitor.check(after(3)), ConnectionAction::Continue);
            assert_eq!(monitor.check(after(6)), expected);
            assert_eq!(monitor.check(after(3_600)), ConnectionAction::Continue, "it is being answered");
            // It is not looked at all the time, although it stays old.
            assert!(monitor.next_check(after(6)) > after(6));
        }
    }

    #[test]
    fn connections_of_different_peers_do_not_grow_old_at_once() {
        let max_age = Duration::from_secs(600);
        let ages: BTreeSet<Duration> = (0..100).map(|port| age_of(peer(port), max_age)).collect();
        let (least, most) = (ages.first().unwrap(), ages.last().unwrap());
        assert!(*least >= max_age.mul_f64(0.9) && *most <= max_age, "{ages:?}");
        assert!(ages.len() == 100 && *most - *least > max_age.mul_f64(0.08), "{ages:?}");
    }

    #[test]
    fn http1_connections_stay_in_the_lame_duck_period() {
        for (version, expected) in
            [(Version::HTTP_11, ConnectionAction::Continue), (Version::HTTP_2, ConnectionAction::Close)]
        {
            let mut monitor = monitor();
            drop(monitor.state.begin(version));
            monitor.leaving = true;
            assert_eq!(monitor.check(after(0)), expected);
        }
    }
}
