//! Free loopback ports for processes that need their address before they bind it.
//!
//! Ports are taken from below the kernel's range for outgoing connections: such a connection could take a
//! port between the check and the bind. The search starts at a different port for each process and call, so
//! that clusters that start at the same time do not collide.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

use super::error::ClusterError;

const FIRST_PORT: u16 = 20_000;
const NUM_PORTS: u16 = 12_000;
/// Distance between the first ports of processes with consecutive ids.
const PORTS_PER_PROCESS: u32 = 61;

/// Returns a loopback address on which nothing listens now.
pub fn free_address() -> Result<SocketAddr, ClusterError> {
    static HANDED_OUT: AtomicU16 = AtomicU16::new(0);
    let home = (std::process::id().wrapping_mul(PORTS_PER_PROCESS) % u32::from(NUM_PORTS)) as u16;
    for _ in 0..NUM_PORTS {
        let offset = HANDED_OUT.fetch_add(1, Ordering::Relaxed) % NUM_PORTS;
        let port = FIRST_PORT + (home + offset) % NUM_PORTS;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        if address_is_free(address) {
            return Ok(address);
        }
    }
    Err(ClusterError::NoFreePort { tried: NUM_PORTS, first: FIRST_PORT + home })
}

/// Returns the address itself, or, if its port is 0, the same interface with a free port.
pub(super) fn resolve(wanted: SocketAddr) -> Result<SocketAddr, ClusterError> {
    if wanted.port() != 0 {
        return Ok(wanted);
    }
    free_address().map(|free| SocketAddr::new(wanted.ip(), free.port()))
}

/// Whether a listener can be bound to this address now.
fn address_is_free(address: SocketAddr) -> bool {
    try_bind(address).is_ok()
}

/// Binds a listener to this address and closes it again.
///
/// # Errors
/// The address is taken, or this process must not or cannot listen there.
pub(crate) fn try_bind(address: SocketAddr) -> std::io::Result<()> {
    TcpListener::bind(address).map(drop)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn addresses_differ_and_can_be_bound() {
        let addresses = (0..20).map(|_| free_address().unwrap()).collect::<HashSet<_>>();
        assert_eq!(addresses.len(), 20);
        let listeners =
            addresses.iter().map(|address| TcpListener::bind(address).unwrap()).collect::<Vec<_>>();
        assert!(addresses.iter().all(|address| !address_is_free(*address)));
        drop(listeners);
    }

    #[test]
    fn only_port_zero_is_replaced() {
        let fixed = "127.0.0.1:8123".parse().unwrap();
        assert_eq!(resolve(fixed).unwrap(), fixed);
        let any = resolve("0.0.0.0:0".parse().unwrap()).unwrap();
        assert!(any.ip().is_unspecified() && any.port() >= FIRST_PORT);
    }
}
