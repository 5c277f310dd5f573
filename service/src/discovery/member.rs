//! One worker as listed by discovery, with checks that keep a mistake from spreading to every router.

use std::net::IpAddr;

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

/// What is wrong with the form of a worker's address, if anything.
pub fn address_fault(address: &str) -> Option<String> {
    let usable = address.parse::<Uri>().is_ok_and(|uri| {
        let has_port = uri.authority().is_some_and(|host| host.port_u16().is_some_and(|port| port > 0));
        let has_host = uri.host().is_some_and(|host| !host.is_empty());
        matches!(uri.scheme_str(), Some("http" | "https"))
            && has_host
            && has_port
            && matches!(uri.path(), "" | "/")
            && uri.query().is_none()
    });
    (!usable).then(|| format!("address `{address}` is not of the form http://HOST:PORT or https://HOST:PORT"))
}

/// Whether the host of an address is `0.0.0.0` or `[::]`. A process can listen there, but other machines
/// cannot connect to it.
pub fn has_unspecified_host(address: &str) -> bool {
    address.parse::<Uri>().is_ok_and(|uri| {
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
        host.parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_scheme_a_host_and_a_port_and_nothing_else() {
        for address in ["http://10.0.0.7:8110", "https://[::1]:8110", "http://target-0:8110/"] {
            assert_eq!((address_fault(address), has_unspecified_host(address)), (None, false), "{address}");
        }
        for address in
            ["10.0.0.7:8110", "http://10.0.0.7", "http://:8110", "http://a:0", "http://a:1/x", "ftp://a:1"]
        {
            assert!(address_fault(address).is_some(), "{address}");
        }
        for address in ["http://0.0.0.0:8110", "https://[::]:8110"] {
            assert_eq!((address_fault(address), has_unspecified_host(address)), (None, true), "{address}");
        }
    }
}
