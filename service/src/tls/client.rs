//! TLS of outgoing connections: the trusted authority, and the certificate presented to servers that require
//! one.

use std::path::Path;
use std::sync::Arc;

use tokio_rustls::rustls::{self, RootCertStore};
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use super::expiry::{Dated, expires_at};
use super::pem::{Pem, certified_key, no_pair};
use super::{TlsError, authority, provider};
use crate::config::Faults;
use crate::reloaded_files::ReloadedFiles;

/// Trusted authority, and optional client certificate, for `https://` addresses.
#[derive(Debug, Clone)]
pub struct ClientTls {
    files: Arc<ReloadedFiles<Dated<ClientTlsConfig>>>,
    /// Name that the server's certificate must have, instead of the host of its address.
    server_name: Option<String>,
}

impl ClientTls {
    /// Reads the authority for the servers' certificates, and a client certificate with its key, if servers
    /// require one.
    pub fn read(ca: &Path, identity: Option<(&Path, &Path)>) -> Result<Self, TlsError> {
        let ca = ca.to_owned();
        let identity = identity.map(|(cert, key)| (cert.to_owned(), key.to_owned()));
        let mut paths = vec![ca.clone()];
        paths.extend(identity.iter().flat_map(|(cert, key)| [cert.clone(), key.clone()]));
        let config = ReloadedFiles::new(paths, move || {
            let identity = identity.as_ref().map(|(cert, key)| (cert.as_path(), key.as_path()));
            dated_grpc_client(Some(&ca), identity)
        })?;
        Ok(Self { files: Arc::new(config), server_name: None })
    }

    /// Requires this name in a server's certificate instead of the host of its address.
    pub fn expecting(self, server_name: impl Into<String>) -> Self {
        Self { server_name: Some(server_name.into()), ..self }
    }

    /// Settings for `tonic::transport::Endpoint::tls_config`, from the files' current content.
    pub fn config(&self) -> ClientTlsConfig {
        let config = self.files.current().value;
        match &self.server_name {
            Some(name) => config.domain_name(name.clone()),
            None => config,
        }
    }

    /// Unix time, in seconds, at which the current client certificate expires; `None` without one.
    pub(super) fn expires_at(&self) -> Option<i64> {
        self.files.current().expires_at
    }
}

/// TLS settings of gRPC clients; without `ca` the system's authorities are trusted.
pub(crate) fn grpc_client(
    ca: Option<&Path>,
    identity: Option<(&Path, &Path)>,
) -> Result<ClientTlsConfig, TlsError> {
    Ok(dated_grpc_client(ca, identity)?.value)
}

/// [`grpc_client`], and when the client certificate expires.
fn dated_grpc_client(
    ca: Option<&Path>,
    identity: Option<(&Path, &Path)>,
) -> Result<Dated<ClientTlsConfig>, TlsError> {
    let mut config = match ca {
        Some(ca) => {
            let ca = Pem::read(ca)?;
            ca.authority()?;
            ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca.text))
        }
        None => ClientTlsConfig::new().with_enabled_roots(),
    };
    let mut until = None;
    if let Some((cert, key)) = identity {
        let (cert, key) = (Pem::read(cert)?, Pem::read(key)?);
        // Tried here, so that an invalid file is found now and not at the first call.
        until = expires_at(&certified_key(&cert, &key)?.cert);
        config = config.identity(Identity::from_pem(cert.text, key.text));
    }
    Ok(Dated { value: config, expires_at: until })
}

/// [`grpc_client`] for other clients; without `ca` the system's authorities are trusted.
pub(crate) fn https_client(
    ca: Option<&Path>,
    identity: Option<(&Path, &Path)>,
) -> Result<rustls::ClientConfig, TlsError> {
    let roots = match ca {
        Some(ca) => authority(ca)?,
        None => {
            let mut roots = RootCertStore::empty();
            // Unreadable certificates of the system are not trusted.
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            roots
        }
    };
    let builder = rustls::ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .expect("ring knows every version that is on by default")
        .with_root_certificates(roots);
    let Some((cert, key)) = identity else { return Ok(builder.with_no_client_auth()) };
    let (cert, key) = (Pem::read(cert)?, Pem::read(key)?);
    builder
        .with_client_auth_cert(cert.certificates()?, key.private_key()?)
        .map_err(|source| no_pair(&cert, &key, source))
}

/// TLS settings of a process that connects to others: `NAME_ca`, `NAME_cert` and `NAME_key`.
#[derive(Debug, Clone, Copy)]
pub struct ClientFiles<'a> {
    /// The `NAME` of the three settings.
    pub name: &'static str,
    /// Trusted authority.
    pub ca: Option<&'a Path>,
    /// Client certificate.
    pub cert: Option<&'a Path>,
    /// Key of the client certificate.
    pub key: Option<&'a Path>,
}

impl ClientFiles<'_> {
    /// Returns the TLS settings; `None` without an authority, or if there was a fault.
    pub fn validate(&self, faults: &mut Faults) -> Option<ClientTls> {
        let (field, name) = (format!("{}_cert", self.name), self.name);
        faults.check(&field, self.cert.is_some() == self.key.is_some(), || {
            format!("--{name}-cert FILE and --{name}-key FILE must be given together")
        });
        faults.check(&field, self.cert.is_none() || self.ca.is_some(), || {
            format!("needs --{name}-ca FILE as well")
        });
        let settings = [("ca", self.ca), ("cert", self.cert), ("key", self.key)];
        let tls = ClientTls::read(self.ca?, self.cert.zip(self.key));
        let at_fault = |error: &TlsError| format!("{name}_{}", error.setting_of(settings).unwrap_or("ca"));
        tls.map_err(|error| faults.add(&at_fault(&error), error)).ok()
    }
}
