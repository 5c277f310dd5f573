//! Who exists: follows discovery, keeps one connection to each member, and publishes the models that targets serve.
//!
//! A worker that cannot be reached is tried again for as long as discovery lists it. It never touches sequences: what
//! connections say goes to their owner.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use proto::v1;
use proto::v1::worker_client::WorkerClient;
use service::discovery::{Member, Members};
use service::shutdown::Lifetime;
use speculation::Role;
use speculation::fingerprint::{first_difference, token_list_from_json};
use tokio::sync::{Mutex, mpsc, watch};
use tonic::transport::Channel;

use crate::catalog::{Catalog, ModelEntry};
use crate::text::ModelText;
use crate::workers::connection::{Caller, Connection, connect, fetch_asset};
use crate::workers::{ConnectedWorker, WorkerEvent, WorkerKey, pairing};

const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(2);

/// Follows the membership until the lifetime ends.
pub async fn follow(registry: Arc<Registry>, mut members: watch::Receiver<Members>, lifetime: Lifetime) {
    let mut followed: BTreeMap<String, (Member, Lifetime)> = BTreeMap::new();
    let cancelled = lifetime.cancelled();
    tokio::pin!(cancelled);
    loop {
        let listed = Arc::clone(&members.borrow_and_update());
        followed.retain(|id, (member, worker)| {
            let stays =
                listed.get(id).is_some_and(|now| now.address == member.address && now.role == member.role);
            if !stays {
                // Ends the connection; what ran there is replayed elsewhere.
                let worker = worker.clone();
                lifetime.spawn("forget worker", async move { worker.shut_down(MAX_BACKOFF).await });
            }
            stays
        });
        for (id, member) in listed.iter() {
            if !followed.contains_key(id) {
                let worker = lifetime.child();
                let task = keep_connected(Arc::clone(&registry), member.clone(), worker.clone());
                worker.spawn("worker connection", task);
                followed.insert(id.clone(), (member.clone(), worker));
            }
        }
        tokio::select! {
            biased;
            // The router stops; children stop with it.
            () = &mut cancelled => return,
            // A change, or a discovery that is gone and will not change anymore.
            changed = members.changed() => if changed.is_err() { return cancelled.await },
        }
    }
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
    role: Role,
    address: String,
    hello: v1::WorkerHello,
    client: WorkerClient<Channel>,
}

impl Registry {
    /// A registry that reports to `events`.
    pub fn new(caller: Caller, catalog: Catalog, events: mpsc::Sender<WorkerEvent>) -> Self {
        Self { caller, catalog, events, next_key: AtomicU64::new(1), known: Mutex::default() }
    }

    /// Connects, and makes sure that the worker is what discovery says. Nothing is left behind where this is dropped.
    async fn reach(&self, member: &Member) -> anyhow::Result<Connection> {
        let connection = connect(&member.address, &self.caller).await?;
        anyhow::ensure!(
            connection.role.as_str() == member.role,
            "discovery says {}, the worker says {}",
            member.role,
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
        member: &Member,
        connection: Connection,
        mut unlisted: impl Future<Output = ()> + Unpin,
    ) -> anyhow::Result<()> {
        let Connection { client, hello, credits, role, outbox, mut frames } = connection;
        let key = WorkerKey(self.next_key.fetch_add(1, Ordering::Relaxed));
        let peer = Peer { role, address: member.address.clone(), hello: hello.clone(), client };
        self.greet(key, peer).await;
        tracing::info!(
            role = role.as_str(),
            address = member.address,
            model = hello.model_id,
            "worker joined"
        );
        let up = ConnectedWorker { key, role, address: member.address.clone(), hello, credits, outbox };
        let mut heard = self.events.send(WorkerEvent::Up(up)).await.is_ok();
        let mut ended = Ok(());
        while heard {
            let frame = tokio::select! {
                biased;
                // No longer listed, or the router stops.
                () = &mut unlisted => break,
                // The worker said something, or is gone.
                frame = frames.message() => frame,
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

    /// Remembers a worker, and says aloud which others it can never be paired with, and why.
    async fn greet(&self, key: WorkerKey, peer: Peer) {
        let others: Vec<Peer> = {
            let mut known = self.known.lock().await;
            let others = known.connected.values().filter(|other| other.role != peer.role).cloned().collect();
            known.connected.insert(key, peer.clone());
            others
        };
        for other in others {
            let (draft, target) = if peer.role == Role::Draft { (&peer, &other) } else { (&other, &peer) };
            if let Err(fault) = pairing::check(&draft.hello, &target.hello) {
                let detail = match fault {
                    pairing::PairFault::Tokenizer => differing_token(draft, target).await,
                    pairing::PairFault::SamplingScheme { .. } => String::new(),
                };
                tracing::warn!(
                    draft = draft.address,
                    target = target.address,
                    "these workers are never paired: {fault}{detail}"
                );
            }
        }
    }
}

async fn keep_connected(registry: Arc<Registry>, member: Member, worker: Lifetime) {
    let mut backoff = FIRST_BACKOFF;
    let mut told = None;
    let cancelled = worker.cancelled();
    tokio::pin!(cancelled);
    loop {
        let began = tokio::time::Instant::now();
        let reached = tokio::select! {
            biased;
            // No longer listed, or the router stops.
            () = &mut cancelled => return,
            reached = registry.reach(&member) => reached,
        };
        let ended = match reached {
            Ok(connection) => {
                told = None;
                registry.serve(&member, connection, cancelled.as_mut()).await
            }
            Err(error) => Err(error),
        };
        match ended.map_err(|error| causes(&error)) {
            Ok(()) => tracing::info!(role = member.role, address = member.address, "worker left"),
            // It is tried again every two seconds, for hours perhaps.
            Err(why) if told.as_ref() == Some(&why) => {
                tracing::debug!(
                    role = member.role,
                    address = member.address,
                    "worker still unreachable: {why}"
                );
            }
            Err(why) => {
                let (role, address) = (&member.role, &member.address);
                tracing::info!(role, address, "worker unreachable, will be tried again: {why}");
                told = Some(why);
            }
        }
        backoff = if began.elapsed() > MAX_BACKOFF { FIRST_BACKOFF } else { (backoff * 2).min(MAX_BACKOFF) };
        tokio::select! {
            biased;
            // As above.
            () = &mut cancelled => return,
            () = tokio::time::sleep(backoff) => {}
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
    use super::*;

    #[test]
    fn a_cause_that_repeats_its_own_is_told_once() {
        let refused = std::io::Error::other("connection refused");
        let error = anyhow::Error::new(refused).context("tcp: connection refused").context("cannot connect");
        assert_eq!(causes(&error), "cannot connect: tcp: connection refused");
        let error = anyhow::anyhow!("no route").context("tcp connect error").context("tcp connect error");
        assert_eq!(causes(&error), "tcp connect error: no route");
    }
}
