//! Keeps a connection to one worker: connects, serves it to its end, and connects again, for as long as discovery lists it.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use service::discovery::Unlisted;
use service::shutdown::Lifetime;
use tokio::sync::{Notify, mpsc, watch};

use crate::workers::follow::Endpoint;
use crate::workers::registry::{List, Registry, named};

const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(2);

/// The task that keeps a connection to one endpoint: for as long as it is listed, and then until the connection ends.
#[derive(Debug)]
pub(super) struct KeepConnected {
    pub(super) endpoint: Endpoint,
    /// Another process may answer there: the next attempt is due at once.
    pub(super) changed: Arc<Notify>,
    /// Whether discovery lists it.
    pub(super) listed: watch::Receiver<bool>,
    /// What it means that it is not.
    pub(super) unlisted: Unlisted,
    /// Told when the task ends because discovery does not.
    pub(super) forgotten: mpsc::Sender<Endpoint>,
}

impl KeepConnected {
    pub(super) async fn run(self, registry: Arc<Registry>, worker: Lifetime) {
        let cancelled = worker.cancelled();
        tokio::pin!(cancelled);
        self.connect_while_listed(&registry, cancelled.as_mut()).await;
        tokio::select! {
            biased;
            // The follower decides no more, or has taken the worker off by itself.
            () = cancelled => {}
            // A follower that is gone needs no word.
            _ = self.forgotten.send(self.endpoint.clone()) => {}
        }
    }

    /// Ends once discovery does not list the worker and no connection to it is left, or when cancelled.
    async fn connect_while_listed(
        &self,
        registry: &Registry,
        mut cancelled: Pin<&mut impl Future<Output = ()>>,
    ) {
        let Endpoint { address, role } = &self.endpoint;
        let mut backoff = FIRST_BACKOFF;
        let mut last_worker_id = None;
        let mut last_error = None;
        loop {
            let began = tokio::time::Instant::now();
            let reached = tokio::select! {
                biased;
                // Taken off the list, or the router stops.
                () = &mut cancelled => return,
                // Nothing is lost: there is no connection.
                () = self.until_unlisted() => return,
                reached = registry.reach(&self.endpoint, last_worker_id) => reached,
            };
            let ended = match reached {
                Ok(connection) => {
                    last_error = None;
                    last_worker_id = named(&connection.hello);
                    let list = List::new(self.listed.clone(), self.unlisted == Unlisted::Removed);
                    registry.serve(&self.endpoint, connection, cancelled.as_mut(), list).await
                }
                Err(error) => Err(error),
            };
            match ended.map_err(|error| causes(&error)) {
                Ok(()) => tracing::info!(role, address, "worker left"),
                // It is tried again every two seconds, for hours perhaps.
                Err(why) if last_error.as_ref() == Some(&why) => {
                    tracing::debug!(role, address, "worker still unreachable: {why}");
                }
                Err(why) => {
                    tracing::info!(
                        role,
                        address,
                        "worker unreachable, will be tried again while listed: {why}"
                    );
                    last_error = Some(why);
                }
            }
            backoff =
                if began.elapsed() > MAX_BACKOFF { FIRST_BACKOFF } else { (backoff * 2).min(MAX_BACKOFF) };
            tokio::select! {
                biased;
                // As above.
                () = &mut cancelled => return,
                () = self.until_unlisted() => return,
                // A worker came back at this address.
                () = self.changed.notified() => backoff = FIRST_BACKOFF,
                () = tokio::time::sleep(backoff) => {}
            }
        }
    }

    /// Resolves while discovery does not list the worker.
    async fn until_unlisted(&self) {
        if self.listed.clone().wait_for(|listed| !listed).await.is_err() {
            // The follower is gone: the router stops.
            std::future::pending().await
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
