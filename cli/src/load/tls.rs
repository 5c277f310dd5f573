//! TLS between the generator and an `https` endpoint: trusted certificates and handshake. Timestamps are
//! taken below TLS, as bytes arrive.
//!
//! Certificates are verified against the operating system's roots, against one file, or not at all if
//! requested. Only HTTP/1.1 is offered, because the generator supports nothing else.

use std::path::PathBuf;
use std::sync::Arc;

use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::{ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use super::stamped::StampedStream;

/// Trusted certificates.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trust {
    /// PEM file of certificates that are trusted instead of the operating system's.
    pub ca_cert: Option<PathBuf>,
    /// Accepts any certificate.
    pub insecure: bool,
}

/// TLS configuration for one host.
#[derive(Clone)]
pub(super) struct Tls {
    connector: TlsConnector,
    host: ServerName<'static>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("host", &self.host).finish_non_exhaustive()
    }
}

impl Tls {
    /// # Errors
    /// The host name is not valid in a certificate, or the trusted certificates cannot be read; the message
    /// says which.
    pub(super) fn new(host: &str, trust: &Trust) -> Result<Self, String> {
        let host = ServerName::try_from(host.to_owned())
            .map_err(|error| format!("`{host}` cannot stand in a certificate: {error}"))?;
        let provider = Arc::new(ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?;
        let mut config = match trust.insecure {
            true => builder
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(AcceptAnyCertificate(provider)))
                .with_no_client_auth(),
            false => builder.with_root_certificates(roots(trust)?).with_no_client_auth(),
        };
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self { connector: TlsConnector::from(Arc::new(config)), host })
    }

    pub(super) async fn handshake(
        &self,
        stream: StampedStream,
    ) -> Result<Box<TlsStream<StampedStream>>, String> {
        let handshake = self.connector.connect(self.host.clone(), stream).await;
        handshake.map(Box::new).map_err(|error| format!("TLS: {error}"))
    }
}

fn roots(trust: &Trust) -> Result<RootCertStore, String> {
    if let Some(file) = &trust.ca_cert {
        return service::tls::authority(file).map_err(|error| format!("--ca-cert: {error}"));
    }
    let mut roots = RootCertStore::empty();
    // Unreadable certificates are skipped; a host that needs one of them will fail verification.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    match roots.is_empty() {
        true => Err("this machine has no certificates of its own: give --ca-cert FILE".to_owned()),
        false => Ok(roots),
    }
}

/// Accepts any certificate. Signatures are still verified, so that a broken handshake is detected.
#[derive(Debug)]
struct AcceptAnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AcceptAnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        tokio_rustls::rustls::crypto::verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        tokio_rustls::rustls::crypto::verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
