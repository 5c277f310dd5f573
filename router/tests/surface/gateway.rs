//! Headers of the Gateway API Inference Extension: fairness id, objective and latency objectives.

use std::collections::BTreeSet;

use axum::body::Body;
use http::Request;
use proto::v1::inference_client::InferenceClient;
use proto::v1::{GenerateRequest, generate_request::Prompt};
use router::generation::GenerationRequest;
use serde_json::json;

use crate::client::{Answer, MODEL, TestRouter};

const COMPLETIONS: &str = "/v1/completions";
const FAIRNESS_ID: &str = "x-llm-d-inference-fairness-id";
const OBJECTIVE: &str = "x-llm-d-inference-objective";

async fn post_with_headers(router: &TestRouter, headers: &[(&str, &str)]) -> Answer {
    let mut request = Request::post(COMPLETIONS).header("content-type", "application/json");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let body = json!({ "model": MODEL, "prompt": "hi" }).to_string();
    router.send(request.body(Body::from(body)).unwrap()).await
}

async fn submitted(router: &TestRouter, headers: &[(&str, &str)]) -> GenerationRequest {
    let answer = post_with_headers(router, headers).await;
    assert_eq!(answer.status, 200, "{headers:?}: {}", answer.text());
    router.lanes.take_one()
}

#[tokio::test]
async fn fairness_ids_have_separate_queues_and_share_prefixes() {
    let router = TestRouter::start().with_reply(" fine");
    let plain = submitted(&router, &[]).await;
    let one = submitted(&router, &[(FAIRNESS_ID, "one")]).await;
    let old_name = submitted(&router, &[("x-gateway-inference-fairness-id", "one")]).await;
    let two = submitted(&router, &[(FAIRNESS_ID, "two")]).await;
    assert_eq!(one.fair_queue_key, old_name.fair_queue_key);
    let different = BTreeSet::from([&plain, &one, &two].map(|request| request.fair_queue_key));
    assert_eq!(different.len(), 3);
    assert_eq!(one.spec.isolation_key, plain.spec.isolation_key);
}

#[tokio::test]
async fn fairness_ids_are_honored_only_for_gateway_keys() {
    let router =
        TestRouter::with_keys("sk-one alice\nsk-two gateway fairness_ids=true\n").with_reply(" fine");
    for (key, is_separate) in [("Bearer sk-one", false), ("Bearer sk-two", true)] {
        let key = ("authorization", key);
        let plain = submitted(&router, &[key]).await.fair_queue_key;
        let with_id = submitted(&router, &[key, (FAIRNESS_ID, "one")]).await.fair_queue_key;
        assert_eq!(with_id != plain, is_separate);
    }
}

#[tokio::test]
async fn an_objective_sets_the_configured_priority() {
    let router = TestRouter::start().with_reply(" fine");
    for (headers, expected) in [
        (vec![], 0),
        (vec![(OBJECTIVE, "batch")], 200),
        (vec![("x-gateway-inference-objective", "batch")], 200),
        (vec![(OBJECTIVE, "nobody-knows-it")], 0),
    ] {
        assert_eq!(submitted(&router, &headers).await.spec.priority, expected, "{headers:?}");
    }
}

#[tokio::test]
async fn latency_objectives_are_evaluated_per_choice() {
    let router = TestRouter::start().with_reply(" shines and shines");
    post_with_headers(&router, &[]).await;
    assert!(!router.metrics().await.contains("outrider_slo_choices_total{"), "no SLO was requested");
    let (kept, missed) = ("86400000", "0.000001");
    for slo in [kept, missed, missed] {
        let headers = [("x-llm-d-slo-ttft-ms", slo), ("x-llm-d-slo-tpot-ms", kept)];
        assert_eq!(post_with_headers(&router, &headers).await.status, 200);
    }
    let page = router.metrics().await;
    for (slo, met, count) in [("ttft", true, 1), ("ttft", false, 2), ("tpot", true, 3)] {
        let labels = format!(r#"model_name="org/demo",engine="0",slo="{slo}",met="{met}""#);
        let line = format!("outrider_slo_choices_total{{{labels}}} {count}");
        assert!(page.lines().any(|shown| shown == line), "{line}\n{page}");
    }
}

#[tokio::test]
async fn bad_headers_are_refused_by_name_and_the_next_request_works() {
    let router = TestRouter::start().with_reply(" fine");
    for (name, value) in
        [(FAIRNESS_ID, "a b"), (OBJECTIVE, ""), ("x-llm-d-slo-ttft-ms", "soon"), ("x-llm-d-slo-tpot-ms", "0")]
    {
        let refused = post_with_headers(&router, &[(name, value)]).await;
        assert_eq!(refused.status, 400, "{name}: {}", refused.text());
        assert_eq!(refused.json()["error"]["param"], name);
        assert!(router.lanes.take_submitted().is_empty(), "{name}: it was submitted");
        submitted(&router, &[]).await;
    }
}

#[tokio::test]
async fn grpc_metadata_carries_the_same_headers() {
    let router = TestRouter::start().with_reply(" fine");
    let mut client = InferenceClient::connect(router.listen_grpc().await).await.unwrap();
    let message = || GenerateRequest {
        model: MODEL.to_owned(),
        prompt: Some(Prompt::Text("hi".to_owned())),
        ..GenerateRequest::default()
    };
    let mut request = tonic::Request::new(message());
    request.metadata_mut().insert(OBJECTIVE, "batch".parse().unwrap());
    request.metadata_mut().insert(FAIRNESS_ID, "one".parse().unwrap());
    let mut answer = client.generate(request).await.unwrap().into_inner();
    while answer.message().await.unwrap().is_some() {}
    let over_grpc = router.lanes.take_one();
    let over_http = submitted(&router, &[(OBJECTIVE, "batch"), (FAIRNESS_ID, "one")]).await;
    assert_eq!((over_grpc.spec.priority, over_grpc.fair_queue_key), (200, over_http.fair_queue_key));
    let mut request = tonic::Request::new(message());
    request.metadata_mut().insert("x-llm-d-slo-ttft-ms", "never".parse().unwrap());
    let refused = client.generate(request).await.unwrap_err();
    assert!(refused.message().contains("x-llm-d-slo-ttft-ms"), "{refused}");
}

#[tokio::test]
async fn requests_without_a_target_read_the_headers_too() {
    let router = TestRouter::start();
    let request = Request::post("/tokenize")
        .header("content-type", "application/json")
        .header(FAIRNESS_ID, "two words")
        .body(Body::from(json!({ "model": MODEL, "prompt": "hi" }).to_string()));
    let answer = router.send(request.unwrap()).await;
    assert_eq!((answer.status.as_u16(), &answer.json()["error"]["param"]), (400, &json!(FAIRNESS_ID)));
}
