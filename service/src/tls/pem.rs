//! PEM files, and what is read from them.

use std::path::Path;
use std::sync::Arc;

use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{self, RootCertStore};

use super::expiry::{Dated, expires_at};
use super::{TlsError, provider};

/// A PEM file and its path.
pub(super) struct Pem<'a> {
    path: &'a Path,
    pub(super) text: Vec<u8>,
}

impl<'a> Pem<'a> {
    pub(super) fn read(path: &'a Path) -> Result<Self, TlsError> {
        let text = std::fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })?;
        Ok(Self { path, text })
    }

    pub(super) fn authority(&self) -> Result<RootCertStore, TlsError> {
        let mut roots = RootCertStore::empty();
        for certificate in self.certificates()? {
            let added = roots.add(certificate);
            added.map_err(|error| self.unlike(&error, "certificates of an authority"))?;
        }
        Ok(roots)
    }

    pub(super) fn certificates(&self) -> Result<Vec<CertificateDer<'static>>, TlsError> {
        const EXPECTED: &str = "one CERTIFICATE or more";
        let found: Result<Vec<_>, pem::Error> = CertificateDer::pem_slice_iter(&self.text).collect();
        let found = found.map_err(|error| self.unlike(&error, EXPECTED))?;
        if found.is_empty() {
            return Err(self.unlike(&pem::Error::NoItemsFound, EXPECTED));
        }
        Ok(found)
    }

    pub(super) fn private_key(&self) -> Result<PrivateKeyDer<'static>, TlsError> {
        PrivateKeyDer::from_pem_slice(&self.text).map_err(|error| self.unlike(&error, "a PRIVATE KEY"))
    }

    fn unlike(&self, reason: &dyn std::fmt::Display, expected: &'static str) -> TlsError {
        TlsError::Content { path: self.path.to_owned(), reason: reason.to_string(), expected }
    }
}

/// A certificate chain with its key, known to belong together.
pub(super) fn certified_key(cert: &Pem<'_>, key: &Pem<'_>) -> Result<Arc<CertifiedKey>, TlsError> {
    CertifiedKey::from_der(cert.certificates()?, key.private_key()?, &provider())
        .map(Arc::new)
        .map_err(|source| no_pair(cert, key, source))
}

/// Reads a certificate chain with its key, and when the chain expires.
pub(super) fn dated_key(cert: &Path, key: &Path) -> Result<Dated<Arc<CertifiedKey>>, TlsError> {
    let pair = certified_key(&Pem::read(cert)?, &Pem::read(key)?)?;
    Ok(Dated { expires_at: expires_at(&pair.cert), value: pair })
}

pub(super) fn no_pair(cert: &Pem<'_>, key: &Pem<'_>, source: rustls::Error) -> TlsError {
    TlsError::Pair { cert: cert.path.to_owned(), key: key.path.to_owned(), source }
}
