//! The exporter of spans, as the standard variables ask for it.
//!
//! | variable | read by |
//! |---|---|
//! | `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` | here: without one, nothing is exported |
//! | `OTEL_SDK_DISABLED`, `OTEL_TRACES_EXPORTER`, `OTEL_EXPORTER_OTLP[_TRACES]_PROTOCOL` | here |
//! | `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES` | the SDK; the process's own name fills a gap |
//! | `OTEL_TRACES_SAMPLER[_ARG]`, `OTEL_BSP_*`, `OTEL_SPAN_*_LIMIT` | the SDK |
//! | `OTEL_EXPORTER_OTLP[_TRACES]_{HEADERS,TIMEOUT,INSECURE}` | the exporter |
//!
//! Only gRPC without TLS is spoken; a collector elsewhere is reached through an agent beside the process.

use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;

use super::TelemetryError;
use crate::config::env_var;

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
    let exporter = SpanExporter::builder().with_tonic().build()?;
    let provider =
        SdkTracerProvider::builder().with_resource(resource(service_name)).with_batch_exporter(exporter);
    Ok(Some(provider.build()))
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
