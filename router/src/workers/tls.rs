//! TLS settings for connections to workers: trusted authority and client certificate.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use service::config::Faults;
use service::tls::{ClientFiles, ClientTls, is_server_name};

/// Flags of TLS for connections to workers.
#[derive(Debug, Clone, Default, clap::Args, Serialize)]
#[command(next_help_heading = "TLS")]
pub struct WorkerTlsFlags {
    /// The authority that signed the workers' certificates, PEM; needed for workers at https:// addresses
    #[arg(long, value_name = "FILE")]
    pub worker_ca: Option<PathBuf>,
    /// A certificate to present to workers that require one (--tls-client-ca), PEM
    #[arg(long, value_name = "FILE")]
    pub worker_cert: Option<PathBuf>,
    /// The private key of --worker-cert, PEM
    #[arg(long, value_name = "FILE")]
    pub worker_key: Option<PathBuf>,
    /// Name that the certificate of every worker must have, instead of the host of the worker's address: for
    /// workers whose addresses no certificate can list, such as pods
    #[arg(long, value_name = "NAME")]
    pub worker_name: Option<String>,
}

/// Raw settings of TLS for connections to workers.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct RawWorkerTls {
    worker_ca: Option<PathBuf>,
    worker_cert: Option<PathBuf>,
    worker_key: Option<PathBuf>,
    worker_name: Option<String>,
}

impl RawWorkerTls {
    /// Returns the TLS settings; `None` without an authority, or if there was a fault.
    pub fn validate(&self, faults: &mut Faults) -> Option<ClientTls> {
        let [ca, cert, key] = [&self.worker_ca, &self.worker_cert, &self.worker_key].map(Option::as_deref);
        let name = self.worker_name.as_deref();
        faults.check("worker_name", name.is_none() || ca.is_some(), || {
            "needs --worker-ca FILE as well".to_owned()
        });
        faults.check("worker_name", name.is_none_or(is_server_name), || {
            "is no name or address that a certificate can have".to_owned()
        });
        let tls = ClientFiles { name: "worker", ca, cert, key }.validate(faults)?;
        Some(match name {
            Some(name) => tls.expecting(name),
            None => tls,
        })
    }
}
