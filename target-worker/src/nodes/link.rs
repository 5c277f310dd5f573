//! A link between two nodes over TCP ([`engine::NodeLink`]). A message is its length, 4 bytes little-endian,
//! and its bytes.
//!
//! One loop sends and receives at the same time: two nodes may send each other messages that are longer than
//! the buffers of both sockets. Sockets do not block; the loop waits until one can continue.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use engine::NodeLink;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Bytes of a message's length.
const LEN_BYTES: usize = 4;
/// Maximum length of a message whose length the receiver does not know: a forward of 65,536 rows has a few
/// megabytes.
const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// A connected socket that can be closed from another thread, with the reason for which its calls then fail.
#[derive(Debug, Clone)]
pub(super) struct Socket {
    stream: Arc<TcpStream>,
    closed: Arc<OnceLock<String>>,
}

impl Socket {
    /// Takes over a connection.
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        // Each message is waited for.
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self { stream: Arc::new(stream), closed: Arc::default() })
    }

    /// Ends all calls. The first reason counts.
    pub(super) fn close(&self, reason: &str) {
        self.closed.get_or_init(|| reason.to_owned());
        // An error means that the other node has closed it.
        drop(self.stream.shutdown(Shutdown::Both));
    }

    /// Whether a link uses this socket.
    pub(super) fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.stream) > 1
    }

    /// The error of a call: why this socket was closed says more than what the call ran into.
    fn explain(&self, error: io::Error) -> io::Error {
        match self.closed.get() {
            Some(reason) => io::Error::other(reason.clone()),
            None => error,
        }
    }

    /// Waits until the socket can do one of these. Returns whether it can; `false` after `limit`.
    pub(super) fn wait(&self, flags: PollFlags, limit: Option<Duration>) -> io::Result<bool> {
        let limit = limit.map_or(PollTimeout::NONE, |limit| limit.try_into().unwrap_or(PollTimeout::MAX));
        match poll(&mut [PollFd::new(self.stream.as_fd(), flags)], limit) {
            Ok(count) => Ok(count > 0),
            Err(Errno::EINTR) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }

    /// Sends one byte, if the socket has room for it.
    pub(super) fn send_byte(&self, byte: u8) -> io::Result<()> {
        moved((&*self.stream).write(&[byte])).map(drop)
    }

    /// Sends these bytes as the last ones, as far as the socket has room for them.
    pub(super) fn finish(&self, bytes: &[u8]) -> io::Result<()> {
        moved((&*self.stream).write(bytes))?;
        self.stream.shutdown(Shutdown::Write)
    }

    /// The bytes that have arrived, as far as `buffer` holds them; none if there are none.
    pub(super) fn read_some<'a>(&self, buffer: &'a mut [u8]) -> io::Result<&'a [u8]> {
        let count = moved((&*self.stream).read(buffer))?.unwrap_or(0);
        Ok(&buffer[..count])
    }
}

/// The bytes that a call moved; `None` if it would have waited.
fn moved(result: io::Result<usize>) -> io::Result<Option<usize>> {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, Interrupted, UnexpectedEof, WouldBlock};
    let closed = || Err(io::Error::new(UnexpectedEof, "it closed the connection"));
    match result {
        Ok(0) => closed(),
        Ok(count) => Ok(Some(count)),
        Err(error) => match error.kind() {
            WouldBlock | Interrupted => Ok(None),
            // The other process ended before it had read everything.
            BrokenPipe | ConnectionReset => closed(),
            kind => Err(io::Error::new(kind, format!("the connection to it failed: {error}"))),
        },
    }
}

/// A message that is being received.
struct Incoming<'a> {
    len: [u8; LEN_BYTES],
    body: Body<'a>,
    /// Number of bytes that have arrived, those of the length included.
    received: usize,
}

/// Where the bytes of a message go.
enum Body<'a> {
    /// The message has this length.
    Exact(&'a mut [u8]),
    /// It has any length up to [`MESSAGE_BYTES_MAX`].
    Any(&'a mut Vec<u8>),
}

impl<'a> Incoming<'a> {
    fn new(body: Body<'a>) -> Self {
        Self { len: [0; LEN_BYTES], body, received: 0 }
    }

    fn is_complete(&self) -> bool {
        self.received >= LEN_BYTES && self.received == LEN_BYTES + self.bytes().len()
    }

    fn bytes(&self) -> &[u8] {
        match &self.body {
            Body::Exact(bytes) => bytes,
            Body::Any(bytes) => bytes,
        }
    }

    /// Reads what has arrived. Returns whether anything has.
    fn advance(&mut self, mut stream: &TcpStream) -> io::Result<bool> {
        let Self { len, body, received } = self;
        let count = match (&mut *body, received.checked_sub(LEN_BYTES)) {
            (Body::Exact(bytes), Some(done)) => stream.read(&mut bytes[done..]),
            (Body::Any(bytes), Some(done)) => stream.read(&mut bytes[done..]),
            (Body::Any(_), None) => stream.read(&mut len[*received..]),
            // A message of the expected length takes one system call.
            (Body::Exact(bytes), None) => {
                stream.read_vectored(&mut [IoSliceMut::new(&mut len[*received..]), IoSliceMut::new(bytes)])
            }
        };
        let Some(count) = moved(count)? else { return Ok(false) };
        let had_len = *received >= LEN_BYTES;
        *received += count;
        if !had_len && *received >= LEN_BYTES {
            self.begin_body()?;
        }
        Ok(true)
    }

    /// Checks the length, which has just arrived.
    fn begin_body(&mut self) -> io::Result<()> {
        let len = u32::from_le_bytes(self.len) as usize;
        match &mut self.body {
            Body::Any(bytes) if len <= MESSAGE_BYTES_MAX => bytes.resize(len, 0),
            Body::Exact(bytes) if len == bytes.len() => {}
            Body::Any(_) => return Err(invalid(format!("it sent a message of {len} bytes"))),
            Body::Exact(bytes) => {
                return Err(invalid(format!("it sent {len} bytes instead of {}", bytes.len())));
            }
        }
        Ok(())
    }
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

/// See the module documentation.
#[derive(Debug)]
pub(super) struct TcpLink {
    socket: Socket,
    /// How long a call may wait without a byte in either direction; `None`: until the socket is closed.
    patience: Option<Duration>,
    /// Held during a call: messages of two threads would mix.
    turn: Mutex<()>,
}

impl TcpLink {
    /// Sends and receives whole messages over a socket.
    pub(super) fn new(socket: Socket, patience: Option<Duration>) -> Self {
        Self { socket, patience, turn: Mutex::default() }
    }

    /// Sends one message, receives one, or both at the same time.
    fn transfer(&self, sent: Option<[&[u8]; 2]>, received: Option<Body<'_>>) -> io::Result<()> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let moved = self.move_bytes(sent, received.map(Incoming::new));
        moved.map_err(|error| self.socket.explain(error))
    }

    fn move_bytes(&self, sent: Option<[&[u8]; 2]>, mut received: Option<Incoming<'_>>) -> io::Result<()> {
        let [head, body] = sent.unwrap_or_default();
        let len = u32::try_from(head.len() + body.len()).map_err(io::Error::other)?.to_le_bytes();
        let mut slices = [&len[..], head, body].map(IoSlice::new);
        let mut outgoing = if sent.is_some() { &mut slices[..] } else { &mut [] };
        let mut since = Instant::now();
        loop {
            let mut has_moved = false;
            if !outgoing.is_empty()
                && let Some(count) = moved((&*self.socket.stream).write_vectored(outgoing))?
            {
                IoSlice::advance_slices(&mut outgoing, count);
                has_moved = true;
            }
            let incoming = received.as_mut().filter(|incoming| !incoming.is_complete());
            let receives = incoming.is_some();
            if let Some(incoming) = incoming {
                has_moved |= incoming.advance(&self.socket.stream)?;
            }
            if has_moved {
                since = Instant::now();
            } else if outgoing.is_empty() && !receives {
                return Ok(());
            } else {
                let mut flags = PollFlags::empty();
                flags.set(PollFlags::POLLOUT, !outgoing.is_empty());
                flags.set(PollFlags::POLLIN, receives);
                self.wait(flags, since)?;
            }
        }
    }

    /// Waits until the socket can continue, for what is left of the patience.
    fn wait(&self, flags: PollFlags, since: Instant) -> io::Result<()> {
        let left = self.patience.map(|patience| patience.saturating_sub(since.elapsed()));
        if self.socket.wait(flags, left)? {
            return Ok(());
        }
        let reason = format!("it did not continue for {:?}", self.patience.unwrap_or_default());
        Err(io::Error::new(io::ErrorKind::TimedOut, reason))
    }
}

impl NodeLink for TcpLink {
    fn send(&self, head: &[u8], body: &[u8]) -> io::Result<()> {
        self.transfer(Some([head, body]), None)
    }

    fn receive(&self, message: &mut Vec<u8>) -> io::Result<()> {
        message.clear();
        self.transfer(None, Some(Body::Any(message)))
    }

    fn receive_into(&self, message: &mut [u8]) -> io::Result<()> {
        self.transfer(None, Some(Body::Exact(message)))
    }

    fn exchange(&self, sent: &[u8], received: &mut [u8]) -> io::Result<()> {
        self.transfer(Some([sent, &[]]), Some(Body::Exact(received)))
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Longer than the buffers of both sockets, and no multiple of anything.
    const LONG: usize = 12_000_001;

    pub(super) fn pair(patience: Option<Duration>) -> [TcpLink; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let first = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let second = listener.accept().unwrap().0;
        [first, second].map(|stream| TcpLink::new(Socket::new(stream).unwrap(), patience))
    }

    fn numbers(seed: u8, len: usize) -> Vec<u8> {
        (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect()
    }

    #[test]
    fn messages_arrive_whole_and_in_order() {
        let [first, second] = pair(None);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for len in [0, 1, 300, LONG, 2] {
                    first.send(&numbers(1, len / 3), &numbers(2, len)).unwrap();
                }
                first.send(b"exactly", &[]).unwrap();
            });
            let mut message = vec![9; 50];
            for len in [0, 1, 300, LONG, 2] {
                second.receive(&mut message).unwrap();
                assert!(message == [numbers(1, len / 3), numbers(2, len)].concat(), "{len} bytes");
            }
            let mut exact = [0; 7];
            second.receive_into(&mut exact).unwrap();
            assert_eq!(&exact, b"exactly");
        });
    }

    #[test]
    fn two_nodes_send_each_other_more_than_their_sockets_hold() {
        let [first, second] = pair(None);
        let exchange = |link: &TcpLink, seed, len| {
            let mut received = vec![0; len];
            link.exchange(&numbers(seed, len), &mut received).unwrap();
            received
        };
        for len in [4, LONG] {
            std::thread::scope(|scope| {
                let other = scope.spawn(|| exchange(&second, 7, len));
                assert!(exchange(&first, 3, len) == numbers(7, len));
                assert!(other.join().unwrap() == numbers(3, len));
            });
        }
    }

    #[test]
    fn a_message_of_another_length_is_an_error() {
        let [first, second] = pair(None);
        first.send(b"seven b", &[]).unwrap();
        let error = second.receive_into(&mut [0; 9]).unwrap_err().to_string();
        assert_eq!(error, "it sent 7 bytes instead of 9");

        let [first, second] = pair(None);
        (&*first.socket.stream).write_all(&[0xff; 4]).unwrap();
        let error = second.receive(&mut Vec::new()).unwrap_err().to_string();
        assert_eq!(error, "it sent a message of 4294967295 bytes");
    }

    #[test]
    fn a_wait_ends_when_the_other_node_is_gone_silent_or_given_up() {
        let [first, second] = pair(None);
        drop(first);
        let error = second.receive(&mut Vec::new()).unwrap_err();
        assert_eq!(error.to_string(), "it closed the connection");

        let [_first, second] = pair(Some(Duration::from_millis(10)));
        let error = second.exchange(b"a", &mut [0; 1]).unwrap_err();
        assert_eq!(error.to_string(), "it did not continue for 10ms");

        let [_first, second] = pair(None);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| second.receive(&mut Vec::new()).unwrap_err().to_string());
            second.socket.close("it was silent for 10s");
            second.socket.close("a later reason");
            assert_eq!(waiting.join().unwrap(), "it was silent for 10s");
        });
        assert_eq!(second.send(b"a", &[]).unwrap_err().to_string(), "it was silent for 10s");
    }
}
