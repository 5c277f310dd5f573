//! A TCP connection that records when its bytes arrived at this host, however late the generator reads them.
//!
//! On Linux the kernel timestamps every segment on arrival (`SO_TIMESTAMPNS`), and a read returns the
//! timestamp of the last segment that it contains: if the generator was off the CPU, its read is late but the
//! timestamp is correct. Segments that arrived before the same late read share the timestamp of the last. On
//! other systems the timestamp is the time after the read. This module does not parse the bytes.

use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::AsRawFd as _;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, Interest, ReadBuf};
use tokio::net::TcpStream;

/// Bytes per read.
const READ_BYTES: usize = 16 << 10;

/// How long to wait for a kernel that does not provide timestamps yet.
const TIMESTAMPS_TIMEOUT: Duration = Duration::from_secs(10);

/// Deliberate delay of a read, to check whether the byte has a timestamp.
const PROBE_READ_DELAY: Duration = Duration::from_millis(2);

/// Times of the last read and write on a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stamp {
    /// Arrival time of the last bytes read.
    pub(super) arrived: Instant,
    /// Delay until they were read.
    pub(super) read_delay: Duration,
    /// When the last bytes were passed to the operating system.
    pub(super) written: Instant,
}

/// Shared between the socket, which hyper owns, and the reader of the response.
#[derive(Debug, Clone)]
pub(super) struct SharedStamp(Arc<Mutex<Stamp>>);

impl SharedStamp {
    pub(super) fn last(&self) -> Stamp {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update(&self, change: impl FnOnce(&mut Stamp)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// The socket with its timestamps.
#[derive(Debug)]
pub(super) struct StampedStream {
    stream: TcpStream,
    stamps: SharedStamp,
}

impl StampedStream {
    pub(super) async fn connect(address: SocketAddr) -> io::Result<(Self, SharedStamp)> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        enable_timestamps(&stream)?;
        let now = Instant::now();
        let stamp = Stamp { arrived: now, read_delay: Duration::ZERO, written: now };
        let stamps = SharedStamp(Arc::new(Mutex::new(stamp)));
        Ok((Self { stream, stamps: stamps.clone() }, stamps))
    }
}

/// Keeps kernel timestamping enabled: it starts some time after the first socket has requested it, and ends
/// with the last such socket.
#[derive(Debug)]
pub(super) struct KernelTimestamps {
    _socket: StampedStream,
}

impl KernelTimestamps {
    /// Returns once timestamps arrive, or after [`TIMESTAMPS_TIMEOUT`] without them.
    pub(super) async fn begin() -> io::Result<Self> {
        let listener = tokio::net::TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).await?;
        let (mut socket, stamps) = StampedStream::connect(listener.local_addr()?).await?;
        let (mut peer, _) = listener.accept().await?;
        let deadline = Instant::now() + TIMESTAMPS_TIMEOUT;
        while cfg!(target_os = "linux") && Instant::now() < deadline {
            peer.write_all(b".").await?;
            tokio::time::sleep(PROBE_READ_DELAY).await;
            socket.read_exact(&mut [0]).await?;
            if stamps.last().read_delay >= PROBE_READ_DELAY {
                break;
            }
        }
        Ok(Self { _socket: socket })
    }
}

impl AsyncRead for StampedStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut bytes = [0; READ_BYTES];
        let room = into.remaining().min(READ_BYTES);
        loop {
            ready!(self.stream.poll_read_ready(cx))?;
            let receive = || receive(&self.stream, &mut bytes[..room]);
            match self.stream.try_io(Interest::READABLE, receive) {
                Ok((len, waited)) => {
                    let now = Instant::now();
                    self.stamps.update(|stamp| {
                        // After a clock adjustment a read must not be dated before earlier events.
                        let earliest = stamp.arrived.max(stamp.written);
                        let arrived = now.checked_sub(waited).unwrap_or(now).max(earliest.min(now));
                        (stamp.arrived, stamp.read_delay) = (arrived, now - arrived);
                    });
                    into.put_slice(&bytes[..len]);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => (),
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for StampedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let len = ready!(Pin::new(&mut self.stream).poll_write(cx, bytes))?;
        self.stamps.update(|stamp| stamp.written = Instant::now());
        Poll::Ready(Ok(len))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(target_os = "linux")]
fn enable_timestamps(stream: &TcpStream) -> io::Result<()> {
    use nix::sys::socket::{setsockopt, sockopt};
    Ok(setsockopt(stream, sockopt::ReceiveTimestampns, &true)?)
}

/// Reads the available bytes; returns how long ago the last of them arrived.
#[cfg(target_os = "linux")]
fn receive(stream: &TcpStream, bytes: &mut [u8]) -> io::Result<(usize, Duration)> {
    use std::time::{SystemTime, UNIX_EPOCH};

    use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
    use nix::sys::time::TimeSpec;

    let mut control = nix::cmsg_space!(TimeSpec);
    let mut parts = [IoSliceMut::new(bytes)];
    let message = recvmsg::<()>(stream.as_raw_fd(), &mut parts, Some(&mut control), MsgFlags::empty())?;
    let arrived = message.cmsgs()?.find_map(|part| match part {
        ControlMessageOwned::ScmTimestampns(at) => Some(Duration::from(at)),
        _ => None,
    });
    // Without a timestamp (the first packets after it was requested) use the current time.
    let waited = arrived.and_then(|at| SystemTime::now().duration_since(UNIX_EPOCH + at).ok());
    Ok((message.bytes, waited.unwrap_or_default()))
}

#[cfg(not(target_os = "linux"))]
fn enable_timestamps(_: &TcpStream) -> io::Result<()> {
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn receive(stream: &TcpStream, bytes: &mut [u8]) -> io::Result<(usize, Duration)> {
    Ok((stream.try_read(bytes)?, Duration::ZERO))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::io::Write as _;

    use super::*;

    /// Allowed difference between reads of the two clocks that are compared, in case another program runs in
    /// between.
    const SLACK: Duration = Duration::from_millis(100);

    /// The reader sleeps first; the bytes must still have the timestamp of their arrival.
    #[tokio::test]
    async fn a_late_read_is_stamped_with_the_arrival() {
        let _kernel_timestamps = KernelTimestamps::begin().await.unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let (mut stream, stamps) = StampedStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut peer, _) = listener.accept().unwrap();
        let before = Instant::now();
        peer.write_all(b"hello").unwrap();
        let after = Instant::now();
        std::thread::sleep(4 * SLACK);
        let mut room = [0; 64];
        let len = stream.read(&mut room).await.unwrap();
        assert_eq!(&room[..len], b"hello");
        let stamp = stamps.last();
        assert!(stamp.arrived + SLACK > before && stamp.arrived < after + SLACK, "{stamp:?} {before:?}");
        assert!(stamp.read_delay > 3 * SLACK, "{stamp:?}");
    }
}
