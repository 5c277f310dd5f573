//! Who serves, and where: workers register, routers watch.
//!
//! Three ways behind one trait, chosen by a [`DiscoveryUri`]: in memory (one process), a static file that an
//! operator keeps, and etcd. Whichever it is, a watcher that loses its source keeps serving the last membership it
//! knew: a discovery that is away must never empty a router's list, and stale members are found out by talking to
//! them. Nor must one that lost its data: [`Unlisted`] says what it means that a member is gone from a list.

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

pub use member::{DRAFT, Load, Member, TARGET};
pub use registration::Registration;
pub use uri::{BadUri, DiscoveryUri};

use crate::reread::LOOK_EVERY;
use crate::secret::Secret;
use crate::shutdown::Lifetime;
use crate::tls::ClientTls;
use crate::toml_file::TomlFault;

/// The workers known at one moment, by id.
pub type Members = Arc<BTreeMap<String, Member>>;

/// Which source of membership to open, and how to speak with it.
#[derive(Debug, Clone)]
pub struct Source {
    /// Which.
    pub uri: DiscoveryUri,
    /// For etcd: speak TLS, and trust and show this.
    pub tls: Option<ClientTls>,
    /// For an etcd that asks who one is.
    pub user: Option<EtcdUser>,
}

/// A user of etcd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdUser {
    /// As etcd knows it.
    pub name: String,
    /// What proves it.
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
    /// Announces a worker until the registration is dropped, or left, or the lifetime ends. A source that is away
    /// does not fail the call: the worker is announced once the source is back.
    async fn register(&self, member: Member) -> Result<Registration, DiscoveryError>;

    /// The membership now (empty until the source was first reached) and after each change.
    async fn watch(&self) -> Result<watch::Receiver<Members>, DiscoveryError>;

    /// What a watcher must make of a member that is gone from the list.
    fn unlisted(&self) -> Unlisted;
}

/// What it means that a member is gone from a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unlisted {
    /// Somebody took it off: it gets nothing new, and a connection to it ends once nothing runs there.
    Removed,
    /// Nobody can tell: it left, its lease ran out, or the list lost its data. A connection to it is kept while it
    /// answers, and is not made again. A worker that leaves ends its connections itself.
    Unknown,
}

/// Why a source of membership cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// The static list cannot be read.
    #[error("cannot read the list of workers {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The static list is at fault.
    #[error("the list of workers {}, {fault}", path.display())]
    List {
        /// The file.
        path: PathBuf,
        /// What is wrong, and the line.
        fault: TomlFault,
    },
    /// A worker describes itself in a way that no router could use.
    #[error("worker `{id}` cannot be registered: {reason}")]
    Member {
        /// The worker.
        id: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// Opens `source`. Its tasks run under `lifetime`.
///
/// Each call with `memory` makes a membership of its own: open it once and share it. A static file must be readable
/// and right at this moment; an etcd may be away.
pub async fn open(source: &Source, lifetime: &Lifetime) -> Result<Arc<dyn Discovery>, DiscoveryError> {
    match &source.uri {
        DiscoveryUri::Memory => Ok(Arc::new(memory::Memory::new())),
        DiscoveryUri::Static(path) => {
            let list = static_file::StaticFile::open(path.clone(), LOOK_EVERY, lifetime).await?;
            Ok(Arc::new(list))
        }
        DiscoveryUri::Etcd { endpoints, prefix } => {
            let cluster = etcd::Cluster::new(endpoints.clone(), prefix)
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
