//! One HTTP/1.1 connection: sends a request and keeps the bytes of the response with the arrival time of each
//! piece.
//!
//! Connection and response are polled in one task, so nothing passes between tasks before a timestamp is
//! taken. Bytes are kept unparsed; `answer` parses them as events after the run.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;

use super::endpoint::Endpoint;
use super::stamped::{SharedStamp, StampedStream};

/// More than any response of a text model; keeps an endless response from filling the memory.
const ANSWER_BYTES_MAX: usize = 32 << 20;

/// The result of one request, as bytes and timestamps.
#[derive(Debug)]
pub struct Exchange {
    /// When it should have been sent; latencies are measured from here.
    pub intended: Instant,
    /// When its last byte was passed to the operating system.
    pub sent: Option<Instant>,
    /// HTTP status, once received.
    pub status: Option<u16>,
    /// The response body.
    pub bytes: Vec<u8>,
    /// The reads in which the body arrived.
    pub reads: Vec<BodyRead>,
    /// How it ended.
    pub end: ExchangeEnd,
    /// When it ended.
    pub ended: Instant,
}

/// A piece of a response.
#[derive(Debug, Clone, Copy)]
pub struct BodyRead {
    /// Length of the body including this piece.
    pub end_offset: usize,
    /// Arrival time at this host.
    pub arrived: Instant,
    /// Delay until the generator read it.
    pub read_delay: Duration,
}

/// How an exchange ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExchangeEnd {
    /// The body is complete.
    Complete,
    /// The connection broke; contains hyper's error.
    Broken(String),
    /// No connection could be established.
    NotConnected(String),
    /// The timeout of the request expired.
    TimedOut,
    /// The response exceeded the size limit.
    TooLong,
}

/// Plain or TLS.
type Stream = TokioIo<Either<StampedStream, Box<TlsStream<StampedStream>>>>;
type Driver = http1::Connection<Stream, Full<Bytes>>;

/// A connection that can be reused for requests.
pub(super) struct Connection {
    sender: http1::SendRequest<Full<Bytes>>,
    /// `None` once the connection is closed: only dropping the driver wakes the futures that wait for it.
    driver: Option<Pin<Box<Driver>>>,
    stamps: SharedStamp,
}

impl Connection {
    pub(super) async fn open(endpoint: &Endpoint) -> Result<Self, String> {
        let address = endpoint.address();
        let (stream, stamps) =
            StampedStream::connect(address).await.map_err(|error| format!("{address}: {error}"))?;
        let stream = match endpoint.tls() {
            Some(tls) => Either::Right(tls.handshake(stream).await?),
            None => Either::Left(stream),
        };
        let (sender, driver) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|error| error.to_string())?;
        Ok(Self { sender, driver: Some(Box::pin(driver)), stamps })
    }

    /// Whether another request can be sent. Polls the connection, which may have been closed while idle.
    pub(super) async fn is_usable(&mut self) -> bool {
        let Self { sender, driver, .. } = self;
        drive(driver, sender.ready()).await.is_ok() && driver.is_some()
    }

    /// Sends `request` and reads the response into `exchange`, including its `end`.
    ///
    /// Cancel safety: the data read so far stays in `exchange`; the connection must not be used again.
    pub(super) async fn exchange(&mut self, request: http::Request<Full<Bytes>>, exchange: &mut Exchange) {
        let Self { sender, driver, stamps } = self;
        let response = match drive(driver, sender.send_request(request)).await {
            Ok(response) => response,
            Err(error) => {
                exchange.end = ExchangeEnd::Broken(error.to_string());
                exchange.ended = Instant::now();
                return;
            }
        };
        exchange.sent = Some(stamps.last().written);
        exchange.status = Some(response.status().as_u16());
        let mut body: Incoming = response.into_body();
        exchange.end = loop {
            match drive(driver, body.frame()).await {
                None => break ExchangeEnd::Complete,
                Some(Err(error)) => break ExchangeEnd::Broken(error.to_string()),
                Some(Ok(frame)) => {
                    let Some(data) = frame.data_ref() else { continue };
                    exchange.bytes.extend_from_slice(data);
                    let stamp = stamps.last();
                    let end_offset = exchange.bytes.len();
                    let Some(read) = exchange.reads.last_mut().filter(|read| read.arrived == stamp.arrived)
                    else {
                        let (arrived, read_delay) = (stamp.arrived, stamp.read_delay);
                        exchange.reads.push(BodyRead { end_offset, arrived, read_delay });
                        continue;
                    };
                    read.end_offset = end_offset;
                }
            }
            if exchange.bytes.len() > ANSWER_BYTES_MAX {
                break ExchangeEnd::TooLong;
            }
        };
        // A complete body ended with its last bytes; any other end is detected now.
        exchange.ended = match exchange.end {
            ExchangeEnd::Complete => stamps.last().arrived,
            _ => Instant::now(),
        };
    }
}

impl Exchange {
    pub(super) fn new(intended: Instant) -> Self {
        let end = ExchangeEnd::TimedOut;
        let (bytes, reads) = (Vec::new(), Vec::new());
        Self { intended, sent: None, status: None, bytes, reads, end, ended: intended }
    }

    /// Whether the server has started to respond.
    pub(super) fn has_begun(&self) -> bool {
        self.status.is_some()
    }
}

/// Polls the connection until `wait` is done. Polls `wait` first, and again after the connection, which may
/// have made it ready.
async fn drive<T>(driver: &mut Option<Pin<Box<Driver>>>, wait: impl Future<Output = T>) -> T {
    let mut wait = pin!(wait);
    poll_fn(|cx| {
        if let Poll::Ready(value) = wait.as_mut().poll(cx) {
            return Poll::Ready(value);
        }
        // An error of the connection is returned by the future that waits for it.
        if driver.as_mut().is_some_and(|driver| driver.as_mut().poll(cx).is_ready()) {
            *driver = None;
        }
        wait.as_mut().poll(cx)
    })
    .await
}
