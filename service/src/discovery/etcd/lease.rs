//! The worker's side: one key under one lease, kept alive. If the key disappears for any reason (an expired
//! lease, a manual deletion, an etcd that lost its data), the worker writes it again.
//!
//! The lease is renewed while the key is written and checked: etcd answers a write only after it has reached
//! the disks of a majority, and a slow disk must not cost the lease. Neither must an etcd that refuses
//! writes, such as one that is out of space: after a fault the worker connects again and continues its lease
//! if etcd knows it.

use std::convert::Infallible;

use etcd_client::{Client, Compare, CompareOp, LeaseKeepAliveStream, LeaseKeeper, PutOptions, Txn, TxnOp};
use tokio::sync::watch;

use super::backoff::Backoff;
use super::{CALL_TIMEOUT, EtcdCluster, Fault, LEASE_TTL, Member, RENEW_EVERY, within_timeout};

/// The last granted lease and the last connection, kept here so that the lease can be continued or revoked
/// however its session ended.
#[derive(Default)]
struct GrantedLease(Option<(Client, i64)>);

/// Both directions of the stream that renews a lease.
type Renewals = (LeaseKeeper, LeaseKeepAliveStream);

/// A worker to keep listed.
pub(super) struct RegisteredWorker {
    /// The member as listed.
    pub(super) member: Member,
    /// Set to whether the worker is listed.
    pub(super) listed: watch::Sender<bool>,
}

/// Keeps a worker listed until `stopped` resolves, then removes it from the list.
pub(super) async fn keep_registered(
    cluster: &EtcdCluster,
    worker: RegisteredWorker,
    stopped: impl Future<Output = ()>,
) {
    tokio::pin!(stopped);
    let mut backoff = Backoff::new("registering");
    // Outlives its session: the key may still be listed under it while the next session cannot start.
    let mut granted = GrantedLease::default();
    loop {
        let etcd_member = cluster.next_member();
        let session = async {
            let mut client = cluster.connect(etcd_member).await?;
            let (lease, renewals) = granted.renew_or_grant(&mut client).await?;
            let key = Key { cluster, lease, worker: &worker };
            hold_lease(&key, (client, renewals), &mut backoff).await
        };
        let fault = tokio::select! {
            biased;
            // The worker leaves: routers should know at once, not when the lease expires.
            () = &mut stopped => break,
            // Ends only with a fault.
            result = session => match result {
                Err(fault) => fault,
            },
        };
        worker.listed.send_replace(false);
        tokio::select! {
            biased;
            // The lease may still be valid.
            () = &mut stopped => break,
            () = backoff.failed(etcd_member, &fault) => {}
        }
    }
    worker.listed.send_replace(false);
    granted.revoke().await;
}

/// Writes the key under the lease, and keeps both for as long as that works.
async fn hold_lease(
    key: &Key<'_>,
    (client, renewals): (Client, Renewals),
    backoff: &mut Backoff,
) -> Result<Infallible, Fault> {
    tokio::select! {
        biased;
        // The lease is lost, or etcd does not answer.
        result = keep_renewing(renewals) => result,
        // The key cannot be written. Boxed because the client's futures are large.
        result = Box::pin(keep_written(key, client, backoff)) => result,
    }
}

/// Renews the lease; ends with a fault.
async fn keep_renewing((mut keeper, mut answers): Renewals) -> Result<Infallible, Fault> {
    loop {
        tokio::time::sleep(RENEW_EVERY).await;
        within_timeout(keeper.keep_alive()).await?;
        match within_timeout(answers.message()).await? {
            Some(answer) if answer.ttl() > 0 => {}
            Some(_) => return Err(Fault::LeaseLost),
            None => return Err(Fault::StreamEnded),
        }
    }
}

/// Writes the key, and again if it was deleted while its lease lives; ends with a fault. A key that is
/// deleted again and again is written at this pace.
async fn keep_written(key: &Key<'_>, mut client: Client, backoff: &mut Backoff) -> Result<Infallible, Fault> {
    let worker = key.worker.member.id.as_str();
    key.write(&mut client).await?;
    backoff.succeeded();
    tracing::info!(worker, "registered in etcd");
    key.worker.listed.send_replace(true);
    loop {
        tokio::time::sleep(RENEW_EVERY).await;
        match key.write(&mut client).await {
            Ok(true) => tracing::warn!(worker, "the worker's key was missing in etcd: wrote it again"),
            Ok(false) => {}
            // The key stays with its lease. If etcd does not answer at all, the next renewal fails.
            Err(fault @ Fault::Timeout) => tracing::debug!(%fault, "etcd is slow: the key is checked again"),
            Err(fault) => return Err(fault),
        }
    }
}

/// The key of one worker under one lease.
struct Key<'a> {
    cluster: &'a EtcdCluster,
    lease: i64,
    worker: &'a RegisteredWorker,
}

impl Key<'_> {
    /// Writes the key unless it exists under this lease; returns whether it was missing. A single
    /// transaction: a key that is deleted meanwhile is not written unnoticed.
    async fn write(&self, client: &mut Client) -> Result<bool, Fault> {
        let member = &self.worker.member;
        let key = self.cluster.key_of(member);
        let json = serde_json::to_string(member).expect("a member is plain data");
        let is_there = Compare::lease(key.as_str(), CompareOp::Equal, self.lease);
        let put = TxnOp::put(key, json, Some(PutOptions::new().with_lease(self.lease)));
        let write = Txn::new().when([is_there]).or_else([put]);
        Ok(!within_timeout(client.txn(write)).await?.succeeded())
    }
}

impl GrantedLease {
    /// Continues the last lease over a new connection, or begins another if etcd no longer knows it.
    async fn renew_or_grant(&mut self, client: &mut Client) -> Result<(i64, Renewals), Fault> {
        if let Some((last_client, lease)) = &mut self.0 {
            match within_timeout(client.lease_keep_alive(*lease)).await {
                Ok(renewals) => {
                    last_client.clone_from(client);
                    return Ok((*lease, renewals));
                }
                // The lease has expired, or the grant below fails for the same reason.
                Err(Fault::Call(_)) => {}
                Err(fault) => return Err(fault),
            }
        }
        let ttl_seconds = i64::try_from(LEASE_TTL.as_secs()).expect("a lease of seconds");
        let lease = within_timeout(client.lease_grant(ttl_seconds, None)).await?.id();
        self.0 = Some((client.clone(), lease));
        let renewals = within_timeout(client.lease_keep_alive(lease)).await?;
        Ok((lease, renewals))
    }

    /// Revokes the lease, and with it the key. If that fails, the lease expires by itself.
    async fn revoke(self) {
        let Some((mut client, lease)) = self.0 else { return };
        if let Err(fault) = within_timeout(client.lease_revoke(lease)).await {
            tracing::warn!(%fault, ttl = ?LEASE_TTL, "cannot remove the worker from etcd: its entry expires with the lease");
        }
    }
}

// A renewal that times out leaves time to register again before routers see the worker disappear.
const _: () = assert!(RENEW_EVERY.as_millis() + CALL_TIMEOUT.as_millis() < LEASE_TTL.as_millis());
