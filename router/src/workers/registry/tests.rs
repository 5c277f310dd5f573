//! Which connections are opened, refused and replaced.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use proto::v1::worker_server::{Worker, WorkerServer};
use proto::version::PROTOCOL_VERSIONS;
use rcgen::{CertificateParams, KeyPair};
use serde_json::json;
use service::accept::{Connections, Listener, RawListener};
use service::config::Faults;
use service::discovery::{DRAFT, TARGET};
use service::metrics::Metrics;
use service::shutdown::Lifetime;
use service::tls::ServerTls;
use tokio::net::TcpListener;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

use super::*;
use crate::workers::tls::{WorkerTls, WorkerTlsFlags};

const WORKER_ID: u64 = 5;

fn registry(tls: Option<WorkerTls>) -> Registry {
    let (events, _) = mpsc::channel(1);
    Registry::new(RouterIdentity { router_id: 7, tls }, Catalog::new(BTreeMap::new()), events)
}

/// A connected worker with [`WORKER_ID`].
fn peer(role: Role, address: &str) -> Peer {
    let hello = v1::WorkerHello { worker_id: WORKER_ID, ..v1::WorkerHello::default() };
    let channel = Channel::from_static("http://127.0.0.1:1").connect_lazy();
    Peer {
        info: worker_info(role, address, &hello, None),
        hello,
        client: WorkerClient::new(channel),
        replaced: CancellationToken::new(),
    }
}

#[tokio::test]
async fn a_worker_that_sends_the_id_of_another_ends_no_connection_to_the_other_role() {
    let registry = registry(None);
    let target = peer(Role::Target, "http://10.0.0.1:1");
    registry.register(WorkerKey(1), &target, None).await;
    let draft = peer(Role::Draft, "http://10.0.0.2:1");
    registry.register(WorkerKey(2), &draft, None).await;
    assert!(!target.replaced.is_cancelled());

    // The target's connection breaks, and is opened again.
    registry.unregister(WorkerKey(1)).await;
    let endpoint = Endpoint { address: "http://10.0.0.1:1".to_owned(), role: TARGET.to_owned() };
    let last_process = target.process_id();
    let found = registry.connected_as(&endpoint, last_process).await;
    assert!(found.is_none(), "the draft worker stands in its way");

    let (first, second) = (peer(Role::Target, "http://a:1"), peer(Role::Target, "http://b:1"));
    registry.register(WorkerKey(3), &first, None).await;
    assert!(registry.connected_as(&endpoint, last_process).await.is_some(), "its own other address");
    registry.register(WorkerKey(4), &second, None).await;
    assert!(first.replaced.is_cancelled() && !draft.replaced.is_cancelled());
}

/// The peers answer no request, so what is known without their files is said at once.
#[tokio::test]
async fn tokenizers_are_fetched_only_if_they_differ_and_are_not_too_large_together() {
    let with_tokenizer = |role, sha256: &str, size| {
        let (name, sha256) = (asset::TOKENIZER.to_owned(), sha256.to_owned());
        let hello =
            v1::WorkerHello { assets: vec![v1::Asset { name, sha256, size }], ..v1::WorkerHello::default() };
        Peer { hello, ..peer(role, "http://10.0.0.1:1") }
    };
    let target = with_tokenizer(Role::Target, "aa", 200 << 20);
    let equal = differing_token(&with_tokenizer(Role::Draft, "aa", 200 << 20), &target).await.unwrap();
    assert!(equal.contains("wrong fingerprint"), "{equal}");
    let too_large = differing_token(&with_tokenizer(Role::Draft, "bb", 200 << 20), &target).await;
    assert!(too_large.unwrap_err().to_string().contains("more than the limit"));
}

/// Sends the hello of a target with [`WORKER_ID`], and nothing else.
struct SilentTarget;

#[tonic::async_trait]
impl Worker for SilentTarget {
    type AttachStream = BoxStream<'static, Result<v1::WorkerFrame, Status>>;
    type FetchAssetStream = BoxStream<'static, Result<v1::AssetChunk, Status>>;

    async fn attach(
        &self,
        _: Request<Streaming<v1::RouterFrame>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let hello = v1::WorkerHello {
            worker_id: WORKER_ID,
            role: v1::WorkerRole::Target as i32,
            protocol_version_min: *PROTOCOL_VERSIONS.start(),
            protocol_version_max: *PROTOCOL_VERSIONS.end(),
            ..v1::WorkerHello::default()
        };
        let frame = v1::WorkerFrame { hello: Some(hello), ..v1::WorkerFrame::default() };
        Ok(Response::new(stream::iter([Ok(frame)]).chain(stream::pending()).boxed()))
    }

    async fn fetch_asset(
        &self,
        _: Request<v1::FetchAssetRequest>,
    ) -> Result<Response<Self::FetchAssetStream>, Status> {
        Err(Status::unimplemented("not in this test"))
    }
}

async fn serve(services: Routes, tls: Option<ServerTls>, lifetime: &Lifetime) -> SocketAddr {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    let config = RawListener::default().validate(&mut Faults::new());
    let connections = Connections::new(config, &Metrics::new());
    Listener::new(socket, tls, &connections).serve_grpc("grpc", services, lifetime);
    address
}

/// A worker answers only on the newest stream of a router.
#[tokio::test]
async fn a_target_listed_as_a_draft_worker_as_well_is_disturbed_once() {
    let (lifetime, registry) = (Lifetime::new(), registry(None));
    let target = peer(Role::Target, "http://another-spelling:1");
    registry.register(WorkerKey(1), &target, None).await;
    let address = serve(Routes::new(WorkerServer::new(SilentTarget)), None, &lifetime).await;
    let endpoint = Endpoint { address: format!("http://{address}"), role: DRAFT.to_owned() };
    let mut last_process = None;
    for expected in ["its hello says target", "list it only once"] {
        let error = registry.connect(&endpoint, &mut last_process).await.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    lifetime.shut_down(Duration::from_secs(10)).await;
}

/// Serves no worker, with a certificate for this name. Returns the address and the certificate, which is its
/// own authority.
async fn serve_as(name: &str, directory: &Path, lifetime: &Lifetime) -> (String, PathBuf) {
    let key = KeyPair::generate().unwrap();
    let cert = CertificateParams::new([name.to_owned()]).unwrap().self_signed(&key).unwrap();
    let [cert_file, key_file] = ["cert.pem", "key.pem"].map(|file| directory.join(file));
    std::fs::write(&cert_file, cert.pem()).unwrap();
    std::fs::write(&key_file, key.serialize_pem()).unwrap();
    let tls = ServerTls::read(&cert_file, &key_file, None).unwrap();
    let address = serve(Routes::default(), Some(tls), lifetime).await;
    (format!("https://{address}"), cert_file)
}

#[tokio::test]
async fn the_certificate_of_a_target_must_have_the_name_required_of_targets() {
    let lifetime = Lifetime::new();
    for (name, role, is_refused) in [
        // A draft worker's certificate, which is for its address.
        ("127.0.0.1", TARGET, true),
        ("127.0.0.1", DRAFT, false),
        ("targets.test", TARGET, false),
        ("targets.test", DRAFT, true),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let (address, ca) = serve_as(name, directory.path(), &lifetime).await;
        let settings = json!({ "worker_ca": ca, "target_name": "targets.test" });
        let settings: WorkerTlsFlags = serde_json::from_value(settings).unwrap();
        let registry = registry(settings.validate(&mut Faults::new()));
        let endpoint = Endpoint { address, role: role.to_owned() };
        let error = registry.connect(&endpoint, &mut None).await.unwrap_err();
        // With an accepted certificate the error is that the port serves no worker.
        let error = format!("{error:#}");
        assert_eq!(error.contains("certificate"), is_refused, "{name} as {role}: {error}");
    }
    lifetime.shut_down(Duration::from_secs(10)).await;
}
