//! Limits on open connections, in total over the listeners that share a [`Connections`], and per peer.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::config::{ListenerConfig, Timeouts};
use super::metrics::ConnectionMetrics;
use crate::metrics::Metrics;

/// Open connections of a process. Clones share them.
#[derive(Clone, Debug)]
pub struct Connections {
    config: ListenerConfig,
    pub(super) metrics: ConnectionMetrics,
    open: Arc<Mutex<Open>>,
}

#[derive(Debug, Default)]
struct Open {
    total: usize,
    by_peer: HashMap<IpAddr, usize>,
}

/// The limit that refused a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LimitReached {
    Process,
    Peer,
}

impl LimitReached {
    /// Name in metrics.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Process => "max_connections",
            Self::Peer => "max_connections_per_address",
        }
    }
}

impl Connections {
    /// Creates an empty set, counted in `metrics`. Call once per process.
    pub fn new(config: ListenerConfig, metrics: &Metrics) -> Self {
        Self { config, metrics: ConnectionMetrics::register(metrics), open: Arc::default() }
    }

    /// A separate set for the admin address of the same process, so that clients cannot use it up.
    pub fn for_admin(&self) -> Self {
        Self { config: self.config.for_admin(), metrics: self.metrics.clone(), open: Arc::default() }
    }

    pub(super) fn timeouts(&self) -> Timeouts {
        self.config.timeouts
    }

    /// Reserves a place for a connection from this address.
    pub(super) fn admit(&self, address: IpAddr) -> Result<ConnectionPermit, LimitReached> {
        let peer = peer_of(address);
        let mut open = self.open();
        if open.total >= self.config.max_connections {
            return Err(LimitReached::Process);
        }
        let of_peer = open.by_peer.entry(peer).or_default();
        if *of_peer >= self.config.max_connections_per_address {
            return Err(LimitReached::Peer);
        }
        *of_peer += 1;
        open.total += 1;
        Ok(ConnectionPermit { peer, connections: self.clone() })
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        // Nothing panics while the lock is held.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection's place; released on drop.
#[derive(Debug)]
pub(super) struct ConnectionPermit {
    peer: IpAddr,
    connections: Connections,
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let mut open = self.connections.open();
        open.total -= 1;
        if let Some(of_peer) = open.by_peer.get_mut(&self.peer) {
            *of_peer -= 1;
            if *of_peer == 0 {
                open.by_peer.remove(&self.peer);
            }
        }
    }
}

/// Groups addresses by peer: a single host usually has a whole IPv6 /64 network.
pub(super) fn peer_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from(u128::from(v6) >> 64 << 64)),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accept::config::RawListener;
    use crate::config::Faults;

    #[test]
    fn places_are_counted_by_peer_and_given_back() {
        let usual = RawListener::default().validate(&mut Faults::new());
        let config = ListenerConfig { max_connections: 3, max_connections_per_address: 2, ..usual };
        let connections = Connections::new(config, &Metrics::new());
        let admit = |address: &str| connections.admit(address.parse().unwrap());

        let first = admit("10.0.0.1").unwrap();
        let _mapped = admit("::ffff:10.0.0.1").unwrap();
        assert_eq!(admit("10.0.0.1").unwrap_err(), LimitReached::Peer);
        let third = admit("10.0.0.2").unwrap();
        assert_eq!(admit("10.0.0.3").unwrap_err(), LimitReached::Process);
        drop(first);
        let again = admit("10.0.0.1").unwrap();
        drop((third, again));

        let _v6 = admit("2001:db8::1").unwrap();
        let same_network = admit("2001:db8::ffff").unwrap();
        drop(same_network);
        let _other = admit("2001:db8:0:1::1").unwrap();
        assert_eq!(connections.open().by_peer.len(), 3, "who has no connection is forgotten");
        assert!(connections.for_admin().admit("10.0.0.9".parse().unwrap()).is_ok(), "its own places");
    }
}
