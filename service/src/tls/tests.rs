//! Which files are refused, what a renewal changes, and which expiry metrics show.

use std::path::PathBuf;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::HandshakeKind;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};

use super::expiry::expires_at;
use super::pem::{Pem, dated_key};
use super::{
    ClientFiles, ClientTls, Clients, PresentedCertificates, ServerTls, ServerTlsFlags, grpc_client,
    https_client,
};
use crate::config::Faults;
use crate::metrics::{Exposition, Metrics};
use crate::reloaded_files::ReloadedFiles;

/// Unix times.
const START_OF_2030: i64 = 1_893_456_000;
const START_OF_2031: i64 = 1_924_992_000;

/// Files of an authority, and of a certificate that it signed for 127.0.0.1.
pub(crate) struct Files {
    dir: TempDir,
}

impl Files {
    pub(crate) fn new() -> Self {
        Self::valid_until(4096)
    }

    /// The same, until the beginning of this year.
    fn valid_until(year: i32) -> Self {
        let (mut params, ca_key) = (CertificateParams::default(), KeyPair::generate().unwrap());
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca_cert = params.self_signed(&ca_key).unwrap();
        let (ca, key) = (Issuer::new(params, ca_key), KeyPair::generate().unwrap());
        let mut cert = CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
        cert.not_after = date_time_ymd(year, 1, 1);
        let cert = cert.signed_by(&key, &ca).unwrap();
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

/// The certificate of a resumed session may have expired.
#[tokio::test]
async fn clients_present_their_certificate_at_each_connection() {
    let files = Files::new();
    let [cert, key, ca] = ["cert.pem", "key.pem", "ca.pem"].map(|name| files.path(name));
    let server = ServerTls::read(&cert, &key, Some(Clients { ca: &ca, names: &[] })).unwrap();
    let client = TlsConnector::from(Arc::new(https_client(Some(&ca), Some((&cert, &key))).unwrap()));
    for connection in 0..2 {
        let (near, far) = tokio::io::duplex(1 << 16);
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let (near, far) = tokio::join!(client.connect(name, near), server.acceptor().accept(far));
        let (mut near, mut far) = (near.unwrap(), far.unwrap());
        // Before this byte, the client reads the tickets with which it could resume the session.
        far.write_all(b"a").await.unwrap();
        far.flush().await.unwrap();
        assert_eq!(near.read_u8().await.unwrap(), b'a');
        assert_eq!(far.get_ref().1.handshake_kind(), Some(HandshakeKind::Full), "{connection}");
    }
}

#[test]
fn each_unusable_file_is_named() {
    let (files, others) = (Files::new(), Files::new());
    let empty = files.write("empty.pem", "");
    let (cert, key) = (files.path("cert.pem"), files.path("key.pem"));
    let cases = [
        (files.path("none.pem"), key.clone(), None, "none.pem: No such file"),
        (empty.clone(), key.clone(), None, "empty.pem: no items found; expected PEM with one CERTIFICATE"),
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
    let error = ClientTls::read(&files.path("ca.pem"), Some((&cert, &others.path("key.pem")))).unwrap_err();
    assert!(error.to_string().contains("cannot be used together"), "{error}");
    // The identity counts without an authority of its own, too.
    let error = grpc_client(None, Some((&cert, &others.path("key.pem")))).unwrap_err().to_string();
    assert!(error.contains("cannot be used together"), "{error}");
}

#[test]
fn a_file_that_cannot_be_used_is_a_fault_of_its_own_setting() {
    let files = Files::new();
    let [cert, key, ca, empty] = ["cert.pem", "key.pem", "ca.pem", "empty.pem"].map(|name| files.path(name));
    files.write("empty.pem", "");
    for (of_server, of_client, [cert, key, ca]) in [
        ("tls_cert", "worker_cert", [&empty, &key, &ca]),
        ("tls_key", "worker_key", [&cert, &empty, &ca]),
        ("tls_client_ca", "worker_ca", [&cert, &key, &empty]),
    ] {
        let (mut server, mut client) = (Faults::new(), Faults::new());
        let [tls_cert, tls_key, tls_client_ca] = [cert, key, ca].map(|path| Some(path.clone()));
        let raw = ServerTlsFlags { tls_cert, tls_key, tls_client_ca, tls_client_name: None };
        assert!(raw.validate(&mut server).is_none());
        let [cert, key, ca] = [cert, key, ca].map(|path| Some(path.as_path()));
        assert!(ClientFiles { name: "worker", ca, cert, key }.validate(&mut client).is_none());
        for (faults, field) in [(server, of_server), (client, of_client)] {
            let error = faults.finish().unwrap_err().to_string();
            assert!(error.contains(&format!(" {field}: ")), "`{error}` is no fault of {field}");
        }
    }
}

#[test]
fn renewed_files_are_shown_and_trusted_from_then_on() {
    let (files, others) = (Files::valid_until(2030), Files::valid_until(2031));
    let (cert, key) = (files.path("cert.pem"), files.path("key.pem"));
    let make = {
        let (cert, key) = (cert.clone(), key.clone());
        move || dated_key(&cert, &key)
    };
    let shown = ReloadedFiles::new(vec![cert.clone(), key.clone()], make).unwrap().checking_always();
    let first = shown.current();
    // Written one after the other, as some tools do: a certificate without its key is not used.
    std::fs::copy(others.path("cert.pem"), &cert).unwrap();
    assert_eq!(shown.current().value.cert, first.value.cert);
    std::fs::copy(others.path("key.pem"), &key).unwrap();
    let second = shown.current();
    assert_ne!(second.value.cert, first.value.cert);
    assert_eq!(second.value.cert, Pem::read(&others.path("cert.pem")).unwrap().certificates().unwrap());
    assert_eq!((first.expires_at, second.expires_at), (Some(START_OF_2030), Some(START_OF_2031)));
}

#[test]
fn metrics_show_when_each_presented_certificate_expires() {
    let (files, metrics) = (Files::valid_until(2030), Metrics::new());
    let [cert, key, ca] = ["cert.pem", "key.pem", "ca.pem"].map(|name| files.path(name));
    let client = ClientTls::read(&ca, Some((&cert, &key))).unwrap();
    let without_certificate = ClientTls::read(&ca, None).unwrap();
    PresentedCertificates {
        listener: Some(&files.server()),
        worker: Some(&client),
        discovery: Some(&without_certificate),
    }
    .register(&metrics);
    let page = metrics.encode(Exposition::Prometheus);
    let series: Vec<&str> = page.lines().filter(|line| !line.starts_with('#')).collect();
    let name = "outrider_tls_certificate_expiry_timestamp_seconds";
    let expected = ["tls_cert", "worker_cert"]
        .map(|certificate| format!("{name}{{certificate=\"{certificate}\"}} {START_OF_2030}"));
    assert_eq!(series, expected);
}

#[test]
fn a_chain_expires_with_the_first_of_its_certificates() {
    let certificate = |year| {
        let files = Files::valid_until(year);
        Pem::read(&files.path("cert.pem")).unwrap().certificates().unwrap().remove(0)
    };
    let (earlier, later) = (certificate(2030), certificate(2031));
    assert_eq!(expires_at(&[later.clone(), earlier.clone()]), Some(START_OF_2030));
    assert_eq!(expires_at(&[earlier, later.clone()]), Some(START_OF_2030));
    assert_eq!(expires_at(&[CertificateDer::from(vec![0]), later]), Some(START_OF_2031));
    assert_eq!(expires_at(&[]), None);
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
        let raw = ServerTlsFlags { tls_cert, tls_key, tls_client_ca, tls_client_name: None };
        assert!(raw.validate(&mut faults).is_none());
        let error = faults.finish().unwrap_err().to_string();
        assert!(error.contains(field), "`{error}` does not name {field}");
    }
    for (tls_client_ca, name) in [(None, "routers"), (path("ca.pem"), "no name at all")] {
        let (tls_cert, tls_key) = (path("cert.pem"), path("key.pem"));
        let tls_client_name = Some(vec![name.to_owned()]);
        let mut faults = Faults::new();
        drop(ServerTlsFlags { tls_cert, tls_key, tls_client_ca, tls_client_name }.validate(&mut faults));
        let error = faults.finish().unwrap_err().to_string();
        assert!(error.contains("tls_client_name"), "`{error}` does not name the field");
    }
}
