//! Settings of a process's listeners: limits on connections, and timeouts.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::Faults;
use crate::descriptors;

/// Default limit on connections; each costs about ten kilobytes.
const USUAL_CONNECTIONS_MAX: usize = 16_384;

/// Timeout for a request's body to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// Interval of HTTP/2 pings, and timeout for the reply.
const KEEP_ALIVE: Duration = Duration::from_secs(20);

/// Maximum value of a timeout, and of the age of a connection.
pub const SECONDS_MAX: u64 = 86_400;

/// Flags of a process with listeners.
#[derive(Debug, Clone, Default, clap::Args, Serialize)]
#[command(next_help_heading = "Connections")]
pub struct ListenerFlags {
    /// Maximum number of open connections, not counting --admin [default: what the limit of open files
    /// allows, at most 16384]
    #[arg(long, value_name = "N")]
    pub max_connections: Option<usize>,
    /// Maximum number of open connections from one address, or one IPv6 /64 network [default: half of
    /// --max-connections]
    #[arg(long, value_name = "N")]
    pub max_connections_per_address: Option<usize>,
    /// Longest time from a new connection to the head of its first request, including the TLS handshake
    #[arg(long, value_name = "SECONDS")]
    pub header_timeout_seconds: Option<u64>,
    /// How long a connection without requests is kept open
    #[arg(long, value_name = "SECONDS")]
    pub idle_timeout_seconds: Option<u64>,
    /// How long a client may stop reading an answer before its connection is closed
    #[arg(long, value_name = "SECONDS")]
    pub write_timeout_seconds: Option<u64>,
}

/// Raw settings of the listeners.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RawListener {
    max_connections: Option<usize>,
    max_connections_per_address: Option<usize>,
    header_timeout_seconds: u64,
    idle_timeout_seconds: u64,
    write_timeout_seconds: u64,
}

impl Default for RawListener {
    fn default() -> Self {
        Self {
            max_connections: None,
            max_connections_per_address: None,
            header_timeout_seconds: 10,
            idle_timeout_seconds: 120,
            write_timeout_seconds: 30,
        }
    }
}

/// Checked settings of the listeners.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListenerConfig {
    /// Maximum number of open connections.
    pub max_connections: usize,
    /// Maximum number of open connections from one peer.
    pub max_connections_per_address: usize,
    /// Timeouts of a connection.
    pub timeouts: Timeouts,
}

/// Timeouts of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// Until the head of the first request.
    pub header: Duration,
    /// Until a request's body is complete, if the answer depends on it.
    pub body: Duration,
    /// Without requests.
    pub idle: Duration,
    /// Without reading the answer.
    pub write: Duration,
    /// Interval and timeout of HTTP/2 pings.
    pub keep_alive: Duration,
    /// Age of an HTTP/2 connection, at most, at which the client is asked to open another; `None`: never.
    pub max_age: Option<Duration>,
}

impl RawListener {
    /// Checks all settings.
    pub fn validate(&self, faults: &mut Faults) -> ListenerConfig {
        let open_files = descriptors::limit();
        let most = open_files.saturating_sub(descriptors::reserved(open_files)).max(1);
        let max_connections = self.max_connections.unwrap_or(most.min(USUAL_CONNECTIONS_MAX));
        faults.check("max_connections", (1..=most).contains(&max_connections), || {
            format!("{max_connections} is not between 1 and {most}, which the limit of {open_files} open files leaves: raise it (ulimit -n)")
        });
        let per_address = self.max_connections_per_address.unwrap_or(max_connections.div_ceil(2));
        faults.check("max_connections_per_address", (1..=max_connections).contains(&per_address), || {
            format!("{per_address} is not between 1 and max_connections, which is {max_connections}")
        });
        let mut seconds = |field: &str, value: u64| {
            faults.check_between(field, value, 1..=SECONDS_MAX);
            Duration::from_secs(value)
        };
        ListenerConfig {
            max_connections,
            max_connections_per_address: per_address,
            timeouts: Timeouts {
                header: seconds("header_timeout_seconds", self.header_timeout_seconds),
                body: BODY_TIMEOUT,
                idle: seconds("idle_timeout_seconds", self.idle_timeout_seconds),
                write: seconds("write_timeout_seconds", self.write_timeout_seconds),
                keep_alive: KEEP_ALIVE,
                max_age: None,
            },
        }
    }
}

impl ListenerConfig {
    /// Asks HTTP/2 clients to connect again at this age of a connection, or up to 10% earlier.
    pub fn with_max_age(self, max_age: Option<Duration>) -> Self {
        Self { timeouts: Timeouts { max_age, ..self.timeouts }, ..self }
    }

    /// Settings for the operators' address: a few connections that clients cannot use up.
    pub fn for_admin(&self) -> Self {
        let most = descriptors::ADMIN_CONNECTIONS;
        Self { max_connections: most, max_connections_per_address: most, ..*self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limits_are_within_what_the_system_allows() {
        let mut faults = Faults::new();
        let config = RawListener::default().validate(&mut faults);
        assert!(faults.is_empty());
        assert!(config.max_connections + descriptors::ADMIN_CONNECTIONS < descriptors::limit());
        assert!(config.max_connections_per_address <= config.max_connections);

        let raw = RawListener {
            max_connections: Some(usize::MAX),
            header_timeout_seconds: 0,
            ..RawListener::default()
        };
        raw.validate(&mut faults);
        let error = faults.finish().unwrap_err().to_string();
        for expected in ["max_connections", "ulimit -n", "header_timeout_seconds: 0 is not between"] {
            assert!(error.contains(expected), "`{error}` does not say `{expected}`");
        }
    }
}
