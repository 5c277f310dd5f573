//! Settings of a process's listeners: how many connections, and how long each may be of no use.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::Faults;
use crate::descriptors;

/// More connections than this are served only where it is asked for: each costs some ten thousand bytes.
const USUAL_CONNECTIONS_MAX: usize = 16_384;

/// How long a request's body may take to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// How often an HTTP/2 peer is asked whether it is there, and how long it may take to say so.
const KEEP_ALIVE: Duration = Duration::from_secs(20);

/// No timeout is longer.
const SECONDS_MAX: u64 = 86_400;

/// Flags of a process that listens.
#[derive(Debug, Clone, Default, clap::Args, Serialize)]
#[command(next_help_heading = "Connections")]
pub struct ListenerFlags {
    /// Connections that are served at once, without those of --admin [default: what the limit of open files leaves, at most 16384]
    #[arg(long, value_name = "N")]
    pub max_connections: Option<usize>,
    /// Connections of one address, or of one IPv6 network of 64 bits, that are served at once [default: half of --max-connections]
    #[arg(long, value_name = "N")]
    pub max_connections_per_address: Option<usize>,
    /// Longest time from a new connection to the head of its first request, the TLS handshake included
    #[arg(long, value_name = "SECONDS")]
    pub header_timeout_seconds: Option<u64>,
    /// How long a connection without requests is kept open
    #[arg(long, value_name = "SECONDS")]
    pub idle_timeout_seconds: Option<u64>,
    /// How long a client may stop reading an answer before its connection is closed
    #[arg(long, value_name = "SECONDS")]
    pub write_timeout_seconds: Option<u64>,
}

/// The raw settings of the same.
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

/// The checked settings of the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListenerConfig {
    /// Connections at once.
    pub max_connections: usize,
    /// Connections of one peer at once.
    pub max_connections_per_address: usize,
    /// How long a connection may be of no use.
    pub timeouts: Timeouts,
}

/// How long a connection may be of no use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// Until the first request's head.
    pub header: Duration,
    /// Until a request's body is complete, where the answer waits for it.
    pub body: Duration,
    /// Without a request.
    pub idle: Duration,
    /// Without reading an answer.
    pub write: Duration,
    /// Between two questions whether an HTTP/2 peer is there.
    pub keep_alive: Duration,
}

impl RawListener {
    /// Checks everything.
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
            faults.check(field, (1..=SECONDS_MAX).contains(&value), || {
                format!("{value} is not between 1 and {SECONDS_MAX}")
            });
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
            },
        }
    }
}

impl ListenerConfig {
    /// For an address where few operators and probes ask: few connections, which others cannot take away.
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
