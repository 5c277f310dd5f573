//! The lower bound for `cpu`: a process that does only the unavoidable work for a router's frames and events.
//! A separate thread owns the streams to two workers ([`crate::echo`]) and passes a prepared event to every
//! client's connection, as a router's rounds do, with the same libraries. It has no sequences, lanes, text or
//! counters. The CPU time of a router beyond it is the router's own.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures::StreamExt as _;
use service::process::stdin_closed;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;

use crate::echo::{Echo, SPAN_IDS};
use crate::helper::Helper;

/// Same limit as in the router for unread events of a client.
const UNREAD_EVENTS: usize = 4_096;

/// As long as a router's event with one or a few tokens.
const EVENT: &[u8] = b"data: {\"id\":\"cmpl-0193a5c7c1d27b0c8c1f3b5a7e9d2f40\",\"object\":\"text_completion\",\"created\":1780000000,\
\"model\":\"relay\",\"system_fingerprint\":\"fp_0123456789abcdef\",\"seed\":1234567890123456789,\"choices\":[{\"index\":0,\
\"text\":\" some words\",\"logprobs\":null,\"finish_reason\":null}]}\n\n";

const MODELS: &str = "{\"object\":\"list\",\"data\":[{\"id\":\"relay\",\"object\":\"model\"}]}";

/// Load of a relay.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct Load {
    /// Number of clients; all must connect before it begins
    #[arg(long)]
    pub(crate) streams: usize,
    /// Sequences per frame
    #[arg(long)]
    pub(crate) frame: usize,
    /// Processing time of the target per frame, microseconds
    #[arg(long)]
    pub(crate) target_us: u64,
    /// Processing time of the draft worker per frame, microseconds; 0: no draft worker is used
    #[arg(long)]
    pub(crate) draft_us: u64,
}

impl Load {
    /// Starts a relay with this load.
    pub(crate) async fn start(&self) -> anyhow::Result<Helper> {
        let mut arguments = vec!["relay".to_owned()];
        for (flag, value) in [
            ("--streams", self.streams as u64),
            ("--frame", self.frame as u64),
            ("--target-us", self.target_us),
            ("--draft-us", self.draft_us),
        ] {
            arguments.extend([flag.to_owned(), value.to_string()]);
        }
        Helper::start(&arguments).await
    }
}

#[derive(Clone)]
struct Relay {
    clients_sender: mpsc::Sender<mpsc::Sender<Bytes>>,
    events: Arc<AtomicU64>,
}

/// Serves until the process that started it ends, with as many threads as a router.
pub(crate) async fn serve(load: Load) -> anyhow::Result<()> {
    let (clients_sender, clients_receiver) = mpsc::channel(load.streams.max(1));
    let listener = Relay { clients_sender, events: Arc::default() };
    let num_events = Arc::clone(&listener.events);
    let (result_sender, result_receiver) = oneshot::channel();
    std::thread::Builder::new().name("rounds".to_owned()).spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let result = runtime
            .map_err(Into::into)
            .and_then(|runtime| runtime.block_on(relay(load, clients_receiver, &num_events)));
        // If the process is ending, the receiver is gone.
        drop(result_sender.send(result));
    })?;
    std::thread::Builder::new().name("listeners".to_owned()).spawn(move || {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads((cores - 1).max(1)).enable_all().build()?;
        runtime.block_on(answer(listener))
    })?;
    tokio::select! {
        result = result_receiver => result.context("the rounds panicked")?,
        () = stdin_closed() => Ok(()),
    }
}

async fn answer(listener: Relay) -> anyhow::Result<()> {
    use axum::serve::ListenerExt as _;
    let app = Router::new()
        .route("/v1/models", get(async || MODELS))
        .route("/v1/completions", post(complete))
        .route("/v1/chat/completions", post(complete))
        .route(
            "/metrics",
            get(async |State(listener): State<Relay>| {
                format!("events {}\n", listener.events.load(Ordering::Relaxed))
            }),
        )
        .with_state(listener);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("http://{}", listener.local_addr()?);
    let listener = listener.tap_io(|connection: &mut TcpStream| drop(connection.set_nodelay(true)));
    Ok(axum::serve(listener, app).await?)
}

async fn complete(State(listener): State<Relay>) -> Response {
    let (event_sender, event_receiver) = mpsc::channel(UNREAD_EVENTS);
    // If all clients are connected already, the stream ends at once.
    drop(listener.clients_sender.try_send(event_sender));
    let body = Body::from_stream(ReceiverStream::new(event_receiver).map(Ok::<_, std::convert::Infallible>));
    ([("content-type", "text/event-stream")], body).into_response()
}

/// Groups of clients alternate between the workers; each return from the target sends an event to every
/// client of the group.
async fn relay(
    load: Load,
    mut clients_receiver: mpsc::Receiver<mpsc::Sender<Bytes>>,
    num_events: &AtomicU64,
) -> anyhow::Result<()> {
    let delay = Duration::from_micros;
    let mut target = Echo::start(delay(load.target_us)).await?;
    let mut draft = Echo::start(delay(load.draft_us)).await?;
    let mut clients = Vec::with_capacity(load.streams);
    while clients.len() < load.streams {
        clients.push(clients_receiver.recv().await.context("the listener has stopped")?);
    }
    let groups: Vec<&[mpsc::Sender<Bytes>]> = clients.chunks(load.frame.max(1)).collect();
    let is_drafted = load.draft_us > 0;
    // Workers answer in order.
    let (mut at_draft, mut at_target) = (VecDeque::new(), VecDeque::new());
    for (group, members) in groups.iter().enumerate() {
        let first = if is_drafted { (&mut draft, &mut at_draft) } else { (&mut target, &mut at_target) };
        first.0.send(members.len() as u64, 0).await?;
        first.1.push_back(group);
    }
    loop {
        let is_from_draft = tokio::select! {
            frame = draft.receive(), if is_drafted => frame.map(|()| true)?,
            frame = target.receive() => frame.map(|()| false)?,
        };
        let queue = if is_from_draft { &mut at_draft } else { &mut at_target };
        let group = queue.pop_front().context("an unrequested frame")?;
        let sequences = groups[group].len() as u64;
        if is_drafted && !is_from_draft {
            draft.send(sequences, 0).await?;
            at_draft.push_back(group);
        } else {
            target.send(sequences, if is_drafted { SPAN_IDS } else { 0 }).await?;
            at_target.push_back(group);
        }
        if !is_from_draft {
            for client in groups[group] {
                client.try_send(Bytes::from_static(EVENT)).context("a client left or does not read")?;
            }
            num_events.fetch_add(sequences, Ordering::Relaxed);
        }
    }
}
