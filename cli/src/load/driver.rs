//! Sends requests on a schedule and keeps the responses.
//!
//! Everything runs in the caller's task: requests in flight are concurrent futures. In an open loop a
//! separate thread keeps the sending times, because the runtime's timer has a resolution of only a
//! millisecond. Latency is measured from the intended time even if the generator was late or had to wait for
//! a free slot (no coordinated omission).

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::stream::{BoxStream, StreamExt as _};
use futures::{FutureExt as _, stream};
use http_body_util::Full;
use tokio::sync::mpsc;

use super::connection::{Connection, Exchange, ExchangeEnd};
use super::endpoint::Endpoint;
use super::request::Request;
use super::sample::Sample;
use super::schedule::Schedule;

/// Maximum number of requests in flight in an open loop. Further requests wait here, and the wait counts as
/// latency.
const OPEN_IN_FLIGHT_MAX: usize = 4096;
/// Capacity of the queue of sending times that passed while the generator was busy.
const PACER_QUEUE: usize = 1024;
/// Default timeout of one request.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Sends requests to one endpoint. Connections are kept between runs.
pub struct Client {
    endpoint: Endpoint,
    timeout: Duration,
    idle: Mutex<Vec<Connection>>,
}

/// Results of a run.
#[derive(Debug)]
pub struct Run {
    /// The first intended sending time.
    pub began: Instant,
    /// One per request, in the order of the requests.
    pub exchanges: Vec<Exchange>,
}

impl Run {
    /// Time from the first intended sending time to the end of the last response.
    pub fn duration(&self) -> Duration {
        let last = self.exchanges.iter().map(|exchange| exchange.ended).max();
        last.map_or(Duration::ZERO, |last| last - self.began)
    }

    /// The figures of each exchange. Parses all responses: call it when nothing is measured.
    pub fn samples(&self, requests: &[Request]) -> Vec<Sample> {
        let both = requests.iter().zip(&self.exchanges);
        both.map(|(request, exchange)| Sample::of(request, exchange, self.began)).collect()
    }
}

impl Client {
    /// Creates a client without connections.
    pub fn new(endpoint: Endpoint) -> Self {
        Self { endpoint, timeout: TIMEOUT, idle: Mutex::default() }
    }

    /// Sets the timeout of each request.
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// The endpoint.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Sends all requests and waits for every response. Calls `on_end` for each as it ends.
    pub async fn drive(
        &self,
        requests: &[Request],
        schedule: &Schedule,
        mut on_end: impl FnMut(&Exchange),
    ) -> Run {
        let began = Instant::now();
        let (send_times, max_in_flight) = send_times(schedule, requests.len(), began);
        let mut answers = send_times
            .map(|(i, intended)| self.send(&requests[i], intended).map(move |exchange| (i, exchange)))
            .buffer_unordered(max_in_flight);
        let mut exchanges: Vec<Option<Exchange>> = requests.iter().map(|_| None).collect();
        while let Some((i, exchange)) = answers.next().await {
            on_end(&exchange);
            exchanges[i] = Some(exchange);
        }
        let exchanges = exchanges.into_iter().flatten().collect();
        Run { began, exchanges }
    }

    /// Sends one request. Without a planned time, now is the intended time.
    async fn send(&self, request: &Request, intended: Option<Instant>) -> Exchange {
        let mut exchange = Exchange::new(intended.unwrap_or_else(Instant::now));
        let kept = tokio::time::timeout(self.timeout, self.attempt(request, &mut exchange)).await;
        match kept {
            Ok(Some(connection)) => self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(connection),
            Ok(None) => (),
            Err(_) => {
                exchange.end = ExchangeEnd::TimedOut;
                exchange.ended = Instant::now();
            }
        }
        exchange
    }

    /// Returns the connection if it can be reused.
    async fn attempt(&self, request: &Request, exchange: &mut Exchange) -> Option<Connection> {
        while let Some(mut connection) = self.take_idle() {
            if connection.is_usable().await {
                connection.exchange(self.http_request(request), exchange).await;
                // A server may close an idle connection just as it is reused. If no response started, retry.
                if exchange.has_begun() {
                    return (exchange.end == ExchangeEnd::Complete).then_some(connection);
                }
            }
        }
        match Connection::open(&self.endpoint).await {
            Ok(mut connection) => {
                connection.exchange(self.http_request(request), exchange).await;
                (exchange.end == ExchangeEnd::Complete).then_some(connection)
            }
            Err(error) => {
                exchange.end = ExchangeEnd::NotConnected(error);
                exchange.ended = Instant::now();
                None
            }
        }
    }

    fn take_idle(&self) -> Option<Connection> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    fn http_request(&self, request: &Request) -> http::Request<Full<bytes::Bytes>> {
        self.endpoint.post(request.path).body(Full::new(request.body.clone())).expect(
            "path and headers were checked when the endpoint was probed, and any bytes are a valid body",
        )
    }
}

/// Request indices in the order of sending, with their intended times, and the maximum number in flight.
fn send_times(
    schedule: &Schedule,
    count: usize,
    began: Instant,
) -> (BoxStream<'static, (usize, Option<Instant>)>, usize) {
    match schedule {
        Schedule::Closed { concurrency } => {
            (stream::iter((0..count).map(|i| (i, None))).boxed(), (*concurrency).max(1))
        }
        Schedule::Open { send_after } => {
            let at: Vec<Instant> = send_after.iter().take(count).map(|after| began + *after).collect();
            let ticks = stream::unfold(pace(at), |mut ticks| async { Some((ticks.recv().await?, ticks)) });
            (ticks.boxed(), OPEN_IN_FLIGHT_MAX)
        }
    }
}

/// Sends each index at its time. The thread ends after the last one, or when the receiver is dropped.
fn pace(send_times: Vec<Instant>) -> mpsc::Receiver<(usize, Option<Instant>)> {
    let (sender, ticks) = mpsc::channel(PACER_QUEUE);
    std::thread::spawn(move || {
        for (i, at) in send_times.into_iter().enumerate() {
            std::thread::sleep(at.saturating_duration_since(Instant::now()));
            if sender.blocking_send((i, Some(at))).is_err() {
                return;
            }
        }
    });
    ticks
}
