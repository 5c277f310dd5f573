//! OTLP over HTTP/1.1, for collectors without gRPC: one connection per batch of spans.

use std::time::Duration;

use async_trait::async_trait;
use axum::body::Bytes;
use http::{HeaderValue, Request, Response, Uri, header};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use opentelemetry_http::{HttpClient, HttpError};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

/// Sends batches.
pub(super) struct ExportClient {
    /// Runtime of the sockets: the exporter calls from its own thread.
    pub(super) runtime: Handle,
    /// TLS for endpoints at `https://`.
    pub(super) tls: TlsConnector,
    /// Timeout of one batch.
    pub(super) timeout: Duration,
}

impl std::fmt::Debug for ExportClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExportClient").field("timeout", &self.timeout).finish_non_exhaustive()
    }
}

#[async_trait]
impl HttpClient for ExportClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (tls, timeout) = (self.tls.clone(), self.timeout);
        let sent = self.runtime.spawn(async move { tokio::time::timeout(timeout, send(request, tls)).await });
        sent.await?.map_err(|_elapsed| format!("no answer within {timeout:?}"))?
    }
}

async fn send(request: Request<Bytes>, tls: TlsConnector) -> Result<Response<Bytes>, HttpError> {
    let uri = request.uri();
    let is_tls = uri.scheme_str() == Some("https");
    let host = uri.host().ok_or("the endpoint names no host")?.trim_matches(['[', ']']).to_owned();
    let port = uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
    let stream = TcpStream::connect((host.as_str(), port)).await?;
    if is_tls {
        let stream = tls.connect(ServerName::try_from(host)?, stream).await?;
        exchange(stream, request).await
    } else {
        exchange(stream, request).await
    }
}

async fn exchange<S>(stream: S, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let request = in_origin_form(request)?;
    let answer = async move {
        let (head, body) = sender.send_request(request).await?.into_parts();
        Ok(Response::from_parts(head, body.collect().await?.to_bytes()))
    };
    // The connection ends when the sender is dropped; its result does not matter once there is a response.
    let (answer, _ended) = futures::future::join(answer, connection).await;
    answer
}

/// Converts the request to origin form, as HTTP/1.1 requires of clients: the path in the first line, the
/// authority in `host`.
fn in_origin_form(request: Request<Bytes>) -> Result<Request<Full<Bytes>>, HttpError> {
    let (mut head, body) = request.into_parts();
    let authority = head.uri.authority().ok_or("the endpoint names no host")?;
    let host = HeaderValue::from_str(authority.as_str())?;
    head.uri = head.uri.path_and_query().map_or_else(|| Uri::from_static("/"), |path| path.clone().into());
    head.headers.insert(header::HOST, host);
    Ok(Request::from_parts(head, Full::new(body)))
}
