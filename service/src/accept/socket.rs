//! What every accepted socket is set to.

use std::io;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

/// A silent peer is asked after so long whether it is there, and then again and again.
const KEEPALIVE_TIME: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// Each small write leaves at once: without that a token waits for the acknowledgement of the one before, up to 40 ms with a
/// client that delays those (RFC 896 against RFC 1122, 4.2.3.2). A peer that is gone without a word is noticed, by the
/// system, while it is silent and while it acknowledges nothing.
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
