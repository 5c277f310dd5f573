//! Telemetry of a request: metrics under vLLM's names, and one trace that begins at the client.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use opentelemetry::Context;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{SdkTracerProvider, Span, SpanData, SpanProcessor};
use serde_json::json;
use tracing_subscriber::layer::SubscriberExt as _;

use crate::client::{MODEL, TestRouter, post};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

#[tokio::test]
async fn a_request_is_counted_under_the_names_of_vllm() {
    let router = TestRouter::start().with_reply(" some text that is long enough for spans");
    router.ok("/v1/completions", &json!({ "model": MODEL, "prompt": "hi", "n": 2, "max_tokens": 64 })).await;
    router.post_json("/v1/completions", &json!({ "model": "nobody", "prompt": "hi" })).await;
    let page = router.metrics().await;
    let labels = r#"{model_name="org/demo",engine="0""#;
    for line in [
        format!("vllm:prompt_tokens_total{labels}}} 2"),
        format!("vllm:num_requests_running{labels}}} 0"),
        format!("vllm:num_requests_waiting{labels}}} 0"),
        format!("vllm:request_success_total{labels},finished_reason=\"stop\"}} 2"),
        format!("vllm:time_to_first_token_seconds_count{labels}}} 2"),
        format!("vllm:request_time_per_output_token_seconds_count{labels}}} 2"),
        format!("vllm:e2e_request_latency_seconds_count{labels}}} 1"),
        format!("vllm:request_queue_time_seconds_count{labels}}} 1"),
        r#"outrider_requests_total{protocol="http",outcome="ok"} 1"#.to_owned(),
        r#"outrider_requests_total{protocol="http",outcome="model_not_found"} 1"#.to_owned(),
        "outrider_tokenize_queue_jobs 0".to_owned(),
    ] {
        assert!(page.lines().any(|written| written == line), "{line} is missing from\n{page}");
    }
    for name in ["vllm:generation_tokens_total", "vllm:inter_token_latency_seconds_count"] {
        assert!(page.contains(&format!("{name}{labels}")), "{name} is missing from\n{page}");
    }
}

/// Collects finished spans.
#[derive(Debug, Clone, Default)]
struct FinishedSpans(Arc<Mutex<Vec<SpanData>>>);

impl SpanProcessor for FinishedSpans {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        self.0.lock().unwrap().push(span);
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

fn attribute<'a>(span: &'a SpanData, name: &str) -> Option<&'a opentelemetry::Value> {
    span.attributes.iter().find(|attribute| attribute.key.as_str() == name).map(|attribute| &attribute.value)
}

#[tokio::test]
async fn one_trace_leads_from_the_client_to_the_lane() {
    let finished = FinishedSpans::default();
    let provider = SdkTracerProvider::builder().with_span_processor(finished.clone()).build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
    let _subscriber = tracing::subscriber::set_default(tracing_subscriber::registry().with(layer));

    let router = TestRouter::start().with_reply(" fine");
    let body = json!({ "model": MODEL, "prompt": "hi", "temperature": 0.5, "seed": 9 });
    let mut request = post("/v1/completions", body.to_string());
    let traceparent = format!("00-{TRACE}-{PARENT}-01");
    request.headers_mut().insert("traceparent", traceparent.parse().unwrap());
    let answer = router.send(request).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.headers["x-request-id"], answer.json()["id"].as_str().unwrap());
    let propagated = service::telemetry::traceparent_of(&router.lanes.take_one().span).unwrap();
    assert!(propagated.starts_with(&format!("00-{TRACE}-")), "{propagated}");

    let spans = finished.0.lock().unwrap();
    let request = spans.iter().find(|span| span.name == "request").unwrap();
    assert_eq!(request.span_context.trace_id().to_string(), TRACE);
    assert_eq!(request.parent_span_id.to_string(), PARENT);
    for (name, expected) in [
        ("gen_ai.operation.name", "text_completion"),
        ("gen_ai.request.model", MODEL),
        ("gen_ai.request.temperature", "0.5"),
        ("gen_ai.request.seed", "9"),
        ("gen_ai.request.max_tokens", "16"),
        ("gen_ai.usage.input_tokens", "2"),
        ("gen_ai.response.finish_reasons", "stop"),
        ("gen_ai.response.id", answer.json()["id"].as_str().unwrap()),
        ("outrider.spec.acceptance", "coupled"),
    ] {
        let value = attribute(request, name).map(|value| value.as_str().into_owned());
        assert_eq!(value.as_deref(), Some(expected), "{name}");
    }
    assert!(attribute(request, "outrider.spec.accepted_tokens").is_some());
    for child in ["queue", "tokenize"] {
        let child = spans.iter().find(|span| span.name == child).unwrap();
        assert_eq!(child.parent_span_id, request.span_context.span_id());
    }
}

#[tokio::test]
async fn a_request_of_the_console_continues_its_trace() {
    let provider = SdkTracerProvider::builder().build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
    let _subscriber = tracing::subscriber::set_default(tracing_subscriber::registry().with(layer));

    let router = TestRouter::start().with_reply(" fine");
    let body = json!({ "model": MODEL, "messages": [{ "role": "user", "content": "hi" }] });
    let mut request = post("/console/generate", body.to_string());
    let traceparent = format!("00-{TRACE}-{PARENT}-01");
    request.headers_mut().insert("traceparent", traceparent.parse().unwrap());
    assert_eq!(router.console(request).await.status, 200);
    let propagated = service::telemetry::traceparent_of(&router.lanes.take_one().span).unwrap();
    assert!(propagated.starts_with(&format!("00-{TRACE}-")), "{propagated}");
}
