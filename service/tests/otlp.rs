//! An exported span, from the standard variables to a collector that receives it over the network.
//!
//! Variables are passed to a process at its start, so the test runs itself again with them set; that second
//! process records a span and ends as a server does.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "all of this crate is a test, its second process included")]

use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use axum::body::Bytes;
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value;
use opentelemetry_proto::tonic::trace::v1::ResourceSpans;
use prost::Message as _;
use service::accept::{Connections, Listener, RawListener};
use service::config::{Faults, env_var};
use service::metrics::Metrics;
use service::shutdown::Lifetime;
use service::telemetry::{self, LogFormat, TelemetryConfig};
use service::tls::ServerTls;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::{Identity, Server, ServerTlsConfig};
use tonic::{Request, Response, Status};

/// Set in the second process.
const RUN_AGAIN: &str = "OUTRIDER_TEST_RUN_AGAIN";

const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

/// Timeout of the collector; only a failing test waits this long.
const AMPLE: Duration = Duration::from_secs(20);

/// A collector that forwards what it receives.
struct Collector(mpsc::Sender<ResourceSpans>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for spans in request.into_inner().resource_spans {
            self.0.send(spans).await.map_err(|_| Status::unavailable("the test is over"))?;
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// Starts a collector; returns its URL and what it receives.
async fn collector(lifetime: &Lifetime) -> (String, mpsc::Receiver<ResourceSpans>) {
    let (address, received) = collector_of(lifetime, Server::builder()).await;
    (format!("http://{address}"), received)
}

async fn collector_of(
    lifetime: &Lifetime,
    mut server: Server,
) -> (SocketAddr, mpsc::Receiver<ResourceSpans>) {
    let (sender, received) = mpsc::channel(64);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = server.add_service(TraceServiceServer::new(Collector(sender)));
    lifetime.spawn("collector", server.serve_with_incoming(TcpListenerStream::new(listener)));
    (address, received)
}

/// Runs this test again as a separate process, with these `OTEL_*` variables and no others.
async fn run_again(test: &str, variables: &[(&str, &str)]) -> std::process::Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("OTEL_")) {
        command.env_remove(name);
    }
    command.args(["--exact", test, "--nocapture"]).env(RUN_AGAIN, "yes").envs(variables.iter().copied());
    let output = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(
        String::from_utf8_lossy(&output.stdout).contains("1 passed"),
        "{test} is not the name of this test"
    );
    output
}

fn config() -> TelemetryConfig {
    let log_filter = "warn".parse().unwrap();
    TelemetryConfig { service_name: "outrider-test".to_owned(), log_format: LogFormat::Text, log_filter }
}

/// Body of the second process: one request with a caller's context, containing one piece of work.
async fn record_a_span() {
    let guard = telemetry::init(&config()).unwrap();
    let request = tracing::info_span!("request", lane = 7);
    telemetry::set_parent(&request, &format!("00-{TRACE}-{PARENT}-01"));
    assert!(telemetry::traceparent_of(&request).unwrap().contains(TRACE));
    request.in_scope(|| {
        tracing::info_span!("verify").in_scope(|| tracing::info!("rows ready"));
        tracing::debug_span!("too fine to export").in_scope(|| ());
    });
    drop(request);
    guard.shut_down().await;
}

fn attribute(spans: &ResourceSpans, key: &str) -> String {
    let attributes = &spans.resource.as_ref().unwrap().attributes;
    let found = attributes.iter().find(|attribute| attribute.key == key).expect(key);
    match found.value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(any_value::Value::StringValue(text)) => text.clone(),
        other => panic!("{key} is {other:?}"),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_span_reaches_the_collector_under_its_callers_trace() {
    if env_var(RUN_AGAIN).is_some() {
        return record_a_span().await;
    }
    let lifetime = Lifetime::new();
    let (url, mut received) = collector(&lifetime).await;
    let variables = [(ENDPOINT, url.as_str()), ("OTEL_RESOURCE_ATTRIBUTES", "deployment=test,zone=a")];
    run_again("a_span_reaches_the_collector_under_its_callers_trace", &variables).await;

    let spans = tokio::time::timeout(AMPLE, received.recv()).await.expect("a batch of spans").unwrap();
    assert_eq!(attribute(&spans, "service.name"), "outrider-test");
    assert_eq!(attribute(&spans, "zone"), "a");
    let mut exported: Vec<_> = spans.scope_spans.into_iter().flat_map(|scope| scope.spans).collect();
    exported.sort_by(|one, other| one.name.cmp(&other.name));
    let [request, verify] = &exported[..] else { panic!("two spans, not {exported:?}") };
    assert_eq!((request.name.as_str(), verify.name.as_str()), ("request", "verify"));
    assert_eq!((hex(&request.trace_id), hex(&request.parent_span_id)), (TRACE.to_owned(), PARENT.to_owned()));
    assert_eq!((&verify.trace_id, &verify.parent_span_id), (&request.trace_id, &request.span_id));
    assert_eq!(
        verify.events[0].name, "rows ready",
        "events are exported although the log shows warnings only"
    );
}

/// Starts a collector for HTTP/1.1, with or without TLS; returns its address and what it receives.
async fn http_collector(
    lifetime: &Lifetime,
    tls: Option<ServerTls>,
) -> (SocketAddr, mpsc::Receiver<ResourceSpans>) {
    let (sender, received) = mpsc::channel(64);
    let take = async move |body: Bytes| {
        let request = ExportTraceServiceRequest::decode(body).expect("OTLP in protobuf");
        for spans in request.resource_spans {
            sender.send(spans).await.expect("the test goes on");
        }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let routes = axum::Router::new().route(
        "/v1/traces",
        post(move |body: Bytes| {
            let take = take.clone();
            async move { take(body).await }
        }),
    );
    let connections = Connections::new(RawListener::default().validate(&mut Faults::new()), &Metrics::new());
    Listener::new(listener, tls, &connections).serve_http("collector", routes, lifetime);
    (address, received)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_span_reaches_a_collector_that_speaks_http_only() {
    if env_var(RUN_AGAIN).is_some() {
        return record_a_span().await;
    }
    let rcgen::CertifiedKey { cert, signing_key } =
        rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (certificate, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    std::fs::write(&certificate, cert.pem()).unwrap();
    std::fs::write(&key, signing_key.serialize_pem()).unwrap();
    let http = ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf");
    let trusting = ("OTEL_EXPORTER_OTLP_CERTIFICATE", certificate.to_str().unwrap());
    let lifetime = Lifetime::new();
    for (scheme, tls) in [("http", None), ("https", Some(ServerTls::read(&certificate, &key, None).unwrap()))]
    {
        let (address, mut received) = http_collector(&lifetime, tls).await;
        let url = format!("{scheme}://{address}");
        run_again("a_span_reaches_a_collector_that_speaks_http_only", &[(ENDPOINT, &url), http, trusting])
            .await;
        let spans = tokio::time::timeout(AMPLE, received.recv()).await.expect("a batch of spans").unwrap();
        assert_eq!(attribute(&spans, "service.name"), "outrider-test");
        assert_eq!(spans.scope_spans[0].spans.len(), 2, "over {scheme}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_environment_names_the_service_and_may_sample_nothing() {
    if env_var(RUN_AGAIN).is_some() {
        return record_a_span().await;
    }
    let lifetime = Lifetime::new();
    let (url, mut received) = collector(&lifetime).await;
    let test = "the_environment_names_the_service_and_may_sample_nothing";
    run_again(test, &[(ENDPOINT, &url), ("OTEL_TRACES_SAMPLER", "always_off")]).await;
    run_again(test, &[(ENDPOINT, &url), ("OTEL_SERVICE_NAME", "named-outside")]).await;
    // The process that sampled nothing ran first and sent nothing.
    let spans = tokio::time::timeout(AMPLE, received.recv()).await.expect("a batch of spans").unwrap();
    assert_eq!(attribute(&spans, "service.name"), "named-outside");
    assert!(received.try_recv().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_at_https_is_trusted_for_the_certificate_that_the_environment_names() {
    if env_var(RUN_AGAIN).is_some() {
        return record_a_span().await;
    }
    let rcgen::CertifiedKey { cert, signing_key } =
        rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let identity = Identity::from_pem(cert.pem(), signing_key.serialize_pem());
    let server = Server::builder().tls_config(ServerTlsConfig::new().identity(identity)).unwrap();
    let lifetime = Lifetime::new();
    let (address, mut received) = collector_of(&lifetime, server).await;
    let (url, dir) = (format!("https://{address}"), tempfile::tempdir().unwrap());
    let certificate = dir.path().join("cert.pem");
    std::fs::write(&certificate, cert.pem()).unwrap();
    let trusting = ("OTEL_EXPORTER_OTLP_CERTIFICATE", certificate.to_str().unwrap());

    let test = "a_collector_at_https_is_trusted_for_the_certificate_that_the_environment_names";
    run_again(test, &[(ENDPOINT, &url), ("OTEL_SERVICE_NAME", "trusts-the-systems-authorities")]).await;
    run_again(test, &[(ENDPOINT, &url), trusting, ("OTEL_SERVICE_NAME", "trusts-this-one")]).await;
    // The process that did not trust the collector ran first and sent nothing.
    let spans = tokio::time::timeout(AMPLE, received.recv()).await.expect("a batch of spans").unwrap();
    assert_eq!(attribute(&spans, "service.name"), "trusts-this-one");
    assert!(received.try_recv().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_is_away_or_hangs_delays_the_end_by_the_flush_timeout_at_most() {
    if env_var(RUN_AGAIN).is_some() {
        return record_a_span().await;
    }
    // Nothing listens on a port that was just released.
    let away = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    // The kernel completes connections that nobody accepts.
    let hanging = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let test = "a_collector_that_is_away_or_hangs_delays_the_end_by_the_flush_timeout_at_most";
    for (address, protocol) in [
        (away, "grpc"),
        (hanging.local_addr().unwrap(), "grpc"),
        (hanging.local_addr().unwrap(), "http/protobuf"),
    ] {
        let url = format!("http://{address}");
        let started = std::time::Instant::now();
        run_again(test, &[(ENDPOINT, &url), ("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)]).await;
        assert!(started.elapsed() < telemetry::FLUSH_TIMEOUT + AMPLE / 2, "{:?}", started.elapsed());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_protocol_that_is_not_spoken_is_refused() {
    if env_var(RUN_AGAIN).is_some() {
        let error = telemetry::init(&config()).expect_err("JSON is not spoken").to_string();
        eprintln!("refused: {error}");
        return;
    }
    let variables = [(ENDPOINT, "http://127.0.0.1:1"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")];
    let output = run_again("a_protocol_that_is_not_spoken_is_refused", &variables).await;
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.contains("refused: OTEL_EXPORTER_OTLP_PROTOCOL=http/json: only"), "{told}");
}

/// It was ignored, and the collector refused the connection without a word.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_certificate_without_its_key_is_refused() {
    if env_var(RUN_AGAIN).is_some() {
        let error = telemetry::init(&config()).expect_err("the key is missing").to_string();
        eprintln!("refused: {error}");
        return;
    }
    for protocol in ["grpc", "http/protobuf"] {
        let variables = [
            (ENDPOINT, "https://127.0.0.1:1"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", protocol),
            ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", "cert.pem"),
        ];
        let output = run_again("a_client_certificate_without_its_key_is_refused", &variables).await;
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(told.contains("refused: OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and"), "{told}");
    }
}

#[tokio::test]
async fn without_an_endpoint_there_are_logs_only() {
    if env_var(RUN_AGAIN).is_some() {
        return record_nothing().await;
    }
    run_again("without_an_endpoint_there_are_logs_only", &[]).await;
    run_again("without_an_endpoint_there_are_logs_only", &[(ENDPOINT, "")]).await;
    let disabled = [(ENDPOINT, "http://127.0.0.1:1"), ("OTEL_SDK_DISABLED", "true")];
    run_again("without_an_endpoint_there_are_logs_only", &disabled).await;
}

async fn record_nothing() {
    let guard = telemetry::init(&config()).unwrap();
    let span = tracing::info_span!("request");
    telemetry::set_parent(&span, &format!("00-{TRACE}-{PARENT}-01"));
    assert_eq!(telemetry::traceparent_of(&span), None);
    assert!(telemetry::init(&config()).is_err(), "a second set-up is refused");
    guard.shut_down().await;
}
