//! The worker's side: one key under one lease, kept alive, and put again under a new lease after any loss.

use std::convert::Infallible;

use etcd_client::{Client, PutOptions};

use super::backoff::Backoff;
use super::{CALL_TIMEOUT, Cluster, Fault, LEASE_TTL, Member, RENEW_EVERY, within_timeout};

/// The newest lease that was granted, kept here so that it can be revoked however its session ended.
#[derive(Default)]
struct Granted(Option<(Client, i64)>);

/// Keeps `member` listed until `stopped` resolves, then takes it off the list.
pub(super) async fn keep_registered(cluster: &Cluster, member: &Member, stopped: impl Future<Output = ()>) {
    tokio::pin!(stopped);
    let mut backoff = Backoff::new("registering");
    // Outlives its session: the key may still be listed under it while the next session cannot start.
    let mut granted = Granted::default();
    loop {
        let fault = tokio::select! {
            biased;
            // The worker leaves: routers should know at once, not when the lease runs out.
            () = &mut stopped => return granted.revoke().await,
            // Ends only by a fault.
            result = hold_one_lease(cluster, member, &mut granted, &mut backoff) => match result {
                Err(fault) => fault,
            },
        };
        tokio::select! {
            biased;
            // The lease may still stand, if only its renewal failed.
            () = &mut stopped => return granted.revoke().await,
            () = backoff.failed(&fault) => {}
        }
    }
}

/// Puts the key under a new lease and renews it for as long as that works.
async fn hold_one_lease(
    cluster: &Cluster,
    member: &Member,
    granted: &mut Granted,
    backoff: &mut Backoff,
) -> Result<Infallible, Fault> {
    let mut client = cluster.connect().await?;
    let ttl_seconds = i64::try_from(LEASE_TTL.as_secs()).expect("a lease of seconds");
    let lease = within_timeout(client.lease_grant(ttl_seconds, None)).await?.id();
    granted.0 = Some((client.clone(), lease));
    let json = serde_json::to_string(member).expect("a member is plain data");
    let options = PutOptions::new().with_lease(lease);
    within_timeout(client.put(cluster.key_of(member), json, Some(options))).await?;
    let (mut keeper, mut answers) = within_timeout(client.lease_keep_alive(lease)).await?;
    backoff.succeeded();
    tracing::info!(worker = member.id, "registered in etcd");
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

impl Granted {
    /// Gives the lease back, and its key with it. Where that fails the lease runs out by itself.
    async fn revoke(self) {
        let Some((mut client, lease)) = self.0 else { return };
        if let Err(fault) = within_timeout(client.lease_revoke(lease)).await {
            tracing::warn!(%fault, ttl = ?LEASE_TTL, "could not leave etcd's list, the lease will run out");
        }
    }
}

// A renewal that times out leaves time to register anew before routers see the worker go.
const _: () = assert!(RENEW_EVERY.as_millis() + CALL_TIMEOUT.as_millis() < LEASE_TTL.as_millis());
