//! Keeps a connection to one worker: connects, serves the connection until it ends, and reconnects as long as
//! discovery lists the worker.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use service::discovery::Unlisted;
use service::error_text;
use service::shutdown::Lifetime;
use tokio::sync::{Notify, mpsc, watch};

use crate::workers::follow::Endpoint;
use crate::workers::registry::{ConnectionEnded, Listing, Registry};

const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(2);

/// The task that keeps a connection to one endpoint while it is listed, and then until the connection ends.
#[derive(Debug)]
pub(super) struct ReconnectLoop {
    pub(super) endpoint: Endpoint,
    /// Notified when another process may listen there: the next attempt is due at once.
    pub(super) changed: Arc<Notify>,
    /// Whether discovery lists the worker.
    pub(super) listed: watch::Receiver<bool>,
    /// How to treat the worker once it is no longer listed.
    pub(super) unlisted: Unlisted,
    /// Receives the endpoint when the task ends because the worker is no longer listed.
    pub(super) ended_tx: mpsc::Sender<Endpoint>,
}

impl ReconnectLoop {
    pub(super) async fn run(self, registry: Arc<Registry>, lifetime: Lifetime) {
        let cancelled = lifetime.cancelled();
        tokio::pin!(cancelled);
        self.connect_while_listed(&registry, cancelled.as_mut()).await;
        tokio::select! {
            biased;
            // Shutdown, or the follower has removed the worker itself.
            () = cancelled => {}
            // An error means that the follower has ended and needs no message.
            _ = self.ended_tx.send(self.endpoint.clone()) => {}
        }
    }

    /// Ends when the worker is no longer listed and has no connection, or when cancelled.
    async fn connect_while_listed(
        &self,
        registry: &Registry,
        mut cancelled: Pin<&mut impl Future<Output = ()>>,
    ) {
        let Endpoint { address, role } = &self.endpoint;
        let mut backoff = FIRST_BACKOFF;
        let mut last_process = None;
        let mut last_error = None;
        loop {
            let started_at = tokio::time::Instant::now();
            let connected = tokio::select! {
                biased;
                // Removed by the follower, or shutdown.
                () = &mut cancelled => return,
                // Nothing is lost: there is no connection yet.
                () = self.until_unlisted() => return,
                connected = registry.connect(&self.endpoint, &mut last_process) => connected,
            };
            let result = match connected {
                Ok(connection) => {
                    last_error = None;
                    let listing = Listing::new(self.listed.clone(), self.unlisted == Unlisted::Removed);
                    registry.serve(&self.endpoint, connection, cancelled.as_mut(), listing).await
                }
                Err(error) => Err(error),
            };
            let is_refusal = result.as_ref().is_err_and(is_refusal);
            match result.map_err(|error| error_text(&error)) {
                Ok(()) => tracing::info!(role, address, "worker left"),
                // Log repeated errors at debug level: the attempt is repeated every two seconds, possibly for
                // hours.
                Err(reason) if last_error.as_ref() == Some(&reason) => {
                    tracing::debug!(role, address, "worker still unreachable: {reason}");
                }
                Err(reason) if is_refusal => {
                    tracing::warn!(
                        role,
                        address,
                        "worker cannot be used, retrying while it is listed: {reason}"
                    );
                    last_error = Some(reason);
                }
                Err(reason) => {
                    tracing::warn!(
                        role,
                        address,
                        "worker unreachable, retrying while it is listed: {reason}; check its --advertise, the \
                         firewall and the worker's log"
                    );
                    last_error = Some(reason);
                }
            }
            backoff = if started_at.elapsed() > MAX_BACKOFF {
                FIRST_BACKOFF
            } else {
                (backoff * 2).min(MAX_BACKOFF)
            };
            tokio::select! {
                biased;
                // As above: removed by the follower, or shutdown.
                () = &mut cancelled => return,
                () = self.until_unlisted() => return,
                // A worker has restarted at this address.
                () = self.changed.notified() => backoff = FIRST_BACKOFF,
                () = tokio::time::sleep(backoff) => {}
            }
        }
    }

    /// Resolves once discovery does not list the worker.
    async fn until_unlisted(&self) {
        if self.listed.clone().wait_for(|listed| !listed).await.is_err() {
            // The follower has ended: shutdown.
            std::future::pending().await
        }
    }
}

/// Whether a connection failed for a reason that waiting does not remove: a certificate, or what either side
/// said in the handshake. A worker that is down, restarting or silent is no refusal.
fn is_refusal(error: &anyhow::Error) -> bool {
    let is_of_transport = |cause: &(dyn std::error::Error + 'static)| {
        cause.is::<ConnectionEnded>()
            || cause.is::<tonic::transport::Error>()
            || cause.downcast_ref::<tonic::Status>().is_some_and(|status| !is_of_versions(status))
            || cause.is::<std::io::Error>()
            || cause.is::<tokio::time::error::Elapsed>()
    };
    let text = error_text(error);
    // TLS faults arrive as texts of the transport.
    let is_of_tls = ["certificate", "fatal alert", "HandshakeFailure"].iter().any(|word| text.contains(word));
    is_of_tls || !error.chain().any(is_of_transport)
}

/// Whether a worker refuses this router's protocol version.
fn is_of_versions(status: &tonic::Status) -> bool {
    status.code() == tonic::Code::FailedPrecondition
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_and_handshakes_are_refusals_and_outages_are_not() {
        let io =
            |text: &'static str| anyhow::Error::new(std::io::Error::other(text)).context("cannot connect");
        let status = |text: &str| anyhow::Error::new(tonic::Status::unavailable(text));
        for (error, expected) in [
            (io("connection refused"), false),
            (status("broken pipe"), false),
            (io("invalid peer certificate: UnknownIssuer"), true),
            (status("received fatal alert: CertificateRequired"), true),
            (anyhow::anyhow!("discovery lists the worker as draft, but its hello says target"), true),
            (tonic::Status::failed_precondition("upgrade the older one").into(), true),
        ] {
            assert_eq!(is_refusal(&error), expected, "{error:#}");
        }
    }
}
