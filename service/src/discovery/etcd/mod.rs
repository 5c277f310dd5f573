//! Membership in etcd: `PREFIX/workers/ID` holds a worker's JSON under a lease.
//!
//! A worker keeps its lease alive ([`lease`]); when the worker dies the lease runs out and the key goes. A router
//! reads the keys and watches them ([`follow`]). Both sides expect etcd to vanish and come back at any moment, with or
//! without its data: they start over with a fresh connection, after growing pauses, and never give up.

mod backoff;
mod follow;
mod lease;
#[cfg(test)]
mod tests;

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use etcd_client::{Client, ConnectOptions};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{Discovery, DiscoveryError, EtcdUser, Load, Member, Members, Registration, Unlisted};
use crate::shutdown::Lifetime;
use crate::tls::ClientTls;

/// How long a worker that died stays listed.
const LEASE_TTL: Duration = Duration::from_secs(6);

/// How often a lease is renewed. One that fails is followed at once by a new lease.
const RENEW_EVERY: Duration = Duration::from_secs(2);

/// How long one call may take before the connection is given up.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// How often an idle connection is probed, so that a watch on a dead peer ends. An etcd closes connections that are probed
/// more often than every 5 s (its --grpc-keepalive-min-time), a watch every 12 s.
const PING_EVERY: Duration = Duration::from_secs(6);

/// The etcd cluster and the part of its keys that is ours.
#[derive(Debug)]
pub(super) struct Cluster {
    endpoints: Vec<String>,
    /// How many connections were begun: each goes to the member after the last one's.
    connects: AtomicUsize,
    tls: Option<ClientTls>,
    user: Option<EtcdUser>,
    /// `PREFIX/workers/`.
    workers: String,
}

/// Why a session with etcd ended.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error("{0}")]
    Call(#[from] etcd_client::Error),
    #[error("no answer within {CALL_TIMEOUT:?}")]
    Timeout,
    #[error("no member of etcd is named")]
    NoMember,
    #[error("the lease ran out")]
    LeaseLost,
    #[error("the watch was cancelled: {0}")]
    WatchCancelled(String),
    #[error("the stream ended")]
    StreamEnded,
}

/// A membership in etcd.
pub(super) struct Etcd {
    cluster: Arc<Cluster>,
    lifetime: Lifetime,
    /// Started by the first watch: workers never need it.
    members: Mutex<Option<watch::Receiver<Members>>>,
}

impl Etcd {
    pub(super) fn new(cluster: Cluster, lifetime: &Lifetime) -> Self {
        Self { cluster: Arc::new(cluster), lifetime: lifetime.clone(), members: Mutex::default() }
    }

    fn start_following(&self) -> watch::Receiver<Members> {
        let (sender, receiver) = watch::channel(Members::default());
        let cluster = Arc::clone(&self.cluster);
        let cancelled = self.lifetime.cancelled();
        self.lifetime.spawn("etcd-watch", async move {
            tokio::select! {
                biased;
                () = cancelled => {}
                () = follow::keep_following(&cluster, &sender) => {}
            }
        });
        receiver
    }
}

#[async_trait]
impl Discovery for Etcd {
    async fn register(&self, member: Member) -> Result<Registration, DiscoveryError> {
        member.check()?;
        let stop = CancellationToken::new();
        let cluster = Arc::clone(&self.cluster);
        let (asked, cancelled) = (stop.clone(), self.lifetime.cancelled());
        let stopped = async move {
            tokio::select! {
                biased;
                // The registration was left or dropped.
                () = asked.cancelled() => {}
                // The process ends.
                () = cancelled => {}
            }
        };
        let (listed, seen) = watch::channel(false);
        let (load, told) = watch::channel(Load::default());
        let worker = lease::Registered { member, listed, load: told };
        let task = self.lifetime.spawn("etcd-lease", async move {
            // Boxed for its size: the client's calls are large futures.
            Box::pin(lease::keep_registered(&cluster, worker, stopped)).await;
        });
        Ok(Registration::kept_by_task(stop, task, seen, load))
    }

    async fn watch(&self) -> Result<watch::Receiver<Members>, DiscoveryError> {
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(members.get_or_insert_with(|| self.start_following()).clone())
    }

    /// Keys go with leases, by hand, and with the data of an etcd.
    fn unlisted(&self) -> Unlisted {
        Unlisted::Unknown
    }
}

impl Cluster {
    /// The members at `endpoints`, asked in this order from a random one on.
    pub(super) fn new(endpoints: Vec<String>, prefix: &str) -> Self {
        // The hasher's keys are random, and so no two processes need to begin at the same member.
        let first = RandomState::new().hash_one(prefix) as usize % endpoints.len().max(1);
        let workers = format!("{prefix}/workers/");
        Self { endpoints, connects: AtomicUsize::new(first), tls: None, user: None, workers }
    }

    /// The same, over TLS.
    pub(super) fn with_tls(self, tls: Option<ClientTls>) -> Self {
        Self { tls, ..self }
    }

    /// The same, as a user.
    pub(super) fn with_user(self, user: Option<EtcdUser>) -> Self {
        Self { user, ..self }
    }

    /// A fresh connection to the next member. Each has one member of its own: of a connection to all of them, calls
    /// would go to a dead member too.
    async fn connect(&self) -> Result<Client, Fault> {
        let turn = self.connects.fetch_add(1, Ordering::Relaxed);
        let endpoint = self.endpoints.get(turn % self.endpoints.len().max(1)).ok_or(Fault::NoMember)?;
        let mut options = ConnectOptions::new()
            .with_connect_timeout(CALL_TIMEOUT)
            .with_keep_alive(PING_EVERY, CALL_TIMEOUT)
            .with_keep_alive_while_idle(true)
            .with_require_leader(true);
        if let Some(tls) = &self.tls {
            options = options.with_tls(tls.config());
        }
        if let Some(user) = &self.user {
            options = options.with_user(&user.name, user.password.expose());
        }
        within_timeout(Client::connect([endpoint], Some(options))).await
    }

    fn key_of(&self, member: &Member) -> String {
        format!("{}{}", self.workers, member.id)
    }
}

async fn within_timeout<T>(call: impl Future<Output = Result<T, etcd_client::Error>>) -> Result<T, Fault> {
    match tokio::time::timeout(CALL_TIMEOUT, call).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(Fault::Timeout),
    }
}
