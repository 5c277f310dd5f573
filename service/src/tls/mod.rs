//! TLS from PEM files: the identity of listeners, and the trusted authorities for outgoing connections.
//!
//! The files are read while the configuration is checked, so that a certificate without its key ends the
//! process before a port is bound. They are reread when they change: new connections use the renewed files,
//! open ones go on. The authority for clients' certificates is read once; changing it needs a restart, which
//! drains first.

mod client_names;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::server::{
    ClientHello, ResolvesServerCert, VerifierBuilderError, WebPkiClientVerifier,
};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{self, RootCertStore, ServerConfig};
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use self::client_names::ClientNames;
use crate::config::Faults;
use crate::reloaded_files::ReloadedFiles;

/// ALPN protocols: gRPC and HTTP choose among them.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

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

/// TLS flags of a process with listeners.
#[derive(Debug, Clone, Default, clap::Args, Serialize)]
#[command(next_help_heading = "TLS")]
pub struct ServerTlsFlags {
    /// Certificate chain to present, PEM; with it every port except --admin accepts TLS only
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of --tls-cert, PEM
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Accept only clients that present a certificate signed by this authority, PEM
    #[arg(long, value_name = "FILE")]
    pub tls_client_ca: Option<PathBuf>,
    /// Of these, accept only clients whose certificate is for one of these DNS names or addresses,
    /// comma-separated: where one authority signs for the whole cluster, the routers' name keeps draft
    /// workers out of targets
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub tls_client_name: Option<Vec<String>>,
}

/// Raw TLS settings of a process with listeners.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct RawServerTls {
    tls_cert: Option<PathBuf>,
    tls_key: Option<PathBuf>,
    tls_client_ca: Option<PathBuf>,
    tls_client_name: Option<Vec<String>>,
}

impl RawServerTls {
    /// Whether clients must present a certificate.
    pub fn is_mutual(&self) -> bool {
        self.tls_cert.is_some() && self.tls_client_ca.is_some()
    }

    /// Returns the listeners' TLS settings; `None` without a certificate, or if there was a fault.
    pub fn validate(&self, faults: &mut Faults) -> Option<ServerTls> {
        let with_cert = |file: &Option<PathBuf>| file.is_none() || self.tls_cert.is_some();
        for (field, file) in [("tls_key", &self.tls_key), ("tls_client_ca", &self.tls_client_ca)] {
            faults.check(field, with_cert(file), || "needs --tls-cert FILE as well".to_owned());
        }
        let has_ca = self.tls_client_name.is_none() || self.tls_client_ca.is_some();
        faults.check("tls_client_name", has_ca, || "needs --tls-client-ca FILE as well".to_owned());
        let cert = self.tls_cert.as_deref()?;
        let Some(key) = self.tls_key.as_deref() else {
            faults.add("tls_key", "is missing: --tls-cert FILE needs its key, --tls-key FILE");
            return None;
        };
        let names = self.tls_client_name.as_deref().unwrap_or_default();
        let clients = self.tls_client_ca.as_deref().map(|ca| Clients { ca, names });
        let field = |error: &TlsError| match error {
            TlsError::Name(_) => "tls_client_name",
            _ => "tls_cert",
        };
        ServerTls::read(cert, key, clients).map_err(|error| faults.add(field(&error), error)).ok()
    }
}

/// Which clients may connect.
#[derive(Debug, Clone, Copy)]
pub struct Clients<'a> {
    /// Authority that must have signed the client's certificate.
    pub ca: &'a Path,
    /// DNS names or addresses, one of which the certificate must be for; empty: any.
    pub names: &'a [String],
}

/// TLS settings of a listener.
#[derive(Debug, Clone)]
pub struct ServerTls(Arc<ServerConfig>);

impl ServerTls {
    /// Reads a certificate chain and its key, and the requirements on clients' certificates, if any.
    pub fn read(cert: &Path, key: &Path, clients: Option<Clients<'_>>) -> Result<Self, TlsError> {
        let provider = provider();
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .expect("ring knows every version that is on by default");
        let builder = match clients {
            None => builder.with_no_client_auth(),
            Some(clients) => builder.with_client_cert_verifier(Arc::new(clients.verifier(provider)?)),
        };
        let paths = vec![cert.to_owned(), key.to_owned()];
        let (cert, key) = (cert.to_owned(), key.to_owned());
        let shown = ReloadedFiles::new(paths, move || certified_key(&Pem::read(&cert)?, &Pem::read(&key)?))?;
        let mut config = builder.with_cert_resolver(Arc::new(CurrentCertificate(shown)));
        config.alpn_protocols = PROTOCOLS.map(<[u8]>::to_vec).to_vec();
        Ok(Self(Arc::new(config)))
    }

    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.0))
    }
}

impl Clients<'_> {
    fn verifier(self, provider: Arc<CryptoProvider>) -> Result<ClientNames, TlsError> {
        let Self { ca, names } = self;
        let name = |name: &String| {
            ServerName::try_from(name.clone()).map_err(|_not_a_name| TlsError::Name(name.clone()))
        };
        let names = names.iter().map(name).collect::<Result<_, _>>()?;
        let inner = WebPkiClientVerifier::builder_with_provider(Arc::new(authority(ca)?), provider)
            .build()
            .map_err(|source| TlsError::Authority { path: ca.to_owned(), source })?;
        Ok(ClientNames { inner, names })
    }
}

/// Presents the same certificate for every server name.
#[derive(Debug)]
struct CurrentCertificate(ReloadedFiles<Arc<CertifiedKey>>);

impl ResolvesServerCert for CurrentCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.current())
    }
}

/// Trusted authority, and optional client certificate, for `https://` addresses.
#[derive(Debug, Clone)]
pub struct ClientTls {
    files: Arc<ReloadedFiles<ClientTlsConfig>>,
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
        let config = ReloadedFiles::new(paths, move || client_config(&ca, identity.as_ref()))?;
        Ok(Self { files: Arc::new(config), server_name: None })
    }

    /// Requires this name in a server's certificate instead of the host of its address.
    pub fn expecting(self, server_name: impl Into<String>) -> Self {
        Self { server_name: Some(server_name.into()), ..self }
    }

    /// Settings for `tonic::transport::Endpoint::tls_config`, from the files' current content.
    pub fn config(&self) -> ClientTlsConfig {
        let config = self.files.current();
        match &self.server_name {
            Some(name) => config.domain_name(name.clone()),
            None => config,
        }
    }
}

fn client_config(ca: &Path, identity: Option<&(PathBuf, PathBuf)>) -> Result<ClientTlsConfig, TlsError> {
    let ca = Pem::read(ca)?;
    ca.authority()?;
    let mut config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca.text));
    if let Some((cert, key)) = identity {
        let (cert, key) = (Pem::read(cert)?, Pem::read(key)?);
        // Tried here, so that an invalid file is found now and not at the first call.
        certified_key(&cert, &key)?;
        config = config.identity(Identity::from_pem(cert.text, key.text));
    }
    Ok(config)
}

/// TLS settings of clients other than gRPC; without `ca` the system's authorities are trusted.
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

fn certified_key(cert: &Pem<'_>, key: &Pem<'_>) -> Result<Arc<CertifiedKey>, TlsError> {
    CertifiedKey::from_der(cert.certificates()?, key.private_key()?, &provider())
        .map(Arc::new)
        .map_err(|source| no_pair(cert, key, source))
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
        let tls = ClientTls::read(self.ca?, self.cert.zip(self.key));
        tls.map_err(|error| faults.add(&format!("{name}_ca"), error)).ok()
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

/// A PEM file and its path.
struct Pem<'a> {
    path: &'a Path,
    text: Vec<u8>,
}

impl<'a> Pem<'a> {
    fn read(path: &'a Path) -> Result<Self, TlsError> {
        let text = std::fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })?;
        Ok(Self { path, text })
    }

    fn authority(&self) -> Result<RootCertStore, TlsError> {
        let mut roots = RootCertStore::empty();
        for certificate in self.certificates()? {
            let added = roots.add(certificate);
            added.map_err(|error| self.unlike(&error, "certificates of an authority"))?;
        }
        Ok(roots)
    }

    fn certificates(&self) -> Result<Vec<CertificateDer<'static>>, TlsError> {
        const EXPECTED: &str = "one CERTIFICATE or more";
        let found: Result<Vec<_>, pem::Error> = CertificateDer::pem_slice_iter(&self.text).collect();
        let found = found.map_err(|error| self.unlike(&error, EXPECTED))?;
        if found.is_empty() {
            return Err(self.unlike(&pem::Error::NoItemsFound, EXPECTED));
        }
        Ok(found)
    }

    fn private_key(&self) -> Result<PrivateKeyDer<'static>, TlsError> {
        PrivateKeyDer::from_pem_slice(&self.text).map_err(|error| self.unlike(&error, "a PRIVATE KEY"))
    }

    fn unlike(&self, reason: &dyn std::fmt::Display, expected: &'static str) -> TlsError {
        TlsError::Content { path: self.path.to_owned(), reason: reason.to_string(), expected }
    }
}

fn no_pair(cert: &Pem<'_>, key: &Pem<'_>, source: rustls::Error) -> TlsError {
    TlsError::Pair { cert: cert.path.to_owned(), key: key.path.to_owned(), source }
}

#[cfg(test)]
pub(crate) mod tests {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
    use tempfile::TempDir;

    use super::*;

    /// Files of an authority, and of a certificate that it signed for 127.0.0.1.
    pub(crate) struct Files {
        dir: TempDir,
    }

    impl Files {
        pub(crate) fn new() -> Self {
            let (mut params, ca_key) = (CertificateParams::default(), KeyPair::generate().unwrap());
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            let ca_cert = params.self_signed(&ca_key).unwrap();
            let (ca, key) = (Issuer::new(params, ca_key), KeyPair::generate().unwrap());
            let cert =
                CertificateParams::new(["127.0.0.1".to_owned()]).unwrap().signed_by(&key, &ca).unwrap();
            let files = Self { dir: TempDir::new().unwrap() };
            files.write("ca.pem", &ca_cert.pem());
            files.write("cert.pem", &cert.pem());
            files.write("key.pem", &key.serialize_pem());
            files
        }

        pub(crate) fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
            std::fs::write(self.path(name), text).unwrap();
            self.path(name)
        }

        pub(crate) fn server(&self) -> ServerTls {
            ServerTls::read(&self.path("cert.pem"), &self.path("key.pem"), None).unwrap()
        }
    }

    #[test]
    fn each_unusable_file_is_named() {
        let (files, others) = (Files::new(), Files::new());
        let empty = files.write("empty.pem", "");
        let (cert, key) = (files.path("cert.pem"), files.path("key.pem"));
        let cases = [
            (files.path("none.pem"), key.clone(), None, "none.pem: No such file"),
            (
                empty.clone(),
                key.clone(),
                None,
                "empty.pem: no items found; expected PEM with one CERTIFICATE",
            ),
            (key.clone(), key.clone(), None, "key.pem: no items found; expected PEM with one CERTIFICATE"),
            (cert.clone(), cert.clone(), None, "cert.pem: no items found; expected PEM with a PRIVATE KEY"),
            (cert.clone(), others.path("key.pem"), None, "cannot be used together"),
            (cert.clone(), key.clone(), Some(empty), "empty.pem: no items found"),
        ];
        for (cert, key, ca, expected) in cases {
            let clients = ca.as_deref().map(|ca| Clients { ca, names: &[] });
            let error = ServerTls::read(&cert, &key, clients).unwrap_err().to_string();
            assert!(error.contains(expected), "`{error}` does not say `{expected}`");
        }
        let error =
            ClientTls::read(&files.path("ca.pem"), Some((&cert, &others.path("key.pem")))).unwrap_err();
        assert!(error.to_string().contains("cannot be used together"), "{error}");
    }

    #[test]
    fn renewed_files_are_shown_and_trusted_from_then_on() {
        let (files, others) = (Files::new(), Files::new());
        let (cert, key) = (files.path("cert.pem"), files.path("key.pem"));
        let make = {
            let (cert, key) = (cert.clone(), key.clone());
            move || certified_key(&Pem::read(&cert)?, &Pem::read(&key)?)
        };
        let shown = ReloadedFiles::new(vec![cert.clone(), key.clone()], make).unwrap().checking_always();
        let first = shown.current();
        // Written one after the other, as some tools do: a certificate without its key is not used.
        std::fs::copy(others.path("cert.pem"), &cert).unwrap();
        assert_eq!(shown.current().cert, first.cert);
        std::fs::copy(others.path("key.pem"), &key).unwrap();
        let second = shown.current();
        assert_ne!(second.cert, first.cert);
        assert_eq!(second.cert, Pem::read(&others.path("cert.pem")).unwrap().certificates().unwrap());
    }

    #[test]
    fn settings_that_need_each_other_say_so() {
        let files = Files::new();
        let path = |name| Some(files.path(name));
        let cases = [
            (None, path("key.pem"), None, "tls_key"),
            (path("cert.pem"), None, None, "tls_key"),
            (None, None, path("ca.pem"), "tls_client_ca"),
        ];
        for (tls_cert, tls_key, tls_client_ca, field) in cases {
            let mut faults = Faults::new();
            let raw = RawServerTls { tls_cert, tls_key, tls_client_ca, tls_client_name: None };
            assert!(raw.validate(&mut faults).is_none());
            let error = faults.finish().unwrap_err().to_string();
            assert!(error.contains(field), "`{error}` does not name {field}");
        }
        for (tls_client_ca, name) in [(None, "routers"), (path("ca.pem"), "no name at all")] {
            let (tls_cert, tls_key) = (path("cert.pem"), path("key.pem"));
            let tls_client_name = Some(vec![name.to_owned()]);
            let mut faults = Faults::new();
            drop(RawServerTls { tls_cert, tls_key, tls_client_ca, tls_client_name }.validate(&mut faults));
            let error = faults.finish().unwrap_err().to_string();
            assert!(error.contains("tls_client_name"), "`{error}` does not name the field");
        }
    }
}
