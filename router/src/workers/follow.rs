//! Follows discovery: one task per listed worker keeps a connection to it ([`super::reconnect`]).
//!
//! Connections are keyed by address, not by discovery's id: a worker that restarts at its address within its
//! lease is listed under two ids for a while. An unreachable worker is retried as long as discovery lists it.
//! A worker that is no longer listed keeps its connection while it answers. If an operator removed it
//! ([`Unlisted`]), it gets no new work, and its connection ends once nothing runs there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use service::discovery::{Members, Unlisted};
use service::shutdown::Lifetime;
use tokio::sync::{Notify, mpsc, watch};

use crate::workers::reconnect::ReconnectLoop;
use crate::workers::registry::Registry;

/// Capacity of the queue of ended connections.
const ENDED_QUEUE_LEN: usize = 64;

/// Membership reported by discovery.
#[derive(Debug)]
pub struct Membership {
    /// Listed workers.
    pub members: watch::Receiver<Members>,
    /// How to treat a worker that is no longer listed.
    pub unlisted: Unlisted,
}

/// Follows the membership until the lifetime ends.
pub async fn follow(registry: Arc<Registry>, membership: Membership, lifetime: Lifetime) {
    let Membership { mut members, unlisted } = membership;
    let mut followed: BTreeMap<Endpoint, FollowedWorker> = BTreeMap::new();
    let (ended_tx, mut ended_rx) = mpsc::channel(ENDED_QUEUE_LEN);
    let cancelled = lifetime.cancelled();
    tokio::pin!(cancelled);
    loop {
        let listed = by_endpoint(&members.borrow_and_update());
        for (endpoint, worker) in &mut followed {
            match listed.get(endpoint) {
                Some(ids) => worker.on_listed(ids),
                None => worker.on_unlisted(endpoint, unlisted),
            }
        }
        for (endpoint, ids) in listed {
            followed.entry(endpoint).or_insert_with_key(|endpoint| {
                let (changed, listed) = (Arc::new(Notify::new()), watch::Sender::new(true));
                let reconnect = ReconnectLoop {
                    endpoint: endpoint.clone(),
                    changed: Arc::clone(&changed),
                    listed: listed.subscribe(),
                    unlisted,
                    ended_tx: ended_tx.clone(),
                };
                let child = lifetime.child();
                child.spawn("worker connection", reconnect.run(Arc::clone(&registry), child.clone()));
                FollowedWorker { ids, changed, listed }
            });
        }
        tokio::select! {
            biased;
            // Shutdown; the child tasks stop with it.
            () = &mut cancelled => return,
            // The connection of an unlisted worker has ended. If the worker is listed again, a new one is
            // started.
            Some(endpoint) = ended_rx.recv() => drop(followed.remove(&endpoint)),
            // The membership changed, or discovery has ended and it will not change anymore.
            changed = members.changed() => if changed.is_err() { return cancelled.await },
        }
    }
}

/// Address and role of a worker.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Endpoint {
    pub(super) address: String,
    pub(super) role: String,
}

/// An endpoint that discovery lists, or that still answers.
#[derive(Debug)]
struct FollowedWorker {
    /// Discovery's ids of the endpoint: more than one after a restart, until the older lease ends.
    ids: BTreeSet<String>,
    /// Notified when the ids change.
    changed: Arc<Notify>,
    /// Whether discovery lists the endpoint.
    listed: watch::Sender<bool>,
}

impl FollowedWorker {
    fn on_listed(&mut self, ids: &BTreeSet<String>) {
        if self.ids != *ids {
            // Another process may listen there now, so skip the rest of the backoff.
            self.changed.notify_one();
            self.ids.clone_from(ids);
        }
        self.listed.send_replace(true);
    }

    fn on_unlisted(&self, Endpoint { address, role }: &Endpoint, unlisted: Unlisted) {
        if !self.listed.send_replace(false) {
            return;
        }
        match unlisted {
            Unlisted::Unknown => {
                tracing::info!(
                    role,
                    address,
                    "discovery no longer lists this worker: connection kept while it answers"
                );
            }
            Unlisted::Removed => {
                tracing::info!(
                    role,
                    address,
                    "worker removed from the list: connection ends once nothing runs there"
                );
            }
        }
    }
}

/// Groups the ids of all members by endpoint.
fn by_endpoint(members: &Members) -> BTreeMap<Endpoint, BTreeSet<String>> {
    let mut endpoints: BTreeMap<Endpoint, BTreeSet<String>> = BTreeMap::new();
    for (id, member) in members.iter() {
        let endpoint = Endpoint { address: member.address.clone(), role: member.role.clone() };
        endpoints.entry(endpoint).or_default().insert(id.clone());
    }
    endpoints
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
}
