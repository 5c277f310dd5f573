//! Membership in etcd: `PREFIX/workers/ID` holds a worker's JSON under a lease.
//!
//! A worker keeps its lease alive ([`lease`]); when the worker dies, the lease expires and the key is
//! deleted. A router reads the keys and watches them ([`follow`]). Both sides expect etcd to disappear and
//! return at any moment, with or without its data: they start over with a new connection, with backoff, and
//! never give up.

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

use super::{Discovery, DiscoveryError, EtcdUser, Member, Members, Registration, Unlisted};
use crate::error_text::causes_text;
use crate::shutdown::Lifetime;
use crate::tls::ClientTls;

/// How long a dead worker stays listed. Routers learn of its death from their connection to it, so a long
/// lease costs them only attempts to connect.
const LEASE_TTL: Duration = Duration::from_secs(12);

/// Interval of a lease's renewals, and of checks of the key under it. After a failure the worker connects
/// again at once.
const RENEW_EVERY: Duration = Duration::from_secs(3);

/// Timeout of one call. After a renewal that took longer the connection is abandoned.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval of keep-alive probes on an idle connection, so that a watch on a dead peer ends. etcd closes
/// connections that are probed more often than every 5 s (its --grpc-keepalive-min-time); with probes every 3
/// s it closed idle watches every 12 s.
const PING_EVERY: Duration = Duration::from_secs(6);

/// The etcd cluster, and the prefix of our keys.
#[derive(Debug)]
pub(super) struct EtcdCluster {
    endpoints: Vec<String>,
    /// Number of etcd members taken in turn, one for each connection.
    connects: AtomicUsize,
    tls: Option<ClientTls>,
    user: Option<EtcdUser>,
    /// `PREFIX/workers/`.
    workers: String,
}

/// Why a session with etcd ended.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error("{}", call_text(.0))]
    Call(#[from] etcd_client::Error),
    #[error("no answer within {CALL_TIMEOUT:?}")]
    Timeout,
    #[error("the lease expired")]
    LeaseLost,
    #[error("the watch was cancelled: {0}")]
    WatchCancelled(String),
    #[error("the stream ended")]
    StreamEnded,
}

/// A membership in etcd.
pub(super) struct Etcd {
    cluster: Arc<EtcdCluster>,
    lifetime: Lifetime,
    /// Started by the first watch, because workers do not need it.
    members: Mutex<Option<watch::Receiver<Members>>>,
    /// Whether the watch sees changes.
    watched: watch::Sender<bool>,
}

impl Etcd {
    pub(super) fn new(cluster: EtcdCluster, lifetime: &Lifetime) -> Self {
        Self {
            cluster: Arc::new(cluster),
            lifetime: lifetime.clone(),
            members: Mutex::default(),
            watched: watch::Sender::new(false),
        }
    }

    fn start_following(&self) -> watch::Receiver<Members> {
        let (sender, receiver) = watch::channel(Members::default());
        let (cluster, watched) = (Arc::clone(&self.cluster), self.watched.clone());
        let following = async move { follow::keep_following(&cluster, &sender, &watched).await };
        self.lifetime.spawn_essential("etcd-watch", self.lifetime.until_cancelled(following));
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
                // Shutdown.
                () = cancelled => {}
            }
        };
        let (listed, seen) = watch::channel(false);
        let worker = lease::RegisteredWorker { member, listed };
        let task = self.lifetime.spawn_essential("etcd-lease", async move {
            // Boxed because the client's futures are large.
            Box::pin(lease::keep_registered(&cluster, worker, stopped)).await;
        });
        Ok(Registration::with_task(stop, task, seen))
    }

    async fn watch(&self) -> Result<watch::Receiver<Members>, DiscoveryError> {
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(members.get_or_insert_with(|| self.start_following()).clone())
    }

    fn watched(&self) -> watch::Receiver<bool> {
        self.watched.subscribe()
    }

    /// Keys disappear with their lease, by hand, or with etcd's data.
    fn unlisted(&self) -> Unlisted {
        Unlisted::Unknown
    }
}

impl EtcdCluster {
    /// Creates a cluster of the members at `endpoints`, at least one, used in this order, beginning with a
    /// random one.
    pub(super) fn new(endpoints: Vec<String>, prefix: &str) -> Self {
        // The hasher's keys are random, so processes begin at different members.
        let first = RandomState::new().hash_one(prefix) as usize % endpoints.len();
        let workers = format!("{prefix}/workers/");
        Self { endpoints, connects: AtomicUsize::new(first), tls: None, user: None, workers }
    }

    /// Sets TLS.
    pub(super) fn with_tls(self, tls: Option<ClientTls>) -> Self {
        Self { tls, ..self }
    }

    /// Sets the user.
    pub(super) fn with_user(self, user: Option<EtcdUser>) -> Self {
        Self { user, ..self }
    }

    /// Returns the etcd member that the next connection is opened to, as `HOST:PORT`.
    fn next_member(&self) -> &str {
        let turn = self.connects.fetch_add(1, Ordering::Relaxed);
        &self.endpoints[turn % self.endpoints.len()]
    }

    /// Opens a new connection to this etcd member. A connection uses a single member: with all of them in
    /// one connection, calls would also go to dead members.
    async fn connect(&self, member: &str) -> Result<Client, Fault> {
        let mut options = ConnectOptions::new()
            .with_connect_timeout(CALL_TIMEOUT)
            .with_keep_alive(PING_EVERY, CALL_TIMEOUT)
            .with_keep_alive_while_idle(true)
            // Tokens expire, with etcd's default settings after 5 minutes.
            .with_auto_token_refresh(true)
            .with_require_leader(true);
        if let Some(tls) = &self.tls {
            options = options.with_tls(tls.config());
        }
        if let Some(user) = &self.user {
            options = options.with_user(&user.name, user.password.expose());
        }
        within_timeout(Client::connect([member], Some(options))).await
    }

    fn key_of(&self, member: &Member) -> String {
        format!("{}{}", self.workers, member.id)
    }
}

/// The text of a failed call. The client's error hides the cause of one that did not reach etcd.
fn call_text(error: &etcd_client::Error) -> String {
    match error {
        etcd_client::Error::TransportError(error) => causes_text(error),
        error => error.to_string(),
    }
}

async fn within_timeout<T>(call: impl Future<Output = Result<T, etcd_client::Error>>) -> Result<T, Fault> {
    match tokio::time::timeout(CALL_TIMEOUT, call).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(Fault::Timeout),
    }
}
