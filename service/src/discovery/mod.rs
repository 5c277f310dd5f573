//! Discovery of workers: workers register, routers watch.
//!
//! There are three implementations of one trait, chosen by a [`DiscoveryUri`]: in memory (one process), a
//! static file maintained by an operator, and etcd. In each, a watcher that loses its source keeps serving
//! the last known membership: an unreachable discovery must never empty a router's list, and stale members
//! are found by talking to them. Neither may one that lost its data: [`Unlisted`] defines what it means that
//! a member is missing from a list.

mod etcd;
mod member;
mod memory;
mod registration;
mod static_file;
mod uri;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::watch;

pub use member::{DRAFT, Member, TARGET, address_fault, has_unspecified_host};
pub use registration::Registration;
pub(crate) use static_file::check as check_static_file;
pub use uri::{BadUri, DiscoveryUri};

use crate::polled_file::POLL_INTERVAL;
use crate::secret::Secret;
use crate::shutdown::Lifetime;
use crate::tls::ClientTls;
use crate::toml_file::TomlFault;

/// The workers known at one moment, by id.
pub type Members = Arc<BTreeMap<String, Member>>;

/// A source of membership, with the settings to connect to it.
#[derive(Debug, Clone)]
pub struct Source {
    /// Kind and location of the source.
    pub uri: DiscoveryUri,
    /// For etcd: use TLS with these settings.
    pub tls: Option<ClientTls>,
    /// For an etcd with authentication.
    pub user: Option<EtcdUser>,
}

/// A user of etcd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdUser {
    /// User name.
    pub name: String,
    /// Password.
    pub password: Secret,
}

impl From<DiscoveryUri> for Source {
    fn from(uri: DiscoveryUri) -> Self {
        Self { uri, tls: None, user: None }
    }
}

/// A source of membership.
#[async_trait]
pub trait Discovery: Send + Sync {
    /// Announces a worker until the registration is dropped, or left, or the lifetime ends. An unreachable
    /// source does not fail the call: the worker is announced once the source is back.
    async fn register(&self, member: Member) -> Result<Registration, DiscoveryError>;

    /// The current membership (empty until the source was first reached) and its changes.
    async fn watch(&self) -> Result<watch::Receiver<Members>, DiscoveryError>;

    /// Whether [`watch`](Self::watch) sees changes now, and that value's changes. `false` until the source was
    /// first read, and after a fault until it was read again.
    fn watched(&self) -> watch::Receiver<bool>;

    /// How a watcher must treat a member that is missing from the list.
    fn unlisted(&self) -> Unlisted;
}

/// What it means that a member is missing from a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unlisted {
    /// An operator removed it: it gets no new work, and connections to it end once nothing runs there.
    Removed,
    /// Unknown: the worker left, its lease expired, or the list lost its data. A connection to it is kept
    /// while it answers, and is not reopened. A worker that leaves closes its connections itself.
    Unknown,
}

/// Why a source of membership cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// The static list cannot be read.
    #[error("cannot read the list of workers {}: {error}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The system's error. Not a `source`, because the text already contains it.
        error: std::io::Error,
    },
    /// The static list is invalid.
    #[error("the list of workers {}, {fault}", path.display())]
    List {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong, with the line.
        fault: TomlFault,
    },
    /// The worker's description is not usable by routers.
    #[error("worker `{id}` cannot be registered: {reason}")]
    Member {
        /// Id of the worker.
        id: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// Opens `source`. Its tasks run under `lifetime`.
///
/// Each call with `memory` creates a separate membership: open it once and share it. A static file must be
/// readable and valid at this time; an etcd may be unreachable.
pub async fn open(source: &Source, lifetime: &Lifetime) -> Result<Arc<dyn Discovery>, DiscoveryError> {
    match &source.uri {
        DiscoveryUri::Memory => {
            // The default is a trap for a cluster: every process looks ready, and none finds another.
            tracing::warn!(
                "--discovery is `memory`, which is the default: this process finds no worker of another process \
                 and is found by none; give all processes the same static:FILE or etcd://HOST:PORT/PREFIX"
            );
            Ok(Arc::new(memory::Memory::new()))
        }
        DiscoveryUri::Static(path) => {
            let list = static_file::StaticFile::open(path.clone(), POLL_INTERVAL, lifetime).await?;
            Ok(Arc::new(list))
        }
        DiscoveryUri::Etcd { endpoints, prefix } => {
            let cluster = etcd::EtcdCluster::new(endpoints.clone(), prefix)
                .with_tls(source.tls.clone())
                .with_user(source.user.clone());
            Ok(Arc::new(etcd::Etcd::new(cluster, lifetime)))
        }
    }
}

/// Publishes a membership if it differs from the last one.
fn publish(members: &watch::Sender<Members>, next: BTreeMap<String, Member>) {
    members.send_if_modified(|members| {
        let changes = **members != next;
        if changes {
            *members = Arc::new(next);
        }
        changes
    });
}
