//! Refuses requests that name a foreign host, at an address that needs no key because only this machine
//! reaches it. A web page can point its own host name at 127.0.0.1 (DNS rebinding): the browser then takes
//! the router for the page's own server, and CORS does not apply. The request still names the page's host.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use axum::Router;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse as _, Response};
use http::uri::Authority;
use http::{HeaderValue, StatusCode, header};

use crate::error::RouterError;
use crate::request::Auth;

/// Ends of names that public DNS does not have: this machine's (RFC 6761), those of the local network (RFC
/// 6762), and private ones, such as the `host.docker.internal` of containers.
const LOCAL_ENDS: [&str; 3] = [".localhost", ".local", ".internal"];

const REFUSED: &str = "this router has no API keys and listens on loopback, so the host must be localhost or an \
                       IP address: use http://127.0.0.1, or set --api-keys FILE";

/// Hosts that requests may name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AllowedHosts {
    /// Any, also none.
    Any,
    /// `localhost`, names below it, IP addresses, names that public DNS does not have, or none: no web page can
    /// have one of these.
    Local,
}

impl AllowedHosts {
    /// Returns the hosts of a router that listens on this address.
    pub fn at(address: SocketAddr, auth: &Auth) -> Self {
        if auth.is_open() && address.ip().is_loopback() { Self::Local } else { Self::Any }
    }
}

/// Lets requests pass to `app` only if they name an allowed host.
pub fn check_host(app: Router, hosts: AllowedHosts) -> Router {
    match hosts {
        AllowedHosts::Any => app,
        AllowedHosts::Local => app.layer(from_fn(refuse_foreign_host)),
    }
}

async fn refuse_foreign_host(request: Request, next: Next) -> Response {
    let headers = request.headers().get_all(header::HOST).iter().map(HeaderValue::as_bytes);
    // HTTP/2 names the host in the URI, as HTTP/1 may.
    let uri = request.uri().authority().map(|authority| authority.as_str().as_bytes());
    let is_allowed = headers.chain(uri).all(is_local);
    if is_allowed {
        return next.run(request).await;
    }
    (StatusCode::MISDIRECTED_REQUEST, RouterError::invalid("host", REFUSED)).into_response()
}

/// Whether a host, with or without a port, is a local name or an IP address.
fn is_local(host: &[u8]) -> bool {
    let Ok(authority) = Authority::try_from(host) else { return false };
    let host = authority.host();
    if let Some(address) = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        return address.parse::<Ipv6Addr>().is_ok();
    }
    let name = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
    let is_local_name = name == "localhost" || LOCAL_ENDS.iter().any(|end| name.ends_with(end));
    is_local_name || name.parse::<Ipv4Addr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_local_names_and_addresses_are_local() {
        for host in [
            "localhost",
            "LOCALHOST:8002",
            "localhost.",
            "a.localhost:1",
            "host.docker.internal:8000",
            "desk.local",
            "127.0.0.1:8002",
            "10.0.0.7",
            "[::1]:80",
        ] {
            assert!(is_local(host.as_bytes()), "{host}");
        }
        for host in [
            "evil.example:8002",
            "localhost.evil.example",
            "evillocalhost",
            "127.0.0.1.evil.example",
            "internal.evil.example",
            "127.0.0.1@evil.example",
            "::1",
            "x",
            "",
            "a b",
        ] {
            assert!(!is_local(host.as_bytes()), "{host}");
        }
    }

    #[test]
    fn hosts_are_checked_on_loopback_without_keys() {
        let keys = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(keys.path(), "sk-one\n").unwrap();
        let keyed = Auth::from_file(keys.path()).unwrap();
        for (address, auth, expected) in [
            ("127.0.0.1:8002", &Auth::Open, AllowedHosts::Local),
            ("[::1]:8002", &Auth::Open, AllowedHosts::Local),
            ("0.0.0.0:8002", &Auth::Open, AllowedHosts::Any),
            ("127.0.0.1:8002", &keyed, AllowedHosts::Any),
        ] {
            assert_eq!(AllowedHosts::at(address.parse().unwrap(), auth), expected, "{address}");
        }
    }
}
