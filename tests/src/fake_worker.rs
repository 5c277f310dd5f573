//! Serves a fake worker, which speaks the worker's wire protocol, in this process.

use proto::v1::worker_server::{Worker, WorkerServer};
use service::shutdown::Lifetime;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;

/// Serves it on a free port for as long as `lifetime` lasts; returns its URL for routers.
pub async fn serve<W: Worker>(worker: W, lifetime: &Lifetime) -> anyhow::Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    let server = WorkerServer::new(worker).max_decoding_message_size(4 * proto::MAX_FRAME_BYTES);
    let server = Server::builder().add_service(server);
    let incoming = TcpListenerStream::new(listener);
    lifetime.spawn("fake worker", server.serve_with_incoming_shutdown(incoming, lifetime.cancelled()));
    Ok(url)
}
