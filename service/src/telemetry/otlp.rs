//! The exporter of spans, as the standard variables ask for it.
//!
//! | variable | read by |
//! |---|---|
//! | `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` | here: without one, nothing is exported |
//! | `OTEL_SDK_DISABLED`, `OTEL_TRACES_EXPORTER`, `OTEL_EXPORTER_OTLP[_TRACES]_PROTOCOL` | here |
//! | `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES` | the SDK; the process's own name fills a gap |
//! | `OTEL_TRACES_SAMPLER[_ARG]`, `OTEL_BSP_*`, `OTEL_SPAN_*_LIMIT` | the SDK |
//! | `OTEL_EXPORTER_OTLP[_TRACES]_{HEADERS,TIMEOUT,INSECURE}` | the exporter |
//! | `OTEL_EXPORTER_OTLP[_TRACES]_{CERTIFICATE,CLIENT_CERTIFICATE,CLIENT_KEY}` | here, for an endpoint at `https://`: whom to trust instead of the system's authorities, and what to show |
//!
//! Only gRPC is spoken.

use std::path::PathBuf;

use opentelemetry_otlp::{SpanExporter, WithTonicConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tonic::transport::ClientTlsConfig;

use super::TelemetryError;
use crate::config::env_var;
use crate::tls::ClientTls;

const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];
const PROTOCOLS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];
const GRPC: &str = "grpc";

/// The provider of tracers, or `None` where the environment names no collector.
pub(super) fn provider(service_name: &str) -> Result<Option<SdkTracerProvider>, TelemetryError> {
    if !is_wanted() {
        return Ok(None);
    }
    if let Some((variable, value)) = PROTOCOLS.into_iter().find_map(|name| Some((name, env_var(name)?)))
        && value != GRPC
    {
        return Err(TelemetryError::Protocol { variable, value });
    }
    let exporter = SpanExporter::builder().with_tonic().with_tls_config(tls()?).build()?;
    let provider =
        SdkTracerProvider::builder().with_resource(resource(service_name)).with_batch_exporter(exporter);
    Ok(Some(provider.build()))
}

/// What is spoken with an endpoint at `https://`.
fn tls() -> Result<ClientTlsConfig, TelemetryError> {
    let [ca, cert, key] = ["CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"].map(file);
    let Some(ca) = ca else { return Ok(ClientTlsConfig::new().with_enabled_roots()) };
    Ok(ClientTls::read(&ca, cert.as_deref().zip(key.as_deref()))?.config())
}

/// The file that a variable names, the one for traces before the one for all signals.
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
