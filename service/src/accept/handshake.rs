//! [`Handshakes`]: TLS handshakes of accepted connections, and which failed ones are logged: without limit, a
//! client with a wrong certificate that tries again and again would fill the log.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use super::connection::{Accepted, ConnectionSetup, serve};
use super::limits::peer_of;
use super::monitor::CloseReason;
use crate::tls::ServerTls;

/// A peer whose handshakes fail is logged once in this time.
const LOGGED_EVERY: Duration = Duration::from_secs(60);

/// Maximum number of peers that are logged in that time.
const PEERS_MAX: usize = 256;

/// The peers whose failed handshakes were logged lately, with the times. Clones share them.
#[derive(Clone, Debug, Default)]
struct LoggedPeers(Arc<Mutex<HashMap<IpAddr, Instant>>>);

impl LoggedPeers {
    /// Returns whether to log a failed handshake of this address.
    fn admits(&self, address: IpAddr, now: Instant) -> bool {
        let mut logged = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        logged.retain(|_, at| now.saturating_duration_since(*at) < LOGGED_EVERY);
        if logged.len() >= PEERS_MAX {
            return false;
        }
        match logged.entry(peer_of(address)) {
            Entry::Occupied(_) => false,
            Entry::Vacant(new) => {
                new.insert(now);
                true
            }
        }
    }
}

/// The handshakes of a listener.
#[derive(Clone, Debug)]
pub(super) struct Handshakes {
    tls: ServerTls,
    logged: LoggedPeers,
}

impl Handshakes {
    pub(super) fn new(tls: ServerTls) -> Self {
        Self { tls, logged: LoggedPeers::default() }
    }

    /// Performs the handshake, then serves the connection; returns why it ended.
    pub(super) async fn serve(
        &self,
        (connection, accepted): (TcpStream, Accepted),
        listener: &'static str,
        setup: ConnectionSetup,
    ) -> &'static str {
        let handshake = self.tls.acceptor().accept(connection);
        let handshake = timeout_at(accepted.at + setup.timeouts.header, handshake);
        let shaken = tokio::select! {
            biased;
            // The process stops: nothing was requested yet.
            () = setup.lifetime.cancelled() => return CloseReason::Stopped.as_str(),
            // The handshake ended, or takes too long.
            shaken = handshake => shaken,
        };
        match shaken {
            Ok(Ok(connection)) => serve(connection, setup, accepted).await.as_str(),
            Ok(Err(error)) if has_left(&error) => CloseReason::Finished.as_str(),
            Ok(Err(error)) => {
                if self.logged.admits(accepted.peer.ip(), Instant::now()) {
                    tracing::info!(listener, peer = %accepted.peer, %error, "a TLS handshake failed; others of this peer are not logged for a minute");
                }
                "tls"
            }
            Err(_) => CloseReason::HeaderTimeout.as_str(),
        }
    }
}

/// Whether the peer only went away, as the connection check of a load balancer does.
fn has_left(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    matches!(error.kind(), Kind::UnexpectedEof | Kind::ConnectionReset | Kind::BrokenPipe)
}

#[cfg(test)]
mod tests;
