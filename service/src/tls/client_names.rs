//! Accepts only clients whose certificate is for a given name: if one authority signs for the whole cluster,
//! a draft worker's certificate still cannot be used at a target.

use std::sync::Arc;

use tokio_rustls::rustls::client::danger::HandshakeSignatureValid;
use tokio_rustls::rustls::client::verify_server_name;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::ParsedCertificate;
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::{DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};

/// Checks a client's certificate as `inner` does, and that it is for one of `names`. Names are matched as a
/// client matches a server's (RFC 6125): DNS names, with wildcards in the certificate, and addresses.
#[derive(Debug)]
pub(super) struct ClientNames {
    pub(super) inner: Arc<dyn ClientCertVerifier>,
    pub(super) names: Vec<ServerName<'static>>,
}

impl ClientCertVerifier for ClientNames {
    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.inner.verify_client_cert(end_entity, intermediates, now)?;
        let certificate = ParsedCertificate::try_from(end_entity)?;
        let mut fault = None;
        for name in &self.names {
            match verify_server_name(&certificate, name) {
                Ok(()) => return Ok(verified),
                Err(error) => fault = Some(error),
            }
        }
        // Without names any certificate is accepted.
        fault.map_or(Ok(verified), Err)
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, cert, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, cert, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}
