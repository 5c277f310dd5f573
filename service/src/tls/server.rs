//! TLS of listeners: the certificate that they present, and the clients that they accept.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::CryptoProvider;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::server::{
    ClientHello, NoServerSessionStorage, ResolvesServerCert, WebPkiClientVerifier,
};
use tokio_rustls::rustls::sign::CertifiedKey;

use super::client_names::ClientNames;
use super::expiry::Dated;
use super::pem::dated_key;
use super::{TlsError, authority, provider};
use crate::config::Faults;
use crate::reloaded_files::ReloadedFiles;

/// ALPN protocols: gRPC and HTTP choose among them.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// TLS flags of a process with listeners.
// Also the raw settings: none of them has a default.
#[derive(Debug, Clone, Default, clap::Args, Serialize, Deserialize)]
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

impl ServerTlsFlags {
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
        let settings = [
            ("tls_cert", Some(cert)),
            ("tls_key", Some(key)),
            ("tls_client_ca", clients.map(|clients| clients.ca)),
        ];
        let tls = ServerTls::read(cert, key, clients);
        tls.map_err(|error| faults.add(error.setting_of(settings).unwrap_or("tls_client_name"), error)).ok()
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
pub struct ServerTls {
    config: Arc<ServerConfig>,
    shown: Arc<CurrentCertificate>,
}

impl ServerTls {
    /// Reads a certificate chain and its key, and the requirements on clients' certificates, if any.
    pub fn read(cert: &Path, key: &Path, clients: Option<Clients<'_>>) -> Result<Self, TlsError> {
        let provider = provider();
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .expect("ring knows every version that is on by default");
        let is_mutual = clients.is_some();
        let builder = match clients {
            None => builder.with_no_client_auth(),
            Some(clients) => builder.with_client_cert_verifier(Arc::new(clients.verifier(provider)?)),
        };
        let paths = vec![cert.to_owned(), key.to_owned()];
        let (cert, key) = (cert.to_owned(), key.to_owned());
        let files = ReloadedFiles::new(paths, move || dated_key(&cert, &key))?;
        let shown = Arc::new(CurrentCertificate(files));
        let mut config = builder.with_cert_resolver(shown.clone());
        config.alpn_protocols = PROTOCOLS.map(<[u8]>::to_vec).to_vec();
        if is_mutual {
            // The client of a resumed session presents no certificate, so that one that has expired would count.
            config.session_storage = Arc::new(NoServerSessionStorage {});
        }
        Ok(Self { config: Arc::new(config), shown })
    }

    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.config))
    }

    /// Unix time, in seconds, at which the current certificate expires.
    pub(super) fn expires_at(&self) -> Option<i64> {
        self.shown.0.current().expires_at
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
struct CurrentCertificate(ReloadedFiles<Dated<Arc<CertifiedKey>>>);

impl ResolvesServerCert for CurrentCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.current().value)
    }
}
