//! State shared by the connections to workers: the connected workers, and the models that targets serve.
//!
//! A worker answers only on a router's newest stream, so a second stream to the same process, even by another
//! address, would silence the first. The registry never touches sequences: frames go to the scheduler's
//! driver.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context as _;
use proto::v1;
use proto::v1::worker_client::WorkerClient;
use scheduling::scheduler::events::WorkerInfo;
use scheduling::scheduler::pairing;
use speculation::Role;
use speculation::fingerprint::{first_difference, token_list_from_json};
use tokio::sync::{Mutex, mpsc, watch};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use crate::catalog::Catalog;
use crate::workers::connection::{
    Connection, RouterIdentity, check_total, connect, fetch_asset, fetch_assets,
};
use crate::workers::follow::Endpoint;
use crate::workers::frame_queue::FrameQueue;
use crate::workers::served_models::{ServedModels, TargetModel, asset_hashes};
use crate::workers::token_differences::TokenDifferences;
use crate::workers::{ConnectedWorker, WorkerEvent, WorkerKey, worker_info};
use text::{ModelText, asset};

/// State shared by the connections.
#[derive(Debug)]
pub struct Registry {
    identity: RouterIdentity,
    catalog: Catalog,
    events: mpsc::Sender<WorkerEvent>,
    next_key: AtomicU64,
    state: Mutex<RegistryState>,
    token_differences: TokenDifferences,
}

#[derive(Debug, Default)]
struct RegistryState {
    models: ServedModels,
    /// Workers that are connected now.
    connected: HashMap<WorkerKey, Peer>,
}

#[derive(Debug, Clone)]
struct Peer {
    info: WorkerInfo,
    hello: v1::WorkerHello,
    client: WorkerClient<Channel>,
    /// Cancelled when a newer connection reaches the same process.
    replaced: CancellationToken,
}

/// A connection that may be served: its worker is the one that discovery lists, and if it is a target, its
/// tokenizer and template can be used.
#[derive(Debug)]
pub(super) struct CheckedConnection {
    connection: Connection,
    /// `None` for a draft worker.
    model: Option<TargetModel>,
}

/// A worker's process, as its hello describes it. The role is a part of it: every worker can send the id of
/// another one, which discovery lists, and must not end connections to workers of the other role that way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProcessId {
    role: Role,
    worker_id: u64,
}

/// An established connection that broke: the worker stopped, or the network between.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct ConnectionEnded(String);

impl Registry {
    /// Creates a registry that sends its events to `events`.
    pub fn new(identity: RouterIdentity, catalog: Catalog, events: mpsc::Sender<WorkerEvent>) -> Self {
        Self {
            identity,
            catalog,
            events,
            next_key: AtomicU64::new(1),
            state: Mutex::default(),
            token_differences: TokenDifferences::default(),
        }
    }

    /// Connects and checks that the worker's role matches discovery. `last_process` is the process that last
    /// answered at this endpoint.
    ///
    /// Cancel safety: a dropped future leaves no state but `last_process`, and no connection.
    pub(super) async fn connect(
        &self,
        endpoint: &Endpoint,
        last_process: &mut Option<ProcessId>,
    ) -> anyhow::Result<CheckedConnection> {
        if let Some(peer) = self.connected_as(endpoint, *last_process).await {
            // A second stream would end the first, whose retry would end the second, and so on.
            let (role, address) = (peer.info.role.as_str(), peer.info.address);
            anyhow::bail!("the worker is already connected as {role} {address}: list it only once");
        }
        let connection = connect(&endpoint.address, &endpoint.role, &self.identity).await?;
        // Also if it is refused below: each further stream to it would end the one that is in use.
        *last_process = process_id(connection.role, &connection.hello);
        anyhow::ensure!(
            connection.role.as_str() == endpoint.role,
            "discovery lists the worker as {}, but its hello says {}",
            endpoint.role,
            connection.role.as_str()
        );
        let model = match connection.role {
            Role::Target => {
                Some(self.target_model(&connection.client, &endpoint.address, &connection.hello).await?)
            }
            Role::Draft => None,
        };
        Ok(CheckedConnection { connection, model })
    }

    /// Serves one connection until the worker ends it, `stopped` resolves, or the scheduler ends it because a
    /// removed worker has nothing left to run. Not cancel-safe: the driver must get a `Down` event for each
    /// `Up`.
    pub(super) async fn serve(
        &self,
        endpoint: &Endpoint,
        CheckedConnection { connection, model }: CheckedConnection,
        mut stopped: impl Future<Output = ()> + Unpin,
        mut listing: Listing,
    ) -> anyhow::Result<()> {
        let Connection { client, hello, credits, role, outbox, mut frames } = connection;
        let key = WorkerKey(self.next_key.fetch_add(1, Ordering::Relaxed));
        let (address, replaced, disconnect) =
            (&endpoint.address, CancellationToken::new(), CancellationToken::new());
        let info = worker_info(role, address, &hello, credits);
        let (model_id, numerics_id) = (&*hello.model_id, &*hello.numerics_id);
        tracing::info!(role = role.as_str(), address, model = model_id, numerics_id, "worker joined");
        let peer = Peer { info: info.clone(), hello, client, replaced: replaced.clone() };
        let others = self.register(key, &peer, model).await;
        let up = ConnectedWorker { key, info, outbox, disconnect: disconnect.clone() };
        let mut is_driver_running = self.events.send(WorkerEvent::Up(up)).await.is_ok();
        // Runs concurrently, so that a worker that does not serve its tokenizer delays no frames.
        let mut pairing_check = Box::pin(self.log_unpairable(peer, others));
        let mut is_pairing_checked = false;
        let queue = FrameQueue::new();
        let mut result = Ok(());
        while is_driver_running {
            let frame = tokio::select! {
                biased;
                // Shutdown.
                () = &mut stopped => break,
                // The worker was removed from the list, and nothing runs there anymore.
                () = disconnect.cancelled() => break,
                // The worker was removed from the list or put back.
                is_listed = listing.changed() => {
                    is_driver_running = self.events.send(WorkerEvent::Listed(key, is_listed)).await.is_ok();
                    continue;
                }
                // A newer connection reaches the same process, which answers only there.
                () = replaced.cancelled() => {
                    let reason = "a newer connection to the same worker replaces this one";
                    result = Err(ConnectionEnded(reason.to_owned()).into());
                    break;
                }
                // A frame, or the end of the stream.
                frame = queue.read(&mut frames) => frame,
                // The pairing check has logged its findings.
                () = &mut pairing_check, if !is_pairing_checked => {
                    is_pairing_checked = true;
                    continue;
                }
            };
            match frame {
                Ok(Some((frame, place))) => {
                    let event = WorkerEvent::Frame(key, frame, place);
                    is_driver_running = self.events.send(event).await.is_ok();
                }
                Ok(None) => break,
                Err(status) => {
                    result = Err(ConnectionEnded(status.message().to_owned()).into());
                    break;
                }
            }
        }
        self.unregister(key).await;
        // An error means that the driver has ended and needs no event.
        drop(self.events.send(WorkerEvent::Down(key)).await);
        result
    }

    /// Returns the target's model. Tokenizer and template are fetched from the worker, unless equal ones are
    /// known.
    async fn target_model(
        &self,
        client: &WorkerClient<Channel>,
        address: &str,
        hello: &v1::WorkerHello,
    ) -> anyhow::Result<TargetModel> {
        let known = self.state.lock().await.models.text(&asset_hashes(hello));
        if let Some(text) = known {
            return Ok(TargetModel::new(address, hello, text));
        }
        let assets = fetch_assets(client, &hello.assets).await?;
        let text = tokio::task::spawn_blocking(move || {
            ModelText::from_assets(|name| assets.get(name).map(Vec::as_slice))
        })
        .await?
        .context("the model's tokenizer or template cannot be used")?;
        Ok(TargetModel::new(address, hello, Arc::new(text)))
    }

    /// Returns the live connection to this process, or to this address in another role.
    async fn connected_as(&self, endpoint: &Endpoint, process: Option<ProcessId>) -> Option<Peer> {
        let state = self.state.lock().await;
        let is_same_worker = |peer: &&Peer| {
            peer.info.address == endpoint.address || (process.is_some() && peer.process_id() == process)
        };
        state.connected.values().find(is_same_worker).cloned()
    }

    /// Registers a worker, publishes a target's model to clients, and ends an older connection to the same
    /// process. Returns the workers of the other role.
    async fn register(&self, key: WorkerKey, peer: &Peer, model: Option<TargetModel>) -> Vec<Peer> {
        let mut state = self.state.lock().await;
        for other in state.connected.values() {
            if other.process_id().is_some() && other.process_id() == peer.process_id() {
                other.replaced.cancel();
            }
        }
        let others =
            state.connected.values().filter(|other| other.info.role != peer.info.role).cloned().collect();
        state.connected.insert(key, peer.clone());
        if model.is_some_and(|model| state.models.join(key, model)) {
            self.catalog.publish(state.models.entries());
        }
        others
    }

    /// Logs which of `others` the worker can never be paired with, and why.
    async fn log_unpairable(&self, peer: Peer, others: Vec<Peer>) {
        for other in others {
            let (draft, target) =
                if peer.info.role == Role::Draft { (&peer, &other) } else { (&other, &peer) };
            let Err(fault) = pairing::check(&draft.info, &target.info) else { continue };
            let detail = match fault {
                pairing::PairingError::Tokenizer => {
                    let of = |peer: &Peer| peer.info.tokenizer_fingerprint.clone();
                    let compare = differing_token(draft, target);
                    let difference = self.token_differences.describe((of(draft), of(target)), compare).await;
                    difference
                        .unwrap_or_else(|error| format!(" (cannot determine the differing token: {error:#})"))
                }
                pairing::PairingError::SamplingScheme { .. } => String::new(),
            };
            tracing::warn!(
                draft_worker = draft.info.address,
                target_worker = target.info.address,
                "these workers cannot be paired: {fault}{detail}"
            );
        }
    }

    /// Removes a worker whose connection has ended.
    async fn unregister(&self, key: WorkerKey) {
        let mut state = self.state.lock().await;
        state.connected.remove(&key);
        self.token_differences.retain(|fingerprint| {
            state.connected.values().any(|peer| peer.info.tokenizer_fingerprint == fingerprint)
        });
        if state.models.leave(key) {
            self.catalog.publish(state.models.entries());
        }
    }
}

/// Whether discovery lists a worker, and what was last reported to the scheduler.
#[derive(Debug)]
pub(super) struct Listing {
    listed: watch::Receiver<bool>,
    /// Whether changes are reported to the scheduler. False if discovery cannot tell why a worker is not
    /// listed.
    is_reported: bool,
    last_reported: bool,
}

impl Listing {
    pub(super) fn new(listed: watch::Receiver<bool>, is_reported: bool) -> Self {
        Self { listed, is_reported, last_reported: true }
    }

    /// Waits until the worker's listing differs from the last report.
    ///
    /// Cancel safety: nothing is lost.
    async fn changed(&mut self) -> bool {
        let last_reported = self.last_reported;
        if !self.is_reported || self.listed.wait_for(|listed| *listed != last_reported).await.is_err() {
            // Changes are not reported, or the follower has ended: shutdown.
            std::future::pending::<()>().await;
        }
        self.last_reported = !last_reported;
        self.last_reported
    }
}

impl Peer {
    fn process_id(&self) -> Option<ProcessId> {
        process_id(self.info.role, &self.hello)
    }
}

/// Returns the process of a worker; `None` if the worker sent no id.
fn process_id(role: Role, hello: &v1::WorkerHello) -> Option<ProcessId> {
    let worker_id = hello.worker_id;
    (worker_id != 0).then_some(ProcessId { role, worker_id })
}

/// Describes the first token to which two workers give different ids, if both serve their tokenizer.
async fn differing_token(draft: &Peer, target: &Peer) -> anyhow::Result<String> {
    let tokenizer = |peer: &Peer| {
        let asset = peer.hello.assets.iter().find(|asset| asset.name == asset::TOKENIZER).cloned();
        asset.context("no tokenizer.json")
    };
    let assets = [tokenizer(draft)?, tokenizer(target)?];
    if assets[0].sha256 == assets[1].sha256 {
        return Ok(", but their files are equal: one of them announces a wrong fingerprint".to_owned());
    }
    check_total(&assets)?;
    let mut files = Vec::new();
    for (peer, asset) in [draft, target].into_iter().zip(&assets) {
        files.push(fetch_asset(&peer.client, asset).await?);
    }
    // Reading token lists takes tens of milliseconds.
    let compare = move || {
        let read = |file: &Vec<u8>| anyhow::Ok(token_list_from_json(std::str::from_utf8(file)?)?);
        anyhow::Ok(first_difference(&read(&files[0])?, &read(&files[1])?))
    };
    let difference = tokio::task::spawn_blocking(compare).await??;
    Ok(difference.map_or_else(String::new, |difference| format!(": {difference}")))
}
