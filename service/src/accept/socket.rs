//! Socket options of accepted connections.

use std::io;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

/// TCP keepalive: idle time before the first probe, and interval of further ones.
const KEEPALIVE_TIME: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// Disables Nagle's algorithm: otherwise a token would wait for the acknowledgement of the previous one, up
/// to 40 ms with a client that delays acknowledgements (RFC 896 with RFC 1122, 4.2.3.2). Also enables
/// detection of dead peers, both while idle and while data is unacknowledged.
pub(super) fn prepare(connection: &TcpStream, unacknowledged_max: Duration) {
    let set = || -> io::Result<()> {
        connection.set_nodelay(true)?;
        let socket = SockRef::from(connection);
        socket.set_tcp_keepalive(
            &TcpKeepalive::new().with_time(KEEPALIVE_TIME).with_interval(KEEPALIVE_INTERVAL),
        )?;
        #[cfg(target_os = "linux")]
        socket.set_tcp_user_timeout(Some(unacknowledged_max))?;
        Ok(())
    };
    if let Err(error) = set() {
        tracing::debug!(%error, "a connection keeps the system's own settings");
    }
}
