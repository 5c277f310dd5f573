//! Trace context across processes, in W3C format: headers to a span's parent, and a span to headers.
//!
//! A request must never fail because of its trace context: malformed context is ignored, and without an
//! exporter there is no context to pass on.

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, Injector, TextMapPropagator as _};
use opentelemetry::trace::TraceContextExt as _;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tracing::Span;
use tracing_opentelemetry::{OpenTelemetrySpanExt as _, SetParentError};

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

struct Headers<'a>(&'a HeaderMap);

struct HeadersMut<'a>(&'a mut HeaderMap);

/// The `traceparent` that makes another process's span a child of `span`; `None` if traces are off.
pub fn traceparent_of(span: &Span) -> Option<String> {
    Some(headers_of(span).get(TRACEPARENT)?.to_str().ok()?.to_owned())
}

/// Makes `span` a child of the span named by `traceparent`; a malformed one is ignored. Must be called before
/// the span is used.
pub fn set_parent(span: &Span, traceparent: &str) {
    if let Ok(value) = HeaderValue::from_str(traceparent) {
        set_parent_from_headers(span, &HeaderMap::from_iter([(TRACEPARENT, value)]));
    }
}

/// Like [`set_parent`], but with another span of the same trace as the parent; `span_id` 0 means none.
pub fn set_parent_in_trace(span: &Span, traceparent: &str, span_id: u64) {
    // Version, trace, span and flags, as hexadecimal digits of fixed length.
    match (traceparent.get(..36), traceparent.get(52..)) {
        (Some(trace), Some(flags)) if span_id != 0 => {
            set_parent(span, &format!("{trace}{span_id:016x}{flags}"))
        }
        _ => set_parent(span, traceparent),
    }
}

/// Returns the id of `span`; 0 if traces are off.
pub fn span_id_of(span: &Span) -> u64 {
    u64::from_be_bytes(span.context().span().span_context().span_id().to_bytes())
}

/// Returns the id of the trace in which `span` is exported; `None` if traces are off or the trace is not
/// sampled.
pub fn trace_id_of(span: &Span) -> Option<String> {
    let context = span.context();
    let context = context.span().span_context().clone();
    (context.is_valid() && context.is_sampled()).then(|| context.trace_id().to_string())
}

/// [`set_parent`] from the headers of a request over HTTP or gRPC, `tracestate` included.
pub fn set_parent_from_headers(span: &Span, headers: &HeaderMap) {
    let context = TraceContextPropagator::new().extract_with_context(&Context::new(), &Headers(headers));
    if !context.span().span_context().is_valid() {
        return;
    }
    match span.set_parent(context) {
        // Without an exporter no span has a context, and a span that was filtered out does not need one.
        Ok(()) | Err(SetParentError::LayerNotFound | SetParentError::SpanDisabled) => {}
        Err(error) => tracing::debug!(%error, "a span kept its parent"),
    }
}

/// The context of `span` as headers; none if traces are off.
fn headers_of(span: &Span) -> HeaderMap {
    let mut headers = HeaderMap::new();
    TraceContextPropagator::new().inject_context(&span.context(), &mut HeadersMut(&mut headers));
    headers
}

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}

impl Injector for HeadersMut<'_> {
    fn set(&mut self, key: &str, value: String) {
        // An empty tracestate is valid but carries no information.
        if value.is_empty() {
            return;
        }
        if let (Ok(key), Ok(value)) = (HeaderName::from_bytes(key.as_bytes()), HeaderValue::from_str(&value))
        {
            self.0.insert(key, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::TracerProvider as _;
    use opentelemetry_sdk::trace::SdkTracerProvider;
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const PARENT: &str = "00f067aa0ba902b7";

    /// Runs `body` with trace contexts but without an exporter.
    fn with_traces(body: impl FnOnce()) {
        let tracer = SdkTracerProvider::builder().build().tracer("test");
        let subscriber =
            tracing_subscriber::registry().with(tracing_opentelemetry::layer().with_tracer(tracer));
        tracing::subscriber::with_default(subscriber, body);
    }

    #[test]
    fn a_child_keeps_the_trace_and_gets_a_span_of_its_own() {
        with_traces(|| {
            let span = tracing::info_span!("request");
            set_parent(&span, &format!("00-{TRACE}-{PARENT}-01"));
            let onward = traceparent_of(&span).unwrap();
            assert!(onward.starts_with(&format!("00-{TRACE}-")) && onward.ends_with("-01"), "{onward}");
            assert!(!onward.contains(PARENT), "{onward}");
        });
    }

    #[test]
    fn a_context_survives_headers() {
        with_traces(|| {
            let parent = tracing::info_span!("parent");
            let trace_of = |span: &Span| traceparent_of(span).unwrap()[3..35].to_owned();

            let child = tracing::info_span!(parent: None, "child");
            set_parent_from_headers(&child, &headers_of(&parent));
            assert_eq!(trace_of(&child), trace_of(&parent));
        });
    }

    #[test]
    fn malformed_parents_are_ignored() {
        let zeros = "0".repeat(32);
        let malformed = [
            String::new(),
            "nonsense".to_owned(),
            "line\nbreak".to_owned(),
            format!("00-{TRACE}-{PARENT}"),
            format!("00-{zeros}-{PARENT}-01"),
            format!("00-{TRACE}-{}-01", "0".repeat(16)),
            format!("ff-{TRACE}-{PARENT}-01"),
            format!("00-{}-{PARENT}-01", TRACE.to_uppercase().replace('A', "G")),
        ];
        with_traces(|| {
            for traceparent in malformed {
                let span = tracing::info_span!("request");
                set_parent(&span, &traceparent);
                let own = traceparent_of(&span).unwrap();
                assert!(!own.contains(TRACE), "{traceparent:?} was taken: {own}");
            }
        });
    }

    #[test]
    fn without_traces_there_is_no_context_to_hand_on() {
        let span = tracing::info_span!("request");
        set_parent(&span, &format!("00-{TRACE}-{PARENT}-01"));
        assert_eq!(traceparent_of(&span), None);
    }
}
