//! Sends requests on a schedule and keeps what came back.
//!
//! Everything runs in the caller's task: requests in flight are futures side by side. In an open loop the moments are kept by a thread
//! of its own, for the runtime's timer is only good to a millisecond. Latency counts from the intended moment even where
//! the generator was late or had to wait for a free place (no coordinated omission).

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::stream::{BoxStream, StreamExt as _};
use futures::{FutureExt as _, stream};
use http_body_util::Full;
use tokio::sync::mpsc;

use super::connection::{Connection, End, Exchange};
use super::endpoint::Endpoint;
use super::request::Request;
use super::sample::Sample;
use super::schedule::Schedule;

/// Requests in flight of an open loop. Past it they wait here, and the wait counts.
const OPEN_IN_FLIGHT_MAX: usize = 4096;
/// Moments that came while the generator was busy.
const PACER_QUEUE: usize = 1024;
/// For one request, unless told otherwise.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Drives one endpoint. Connections are kept between runs.
pub struct Client {
    endpoint: Endpoint,
    timeout: Duration,
    idle: Mutex<Vec<Connection>>,
}

/// What came of a run.
#[derive(Debug)]
pub struct Run {
    /// The first intended moment.
    pub began: Instant,
    /// One for each request, in their order.
    pub exchanges: Vec<Exchange>,
}

impl Run {
    /// From the first intended moment to the end of the last answer.
    pub fn duration(&self) -> Duration {
        let last = self.exchanges.iter().map(|exchange| exchange.ended).max();
        last.map_or(Duration::ZERO, |last| last - self.began)
    }

    /// The numbers of each exchange. Reads all answers: call it when nothing is measured.
    pub fn samples(&self, requests: &[Request]) -> Vec<Sample> {
        let both = requests.iter().zip(&self.exchanges);
        both.map(|(request, exchange)| Sample::of(request, exchange, self.began)).collect()
    }
}

impl Client {
    /// A client without connections.
    pub fn new(endpoint: Endpoint) -> Self {
        Self { endpoint, timeout: TIMEOUT, idle: Mutex::default() }
    }

    /// The same, giving each request this long.
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Whom it drives.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Sends all requests and waits for every answer. `on_end` is told of each as it ends.
    pub async fn drive(
        &self,
        requests: &[Request],
        schedule: &Schedule,
        mut on_end: impl FnMut(&Exchange),
    ) -> Run {
        let began = Instant::now();
        let (moments, width) = moments(schedule, requests.len(), began);
        let mut answers = moments
            .map(|(i, intended)| self.send(&requests[i], intended).map(move |exchange| (i, exchange)))
            .buffer_unordered(width);
        let mut exchanges: Vec<Option<Exchange>> = requests.iter().map(|_| None).collect();
        while let Some((i, exchange)) = answers.next().await {
            on_end(&exchange);
            exchanges[i] = Some(exchange);
        }
        let exchanges = exchanges.into_iter().flatten().collect();
        Run { began, exchanges }
    }

    /// One request. Where no moment was set beforehand, now is the intended one.
    async fn send(&self, request: &Request, intended: Option<Instant>) -> Exchange {
        let mut exchange = Exchange::new(intended.unwrap_or_else(Instant::now));
        let kept = tokio::time::timeout(self.timeout, self.attempt(request, &mut exchange)).await;
        match kept {
            Ok(Some(connection)) => self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(connection),
            Ok(None) => (),
            Err(_) => {
                exchange.end = End::TimedOut;
                exchange.ended = Instant::now();
            }
        }
        exchange
    }

    /// Returns the connection if it may serve again.
    async fn attempt(&self, request: &Request, exchange: &mut Exchange) -> Option<Connection> {
        while let Some(mut connection) = self.take_idle() {
            if connection.is_usable().await {
                connection.exchange(self.http_request(request), exchange).await;
                // A server may close an idle connection just as it is used again. Nothing was answered: ask anew.
                if exchange.has_begun() {
                    return (exchange.end == End::Whole).then_some(connection);
                }
            }
        }
        match Connection::open(&self.endpoint).await {
            Ok(mut connection) => {
                connection.exchange(self.http_request(request), exchange).await;
                (exchange.end == End::Whole).then_some(connection)
            }
            Err(error) => {
                exchange.end = End::NotConnected(error);
                exchange.ended = Instant::now();
                None
            }
        }
    }

    fn take_idle(&self) -> Option<Connection> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    fn http_request(&self, request: &Request) -> http::Request<Full<bytes::Bytes>> {
        self.endpoint
            .post(request.path)
            .body(Full::new(request.body.clone()))
            .expect("path and headers were checked when the endpoint was reached, and the body is any bytes")
    }
}

/// The requests by number in the order of sending, with their moments, and how many may be in flight.
fn moments(
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

/// Tells of each moment when it has come. The thread ends with the last one, or with its receiver.
fn pace(moments: Vec<Instant>) -> mpsc::Receiver<(usize, Option<Instant>)> {
    let (tell, ticks) = mpsc::channel(PACER_QUEUE);
    std::thread::spawn(move || {
        for (i, at) in moments.into_iter().enumerate() {
            std::thread::sleep(at.saturating_duration_since(Instant::now()));
            if tell.blocking_send((i, Some(at))).is_err() {
                return;
            }
        }
    });
    ticks
}
