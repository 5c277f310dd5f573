//! TLS settings for connections to workers: trusted authority, client certificate, and the names that the
//! workers' certificates must have.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use service::config::Faults;
use service::discovery::TARGET;
use service::tls::{ClientFiles, ClientTls, is_server_name};

/// Flags of TLS for connections to workers.
// Also the raw settings: none of them has a default.
#[derive(Debug, Clone, Default, clap::Args, Serialize, Deserialize)]
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
    /// Name that the certificate of every target worker must have, instead of --worker-name or the host of
    /// its address: a worker without it, such as a draft worker, cannot register as a target
    #[arg(long, value_name = "NAME")]
    pub target_name: Option<String>,
}

/// TLS settings for connections to workers, by the role in which discovery lists them.
#[derive(Debug, Clone)]
pub struct WorkerTls {
    /// For draft workers.
    pub draft: ClientTls,
    /// For targets.
    pub target: ClientTls,
}

impl WorkerTls {
    /// The settings for a worker that discovery lists in this role.
    pub fn of(&self, role: &str) -> &ClientTls {
        if role == TARGET { &self.target } else { &self.draft }
    }
}

impl WorkerTlsFlags {
    /// Returns the TLS settings; `None` without an authority, or if there was a fault.
    pub fn validate(&self, faults: &mut Faults) -> Option<WorkerTls> {
        let [ca, cert, key] = [&self.worker_ca, &self.worker_cert, &self.worker_key].map(Option::as_deref);
        for (field, name) in [("worker_name", &self.worker_name), ("target_name", &self.target_name)] {
            faults
                .check(field, name.is_none() || ca.is_some(), || "needs --worker-ca FILE as well".to_owned());
            faults.check(field, name.as_deref().is_none_or(is_server_name), || {
                "is no name or address that a certificate can have".to_owned()
            });
        }
        let tls = ClientFiles { name: "worker", ca, cert, key }.validate(faults)?;
        let draft = match &self.worker_name {
            Some(name) => tls.expecting(name),
            None => tls,
        };
        let target = match &self.target_name {
            Some(name) => draft.clone().expecting(name),
            None => draft.clone(),
        };
        Some(WorkerTls { draft, target })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is wrong with these settings and this name of workers and of targets.
    fn faults(raw: WorkerTlsFlags, name: &str) -> String {
        let mut faults = Faults::new();
        let (worker_name, target_name) = (Some(name.to_owned()), Some(name.to_owned()));
        WorkerTlsFlags { worker_name, target_name, ..raw }.validate(&mut faults);
        faults.finish().unwrap_err().to_string()
    }

    #[test]
    fn required_names_need_an_authority_and_can_be_in_a_certificate() {
        let directory = tempfile::tempdir().unwrap();
        let ca = directory.path().join("ca.pem");
        let authority = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        std::fs::write(&ca, authority.cert.pem()).unwrap();
        let with_ca = WorkerTlsFlags { worker_ca: Some(ca), ..WorkerTlsFlags::default() };
        for (faults, expected) in [
            (faults(WorkerTlsFlags::default(), "workers.test"), "needs --worker-ca FILE as well"),
            (faults(with_ca, "no name at all"), "is no name or address that a certificate can have"),
        ] {
            for field in ["worker_name", "target_name"] {
                assert!(faults.contains(&format!("{field}: {expected}")), "{faults}");
            }
        }
    }
}
