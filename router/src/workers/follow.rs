//! Follows discovery: one task for each worker that is listed, which keeps a connection to it ([`super::keep`]).
//!
//! Connections are kept by address, not by discovery's id: a worker that restarts at its address within its lease is
//! listed under two ids for a while. A worker that cannot be reached is tried again for as long as discovery lists it. One
//! that is no longer listed is kept while it answers; where somebody took it off the list ([`Unlisted`]) it gets nothing
//! new meanwhile, and its connection ends once nothing runs there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use service::discovery::{Members, Unlisted};
use service::shutdown::Lifetime;
use tokio::sync::{Notify, mpsc, watch};

use crate::workers::keep::KeepConnected;
use crate::workers::registry::Registry;

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
        for (endpoint, worker) in &mut followed {
            match listed.get(endpoint) {
                Some(ids) => worker.is_listed_as(ids),
                None => worker.is_unlisted(endpoint, unlisted),
            }
        }
        for (endpoint, ids) in listed {
            followed.entry(endpoint).or_insert_with_key(|endpoint| {
                let keep = |changed, listed| KeepConnected {
                    endpoint: endpoint.clone(),
                    changed,
                    listed,
                    unlisted,
                    forgotten: forgotten.clone(),
                };
                Followed::start(ids, &registry, &lifetime, keep)
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
pub(super) struct Endpoint {
    pub(super) address: String,
    pub(super) role: String,
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
}

impl Followed {
    /// Keeps a connection to the endpoint.
    fn start(
        ids: BTreeSet<String>,
        registry: &Arc<Registry>,
        lifetime: &Lifetime,
        keep: impl FnOnce(Arc<Notify>, watch::Receiver<bool>) -> KeepConnected,
    ) -> Self {
        let (worker, changed, listed) = (lifetime.child(), Arc::default(), watch::Sender::new(true));
        let keep = keep(Arc::clone(&changed), listed.subscribe());
        worker.spawn("worker connection", keep.run(Arc::clone(registry), worker.clone()));
        Self { ids, changed, listed }
    }

    fn is_listed_as(&mut self, ids: &BTreeSet<String>) {
        if self.ids != *ids {
            // Another process may answer there now: the next attempt need not wait.
            self.changed.notify_one();
            self.ids.clone_from(ids);
        }
        self.listed.send_replace(true);
    }

    fn is_unlisted(&self, Endpoint { address, role }: &Endpoint, unlisted: Unlisted) {
        if !self.listed.send_replace(false) {
            return;
        }
        match unlisted {
            Unlisted::Unknown => {
                tracing::info!(
                    role,
                    address,
                    "discovery lists this worker no more, it is kept while it answers"
                );
            }
            Unlisted::Removed => {
                tracing::info!(
                    role,
                    address,
                    "this worker was taken off the list, it is left once nothing runs there"
                );
            }
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

#[cfg(test)]
mod tests {
    use service::discovery::{Load, Member};

    use super::*;

    #[test]
    fn a_worker_listed_under_two_ids_is_one_endpoint() {
        let member = |id: &str, role: &str, port: u16| {
            let (id, role) = (id.to_owned(), role.to_owned());
            let address = format!("http://10.0.0.1:{port}");
            (id.clone(), Member { id, role, address, facts: serde_json::Value::Null, load: Load::default() })
        };
        let members = [member("old", "target", 1), member("new", "target", 1), member("other", "draft", 2)];
        let endpoints = by_endpoint(&Arc::new(members.into_iter().collect()));
        let ids: Vec<_> = endpoints.values().map(|ids| ids.iter().cloned().collect::<Vec<_>>()).collect();
        assert_eq!(ids, [vec!["new".to_owned(), "old".to_owned()], vec!["other".to_owned()]]);
    }
}
