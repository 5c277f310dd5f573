//! Who exists: follows discovery, keeps one connection to each worker process, and publishes the models that targets serve.
//!
//! Connections are kept by address, not by discovery's id: a worker that restarts at its address within its lease is
//! listed under two ids for a while. A worker answers on a router's newest stream only, so a second stream to one
//! process, by whichever way, would silence the first. A worker that cannot be reached is tried again for as long as
//! discovery lists it. One that is no longer listed is kept while it answers, unless somebody took it off the list
//! ([`Unlisted`]). The registry never touches sequences: what connections say goes to their owner.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use proto::v1;
use proto::v1::worker_client::WorkerClient;
use scheduling::scheduler::events::WorkerInfo;
use scheduling::scheduler::pairing;
use service::discovery::{Members, Unlisted};
use service::shutdown::Lifetime;
use speculation::Role;
use speculation::fingerprint::{first_difference, token_list_from_json};
use tokio::sync::{Mutex, Notify, mpsc, watch};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use crate::catalog::settings::RequestDefaults;
use crate::catalog::{Catalog, ModelEntry};
use crate::workers::connection::{Caller, Connection, connect, fetch_asset};
use crate::workers::{ConnectedWorker, WorkerEvent, WorkerKey, worker_info};
use text::ModelText;

const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(2);

/// Ends of connections that the follower has not seen yet.
const ENDED_QUEUE: usize = 64;

/// What discovery says.
#[derive(Debug)]
pub struct Membership {
    /// Who is listed.
    pub members: watch::Receiver<Members>,
    /// What to make of a worker that is not listed any more.
    pub unlisted: Unlisted,
}

/// Follows the membership until the lifetime ends.
pub async fn follow(registry: Arc<Registry>, membership: Membership, lifetime: Lifetime) {
    let Membership { mut members, unlisted } = membership;
    let mut followed: BTreeMap<Endpoint, Followed> = BTreeMap::new();
    let (forgotten, mut forgets) = mpsc::channel(ENDED_QUEUE);
    let cancelled = lifetime.cancelled();
    tokio::pin!(cancelled);
    loop {
        let listed = by_endpoint(&members.borrow_and_update());
        followed.retain(|endpoint, worker| match (listed.get(endpoint), unlisted) {
            (Some(ids), _) => {
                worker.is_listed_as(ids);
                true
            }
            (None, Unlisted::Unknown) => {
                worker.is_unlisted(endpoint);
                true
            }
            (None, Unlisted::Removed) => {
                // Ends the connection; what ran there is replayed elsewhere.
                let worker = worker.lifetime.clone();
                lifetime.spawn("forget worker", async move { worker.shut_down(MAX_BACKOFF).await });
                false
            }
        });
        for (endpoint, ids) in listed {
            followed.entry(endpoint).or_insert_with_key(|endpoint| {
                Followed::start(endpoint, ids, (&registry, &forgotten), &lifetime)
            });
        }
        tokio::select! {
            biased;
            // The router stops; children stop with it.
            () = &mut cancelled => return,
            // An unlisted worker's connection is over. Where it is listed again by now, it starts anew.
            Some(endpoint) = forgets.recv() => drop(followed.remove(&endpoint)),
            // A change, or a discovery that is gone and will not change anymore.
            changed = members.changed() => if changed.is_err() { return cancelled.await },
        }
    }
}

/// Where a worker of one role listens.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Endpoint {
    address: String,
    role: String,
}

/// One endpoint that discovery lists, or that answers still.
#[derive(Debug)]
struct Followed {
    /// Discovery's ids for it: more than one after a restart, until the older lease ends.
    ids: BTreeSet<String>,
    /// Told when the ids change.
    changed: Arc<Notify>,
    /// Told whether discovery lists it.
    listed: watch::Sender<bool>,
    lifetime: Lifetime,
}

impl Followed {
    /// Keeps a connection to the endpoint; `forgotten` is told once one that is not listed any more is over.
    fn start(
        endpoint: &Endpoint,
        ids: BTreeSet<String>,
        (registry, forgotten): (&Arc<Registry>, &mpsc::Sender<Endpoint>),
        lifetime: &Lifetime,
    ) -> Self {
        let (worker, changed, listed) = (lifetime.child(), Arc::default(), watch::Sender::new(true));
        let keep = KeepConnected {
            endpoint: endpoint.clone(),
            changed: Arc::clone(&changed),
            listed: listed.subscribe(),
            forgotten: forgotten.clone(),
        };
        worker.spawn("worker connection", keep.run(Arc::clone(registry), worker.clone()));
        Self { ids, changed, listed, lifetime: worker }
    }

    fn is_listed_as(&mut self, ids: &BTreeSet<String>) {
        if self.ids != *ids {
            // Another process may answer there now: the next attempt need not wait.
            self.changed.notify_one();
            self.ids.clone_from(ids);
        }
        self.listed.send_replace(true);
    }

    fn is_unlisted(&self, Endpoint { address, role }: &Endpoint) {
        if self.listed.send_replace(false) {
            tracing::info!(role, address, "discovery lists this worker no more, it is kept while it answers");
        }
    }
}

/// Each endpoint once, with all ids that it is listed under.
fn by_endpoint(members: &Members) -> BTreeMap<Endpoint, BTreeSet<String>> {
    let mut endpoints: BTreeMap<Endpoint, BTreeSet<String>> = BTreeMap::new();
    for (id, member) in members.iter() {
        let endpoint = Endpoint { address: member.address.clone(), role: member.role.clone() };
        endpoints.entry(endpoint).or_default().insert(id.clone());
    }
    endpoints
}

/// What connections share.
#[derive(Debug)]
pub struct Registry {
    caller: Caller,
    catalog: Catalog,
    events: mpsc::Sender<WorkerEvent>,
    next_key: AtomicU64,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// Every model that a target ever served here.
    models: BTreeMap<String, Arc<ModelEntry>>,
    /// Workers that are connected now.
    connected: HashMap<WorkerKey, Peer>,
}

#[derive(Debug, Clone)]
struct Peer {
    info: WorkerInfo,
    hello: v1::WorkerHello,
    client: WorkerClient<Channel>,
    /// Cancelled when a newer connection leads to the same process.
    replaced: CancellationToken,
}

impl Registry {
    /// A registry that reports to `events`.
    pub fn new(caller: Caller, catalog: Catalog, events: mpsc::Sender<WorkerEvent>) -> Self {
        Self { caller, catalog, events, next_key: AtomicU64::new(1), known: Mutex::default() }
    }

    /// Connects, and makes sure that the worker is what discovery says. Nothing is left behind where this is dropped.
    /// `last_worker_id` is the process that answered at this endpoint last.
    async fn reach(&self, endpoint: &Endpoint, last_worker_id: Option<u64>) -> anyhow::Result<Connection> {
        if let Some(peer) = self.connected_as(endpoint, last_worker_id).await {
            // One more stream would end that one, whose next attempt would end this one, and so on.
            let (role, address) = (peer.info.role.as_str(), peer.info.address);
            anyhow::bail!("the worker is connected already, as {role} {address}: list it once");
        }
        let connection = connect(&endpoint.address, &self.caller).await?;
        anyhow::ensure!(
            connection.role.as_str() == endpoint.role,
            "discovery says {}, the worker says {}",
            endpoint.role,
            connection.role.as_str()
        );
        if connection.role == Role::Target {
            self.publish_model(&connection.client, &connection.hello).await?;
        }
        Ok(connection)
    }

    /// One connection to its end, which the worker brings about or `unlisted`. Must not be dropped before: whoever heard of the
    /// worker has to hear of its end.
    async fn serve(
        &self,
        endpoint: &Endpoint,
        connection: Connection,
        mut unlisted: impl Future<Output = ()> + Unpin,
    ) -> anyhow::Result<()> {
        let Connection { client, hello, credits, role, outbox, mut frames } = connection;
        let key = WorkerKey(self.next_key.fetch_add(1, Ordering::Relaxed));
        let (address, replaced) = (&endpoint.address, CancellationToken::new());
        let info = worker_info(role, address, &hello, credits);
        tracing::info!(role = role.as_str(), address, model = hello.model_id, "worker joined");
        let peer = Peer { info: info.clone(), hello, client, replaced: replaced.clone() };
        let others = self.remember(key, &peer).await;
        let up = ConnectedWorker { key, info, outbox };
        let mut heard = self.events.send(WorkerEvent::Up(up)).await.is_ok();
        // Beside the frames: a worker that does not serve its tokenizer holds up nobody.
        let explaining = explain_pairs(peer, others);
        tokio::pin!(explaining);
        let mut is_explained = false;
        let mut ended = Ok(());
        while heard {
            let frame = tokio::select! {
                biased;
                // No longer listed, or the router stops.
                () = &mut unlisted => break,
                // A newer connection leads to the same process, which answers there.
                () = replaced.cancelled() => {
                    ended = Err(anyhow::anyhow!("a newer connection to the same worker replaces this one"));
                    break;
                }
                // The worker said something, or is gone.
                frame = frames.message() => frame,
                // Why it is never paired with some of the others was told.
                () = &mut explaining, if !is_explained => {
                    is_explained = true;
                    continue;
                }
            };
            match frame {
                Ok(Some(frame)) => heard = self.events.send(WorkerEvent::Frame(key, frame)).await.is_ok(),
                Ok(None) => break,
                Err(status) => {
                    ended = Err(anyhow::anyhow!("{}", status.message()));
                    break;
                }
            }
        }
        self.known.lock().await.connected.remove(&key);
        // An owner that is gone needs no word.
        drop(self.events.send(WorkerEvent::Down(key)).await);
        ended
    }

    /// Makes the target's model known to clients: tokenizer, template and limits come from the worker itself.
    async fn publish_model(
        &self,
        client: &WorkerClient<Channel>,
        hello: &v1::WorkerHello,
    ) -> anyhow::Result<()> {
        if self
            .known
            .lock()
            .await
            .models
            .get(&hello.model_id)
            .is_some_and(|known| known.numerics_id == hello.numerics_id)
        {
            return Ok(());
        }
        let mut assets = BTreeMap::new();
        for asset in &hello.assets {
            assets.insert(asset.name.clone(), fetch_asset(client, asset).await?);
        }
        let text = tokio::task::spawn_blocking(move || {
            ModelText::from_assets(|name| assets.get(name).map(Vec::as_slice))
        })
        .await?
        .context("the model's tokenizer or template cannot be used")?;
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let entry = ModelEntry {
            id: hello.model_id.clone(),
            model: hello.model_id.clone(),
            defaults: RequestDefaults::default(),
            created,
            text: Arc::new(text),
            max_model_len: hello.max_model_len,
            vocab_size: hello.vocab_size,
            eos_token_ids: hello.eos_token_ids.clone(),
            numerics_id: hello.numerics_id.clone(),
        };
        let mut known = self.known.lock().await;
        known.models.insert(entry.id.clone(), Arc::new(entry));
        self.catalog.publish(known.models.values().cloned());
        Ok(())
    }

    /// The live connection to the process `worker_id`, or to this address in another role.
    async fn connected_as(&self, endpoint: &Endpoint, worker_id: Option<u64>) -> Option<Peer> {
        let known = self.known.lock().await;
        let leads_there = |peer: &&Peer| {
            peer.info.address == endpoint.address || (worker_id.is_some() && peer.worker_id() == worker_id)
        };
        known.connected.values().find(leads_there).cloned()
    }

    /// Remembers a worker and ends an older connection to the same process. Returns the workers of the other role.
    async fn remember(&self, key: WorkerKey, peer: &Peer) -> Vec<Peer> {
        let mut known = self.known.lock().await;
        for other in known.connected.values() {
            if other.worker_id().is_some() && other.worker_id() == peer.worker_id() {
                other.replaced.cancel();
            }
        }
        let others =
            known.connected.values().filter(|other| other.info.role != peer.info.role).cloned().collect();
        known.connected.insert(key, peer.clone());
        others
    }
}

/// Says aloud which of `others` the worker can never be paired with, and why.
async fn explain_pairs(peer: Peer, others: Vec<Peer>) {
    for other in others {
        let (draft, target) = if peer.info.role == Role::Draft { (&peer, &other) } else { (&other, &peer) };
        if let Err(fault) = pairing::check(&draft.info, &target.info) {
            let detail = match fault {
                pairing::PairFault::Tokenizer => differing_token(draft, target).await,
                pairing::PairFault::SamplingScheme { .. } => String::new(),
            };
            tracing::warn!(
                draft = draft.info.address,
                target = target.info.address,
                "these workers are never paired: {fault}{detail}"
            );
        }
    }
}

impl Peer {
    /// Names the worker's process; a worker may say nothing of it.
    fn worker_id(&self) -> Option<u64> {
        named(&self.hello)
    }
}

fn named(hello: &v1::WorkerHello) -> Option<u64> {
    (hello.worker_id != 0).then_some(hello.worker_id)
}

/// The task that keeps a connection to one endpoint: for as long as it is listed, and then until the connection ends.
#[derive(Debug)]
struct KeepConnected {
    endpoint: Endpoint,
    /// Another process may answer there: the next attempt is due at once.
    changed: Arc<Notify>,
    /// Whether discovery lists it.
    listed: watch::Receiver<bool>,
    /// Told when the task ends because discovery does not.
    forgotten: mpsc::Sender<Endpoint>,
}

impl KeepConnected {
    async fn run(self, registry: Arc<Registry>, worker: Lifetime) {
        let cancelled = worker.cancelled();
        tokio::pin!(cancelled);
        self.connect_while_listed(&registry, cancelled.as_mut()).await;
        tokio::select! {
            biased;
            // The follower decides no more, or has taken the worker off by itself.
            () = cancelled => {}
            // A follower that is gone needs no word.
            _ = self.forgotten.send(self.endpoint.clone()) => {}
        }
    }

    /// Ends once discovery does not list the worker and no connection to it is left, or when cancelled.
    async fn connect_while_listed(
        &self,
        registry: &Registry,
        mut cancelled: Pin<&mut impl Future<Output = ()>>,
    ) {
        let Endpoint { address, role } = &self.endpoint;
        let mut backoff = FIRST_BACKOFF;
        let mut last_worker_id = None;
        let mut last_error = None;
        loop {
            let began = tokio::time::Instant::now();
            let reached = tokio::select! {
                biased;
                // Taken off the list, or the router stops.
                () = &mut cancelled => return,
                // Nothing is lost: there is no connection.
                () = self.unlisted() => return,
                reached = registry.reach(&self.endpoint, last_worker_id) => reached,
            };
            let ended = match reached {
                Ok(connection) => {
                    last_error = None;
                    last_worker_id = named(&connection.hello);
                    registry.serve(&self.endpoint, connection, cancelled.as_mut()).await
                }
                Err(error) => Err(error),
            };
            match ended.map_err(|error| causes(&error)) {
                Ok(()) => tracing::info!(role, address, "worker left"),
                // It is tried again every two seconds, for hours perhaps.
                Err(why) if last_error.as_ref() == Some(&why) => {
                    tracing::debug!(role, address, "worker still unreachable: {why}");
                }
                Err(why) => {
                    tracing::info!(
                        role,
                        address,
                        "worker unreachable, will be tried again while listed: {why}"
                    );
                    last_error = Some(why);
                }
            }
            backoff =
                if began.elapsed() > MAX_BACKOFF { FIRST_BACKOFF } else { (backoff * 2).min(MAX_BACKOFF) };
            tokio::select! {
                biased;
                // As above.
                () = &mut cancelled => return,
                () = self.unlisted() => return,
                // A worker came back at this address.
                () = self.changed.notified() => backoff = FIRST_BACKOFF,
                () = tokio::time::sleep(backoff) => {}
            }
        }
    }

    /// Resolves while discovery does not list the worker.
    async fn unlisted(&self) {
        if self.listed.clone().wait_for(|listed| !listed).await.is_err() {
            // The follower is gone: the router stops.
            std::future::pending().await
        }
    }
}

/// An error and its causes, each once: transports repeat what their causes say.
fn causes(error: &anyhow::Error) -> String {
    let mut causes = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if causes.is_empty() {
            causes = cause;
        } else if !causes.ends_with(&cause) {
            causes += ": ";
            causes += &cause;
        }
    }
    causes
}

/// Names the first token that two workers number differently, as far as both tell.
async fn differing_token(draft: &Peer, target: &Peer) -> String {
    let lists = async {
        let mut lists = Vec::new();
        for peer in [draft, target] {
            let asset = peer.hello.assets.iter().find(|asset| asset.name == "tokenizer.json");
            let bytes = fetch_asset(&peer.client, asset.context("no tokenizer.json")?).await?;
            lists.push(token_list_from_json(std::str::from_utf8(&bytes)?)?);
        }
        anyhow::Ok(first_difference(&lists[0], &lists[1]))
    };
    match lists.await {
        Ok(Some(difference)) => format!(": {difference}"),
        Ok(None) => String::new(),
        Err(error) => format!(" (which token could not be found out: {error:#})"),
    }
}

#[cfg(test)]
mod tests {
    use service::discovery::Member;

    use super::*;

    #[test]
    fn a_worker_listed_under_two_ids_is_one_endpoint() {
        let member = |id: &str, role: &str, port: u16| {
            let (id, role) = (id.to_owned(), role.to_owned());
            let address = format!("http://10.0.0.1:{port}");
            (id.clone(), Member { id, role, address, facts: serde_json::Value::Null })
        };
        let members = [member("old", "target", 1), member("new", "target", 1), member("other", "draft", 2)];
        let endpoints = by_endpoint(&Arc::new(members.into_iter().collect()));
        let ids: Vec<_> = endpoints.values().map(|ids| ids.iter().cloned().collect::<Vec<_>>()).collect();
        assert_eq!(ids, [vec!["new".to_owned(), "old".to_owned()], vec!["other".to_owned()]]);
    }

    #[test]
    fn a_cause_that_repeats_its_own_is_told_once() {
        let refused = std::io::Error::other("connection refused");
        let error = anyhow::Error::new(refused).context("tcp: connection refused").context("cannot connect");
        assert_eq!(causes(&error), "cannot connect: tcp: connection refused");
        let error = anyhow::anyhow!("no route").context("tcp connect error").context("tcp connect error");
        assert_eq!(causes(&error), "tcp connect error: no route");
    }
}
