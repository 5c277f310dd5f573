//! The load generator over TLS: a trusted certificate, an untrusted one, and latencies that still match the
//! server's.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use outrider_cli::load::prompts::Content;
use outrider_cli::load::scripted::{Script, ScriptedServer};
use outrider_cli::load::{Access, Client, Endpoint, Prompt, Sample, Schedule, Settings, Trust};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;

/// Terminates TLS in front of a scripted server, as a proxy would.
struct TlsFront {
    url: String,
    ca_cert: PathBuf,
    /// Number of connections whose first request contained the API key.
    authorized: Arc<AtomicUsize>,
    _directory: tempfile::TempDir,
}

impl TlsFront {
    async fn start(server: &ScriptedServer) -> Self {
        let server = server.url().trim_start_matches("http://").to_owned();
        let issued =
            rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate can be made");
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let ca_cert = directory.path().join("ca.pem");
        std::fs::write(&ca_cert, issued.cert.pem()).expect("it can be written");
        let key = PrivateKeyDer::try_from(issued.signing_key.serialize_der()).expect("it was just made");
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("the provider knows them")
            .with_no_client_auth()
            .with_single_cert(vec![issued.cert.der().clone()], key)
            .expect("the key is the certificate\'s");
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("https://localhost:{}", listener.local_addr().expect("it is bound").port());
        let authorized = Arc::new(AtomicUsize::new(0));
        let seen = authorized.clone();
        // The LocalSet drops both kinds of task at the end of the test.
        tokio::task::spawn_local(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (acceptor, server, seen) = (acceptor.clone(), server.clone(), seen.clone());
                tokio::task::spawn_local(async move {
                    client.set_nodelay(true).ok();
                    let Ok(mut client) = acceptor.accept(client).await else { return };
                    let mut head = [0; 4096];
                    let len = client.read(&mut head).await.expect("a request");
                    let key = String::from_utf8_lossy(&head[..len]).contains("Bearer sk-test");
                    seen.fetch_add(usize::from(key), Ordering::Relaxed);
                    let mut server = TcpStream::connect(server).await.expect("the server listens");
                    server.set_nodelay(true).ok();
                    server.write_all(&head[..len]).await.expect("the server reads");
                    tokio::io::copy_bidirectional(&mut client, &mut server).await.ok();
                });
            }
        });
        Self { url, ca_cert, authorized, _directory: directory }
    }

    async fn reach(&self, trust: Trust) -> Result<Endpoint, String> {
        let access = Access { api_key: Some("sk-test".to_owned()), trust, ..Access::default() };
        Endpoint::connect(&self.url, access).await.map_err(|error| error.to_string())
    }
}

#[tokio::test]
async fn certificates_are_believed_by_file_or_not_at_all_and_latencies_stay_the_servers() {
    tokio::task::LocalSet::new().run_until(over_tls()).await;
}

async fn over_tls() {
    let waits = [Duration::from_millis(60); 4];
    let server = ScriptedServer::start(move |_| Script::tokens(&waits)).expect("a free port");
    let front = TlsFront::start(&server).await;

    let unknown = front.reach(Trust::default()).await.expect_err("nobody knows it");
    assert!(unknown.contains("certificate"), "{unknown}");
    let empty = front.ca_cert.with_file_name("empty.pem");
    std::fs::write(&empty, "").expect("it can be written");
    let faulty =
        front.reach(Trust { ca_cert: Some(empty), insecure: false }).await.expect_err("an empty file");
    assert!(faulty.contains("empty.pem: no items found; expected PEM with one CERTIFICATE"), "{faulty}");

    for (turn, trust) in [
        Trust { ca_cert: Some(front.ca_cert.clone()), insecure: false },
        Trust { ca_cert: None, insecure: true },
    ]
    .into_iter()
    .enumerate()
    {
        let endpoint = front.reach(trust).await.expect("it is believed");
        let prompt = |i: usize| Prompt { task: "chat".to_owned(), content: Content::Prompt(i.to_string()) };
        let requests: Vec<_> = (0..6).map(|i| Settings::default().request(&endpoint, &prompt(i))).collect();
        let client = Client::new(endpoint);
        let run = client.drive(&requests, &Schedule::Closed { concurrency: 2 }, |_| ()).await;
        let samples = run.samples(&requests);
        assert!(samples.iter().all(Sample::is_completed), "{:?}", run.exchanges);
        // Gaps between tokens match the server's log of the same requests within 2%.
        let log = loop {
            let log = server.log();
            if log.len() == 6 * (turn + 1) {
                break log.into_iter().skip(6 * turn);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        let sent: f64 = log
            .flat_map(|entry| {
                let times: Vec<_> = entry.tokens().map(|event| event.after).collect();
                times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect::<Vec<_>>()
            })
            .sum();
        let seen: f64 = samples.iter().flat_map(|sample| &sample.gaps).map(Duration::as_secs_f64).sum();
        assert!((seen / sent - 1.0).abs() < 0.02, "{seen} s between tokens, by the log {sent}");
    }
    // One connection per request for the model list, and two per run.
    assert!(front.authorized.load(Ordering::Relaxed) >= 6);
}
