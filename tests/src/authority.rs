//! A certificate authority for tests, for servers and clients on 127.0.0.1.

use std::path::PathBuf;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};
use service::tls::{ClientTls, Clients, ServerTls};
use tempfile::TempDir;

/// Name in some of the certificates.
pub const NAME: &str = "router.outrider.test";

/// The authority's certificate and certificates that it signed, as files.
#[derive(Debug)]
pub struct TestCa {
    dir: TempDir,
}

impl TestCa {
    /// Creates an authority that no process trusts yet.
    pub fn new() -> anyhow::Result<Self> {
        let (mut params, ca_key) = (CertificateParams::default(), KeyPair::generate()?);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca_cert = params.self_signed(&ca_key)?;
        let (issuer, key) = (Issuer::new(params, ca_key), KeyPair::generate()?);
        let params = || CertificateParams::new(["127.0.0.1".to_owned()]);
        let cert = params()?.signed_by(&key, &issuer)?;
        let named = CertificateParams::new([NAME.to_owned()])?.signed_by(&key, &issuer)?;
        let mut expired = params()?;
        expired.not_after = date_time_ymd(2001, 1, 1);
        let expired = expired.signed_by(&key, &issuer)?;
        let authority = Self { dir: TempDir::new()? };
        std::fs::write(authority.file("ca.pem"), ca_cert.pem())?;
        std::fs::write(authority.file("cert.pem"), cert.pem())?;
        std::fs::write(authority.file("expired.pem"), expired.pem())?;
        std::fs::write(authority.file("named.pem"), named.pem())?;
        std::fs::write(authority.file("key.pem"), key.serialize_pem())?;
        Ok(authority)
    }

    /// A server that presents the signed certificate, and requires one of the same authority if `mutual`.
    pub fn server(&self, mutual: bool) -> anyhow::Result<ServerTls> {
        let ca = mutual.then(|| self.file("ca.pem"));
        let clients = ca.as_deref().map(|ca| Clients { ca, names: &[] });
        Ok(ServerTls::read(&self.file("cert.pem"), &self.file("key.pem"), clients)?)
    }

    /// A server that requires a certificate of the same authority for [`NAME`].
    pub fn server_for_named(&self) -> anyhow::Result<ServerTls> {
        let clients = Clients { ca: &self.file("ca.pem"), names: &[NAME.to_owned()] };
        Ok(ServerTls::read(&self.file("cert.pem"), &self.file("key.pem"), Some(clients))?)
    }

    /// A server whose certificate is for [`NAME`], and for no address.
    pub fn named_server(&self) -> anyhow::Result<ServerTls> {
        Ok(ServerTls::read(&self.file("named.pem"), &self.file("key.pem"), None)?)
    }

    /// A client that trusts the authority and presents no certificate.
    pub fn client_without_certificate(&self) -> anyhow::Result<ClientTls> {
        Ok(ClientTls::read(&self.file("ca.pem"), None)?)
    }

    /// A client that trusts the authority and presents a certificate signed by it.
    pub fn client(&self) -> anyhow::Result<ClientTls> {
        self.client_with("cert.pem")
    }

    /// The same, with an expired certificate.
    pub fn expired_client(&self) -> anyhow::Result<ClientTls> {
        self.client_with("expired.pem")
    }

    /// The same, with a certificate for [`NAME`].
    pub fn named_client(&self) -> anyhow::Result<ClientTls> {
        self.client_with("named.pem")
    }

    fn client_with(&self, cert: &str) -> anyhow::Result<ClientTls> {
        let (cert, key) = (self.file(cert), self.file("key.pem"));
        Ok(ClientTls::read(&self.file("ca.pem"), Some((&cert, &key)))?)
    }

    /// Replaces the certificate and key that servers present by those of another authority; the authority
    /// that clients trust stays.
    pub fn replace_server_certificate(&self, other: &Self) -> anyhow::Result<()> {
        // The key first: a certificate without a matching key is not loaded.
        for name in ["key.pem", "cert.pem"] {
            std::fs::copy(other.file(name), self.file("new.pem"))?;
            std::fs::rename(self.file("new.pem"), self.file(name))?;
        }
        Ok(())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}
