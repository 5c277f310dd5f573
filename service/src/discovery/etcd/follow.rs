//! The router's side: read all keys, then watch from the next revision on; after any fault, start over.
//!
//! Reading all keys also handles a compacted revision. Between a fault and the next read the last membership
//! stays published.

use std::collections::BTreeMap;
use std::convert::Infallible;

use etcd_client::{Client, Event, EventType, GetOptions, KeyValue, ResponseHeader};
use etcd_client::{WatchOptions, WatchResponse, WatchStream};
use tokio::sync::watch;

use super::super::publish;
use super::backoff::Backoff;
use super::{EtcdCluster, Fault, Member, Members, within_timeout};

/// Publishes the membership, and whether its changes are seen; never returns.
pub(super) async fn keep_following(
    cluster: &EtcdCluster,
    members: &watch::Sender<Members>,
    watched: &watch::Sender<bool>,
) {
    let mut backoff = Backoff::new("watching");
    loop {
        let etcd_member = cluster.next_member();
        let session = follow_once((cluster, etcd_member), (members, watched), &mut backoff);
        // Boxed because the client's futures are large.
        let Err(fault) = Box::pin(session).await;
        watched.send_replace(false);
        backoff.failed(etcd_member, &fault).await;
    }
}

async fn follow_once(
    (cluster, etcd_member): (&EtcdCluster, &str),
    (members, watched): (&watch::Sender<Members>, &watch::Sender<bool>),
    backoff: &mut Backoff,
) -> Result<Infallible, Fault> {
    let mut client = cluster.connect(etcd_member).await?;
    let (revision, present) = cluster.read_all(&mut client).await?;
    publish(members, present.clone());
    let changes = cluster.changes_from(&mut client, revision + 1).await?;
    backoff.succeeded();
    watched.send_replace(true);
    follow_changes(cluster, changes, present, members).await
}

/// Applies each change to `present`, the known membership, and publishes it.
pub(super) async fn follow_changes(
    cluster: &EtcdCluster,
    mut changes: WatchStream,
    mut present: BTreeMap<String, Member>,
    members: &watch::Sender<Members>,
) -> Result<Infallible, Fault> {
    loop {
        // No timeout: silence means that nothing changes. The connection's keep-alive detects a dead peer.
        let response = changes.message().await?.ok_or(Fault::StreamEnded)?;
        if response.canceled() {
            return Err(Fault::WatchCancelled(reason(&response)));
        }
        let mut is_changed = false;
        for event in response.events() {
            is_changed |= cluster.apply(event, &mut present);
        }
        if is_changed {
            publish(members, present.clone());
        }
    }
}

fn reason(response: &WatchResponse) -> String {
    match response.compact_revision() {
        0 => response.cancel_reason().to_owned(),
        compacted => format!("revisions up to {compacted} were compacted"),
    }
}

impl EtcdCluster {
    /// Returns all members, and the revision of etcd's state they are from.
    pub(super) async fn read_all(
        &self,
        client: &mut Client,
    ) -> Result<(i64, BTreeMap<String, Member>), Fault> {
        let everything = GetOptions::new().with_prefix();
        let snapshot = within_timeout(client.get(self.workers.as_str(), Some(everything))).await?;
        let revision = snapshot.header().map_or(0, ResponseHeader::revision);
        let members = snapshot.kvs().iter().filter_map(|pair| self.member_of(pair));
        Ok((revision, members.map(|member| (member.id.clone(), member)).collect()))
    }

    /// Watches the changes of the members from `revision` on.
    pub(super) async fn changes_from(
        &self,
        client: &mut Client,
        revision: i64,
    ) -> Result<WatchStream, Fault> {
        let options = WatchOptions::new().with_prefix().with_start_revision(revision);
        within_timeout(client.watch(self.workers.as_str(), Some(options))).await
    }

    /// Applies a change. Returns whether `present` changed: a worker may write the same member again.
    fn apply(&self, event: &Event, present: &mut BTreeMap<String, Member>) -> bool {
        let Some(pair) = event.kv() else { return false };
        match (event.event_type(), self.member_of(pair)) {
            (EventType::Put, Some(member)) => {
                present.insert(member.id.clone(), member.clone()) != Some(member)
            }
            // Deleted, or replaced by something that is not a member.
            _ => self.id_of(pair).and_then(|id| present.remove(id)).is_some(),
        }
    }

    fn id_of<'a>(&self, pair: &'a KeyValue) -> Option<&'a str> {
        pair.key_str().ok()?.strip_prefix(self.workers.as_str())
    }

    /// Parses the member under a key. An invalid one is logged and skipped, so that one bad key affects no
    /// other.
    fn member_of(&self, pair: &KeyValue) -> Option<Member> {
        if pair.value().is_empty() {
            // A deletion contains only the key.
            return None;
        }
        let member = serde_json::from_slice::<Member>(pair.value()).map_err(|error| error.to_string());
        let checked = member.and_then(|member| match member.fault() {
            Some(fault) => Err(fault),
            None if self.id_of(pair) != Some(&member.id) => Err(format!("holds the id `{}`", member.id)),
            None => Ok(member),
        });
        let key = String::from_utf8_lossy(pair.key());
        checked
            .map_err(
                |fault| tracing::warn!(%key, fault, "ignoring an etcd key that does not describe a worker"),
            )
            .ok()
    }
}
