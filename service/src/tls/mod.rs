//! TLS from PEM files: the identity of listeners, and the trusted authorities for outgoing connections.
//!
//! The files are read while the configuration is checked, so that a certificate without its key ends the
//! process before a port is bound. They are reread when they change: new connections use the renewed files,
//! open ones go on. Two kinds of files are read once, and changing them needs a restart, which drains first:
//! the authority for clients' certificates, and the files of the exporter of traces.

mod client;
mod client_names;
mod expiry;
mod pem;
mod server;
#[cfg(test)]
pub(crate) mod tests;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::server::VerifierBuilderError;
use tokio_rustls::rustls::{self, RootCertStore};

pub use self::client::{ClientFiles, ClientTls};
pub(crate) use self::client::{grpc_client, https_client};
pub use self::expiry::PresentedCertificates;
use self::pem::Pem;
pub use self::server::{Clients, ServerTls, ServerTlsFlags};

/// Why TLS files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A file has other content.
    #[error("{}: {reason}; expected PEM with {expected}", path.display())]
    Content {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
        /// Expected content.
        expected: &'static str,
    },
    /// Certificate and key cannot be used together.
    #[error("{} and {} cannot be used together: {source}", cert.display(), key.display())]
    Pair {
        /// File of the certificate.
        cert: PathBuf,
        /// File of the key.
        key: PathBuf,
        /// Error of the TLS library.
        source: rustls::Error,
    },
    /// The certificate of an authority cannot be used.
    #[error("{}: {source}", path.display())]
    Authority {
        /// Path of the file.
        path: PathBuf,
        /// Error of the TLS library.
        source: VerifierBuilderError,
    },
    /// A client name is neither a DNS name nor an address.
    #[error("`{0}` is neither a DNS name nor an address")]
    Name(String),
}

impl TlsError {
    /// The first of these settings that names the file at fault; `None` if the error is not about a file.
    fn setting_of<const N: usize>(
        &self,
        settings: [(&'static str, Option<&Path>); N],
    ) -> Option<&'static str> {
        let file = match self {
            Self::Read { path, .. } | Self::Content { path, .. } | Self::Authority { path, .. } => path,
            Self::Pair { cert, .. } => cert,
            Self::Name(_) => return None,
        };
        let setting = settings.into_iter().find(|(_, named)| *named == Some(file.as_path()));
        setting.map(|(name, _)| name)
    }
}

/// Whether a certificate can be for this name.
pub fn is_server_name(name: &str) -> bool {
    rustls::pki_types::ServerName::try_from(name).is_ok()
}

/// The same cryptography library everywhere, whatever others the build contains.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// Reads the trusted certificates from a PEM file; at least one.
pub fn authority(path: &Path) -> Result<RootCertStore, TlsError> {
    Pem::read(path)?.authority()
}
