//! When the certificates that a process presents expire, as a metric. Those of authorities are left out: a
//! trusted authority counts by its name and key only, so its own expiry ends no connection.

use tokio_rustls::rustls::pki_types::CertificateDer;

use super::{ClientTls, ServerTls};
use crate::metrics::{EncodeLabelSet, GaugeName, LabelValues, Metrics, ReadGauge};

const LISTENER: &str = "tls_cert";
const WORKER: &str = "worker_cert";
const DISCOVERY: &str = "discovery_cert";

const EXPIRY: GaugeName = GaugeName::new(
    "outrider_tls_certificate_expiry_timestamp_seconds",
    "Unix time at which a certificate chain that this process presents expires, by the setting of its file",
)
.with_labels(&[("certificate", LabelValues::Listed(|| vec![LISTENER, WORKER, DISCOVERY]))]);

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CertificateLabels {
    certificate: &'static str,
}

/// The certificates that a process presents. A process without one has no series for it.
#[derive(Clone, Copy, Debug, Default)]
pub struct PresentedCertificates<'a> {
    /// That of `--tls-cert`, to clients.
    pub listener: Option<&'a ServerTls>,
    /// That of a router's `--worker-cert`, to workers.
    pub worker: Option<&'a ClientTls>,
    /// That of `--discovery-cert`, to etcd.
    pub discovery: Option<&'a ClientTls>,
}

impl PresentedCertificates<'_> {
    /// Registers when each of them expires. A scrape rereads changed files, as a new connection does.
    pub fn register(self, metrics: &Metrics) {
        let mut series: Vec<(CertificateLabels, ReadGauge)> = Vec::new();
        if let Some(tls) = self.listener.cloned() {
            series.push((CertificateLabels { certificate: LISTENER }, Box::new(move || tls.expires_at())));
        }
        for (certificate, tls) in [(WORKER, self.worker), (DISCOVERY, self.discovery)] {
            if let Some(tls) = tls.cloned() {
                series.push((CertificateLabels { certificate }, Box::new(move || tls.expires_at())));
            }
        }
        metrics.scraped_gauges(&EXPIRY, series);
    }
}

/// A value made from a certificate chain, and when that expires.
#[derive(Clone, Debug)]
pub(super) struct Dated<T> {
    pub(super) value: T,
    /// See [`expires_at`]; `None` without a certificate as well.
    pub(super) expires_at: Option<i64>,
}

/// Unix time, in seconds, at which the first certificate of a chain expires; `None` if it cannot be read.
pub(super) fn expires_at(chain: &[CertificateDer<'_>]) -> Option<i64> {
    chain.iter().filter_map(not_after).min()
}

fn not_after(certificate: &CertificateDer<'_>) -> Option<i64> {
    match x509_parser::parse_x509_certificate(certificate) {
        Ok((_, parsed)) => Some(parsed.validity().not_after.timestamp()),
        // Connections do not need it.
        Err(error) => {
            tracing::warn!(%error, "cannot read when a certificate expires: the metric leaves it out");
            None
        }
    }
}
