//! The span exporter, over gRPC or as protobuf over HTTP, configured by the standard variables that
//! deploy/README.md lists (*Traces*). `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_SAMPLER`,
//! `OTEL_BSP_*` and `OTEL_SPAN_*_LIMIT` are read by the SDK; `HEADERS`, `INSECURE` and the timeout over gRPC
//! by the exporter; all others here.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig as _};
use opentelemetry_otlp::{WithHttpConfig as _, WithTonicConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tokio::runtime::Handle;
use tokio_rustls::TlsConnector;

use super::TelemetryError;
use super::http_client::ExportClient;
use crate::config::env_var;
use crate::tls;

const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];
const PROTOCOLS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];
const TIMEOUTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"];
const GRPC: &str = "grpc";
const HTTP: &str = "http/protobuf";

/// OpenTelemetry's default.
const TIMEOUT_MILLIS: u64 = 10_000;

/// Returns the tracer provider; `None` if the environment names no collector.
pub(super) fn provider(service_name: &str) -> Result<Option<SdkTracerProvider>, TelemetryError> {
    if !is_wanted() {
        return Ok(None);
    }
    let exporter = match PROTOCOLS.into_iter().find_map(|name| Some((name, env_var(name)?))) {
        None => over_grpc()?,
        Some((_, value)) if value == GRPC => over_grpc()?,
        Some((_, value)) if value == HTTP => over_http()?,
        Some((variable, value)) => return Err(TelemetryError::Protocol { variable, value }),
    };
    let provider =
        SdkTracerProvider::builder().with_resource(resource(service_name)).with_batch_exporter(exporter);
    Ok(Some(provider.build()))
}

fn over_grpc() -> Result<SpanExporter, TelemetryError> {
    // TLS settings for an endpoint at `https://`.
    let files = TlsFiles::from_environment()?;
    let tls = tls::grpc_client(files.ca.as_deref(), files.identity())?;
    Ok(SpanExporter::builder().with_tonic().with_tls_config(tls).build()?)
}

fn over_http() -> Result<SpanExporter, TelemetryError> {
    let files = TlsFiles::from_environment()?;
    let tls = tls::https_client(files.ca.as_deref(), files.identity())?;
    let millis = TIMEOUTS.into_iter().find_map(|name| env_var(name)?.parse().ok()).unwrap_or(TIMEOUT_MILLIS);
    let client = ExportClient {
        runtime: Handle::current(),
        tls: TlsConnector::from(Arc::new(tls)),
        timeout: Duration::from_millis(millis),
    };
    let builder = SpanExporter::builder().with_http().with_protocol(Protocol::HttpBinary);
    Ok(builder.with_http_client(client).build()?)
}

/// The files that the variables name.
struct TlsFiles {
    ca: Option<PathBuf>,
    /// Client certificate and its key.
    identity: Option<(PathBuf, PathBuf)>,
}

impl TlsFiles {
    fn from_environment() -> Result<Self, TelemetryError> {
        let [ca, cert, key] = ["CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"].map(file);
        if cert.is_some() != key.is_some() {
            return Err(TelemetryError::HalfIdentity);
        }
        Ok(Self { ca, identity: cert.zip(key) })
    }

    fn identity(&self) -> Option<(&Path, &Path)> {
        self.identity.as_ref().map(|(cert, key)| (cert.as_path(), key.as_path()))
    }
}

/// Returns the file named by a variable; the one for traces takes precedence over the one for all signals.
fn file(name: &str) -> Option<PathBuf> {
    let of = |signal| env_var(&format!("OTEL_EXPORTER_OTLP_{signal}{name}"));
    of("TRACES_").or_else(|| of("")).map(PathBuf::from)
}

fn is_wanted() -> bool {
    let disabled = env_var("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let other_exporter = env_var("OTEL_TRACES_EXPORTER").is_some_and(|value| value != "otlp");
    !disabled && !other_exporter && ENDPOINTS.into_iter().any(|name| env_var(name).is_some())
}

fn resource(service_name: &str) -> Resource {
    let named_outside = env_var("OTEL_SERVICE_NAME").is_some()
        || env_var("OTEL_RESOURCE_ATTRIBUTES").is_some_and(|attributes| attributes.contains("service.name="));
    let builder = Resource::builder();
    if named_outside { builder.build() } else { builder.with_service_name(service_name.to_owned()).build() }
}
