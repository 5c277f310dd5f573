//! Notices a node that is lost while nothing is exchanged with it: both ends of a connection of its own send
//! a byte several times a second. A node that is stopped keeps its sockets open; only its silence shows it.
//!
//! The same bytes tell the other node that this one drains or has ended.

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
                // What is lost with this process is a failure of the other one, too.
                if has_served && !self.has_failed(lifetime) {
                    self.socket.send_byte(ENDED)?;
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

    fn has_failed(&self, lifetime: &Lifetime) -> bool {
        lifetime.failed_task().is_some() || matches!(self.health.state(), State::Failed(_))
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

    use super::*;

    /// Its sockets stay open, as those of a process that is stopped.
    #[test]
    fn a_node_that_keeps_its_connection_open_and_is_silent_is_lost() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _silent = listener.accept().unwrap();
        let socket = Socket::new(stream).unwrap();
        let (ended, end) = sync_channel(1);
        let pulse = Pulse {
            peer: "node 1".to_owned(),
            socket: socket.clone(),
            links: [socket.clone(), socket.clone()],
            patience: Duration::from_millis(10),
            health: Health::new(),
            has_served: Arc::default(),
        };
        pulse.start(&Lifetime::new(), move |end| ended.send(end).unwrap()).unwrap();
        assert_eq!(end.recv().unwrap(), End::Lost("it was silent for 10ms".to_owned()));
        assert!(socket.read_some(&mut [0; 1]).is_err(), "its sockets are closed");
    }
}
