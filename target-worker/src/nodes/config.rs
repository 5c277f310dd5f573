//! Settings of a target whose model is spread over several nodes. Names are those of SGLang.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use clap::Args;
use serde::{Deserialize, Serialize};
use service::config::Faults;
use service::secret::Secret;

/// Flags of nodes.
#[derive(Debug, Clone, Default, Args, Serialize)]
#[command(next_help_heading = "Several nodes")]
pub struct NodesFlags {
    /// Number of nodes over which the model is split: 1, 2, 4 or 8. A node is one process, usually one per
    /// host; all have the same settings except --node-rank and addresses
    #[arg(long, value_name = "N")]
    pub nnodes: Option<usize>,
    /// Number of this node, from 0. Node 0 serves routers; the others follow it
    #[arg(long, value_name = "N")]
    pub node_rank: Option<usize>,
    /// Address of node 0 for the other nodes, where it listens until all have joined (on all its addresses if
    /// HOST is a name). Traffic between nodes is not encrypted: use a private network. Other machines can
    /// join only with OUTRIDER_DIST_SECRET, the same on all nodes, or with --insecure
    #[arg(long, value_name = "HOST:PORT")]
    pub dist_init_addr: Option<String>,
    /// How long nodes wait for each other at the start
    #[arg(long, value_name = "SECONDS")]
    pub dist_timeout_seconds: Option<u64>,
    /// A node that is silent for this long is lost, and all nodes fail
    #[arg(long, value_name = "SECONDS")]
    pub node_timeout_seconds: Option<u64>,
}

/// Unvalidated settings of nodes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RawNodes {
    nnodes: usize,
    node_rank: Option<usize>,
    dist_init_addr: Option<String>,
    dist_timeout_seconds: u64,
    node_timeout_seconds: u64,
    dist_secret: Option<Secret>,
}

impl Default for RawNodes {
    fn default() -> Self {
        Self {
            nnodes: 1,
            node_rank: None,
            dist_init_addr: None,
            dist_timeout_seconds: 600,
            node_timeout_seconds: 10,
            dist_secret: None,
        }
    }
}

/// Validated settings of a node.
#[derive(Debug, Clone)]
pub struct NodesConfig {
    /// Number of nodes, at least 2.
    pub count: usize,
    /// Number of this node.
    pub node: usize,
    /// Where node 0 listens, as HOST:PORT.
    pub leader: String,
    /// Maximum time until all nodes have joined.
    pub join_timeout: Duration,
    /// Maximum silence of a node.
    pub silence: Duration,
    /// What all nodes know and strangers do not; empty without a secret.
    pub secret: Secret,
}

impl RawNodes {
    /// The number of nodes.
    pub fn count(&self) -> usize {
        self.nnodes
    }

    /// Validates the settings; `None` for a single node or after a fault. `is_insecure`: anyone who can
    /// connect may join.
    pub fn validate(self, is_insecure: bool, faults: &mut Faults) -> Option<NodesConfig> {
        let is_count = matches!(self.nnodes, 1 | 2 | 4 | 8);
        faults.check("nnodes", is_count, || format!("{} is not 1, 2, 4 or 8", self.nnodes));
        let seconds = [
            ("dist_timeout_seconds", self.dist_timeout_seconds),
            ("node_timeout_seconds", self.node_timeout_seconds),
        ];
        for (field, seconds) in seconds {
            let is_in_range = (1..=86_400).contains(&seconds);
            faults.check(field, is_in_range, || format!("{seconds} is not between 1 and 86400 (a day)"));
        }
        if self.nnodes < 2 {
            let alone =
                [("node_rank", self.node_rank.is_some()), ("dist_init_addr", self.dist_init_addr.is_some())];
            for (field, is_given) in alone {
                faults.check(field, !is_given, || "is for several nodes: give --nnodes, too".to_owned());
            }
            return None;
        }
        let node = faults.require("node_rank", self.node_rank);
        let leader = faults.require("dist_init_addr", self.dist_init_addr);
        let node = node.filter(|&node| {
            let is_node = node < self.nnodes;
            faults.check("node_rank", is_node, || format!("{node} is not below --nnodes {}", self.nnodes));
            is_node
        })?;
        let leader = leader.filter(|leader| is_reachable_address(leader, faults))?;
        let is_empty = self.dist_secret.as_ref().is_some_and(|secret| secret.expose().is_empty());
        faults.check("dist_secret", !is_empty, || "is empty".to_owned());
        let is_closed = self.dist_secret.is_some() || is_insecure || is_of_this_machine(&leader);
        faults.check("dist_init_addr", is_closed, || {
            format!(
                "{leader} is reachable from other machines: give all nodes the same OUTRIDER_DIST_SECRET (or dist_secret \
                 in the file), or pass --insecure if only nodes can reach it"
            )
        });
        Some(NodesConfig {
            count: self.nnodes,
            node,
            leader,
            join_timeout: Duration::from_secs(self.dist_timeout_seconds),
            silence: Duration::from_secs(self.node_timeout_seconds),
            secret: self.dist_secret.unwrap_or_else(|| Secret::new("")),
        })
    }
}

/// Whether this is HOST:PORT with a port that other nodes can know.
fn is_reachable_address(address: &str, faults: &mut Faults) -> bool {
    let port = address.rsplit_once(':').filter(|(host, _)| !host.is_empty());
    let is_known = port.and_then(|(_, port)| port.parse::<u16>().ok()).is_some_and(|port| port > 0);
    faults.check("dist_init_addr", is_known, || {
        format!("`{address}` is not HOST:PORT with a port from 1 to 65535")
    });
    is_known
}

/// Whether only this machine reaches the address.
pub(super) fn is_of_this_machine(address: &str) -> bool {
    let ip = address.parse::<SocketAddr>().ok().map(|address| address.ip());
    ip.as_ref().is_some_and(IpAddr::is_loopback) || address.starts_with("localhost:")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(count: usize, node: Option<usize>, address: Option<&str>) -> RawNodes {
        let dist_init_addr = address.map(str::to_owned);
        RawNodes { nnodes: count, node_rank: node, dist_init_addr, ..RawNodes::default() }
    }

    fn checked(raw: RawNodes, is_insecure: bool) -> Result<Option<NodesConfig>, String> {
        let mut faults = Faults::new();
        let config = raw.validate(is_insecure, &mut faults);
        faults.finish().map_err(|error| error.to_string())?;
        Ok(config)
    }

    #[test]
    fn a_single_node_needs_nothing_and_several_need_a_number_and_an_address() {
        assert!(checked(RawNodes::default(), false).unwrap().is_none());
        let local = Some("127.0.0.1:7070");
        let config = checked(nodes(4, Some(3), local), false).unwrap().unwrap();
        assert_eq!((config.count, config.node, config.leader.as_str()), (4, 3, "127.0.0.1:7070"));
        for (raw, says) in [
            (nodes(3, Some(0), local), "nnodes: 3 is not 1, 2, 4 or 8"),
            (nodes(1, Some(0), None), "node_rank: is for several nodes"),
            (nodes(1, None, local), "dist_init_addr: is for several nodes"),
            (nodes(2, None, local), "node_rank: is required"),
            (nodes(2, Some(0), None), "dist_init_addr: is required"),
            (nodes(2, Some(2), local), "node_rank: 2 is not below --nnodes 2"),
            (nodes(2, Some(0), Some("10.0.0.1")), "dist_init_addr: `10.0.0.1` is not HOST:PORT"),
            (nodes(2, Some(0), Some("10.0.0.1:0")), "is not HOST:PORT"),
            (nodes(2, Some(0), Some(":7070")), "is not HOST:PORT"),
            (
                RawNodes { node_timeout_seconds: 0, ..nodes(2, Some(0), local) },
                "node_timeout_seconds: 0 is not",
            ),
        ] {
            let error = checked(raw, false).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn other_machines_join_with_a_secret_or_where_it_was_allowed() {
        for address in ["127.0.0.1:7070", "[::1]:7070", "localhost:7070"] {
            assert!(checked(nodes(2, Some(0), Some(address)), false).is_ok(), "{address}");
        }
        for address in ["10.0.0.1:7070", "0.0.0.0:7070", "target-0.target:7070"] {
            let raw = nodes(2, Some(1), Some(address));
            let error = checked(raw.clone(), false).unwrap_err();
            assert!(error.contains("OUTRIDER_DIST_SECRET") && error.contains("--insecure"), "{error}");
            assert!(checked(raw.clone(), true).is_ok());
            let raw = RawNodes { dist_secret: Some(Secret::new("sesame")), ..raw };
            assert_eq!(checked(raw.clone(), false).unwrap().unwrap().secret.expose(), "sesame");
            let raw = RawNodes { dist_secret: Some(Secret::new("")), ..raw };
            assert!(checked(raw, false).unwrap_err().contains("dist_secret: is empty"));
        }
    }
}
