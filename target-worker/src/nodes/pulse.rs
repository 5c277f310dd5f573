//! Notices a node that is lost while nothing is exchanged with it: both ends of a connection of its own send
//! a byte several times a second. A node that is stopped keeps its sockets open; only its silence shows it.
//!
//! The same bytes tell the other node that this one drains, has ended, or has failed and why.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::poll::PollFlags;
use service::health::{Health, State};
use service::shutdown::Lifetime;

use super::link::Socket;

/// Interval between two bytes.
const INTERVAL: Duration = Duration::from_millis(250);

/// This node is there.
const ALIVE: u8 = 1;
/// It does not serve itself, was told to stop, and waits until the model is not needed any more.
const LEAVES: u8 = 2;
/// It has finished its work and ends.
const ENDED: u8 = 3;
/// It has failed: all other bytes say why, as text.
const FAILED: u8 = 4;

/// Maximum length of that text, in bytes.
const REASON_BYTES_MAX: usize = 1024;

/// How a connection to another node ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    /// The other node has finished its work.
    Ended,
    /// It is lost, for this reason.
    Lost(String),
    /// This process stops.
    Stopping,
}

/// One end of the connection.
pub(super) struct Pulse {
    /// The other node, as the log names it.
    pub(super) peer: String,
    pub(super) socket: Socket,
    /// What to close when the other node is lost: waits on these sockets then end.
    pub(super) links: [Socket; 2],
    /// Maximum silence.
    pub(super) patience: Duration,
    pub(super) health: Health,
    /// Whether this node has served: only then is its end no failure of the other one.
    pub(super) has_served: Arc<AtomicBool>,
}

impl Pulse {
    /// Starts the thread, which calls `on_end` when the connection has ended.
    pub(super) fn start(
        self,
        lifetime: &Lifetime,
        on_end: impl FnOnce(End) + Send + 'static,
    ) -> io::Result<()> {
        let own = lifetime.clone();
        lifetime.spawn_essential_thread("node pulse", move || {
            let how = self.run(&own).unwrap_or_else(|error| End::Lost(error.to_string()));
            self.close(&how);
            on_end(how);
        })
    }

    /// Runs until one of the nodes ends or is lost.
    fn run(&self, lifetime: &Lifetime) -> io::Result<End> {
        let mut heard = Instant::now();
        loop {
            let has_served = self.has_served.load(Ordering::Acquire);
            // The last forward of a node that has served needs the others.
            if lifetime.is_cancelled() && !(has_served && self.links.iter().any(Socket::is_in_use)) {
                match self.failure(lifetime) {
                    // What is lost with this process is a failure of the other one, too.
                    Some(reason) => self.tell_failure(&reason),
                    None if has_served => self.socket.send_byte(ENDED)?,
                    None => {}
                }
                return Ok(End::Stopping);
            }
            let leaves = lifetime.is_draining() && !has_served;
            // Fails if the other node has closed the connection, but what it sent before is still there.
            let sent = self.socket.send_byte(if leaves { LEAVES } else { ALIVE });
            let until = Instant::now() + INTERVAL;
            while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
            {
                if !self.socket.wait(PollFlags::POLLIN, Some(left))? {
                    break;
                }
                match self.socket.read_some(&mut [0; 64])? {
                    bytes if bytes.contains(&FAILED) => {
                        let reason = self.read_failure(bytes);
                        return Ok(End::Lost(format!("it failed: {reason}")));
                    }
                    [.., ENDED] => return Ok(End::Ended),
                    [.., LEAVES] => lifetime.request_stop(format!("{} stops", self.peer)),
                    // A wait that a signal interrupted.
                    [] => continue,
                    _ => {}
                }
                heard = Instant::now();
            }
            sent?;
            if heard.elapsed() > self.patience {
                return Ok(End::Lost(format!("it was silent for {:?}", self.patience)));
            }
        }
    }

    /// Why this process has failed, if it has.
    fn failure(&self, lifetime: &Lifetime) -> Option<String> {
        match self.health.state() {
            State::Failed(reason) => Some(reason.into_owned()),
            _ => lifetime.failed_task().map(|task| format!("its task `{task}` panicked")),
        }
    }

    /// Sends why this node has failed, and waits a moment for the other one to close the connection. Its
    /// waits on the links then end with this reason, not because this node has closed them.
    fn tell_failure(&self, reason: &str) {
        let text = reason.bytes().take(REASON_BYTES_MAX);
        let last: Vec<u8> = std::iter::once(FAILED).chain(text).collect();
        // If this fails, the connection is lost, which the other node notices.
        if self.socket.finish(&last).is_ok() {
            self.read_rest();
        }
    }

    /// Why the other node has failed, of which `bytes` are the first.
    fn read_failure(&self, bytes: &[u8]) -> String {
        let text = bytes.splitn(2, |byte| *byte == FAILED).nth(1).unwrap_or_default();
        String::from_utf8_lossy(&[text, &self.read_rest()].concat()).into_owned()
    }

    /// What the other node sends until it closes the connection, in an interval at most.
    fn read_rest(&self) -> Vec<u8> {
        let (mut rest, until) = (Vec::new(), Instant::now() + INTERVAL);
        while rest.len() < REASON_BYTES_MAX {
            let left = until.saturating_duration_since(Instant::now());
            let mut buffer = [0; 64];
            match self.socket.wait(PollFlags::POLLIN, Some(left)) {
                Ok(true) => {}
                _ => break,
            }
            match self.socket.read_some(&mut buffer) {
                Ok(more) => rest.extend_from_slice(more),
                Err(_) => break,
            }
        }
        rest
    }

    fn close(&self, how: &End) {
        let reason = match how {
            End::Ended => "it has ended",
            End::Lost(reason) => reason,
            End::Stopping => "this node stops",
        };
        self.links.iter().chain([&self.socket]).for_each(|socket| socket.close(reason));
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::sync::mpsc::sync_channel;

    use engine::NodeLink as _;

    use super::*;
    use crate::nodes::link::TcpLink;

    fn pair() -> [Socket; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        [stream, listener.accept().unwrap().0].map(|stream| Socket::new(stream).unwrap())
    }

    fn pulse(socket: Socket, link: &Socket) -> Pulse {
        Pulse {
            peer: "node 1".to_owned(),
            socket,
            links: [link.clone(), link.clone()],
            patience: Duration::from_secs(100),
            health: Health::new(),
            has_served: Arc::default(),
        }
    }

    /// Whoever waits for the failed node ends with its reason.
    #[tokio::test]
    async fn a_failed_node_says_why_and_waits_for_it_end_with_that() {
        let long = "x".repeat(5000);
        for (reason, heard) in [("no memory", "no memory"), (&long[..], &long[..REASON_BYTES_MAX])] {
            let ([failing, other], [_kept, link]) = (pair(), pair());
            let lifetime = Lifetime::new();
            let of_failing = pulse(failing.clone(), &failing);
            of_failing.health.set_failed(reason.to_owned());
            of_failing.start(&lifetime, drop).unwrap();
            let (ended, end) = sync_channel(1);
            pulse(other, &link).start(&Lifetime::new(), move |end| ended.send(end).unwrap()).unwrap();
            let waiting = TcpLink::new(link, None);
            let waiting =
                std::thread::spawn(move || waiting.receive(&mut Vec::new()).unwrap_err().to_string());
            lifetime.shut_down(Duration::from_secs(100)).await;
            let heard = format!("it failed: {heard}");
            assert_eq!(waiting.join().unwrap(), heard);
            assert_eq!(end.recv().unwrap(), End::Lost(heard));
        }
    }

    /// Its sockets stay open, as those of a process that is stopped.
    #[test]
    fn a_node_that_keeps_its_connection_open_and_is_silent_is_lost() {
        let [socket, _silent] = pair();
        let (ended, end) = sync_channel(1);
        let pulse = Pulse { patience: Duration::from_millis(10), ..pulse(socket.clone(), &socket) };
        pulse.start(&Lifetime::new(), move |end| ended.send(end).unwrap()).unwrap();
        assert_eq!(end.recv().unwrap(), End::Lost("it was silent for 10ms".to_owned()));
        assert!(socket.read_some(&mut [0; 1]).is_err(), "its sockets are closed");
    }
}
