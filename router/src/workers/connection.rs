//! The long-lived stream to a worker: connect, shake hands, exchange frames until either side ends it.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use proto::v1::worker_client::WorkerClient;
use proto::version::{PROTOCOL_VERSIONS, common_version};
use proto::{MAX_ASSET_BYTES, MAX_FRAME_BYTES, v1};
use speculation::Role;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

use crate::workers::QUEUED_FRAMES;
use crate::workers::tls::WorkerTls;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Timeout for the worker's hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// A worker that is silent on the transport for interval + timeout counts as dead, even if no packet reports
/// it.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(3);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Timeout for fetching one asset.
const ASSET_TIMEOUT: Duration = Duration::from_secs(60);

/// An open stream after the handshake.
#[derive(Debug)]
pub struct Connection {
    /// Client for other calls to the same worker.
    pub client: WorkerClient<Channel>,
    /// The worker's hello.
    pub hello: v1::WorkerHello,
    /// Maximum number of KV blocks this router may reserve there, if the worker sent it.
    pub credits: Option<u64>,
    /// Role of the worker.
    pub role: Role,
    /// Frames to the worker.
    pub outbox: mpsc::Sender<v1::RouterFrame>,
    /// Frames from the worker.
    pub frames: Streaming<v1::WorkerFrame>,
}

/// Identity and TLS settings that this router uses with every worker.
#[derive(Debug)]
pub struct RouterIdentity {
    /// Distinguishes routers at workers that serve several.
    pub router_id: u64,
    /// TLS settings for workers at `https://` addresses.
    pub tls: Option<WorkerTls>,
}

/// Connects to a worker that discovery lists in this role, and completes the handshake.
pub async fn connect(address: &str, role: &str, identity: &RouterIdentity) -> anyhow::Result<Connection> {
    let mut endpoint = Endpoint::from_shared(address.to_owned())
        .with_context(|| format!("`{address}` is not an address; expected http://HOST:PORT"))?
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true);
    if address.starts_with("https:") {
        let tls = identity
            .tls
            .as_ref()
            .context("the worker uses TLS: set --worker-ca FILE to the authority of its certificate")?;
        endpoint = endpoint.tls_config(tls.of(role).config())?;
    } else {
        ensure!(
            identity.tls.is_none(),
            "`{address}` is plain text, but --worker-ca requires TLS for every worker: set --tls-cert at the worker, or remove --worker-ca"
        );
    }
    let channel = open(&endpoint, CONNECT_TIMEOUT).await?;
    let mut client = WorkerClient::new(channel).max_decoding_message_size(4 * MAX_FRAME_BYTES);
    let (outbox, outgoing) = mpsc::channel(QUEUED_FRAMES);
    let hello = v1::RouterHello {
        protocol_version_min: *PROTOCOL_VERSIONS.start(),
        protocol_version_max: *PROTOCOL_VERSIONS.end(),
        router_id: identity.router_id,
    };
    outbox.try_send(v1::RouterFrame { hello: Some(hello), ..v1::RouterFrame::default() })?;
    let attach = client.attach(ReceiverStream::new(outgoing));
    let mut frames = tokio::time::timeout(HELLO_TIMEOUT, attach)
        .await
        .context("timed out waiting for the hello")??
        .into_inner();
    let first = tokio::time::timeout(HELLO_TIMEOUT, frames.message())
        .await
        .context("timed out waiting for the hello")??;
    let v1::WorkerFrame { hello, credits, .. } = first.unwrap_or_default();
    let hello = hello.context("the first frame has no hello")?;
    let credits = credits.map(|credits| credits.blocks);
    let role = match hello.role() {
        v1::WorkerRole::Draft => Role::Draft,
        v1::WorkerRole::Target => Role::Target,
        v1::WorkerRole::Unspecified => bail!("the hello has no role"),
    };
    let worker_versions = hello.protocol_version_min..=hello.protocol_version_max;
    let version = common_version(&PROTOCOL_VERSIONS, &worker_versions).with_context(|| {
        format!("the worker supports protocol versions {worker_versions:?}, this router {PROTOCOL_VERSIONS:?}: upgrade the older one")
    })?;
    tracing::debug!(address, version, "worker connected");
    Ok(Connection { client, hello, credits, role, outbox, frames })
}

/// Opens a channel within `timeout`. The endpoint's own timeout would end with TCP's handshake, before that
/// of TLS.
async fn open(endpoint: &Endpoint, timeout: Duration) -> anyhow::Result<Channel> {
    let opened = tokio::time::timeout(timeout, endpoint.connect()).await;
    opened.context("timed out connecting")?.context("cannot connect")
}

/// Fetches all assets of a worker, by name.
pub async fn fetch_assets(
    client: &WorkerClient<Channel>,
    assets: &[v1::Asset],
) -> anyhow::Result<BTreeMap<String, Vec<u8>>> {
    check_total(assets)?;
    let mut fetched = BTreeMap::new();
    for asset in assets {
        fetched.insert(asset.name.clone(), fetch_asset(client, asset).await?);
    }
    Ok(fetched)
}

/// Refuses assets that are too large together: a worker may announce any number of them.
pub fn check_total<'a>(assets: impl IntoIterator<Item = &'a v1::Asset>) -> anyhow::Result<()> {
    let total = assets.into_iter().fold(0_u64, |total, asset| total.saturating_add(asset.size));
    ensure!(
        total <= MAX_ASSET_BYTES,
        "the assets have {total} bytes together, more than the limit of {MAX_ASSET_BYTES}"
    );
    Ok(())
}

/// Fetches one asset within a minute and checks it against the hash in the handshake.
pub async fn fetch_asset(client: &WorkerClient<Channel>, asset: &v1::Asset) -> anyhow::Result<Vec<u8>> {
    let fetched = tokio::time::timeout(ASSET_TIMEOUT, read_asset(client, asset)).await;
    fetched
        .with_context(|| format!("{} was not received within {} s", asset.name, ASSET_TIMEOUT.as_secs()))?
}

async fn read_asset(client: &WorkerClient<Channel>, asset: &v1::Asset) -> anyhow::Result<Vec<u8>> {
    use sha2::{Digest, Sha256};
    let name = &asset.name;
    ensure!(
        asset.size <= MAX_ASSET_BYTES,
        "{name} has {} bytes, more than the limit of {MAX_ASSET_BYTES}",
        asset.size
    );
    let request = v1::FetchAssetRequest { name: name.clone() };
    let mut chunks = client
        .clone()
        .fetch_asset(request)
        .await
        .with_context(|| format!("cannot fetch {name}"))?
        .into_inner();
    let mut bytes = Vec::with_capacity(asset.size as usize);
    // Hashed as it arrives: an asset may have many megabytes, and other tasks run between two chunks.
    let mut hasher = Sha256::new();
    while let Some(chunk) = chunks.message().await.with_context(|| format!("cannot fetch {name}"))? {
        ensure!(bytes.len() + chunk.data.len() <= asset.size as usize, "{name} is longer than announced");
        hasher.update(&chunk.data);
        bytes.extend_from_slice(&chunk.data);
    }
    let digest: String = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    ensure!(digest == asset.sha256, "{name} does not have the announced hash");
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use service::tls::ClientTls;

    use super::*;

    #[test]
    fn assets_are_limited_together() {
        let asset = |size| v1::Asset { size, ..v1::Asset::default() };
        check_total(&[asset(MAX_ASSET_BYTES - 1), asset(1)]).unwrap();
        check_total(&[asset(MAX_ASSET_BYTES), asset(1)]).unwrap_err();
        check_total(&[asset(u64::MAX), asset(1)]).unwrap_err();
    }

    /// A stopped process, or a proxy without one behind it, accepts connections and says nothing.
    #[tokio::test]
    async fn a_worker_that_never_answers_the_tls_handshake_is_given_up() {
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("https://{}", silent.local_addr().unwrap());
        let directory = tempfile::tempdir().unwrap();
        let ca = directory.path().join("ca.pem");
        let authority = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        std::fs::write(&ca, authority.cert.pem()).unwrap();
        let tls = ClientTls::read(&ca, None).unwrap().config();
        let endpoint = Endpoint::from_shared(address).unwrap().tls_config(tls).unwrap();
        let error = open(&endpoint, Duration::from_millis(20)).await.unwrap_err();
        assert_eq!(error.to_string(), "timed out connecting");
    }
}
