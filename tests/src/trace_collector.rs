//! An OTLP collector in this process: receives the spans that real processes export, and looks them up.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, Span};
use service::shutdown::Lifetime;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// A finished span.
#[derive(Debug, Clone, PartialEq)]
pub struct SeenSpan {
    /// The process's `service.name`.
    pub service: String,
    /// The span's name.
    pub name: String,
    /// Hexadecimal.
    pub trace_id: String,
    /// Hexadecimal.
    pub span_id: String,
    /// Hexadecimal; empty for the root.
    pub parent_id: String,
    /// Start time, nanoseconds since 1970 on its host's clock.
    pub start_nanos: u64,
    /// Duration, nanoseconds.
    pub nanos: u64,
    /// Strings unchanged, other values as formatted by Rust.
    pub attributes: BTreeMap<String, String>,
}

/// A running collector.
pub struct TraceCollector {
    url: String,
    seen: Arc<Mutex<Vec<SeenSpan>>>,
    /// The server task ends when this is dropped.
    _lifetime: Lifetime,
}

/// The gRPC service.
struct Sink(Arc<Mutex<Vec<SeenSpan>>>);

impl TraceCollector {
    /// Listens on a free port.
    pub async fn start() -> anyhow::Result<Self> {
        let (seen, lifetime) = (Arc::default(), Lifetime::new());
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let service = TraceServiceServer::new(Sink(Arc::clone(&seen)));
        let server = tonic::transport::Server::builder().add_service(service);
        let incoming = TcpListenerStream::new(listener);
        lifetime.spawn("collector", server.serve_with_incoming_shutdown(incoming, lifetime.cancelled()));
        Ok(Self { url, seen, _lifetime: lifetime })
    }

    /// Environment variables with which a process exports to it, shortly after a span ends.
    pub fn environment(&self) -> Vec<(String, String)> {
        let variables =
            [("OTEL_EXPORTER_OTLP_ENDPOINT", self.url.as_str()), ("OTEL_BSP_SCHEDULE_DELAY", "50")];
        variables.map(|(name, value)| (name.to_owned(), value.to_owned())).into()
    }

    /// The spans of one trace received so far.
    pub fn trace(&self, trace_id: &str) -> Vec<SeenSpan> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.iter().filter(|span| span.trace_id == trace_id).cloned().collect()
    }

    /// All trace ids received so far.
    pub fn trace_ids(&self) -> Vec<String> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let mut ids: Vec<String> = seen.iter().map(|span| span.trace_id.clone()).collect();
        ids.sort();
        ids.dedup();
        ids
    }
}

/// The names of the ancestors of `span`, nearest first, as far as they are in `spans`.
pub fn ancestors<'a>(spans: &'a [SeenSpan], span: &'a SeenSpan) -> Vec<&'a str> {
    let by_id: HashMap<&str, &SeenSpan> = spans.iter().map(|span| (span.span_id.as_str(), span)).collect();
    let parent = |span: &SeenSpan| by_id.get(span.parent_id.as_str()).copied();
    std::iter::successors(parent(span), |span| parent(span)).map(|span| span.name.as_str()).collect()
}

#[tonic::async_trait]
impl TraceService for Sink {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let spans = request.into_inner().resource_spans.into_iter().flat_map(seen_spans);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(spans);
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn seen_spans(spans: ResourceSpans) -> Vec<SeenSpan> {
    let resource = attributes(spans.resource.map(|resource| resource.attributes).unwrap_or_default());
    let service = resource.get("service.name").cloned().unwrap_or_default();
    let seen = |span: Span| SeenSpan {
        service: service.clone(),
        name: span.name,
        trace_id: hex(&span.trace_id),
        span_id: hex(&span.span_id),
        parent_id: hex(&span.parent_span_id),
        start_nanos: span.start_time_unix_nano,
        nanos: span.end_time_unix_nano.saturating_sub(span.start_time_unix_nano),
        attributes: attributes(span.attributes),
    };
    spans.scope_spans.into_iter().flat_map(|scope| scope.spans).map(seen).collect()
}

fn attributes(list: Vec<KeyValue>) -> BTreeMap<String, String> {
    let text = |value| match value {
        any_value::Value::StringValue(text) => text,
        any_value::Value::IntValue(number) => number.to_string(),
        any_value::Value::BoolValue(truth) => truth.to_string(),
        other => format!("{other:?}"),
    };
    let pair = |entry: KeyValue| Some((entry.key, text(entry.value?.value?)));
    list.into_iter().filter_map(pair).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
