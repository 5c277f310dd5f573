//! The clients of a run: a fixed number of clients request one text after the other, and record when tokens
//! arrived and how each stream ended. Each answer is compared with the text that an undisturbed target
//! generated without drafts.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use futures::future::join_all;
use proto::v1::FinishReason;
use service::shutdown::Lifetime;
use speculation::TokenId;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::case::Case;
use crate::client::{Answer, Client};
use crate::wait::WAIT_TIMEOUT;

/// Pause of a client after a lost stream, as in the routers' Retry-After: avoids a request storm on a router
/// that refuses all.
const PAUSE_AFTER_LOSS: Duration = Duration::from_secs(1);

/// A text to request, and the expected answer.
#[derive(Debug, Clone)]
pub struct ExpectedAnswer {
    /// The request.
    pub case: Case,
    /// The expected ids of the answer.
    pub expected: Vec<TokenId>,
}

/// How a stream ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// With all ids of the text.
    Complete,
    /// With ids that differ from the text's; contains the first such position.
    Differs(usize),
    /// Before the end of the text; contains the error.
    Lost(String),
    /// Before the end of the text, while its router was down.
    RouterDown,
}

/// Record of one stream.
#[derive(Debug, Clone)]
pub struct StreamRecord {
    /// Counted from 0.
    pub number: u64,
    /// Name of the text.
    pub name: String,
    /// Index of the router.
    pub router: usize,
    /// When the request was sent.
    pub opened: Instant,
    /// When tokens arrived, one entry per message.
    pub arrivals: Vec<Instant>,
    /// When the stream ended.
    pub ended: Instant,
    /// How the stream ended.
    pub end: End,
    /// Number of tokens received.
    pub tokens: u64,
    /// Number of its drafted tokens that were verified; known only for complete streams.
    pub drafted: u64,
    /// Number of drafted tokens that were accepted.
    pub accepted: u64,
}

/// Running clients.
#[derive(Debug)]
pub struct Load {
    shared: Arc<Shared>,
    clients: Vec<JoinHandle<()>>,
}

/// Sizes of the load.
#[derive(Debug, Clone, Copy)]
pub struct LoadSize {
    /// Concurrent streams.
    pub width: usize,
    /// Minimum number of streams before [`Load::finish`] may end the load.
    pub streams: u64,
    /// A stream is lost after this time without a message.
    pub stream_timeout: Duration,
}

#[derive(Debug)]
struct Shared {
    expected_answers: Vec<ExpectedAnswer>,
    routers: Vec<Client>,
    size: LoadSize,
    next: AtomicU64,
    tokens: AtomicU64,
    is_finishing: AtomicBool,
    state: Mutex<StreamsState>,
    /// Notified when a router is back.
    router_back: Notify,
}

/// State shared by all clients.
#[derive(Debug, Default)]
struct StreamsState {
    /// Active streams, with the time of their last message.
    active: BTreeMap<u64, Instant>,
    done: Vec<StreamRecord>,
    /// Router index, start and end of each outage.
    outages: Vec<(usize, Instant, Option<Instant>)>,
}

impl Load {
    /// Starts the clients; stream `n` requests text `n` through router `n`, each modulo their number.
    pub fn start(
        expected_answers: Vec<ExpectedAnswer>,
        routers: Vec<Client>,
        size: LoadSize,
        lifetime: &Lifetime,
    ) -> Self {
        let shared = Arc::new(Shared {
            expected_answers,
            routers,
            size,
            next: AtomicU64::new(0),
            tokens: AtomicU64::new(0),
            is_finishing: AtomicBool::new(false),
            state: Mutex::default(),
            router_back: Notify::new(),
        });
        let one = |_| lifetime.spawn("client", Arc::clone(&shared).request_repeatedly());
        let clients = (0..size.width).map(one).collect();
        Self { shared, clients }
    }

    /// Number of tokens that have reached clients.
    pub fn tokens(&self) -> u64 {
        self.shared.tokens.load(Ordering::Relaxed)
    }

    /// The active streams.
    pub fn active(&self) -> Vec<u64> {
        self.shared.state().active.keys().copied().collect()
    }

    /// The streams among these that are active and have received nothing since `then`.
    pub fn silent_since(&self, then: Instant, streams: &[u64]) -> Vec<u64> {
        let state = self.shared.state();
        let is_silent = |stream: &&u64| state.active.get(stream).is_some_and(|&last| last <= then);
        streams.iter().filter(is_silent).copied().collect()
    }

    /// Marks the start of a router's outage: its streams may break from now on.
    pub fn on_router_down(&self, router: usize) {
        self.shared.state().outages.push((router, Instant::now(), None));
    }

    /// Marks the end of a router's outage.
    pub fn on_router_up(&self, router: usize) {
        let mut state = self.shared.state();
        let open = state.outages.iter_mut().filter(|outage| outage.0 == router && outage.2.is_none());
        open.for_each(|outage| outage.2 = Some(Instant::now()));
        drop(state);
        self.shared.router_back.notify_waiters();
    }

    /// Lets clients stop after the minimum number of streams, waits for them, and returns the records of all
    /// streams. Fails if a client panicked: the record of its stream is missing.
    pub async fn finish(self) -> anyhow::Result<Vec<StreamRecord>> {
        self.shared.is_finishing.store(true, Ordering::Relaxed);
        for client in join_all(self.clients).await {
            client.context("a client panicked")?;
        }
        Ok(std::mem::take(&mut self.shared.state().done))
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, StreamsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One client: runs one stream after the other until there are enough.
    async fn request_repeatedly(self: Arc<Self>) {
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if self.is_finishing.load(Ordering::Relaxed) && number >= self.size.streams {
                return;
            }
            let record = self.ask(number).await;
            let router = record.router;
            let (is_away, is_lost) = (record.end == End::RouterDown, matches!(record.end, End::Lost(_)));
            {
                let mut state = self.state();
                state.active.remove(&number);
                state.done.push(record);
            }
            if is_away {
                self.wait_for_router(router).await;
            }
            if is_lost {
                sleep(PAUSE_AFTER_LOSS).await;
            }
        }
    }

    /// Waits until the router is back. After [`WAIT_TIMEOUT`] the next stream fails and is counted.
    async fn wait_for_router(&self, router: usize) {
        loop {
            let back = self.router_back.notified();
            if !self.is_away(router) || timeout(WAIT_TIMEOUT, back).await.is_err() {
                return;
            }
        }
    }

    async fn ask(&self, number: u64) -> StreamRecord {
        let ask = &self.expected_answers[number as usize % self.expected_answers.len()];
        let router = number as usize % self.routers.len();
        let opened = Instant::now();
        self.state().active.insert(number, opened);
        let (mut arrivals, mut answer) = (Vec::new(), Answer::default());
        let read = self.read(number, &mut arrivals, &mut answer).await;
        let wrong = ask.expected.iter().zip(&answer.token_ids).position(|(expected, got)| expected != got);
        let end = match (wrong, read) {
            (Some(at), _) => End::Differs(at),
            (None, Err(_)) if self.was_away(router, opened) => End::RouterDown,
            (None, Err(error)) => End::Lost(format!("{error:#}")),
            (None, Ok(())) if answer.token_ids.len() != ask.expected.len() => {
                End::Differs(answer.token_ids.len().min(ask.expected.len()))
            }
            (None, Ok(())) => End::Complete,
        };
        let used = answer.speculation();
        StreamRecord {
            number,
            name: ask.case.name.clone(),
            router,
            opened,
            arrivals,
            ended: Instant::now(),
            end,
            tokens: answer.token_ids.len() as u64,
            drafted: used.draft_tokens,
            accepted: used.accepted_tokens,
        }
    }

    /// Reads one stream to its end. `arrivals` and `answer` are filled even if it fails.
    async fn read(
        &self,
        number: u64,
        arrivals: &mut Vec<Instant>,
        answer: &mut Answer,
    ) -> anyhow::Result<()> {
        let ask = &self.expected_answers[number as usize % self.expected_answers.len()];
        let stream_timeout = self.size.stream_timeout;
        let client = &self.routers[number as usize % self.routers.len()];
        let open = timeout(stream_timeout, client.open(&ask.case)).await;
        let mut stream = open.with_context(|| format!("no response after {stream_timeout:?}"))??;
        loop {
            let message = timeout(stream_timeout, stream.read_message()).await;
            let before = answer.token_ids.len();
            answer.clone_from(stream.so_far());
            if !message.with_context(|| format!("silent for {stream_timeout:?} after {before} tokens"))?? {
                break;
            }
            let more = answer.token_ids.len() - before;
            if more > 0 {
                let now = Instant::now();
                arrivals.push(now);
                self.tokens.fetch_add(more as u64, Ordering::Relaxed);
                self.state().active.insert(number, now);
            }
        }
        ensure!(answer.finish != FinishReason::Unspecified, "ended without a reason");
        Ok(())
    }

    fn is_away(&self, router: usize) -> bool {
        self.state().outages.iter().any(|(away, _, back)| *away == router && back.is_none())
    }

    /// Whether the router was down at any time since `since`.
    fn was_away(&self, router: usize, since: Instant) -> bool {
        let state = self.state();
        state.outages.iter().any(|(away, _, back)| *away == router && back.is_none_or(|back| back >= since))
    }
}
