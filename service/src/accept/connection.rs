//! One connection, from its first byte to its end, with the same rules for HTTP/1 and HTTP/2 (`monitor`).
//!
//! A connection is closed when no complete request head arrives within the header timeout, when there is no
//! request for the idle timeout, or when a response is not read for the write timeout (HTTP/2: only that
//! response is ended). An HTTP/2 client is asked to connect again when its connection is old, if there is a
//! maximum age. A process that leaves asks its peers to connect elsewhere, and waits for responses in
//! flight.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use http::{HeaderValue, Request, Response, header};
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

use super::PeerAddress;
use super::config::Timeouts;
use super::monitor::{CloseReason, ConnectionAction, ConnectionMonitor};
use super::request_body::RequestBody;
use super::response::{ResponseBody, ResponseHandle};
use super::state::ConnectionState;
use super::write_timeout::WriteTimeout;
use crate::on_wake::OnWake;
use crate::shutdown::Lifetime;

/// Maximum buffer of an HTTP/1 connection in each direction; also limits a request's head.
const HTTP1_BUFFER_BYTES: usize = 64 << 10;

/// Send buffer of an HTTP/2 stream, for data beyond the client's window.
const HTTP2_SEND_BUFFER_BYTES: usize = 64 << 10;

/// Protocol of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    /// HTTP/1 or HTTP/2, chosen by the client.
    Http,
    /// gRPC: HTTP/2 only.
    Grpc,
}

/// What a listener's connections share.
#[derive(Clone)]
pub(super) struct ConnectionSetup {
    pub(super) protocol: Protocol,
    pub(super) app: axum::Router,
    pub(super) timeouts: Timeouts,
    pub(super) lifetime: Lifetime,
}

/// Runs the requests of HTTP/2 connections as tasks of the lifetime, which waits for them and logs their
/// panics.
#[derive(Clone)]
struct StreamExecutor(Lifetime);

impl<F> Executor<F> for StreamExecutor
where
    F: Future<Output: Send> + Send + 'static,
{
    fn execute(&self, stream: F) {
        drop(self.0.spawn("http2-stream", stream));
    }
}

/// A connection's peer, and when it connected.
#[derive(Clone, Copy, Debug)]
pub(super) struct Accepted {
    pub(super) peer: SocketAddr,
    pub(super) at: Instant,
}

/// Serves a connection until it ends.
pub(super) async fn serve<I>(io: I, setup: ConnectionSetup, accepted: Accepted) -> CloseReason
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let state = Arc::new(ConnectionState::new());
    let timeouts = setup.timeouts;
    let io = TokioIo::new(WriteTimeout::new(io, timeouts.write, Arc::clone(&state.written)));
    let (app, of_requests) = (TowerToHyperService::new(setup.app.clone()), Arc::clone(&state));
    let lifetime = setup.lifetime.clone();
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(PeerAddress(accepted.peer));
        let state = Arc::clone(&of_requests);
        answer(app.clone(), state, lifetime.clone(), timeouts.body, request)
    });
    let builder = builder(&setup);
    let mut connection = Box::pin(builder.serve_connection(io, service));
    let mut monitor = ConnectionMonitor::new(state, timeouts, accepted.peer, accepted.at);
    loop {
        let event = OnWake::new(monitor.next_event(setup.lifetime.clone()));
        tokio::select! {
            biased;
            // First: data read or sent by the peer counts before any timeout is checked.
            ended = connection.as_mut() => return monitor.close_reason(ended),
            event = event => monitor.on_event(event),
        }
        match monitor.check(Instant::now()) {
            ConnectionAction::Continue => {}
            ConnectionAction::Close => connection.as_mut().graceful_shutdown(),
            ConnectionAction::End(reason) => return reason,
        }
    }
}

fn builder(setup: &ConnectionSetup) -> Builder<StreamExecutor> {
    let mut builder = Builder::new(StreamExecutor(setup.lifetime.clone()));
    // No timer: the monitor implements the header timeout, for both protocols and before the protocol is
    // known.
    // Without `writev`, a chunk is copied into the buffer: the kernel takes longer to read its three parts
    // than to read one.
    builder.http1().max_buf_size(HTTP1_BUFFER_BYTES).writev(false);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(setup.timeouts.keep_alive)
        .keep_alive_timeout(setup.timeouts.keep_alive)
        .max_send_buf_size(HTTP2_SEND_BUFFER_BYTES);
    match setup.protocol {
        Protocol::Http => builder,
        Protocol::Grpc => builder.http2_only(),
    }
}

async fn answer(
    app: TowerToHyperService<axum::Router>,
    state: Arc<ConnectionState>,
    lifetime: Lifetime,
    body_timeout: Duration,
    request: Request<Incoming>,
) -> Result<Response<ResponseBody>, Infallible> {
    let (slot, body) = state.begin(request.version());
    let handle = ResponseHandle(Arc::clone(&slot));
    let mut request = request.map(|body| Body::new(RequestBody::new(body, slot, body_timeout)));
    request.extensions_mut().insert(handle);
    let (mut head, content) = app.call(request).await?.into_parts();
    if state.is_http1() && lifetime.is_leaving() {
        head.headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    body.fill(content);
    Ok(Response::from_parts(head, body))
}
