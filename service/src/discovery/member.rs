//! One worker as listed by discovery, with checks that keep a mistake from spreading to every router.

use http::Uri;
use serde::{Deserialize, Serialize};

use super::DiscoveryError;

/// The role of a draft worker.
pub const DRAFT: &str = "draft";

/// The role of a target worker.
pub const TARGET: &str = "target";

/// One worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// Unique name of the worker.
    pub id: String,
    /// [`DRAFT`] or [`TARGET`].
    pub role: String,
    /// Address of its gRPC service, as `http://HOST:PORT`, or `https://` with TLS.
    pub address: String,
    /// Its description from the handshake; opaque here.
    #[serde(default)]
    pub facts: serde_json::Value,
    /// Its last reported load.
    #[serde(default)]
    pub load: Load,
}

/// Load of a worker over all routers. For users and programs that read the list: routers know it earlier from
/// their own streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// Open sequences.
    pub sequences: u64,
    /// KV blocks in use by these sequences.
    pub kv_blocks_used: u64,
}

impl Member {
    /// What is wrong with this member, if anything.
    pub(super) fn fault(&self) -> Option<String> {
        if self.id.is_empty() {
            return Some("id is empty".to_owned());
        }
        role_fault(&self.role).or_else(|| address_fault(&self.address))
    }

    pub(super) fn check(&self) -> Result<(), DiscoveryError> {
        match self.fault() {
            None => Ok(()),
            Some(reason) => Err(DiscoveryError::Member { id: self.id.clone(), reason }),
        }
    }
}

pub(super) fn role_fault(role: &str) -> Option<String> {
    (role != DRAFT && role != TARGET).then(|| format!("role `{role}` is neither `{DRAFT}` nor `{TARGET}`"))
}

pub(super) fn address_fault(address: &str) -> Option<String> {
    let usable = address.parse::<Uri>().is_ok_and(|uri| {
        let has_port = uri.authority().is_some_and(|host| host.port_u16().is_some_and(|port| port > 0));
        matches!(uri.scheme_str(), Some("http" | "https"))
            && has_port
            && matches!(uri.path(), "" | "/")
            && uri.query().is_none()
    });
    (!usable).then(|| format!("address `{address}` is not of the form http://HOST:PORT or https://HOST:PORT"))
}
