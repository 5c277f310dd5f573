//! How a listener handles peers that are slow, silent or too many, and well-behaved ones.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::Extension;
use axum::routing::{get, post};
use futures::stream;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};

use super::monitor::CloseReason;
use super::*;
use crate::config::Faults;
use crate::metrics::{Exposition, Metrics};

/// A timeout that expires within a test.
const SHORT: Duration = Duration::from_millis(50);

pub(super) const HEAD: &[u8] = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n";

/// HTTP/2 preface, with empty settings.
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

pub(super) fn config() -> ListenerConfig {
    RawListener::default().validate(&mut Faults::new())
}

/// Shared token that reveals whether a body is still alive.
#[derive(Clone, Default)]
struct Held(Arc<()>);

/// An endless body that keeps `held`.
fn endless(held: &Held) -> Body {
    let held = held.clone();
    Body::from_stream(stream::repeat_with(move || {
        let _held = &held;
        Ok::<_, Infallible>(Bytes::from_static(&[b'x'; 8 << 10]))
    }))
}

pub(super) struct Server {
    pub(super) lifetime: Lifetime,
    /// Kept by endless bodies.
    held: Held,
    /// Where `/cut` stores its handle.
    handle: Arc<std::sync::Mutex<Option<ResponseHandle>>>,
}

impl Server {
    pub(super) fn new() -> Self {
        Self { lifetime: Lifetime::new(), held: Held::default(), handle: Arc::default() }
    }

    pub(super) fn app(&self) -> axum::Router {
        let (held, kept, handle) = (self.held.clone(), self.held.clone(), Arc::clone(&self.handle));
        axum::Router::new()
            .route("/", get(async || "served"))
            .route("/peer", get(async |Extension(peer): Extension<PeerAddress>| peer.0.to_string()))
            .route("/body", post(async |body: Bytes| body.len().to_string()))
            .route("/endless", get(async move || endless(&held)))
            .route(
                "/silent",
                get(async move |Extension(of_this): Extension<ResponseHandle>| {
                    *handle.lock().unwrap() = Some(of_this);
                    let first = stream::once(async { Ok::<_, Infallible>(Bytes::from_static(b"first")) });
                    Body::from_stream(futures::StreamExt::chain(
                        first,
                        stream::poll_fn(move |_| {
                            let _kept = &kept;
                            std::task::Poll::Pending
                        }),
                    ))
                }),
            )
    }

    /// Serves one end of a small pipe; returns the task and the other end. Timeouts not set by `change` do
    /// not expire.
    fn connect(&self, change: impl FnOnce(&mut Timeouts)) -> (JoinHandle<CloseReason>, DuplexStream) {
        let (here, there) = duplex(1 << 10);
        let long = Duration::from_secs(3_600);
        let mut timeouts =
            Timeouts { header: long, body: long, idle: long, write: long, keep_alive: long, max_age: None };
        change(&mut timeouts);
        let accepted = Accepted { peer: SocketAddr::from(([10, 0, 0, 7], 40_000)), at: Instant::now() };
        let serving = ConnectionSetup {
            protocol: Protocol::Http,
            app: self.app(),
            timeouts,
            lifetime: self.lifetime.clone(),
        };
        (self.lifetime.spawn("connection", serve(here, serving, accepted)), there)
    }

    /// Whether a body is alive; the routes of an ended connection hold no token.
    fn is_held(&self) -> bool {
        Arc::strong_count(&self.held.0) > 1
    }
}

async fn read_until(peer: &mut DuplexStream, expected: &str) -> String {
    let mut received = Vec::new();
    while !String::from_utf8_lossy(&received).contains(expected) {
        let mut buffer = [0; 256];
        let len = peer.read(&mut buffer).await.unwrap();
        assert!(len > 0, "it ended before `{expected}`: {}", String::from_utf8_lossy(&received));
        received.extend_from_slice(&buffer[..len]);
    }
    String::from_utf8(received).unwrap()
}

#[tokio::test]
async fn who_sends_no_whole_head_is_dropped_when_the_header_timeout_is_over() {
    for beginning in [&b""[..], b"GET / HT", b"GET / HTTP/1.1\r\nhost: here\r\nx-slow: ", HTTP2_PREFACE] {
        let server = Server::new();
        let (ended, mut peer) = server.connect(|timeouts| timeouts.header = SHORT);
        peer.write_all(beginning).await.unwrap();
        assert_eq!(ended.await.unwrap(), CloseReason::HeaderTimeout, "{beginning:?}");
    }
}

#[tokio::test]
async fn a_request_knows_its_peer() {
    let server = Server::new();
    let (_ended, mut peer) = server.connect(|_| ());
    peer.write_all(b"GET /peer HTTP/1.1\r\nhost: here\r\n\r\n").await.unwrap();
    read_until(&mut peer, "10.0.0.7:40000").await;
}

#[tokio::test]
async fn a_header_now_and_then_does_not_help() {
    let server = Server::new();
    let (ended, mut peer) = server.connect(|timeouts| timeouts.header = SHORT);
    peer.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
    let drip = async {
        while peer.write_all(b"x: y\r\n").await.is_ok() {
            tokio::time::sleep(SHORT / 10).await;
        }
    };
    let (ended, ()) = tokio::join!(ended, drip);
    assert_eq!(ended.unwrap(), CloseReason::HeaderTimeout);
}

#[tokio::test]
async fn a_connection_without_requests_ends_when_the_idle_timeout_is_over() {
    let server = Server::new();
    let (ended, mut peer) = server.connect(|timeouts| timeouts.idle = SHORT);
    peer.write_all(HEAD).await.unwrap();
    read_until(&mut peer, "served").await;
    // An incomplete head is not a request.
    drop(peer.write_all(b"GET / HTTP/1.1\r\n").await);
    assert_eq!(ended.await.unwrap(), CloseReason::IdleTimeout);
}

#[tokio::test]
async fn a_body_that_does_not_arrive_is_answered() {
    let server = Server::new();
    let (_ended, mut peer) = server.connect(|timeouts| timeouts.body = SHORT);
    peer.write_all(b"POST /body HTTP/1.1\r\nhost: here\r\ncontent-length: 9\r\n\r\nhalf").await.unwrap();
    let answer = read_until(&mut peer, "did not arrive within").await;
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
}

#[tokio::test]
async fn a_client_that_does_not_read_loses_connection_and_what_its_answer_holds() {
    let server = Server::new();
    let (ended, mut peer) = server.connect(|timeouts| timeouts.write = SHORT);
    peer.write_all(b"GET /endless HTTP/1.1\r\nhost: here\r\n\r\n").await.unwrap();
    assert_eq!(ended.await.unwrap(), CloseReason::WriteTimeout);
    assert!(!server.is_held());
}

#[tokio::test]
async fn an_answer_is_cut_from_outside_though_nothing_comes() {
    let server = Server::new();
    let (ended, mut peer) = server.connect(|_| ());
    peer.write_all(b"GET /silent HTTP/1.1\r\nhost: here\r\n\r\n").await.unwrap();
    read_until(&mut peer, "first").await;
    assert!(server.is_held());
    server.handle.lock().unwrap().as_ref().unwrap().cut();
    assert_eq!(ended.await.unwrap(), CloseReason::WriteTimeout);
    assert!(!server.is_held());
}

#[tokio::test]
async fn a_process_that_leaves_serves_on_and_says_so_and_one_that_drains_closes() {
    let server = Server::new();
    let (idle_ended, mut idle) = server.connect(|_| ());
    let (busy_ended, mut busy) = server.connect(|_| ());
    let (new_ended, mut new) = server.connect(|_| ());
    idle.write_all(HEAD).await.unwrap();
    assert!(!read_until(&mut idle, "served").await.contains("connection: close"));
    busy.write_all(b"GET /silent HTTP/1.1\r\nhost: here\r\n\r\n").await.unwrap();
    read_until(&mut busy, "first").await;

    server.lifetime.leave();
    new.write_all(HEAD).await.unwrap();
    assert!(read_until(&mut new, "served").await.contains("connection: close"));
    assert_eq!(new_ended.await.unwrap(), CloseReason::Finished);
    assert!(!idle_ended.is_finished(), "the next request on it is told");

    server.lifetime.drain(Duration::ZERO).await;
    assert_eq!(idle_ended.await.unwrap(), CloseReason::Finished);
    let (late_ended, mut late) = server.connect(|_| ());
    late.write_all(HEAD).await.unwrap();
    assert!(read_until(&mut late, "served").await.contains("connection: close"));
    assert_eq!(late_ended.await.unwrap(), CloseReason::Finished);
    assert!(!busy_ended.is_finished(), "its answer may end");
    let (outcome, busy_ended) = tokio::join!(server.lifetime.shut_down(Duration::from_secs(20)), busy_ended);
    assert_eq!(
        (outcome, busy_ended.unwrap()),
        (crate::shutdown::ShutdownOutcome::Clean, CloseReason::Stopped)
    );
}

/// Frame types received by an HTTP/2 peer until the end of the connection.
async fn http2_frames(peer: &mut DuplexStream) -> Vec<u8> {
    let mut types = Vec::new();
    let mut head = [0; 9];
    while peer.read_exact(&mut head).await.is_ok() {
        let len = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let mut payload = vec![0; len];
        peer.read_exact(&mut payload).await.unwrap();
        types.push(head[3]);
        let is_ping = head[3] == 6 && head[4] & 1 == 0;
        if is_ping {
            let pong = [&[0, 0, 8, 6, 1, 0, 0, 0, 0], payload.as_slice()].concat();
            peer.write_all(&pong).await.unwrap();
        }
    }
    types
}

/// `GET path` as an HTTP/2 headers frame on this stream, without compression.
fn http2_get(stream: u8, path: &str) -> Vec<u8> {
    let mut block = vec![0x82, 0x86, 0x04, path.len() as u8];
    block.extend_from_slice(path.as_bytes());
    block.extend_from_slice(&[0x01, 4]);
    block.extend_from_slice(b"here");
    [&[0, 0, block.len() as u8, 1, 5, 0, 0, 0, stream], block.as_slice()].concat()
}

/// An HTTP/2 frame that cancels the request on this stream.
fn http2_reset(stream: u8) -> Vec<u8> {
    const CANCEL: u8 = 8;
    vec![0, 0, 4, 3, 0, 0, 0, 0, stream, 0, 0, 0, CANCEL]
}

/// Sends one HTTP/2 request and waits for its answer.
async fn ask_over_http2(peer: &mut DuplexStream) {
    peer.write_all(&[HTTP2_PREFACE, &http2_get(1, "/")].concat()).await.unwrap();
    let mut buffer = [0; 512];
    let mut received = Vec::new();
    while !received.windows(6).any(|bytes| bytes == b"served") {
        let len = peer.read(&mut buffer).await.unwrap();
        received.extend_from_slice(&buffer[..len]);
    }
}

#[tokio::test]
async fn an_http2_client_hears_at_once_that_the_process_leaves() {
    const GOAWAY: u8 = 7;
    let server = Server::new();
    let (ended, mut peer) = server.connect(|_| ());
    ask_over_http2(&mut peer).await;
    server.lifetime.leave();
    assert!(http2_frames(&mut peer).await.contains(&GOAWAY));
    assert_eq!(ended.await.unwrap(), CloseReason::Finished);
}

/// Without the limit it would be kept for as long as the client sends requests.
#[tokio::test(start_paused = true)]
async fn an_http2_client_hears_that_its_connection_is_old() {
    const GOAWAY: u8 = 7;
    let server = Server::new();
    let connected = Instant::now();
    let (ended, mut peer) = server.connect(|timeouts| timeouts.max_age = Some(Duration::from_secs(600)));
    ask_over_http2(&mut peer).await;
    assert!(http2_frames(&mut peer).await.contains(&GOAWAY));
    assert!((540..=600).contains(&connected.elapsed().as_secs()), "{:?}", connected.elapsed());
    assert_eq!(ended.await.unwrap(), CloseReason::Finished);
}

/// A cancelled request does not count as open, but costs work ("rapid reset").
#[tokio::test]
async fn an_http2_client_that_cancels_request_after_request_loses_its_connection() {
    const GOAWAY: u8 = 7;
    const ENHANCE_YOUR_CALM: [u8; 4] = [0, 0, 0, 11];
    let server = Server::new();
    let (ended, mut peer) = server.connect(|_| ());
    let streams = (0..100).map(|idx| 2 * idx + 1);
    let requests: Vec<_> = streams.flat_map(|stream| [http2_get(stream, "/"), http2_reset(stream)]).collect();
    // Fails where the server has closed the connection.
    drop(peer.write_all(&[HTTP2_PREFACE, &requests.concat()].concat()).await);
    drop(peer.shutdown().await);
    let mut received = Vec::new();
    peer.read_to_end(&mut received).await.unwrap();
    assert_eq!(ended.await.unwrap(), CloseReason::Finished);
    let (mut rest, mut reasons) = (received.as_slice(), Vec::new());
    while let [_, high, low, kind, _, _, _, _, _, others @ ..] = rest {
        let (payload, next) = others.split_at(usize::from(u16::from_be_bytes([*high, *low])));
        // The last stream, then the reason.
        reasons.extend((*kind == GOAWAY).then(|| payload[4..8].to_vec()));
        rest = next;
    }
    assert_eq!(reasons, [ENHANCE_YOUR_CALM]);
}

/// A panic in one is logged, and a shutdown waits for it and names it.
#[tokio::test]
async fn http2_requests_are_tasks_of_the_lifetime() {
    let server = Server::new();
    let (ended, mut peer) = server.connect(|_| ());
    peer.write_all(&[HTTP2_PREFACE, &http2_get(1, "/silent")].concat()).await.unwrap();
    let mut buffer = [0; 512];
    let mut received = Vec::new();
    while !received.windows(5).any(|bytes| bytes == b"first") {
        let len = peer.read(&mut buffer).await.unwrap();
        received.extend_from_slice(&buffer[..len]);
    }
    assert_eq!(server.lifetime.tasks(), "connection x1, http2-stream x1");
    drop(peer);
    assert_eq!(ended.await.unwrap(), CloseReason::Finished);
    let outcome = server.lifetime.shut_down(Duration::from_secs(20)).await;
    assert_eq!(outcome, crate::shutdown::ShutdownOutcome::Clean);
}

#[tokio::test]
async fn an_http2_client_without_a_window_loses_its_answer_and_then_the_connection() {
    let server = Server::new();
    let (ended, mut peer) = server.connect(|timeouts| {
        timeouts.write = SHORT;
        timeouts.idle = SHORT;
    });
    peer.write_all(&[HTTP2_PREFACE, &http2_get(1, "/endless")].concat()).await.unwrap();
    // The peer reads every frame but grants no further window.
    let (_frames, ended) = tokio::join!(http2_frames(&mut peer), ended);
    assert_eq!(ended.unwrap(), CloseReason::IdleTimeout);
    assert!(!server.is_held());
}

pub(super) async fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

#[tokio::test]
async fn accepted_sockets_send_at_once_and_notice_a_peer_that_is_gone() {
    let (socket, address) = listener().await;
    let _client = TcpStream::connect(address).await.unwrap();
    let connection = socket.accept().await.unwrap().0;
    assert!(!connection.nodelay().unwrap(), "what the system does by itself");
    socket::prepare(&connection, Duration::from_secs(30));
    let options = socket2::SockRef::from(&connection);
    assert!(connection.nodelay().unwrap() && options.keepalive().unwrap());
    assert_eq!(options.tcp_user_timeout().unwrap(), Some(Duration::from_secs(30)));
}

async fn get_root(address: SocketAddr) -> io::Result<String> {
    let mut client = TcpStream::connect(address).await?;
    client.write_all(b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n").await?;
    let mut answer = String::new();
    client.read_to_string(&mut answer).await?;
    Ok(answer)
}

#[tokio::test]
async fn sockets_beyond_the_limit_are_turned_away_and_the_admin_address_answers() {
    let (server, metrics) = (Server::new(), Metrics::new());
    let limited = ListenerConfig { max_connections: 2, max_connections_per_address: 2, ..config() };
    let connections = Connections::new(limited, &metrics);
    let ((socket, address), (admin, admin_address)) = (listener().await, listener().await);
    let _server =
        Listener::new(socket, None, &connections).serve_http("http", server.app(), &server.lifetime);
    let _admin = Listener::new(admin, None, &connections.for_admin()).serve_http(
        "admin",
        server.app(),
        &server.lifetime,
    );
    let page = || metrics.encode(Exposition::Prometheus);
    let idle = [TcpStream::connect(address).await.unwrap(), TcpStream::connect(address).await.unwrap()];
    let mut third = TcpStream::connect(address).await.unwrap();
    let mut answer = Vec::new();
    // Closed, or reset if data was sent.
    drop(third.read_to_end(&mut answer).await);
    assert!(answer.is_empty());
    let refused = r#"outrider_connections_closed_total{listener="http",reason="max_connections"} 1"#;
    assert!(page().contains(refused), "{}", page());
    assert!(get_root(admin_address).await.unwrap().ends_with("served"));
    drop(idle);
    while !page().contains(r#"outrider_connections{listener="http"} 0"#) {
        tokio::task::yield_now().await;
    }
    assert!(get_root(address).await.unwrap().ends_with("served"));
}

/// Requests `/` over a new connection, using an existing socket's descriptor; returns the response.
async fn ask(socket: tokio::net::TcpSocket, address: SocketAddr) -> String {
    let mut connection = socket.connect(address).await.unwrap();
    connection.write_all(b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    connection.read_to_end(&mut answer).await.unwrap();
    String::from_utf8(answer).unwrap()
}

/// Each test runs in its own process, so it may change the process's limit.
#[tokio::test(flavor = "multi_thread")]
async fn without_descriptors_listeners_rest_and_health_checks_are_answered() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (server, metrics) = (Server::new(), Metrics::new());
    let connections = Connections::new(config(), &metrics);
    let bind = || TcpListener::bind("127.0.0.1:0");
    let (http, grpc, admin) = (bind().await.unwrap(), bind().await.unwrap(), bind().await.unwrap());
    let addresses = [&http, &grpc, &admin].map(|socket| socket.local_addr().unwrap());
    let listener = |socket| Listener::new(socket, None, &connections);
    listener(http).serve_http("http", server.app(), &server.lifetime);
    listener(grpc).serve_grpc("grpc", Routes::default(), &server.lifetime);
    crate::health::serve_admin(admin, server.app(), &connections, &server.lifetime);
    assert!(ask(tokio::net::TcpSocket::new_v4().unwrap(), addresses[2]).await.ends_with("served"));

    // Create the clients' sockets before the process runs out of descriptors.
    let sockets: Vec<_> = (0..5).map(|_| tokio::net::TcpSocket::new_v4().unwrap()).collect();
    let mut sockets = sockets.into_iter();
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let highest = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().to_string_lossy().parse::<u64>().ok());
    // Fill the gaps below the highest descriptor, so that none is left.
    let limit = highest.max().unwrap() + 1;
    setrlimit(Resource::RLIMIT_NOFILE, limit, hard).unwrap();
    let mut filler = Vec::new();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        filler.push(file);
    }
    let waiting = [addresses[0], addresses[1]].map(|address| {
        let socket = sockets.next().unwrap();
        server.lifetime.spawn("client", async move { socket.connect(address).await.unwrap() })
    });
    for socket in sockets.by_ref() {
        assert!(ask(socket, addresses[2]).await.ends_with("served"), "a health check is answered");
    }
    for name in ["http", "grpc"] {
        let failed = format!("listener=\"{name}\",reason=\"accept_error\"");
        while !metrics.encode(Exposition::Prometheus).lines().any(|line| line.contains(&failed)) {
            tokio::task::yield_now().await;
        }
    }
    drop(filler);
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
    // The waiting connections are served.
    let [http, grpc] = waiting;
    let mut http = http.await.unwrap();
    http.write_all(HEAD).await.unwrap();
    let mut first = [0; 12];
    http.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 200");
    let mut grpc = grpc.await.unwrap();
    grpc.write_all(HTTP2_PREFACE).await.unwrap();
    assert!(grpc.read(&mut first).await.unwrap() > 0, "its settings");
}
