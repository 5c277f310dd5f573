//! The console as seen by a browser: its files, the files they refer to, and the endpoints they use.

use std::collections::BTreeSet;

use axum::body::Body;
use http::Request;
use serde_json::{Value, json};

use crate::client::{MODEL, TestRouter, merged, post};
use crate::fake_lanes::Script;

const GENERATE: &str = "/console/generate";
const MODELS: &str = "/console/models";
const PAIR: &str = "/console/pair";

fn get(path: &str) -> Request<Body> {
    Request::get(path).body(Body::empty()).unwrap()
}

fn generate_request(fields: Value) -> Request<Body> {
    let body = json!({ "model": MODEL, "messages": [{ "role": "user", "content": "hi" }], "seed": 7 });
    post(GENERATE, merged(body, &fields).to_string())
}

/// The files that a file of the console refers to: the page to `console/..`, scripts to `./..`.
fn console_paths(text: &str) -> impl Iterator<Item = String> {
    text.split('"').filter_map(|quoted| {
        let name = quoted.strip_prefix("console/").or_else(|| quoted.strip_prefix("./"))?;
        name.contains('.').then(|| format!("/console/{name}"))
    })
}

#[tokio::test]
async fn every_console_file_is_served_and_refers_to_this_host_only() {
    let router = TestRouter::start();
    let (mut seen, mut next) = (BTreeSet::new(), vec!["/".to_owned()]);
    while let Some(path) = next.pop() {
        let file = router.console(get(&path)).await;
        assert_eq!(file.status, 200, "{path}");
        let policy = file.headers["content-security-policy"].to_str().unwrap();
        assert!(policy.starts_with("default-src 'none'; script-src 'self'"), "{policy}");
        assert_eq!(file.headers["x-content-type-options"], "nosniff");
        let expected = match path.rsplit_once('.').map(|(_, ending)| ending) {
            Some("js") => "text/javascript",
            Some("css") => "text/css",
            _ => "text/html",
        };
        assert!(file.headers["content-type"].to_str().unwrap().starts_with(expected), "{path}");
        let text = file.text().replace("http://www.w3.org/2000/svg", "");
        assert!(!text.contains("://"), "{path} refers to another host");
        for path in console_paths(file.text()) {
            if seen.insert(path.clone()) {
                next.push(path);
            }
        }
    }
    assert_eq!(seen.len(), 10, "{seen:?}");
    let missing = router.console(get("/console/no.js")).await;
    assert_eq!(missing.status, 404);
    assert_eq!(router.get("/console/app.js").await.status, 404, "not on the client address");
}

#[tokio::test]
async fn each_token_has_its_id_and_whether_it_was_drafted() {
    let router = TestRouter::start().with_reply(" fine words");
    let answer = router.console(generate_request(json!({}))).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.headers["content-type"], "application/x-ndjson");
    let lines: Vec<Value> = answer.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (first, last) = (&lines[0]["start"], &lines[lines.len() - 1]["end"]);
    assert_eq!((first["seed"].as_u64(), first["model"].as_str()), (Some(7), Some(MODEL)));
    assert!(last["ms"].as_f64().unwrap() >= 0.0 && last["rounds"].is_u64(), "{last}");
    let spans: Vec<&Value> = lines[1..lines.len() - 1].iter().map(|line| &line["span"]).collect();
    let tokens: Vec<&Value> = spans.iter().flat_map(|span| span["tokens"].as_array().unwrap()).collect();
    let text: String = tokens.iter().map(|token| token["text"].as_str().unwrap()).collect();
    assert!(text.contains("fine words"), "{text:?}");
    assert!(tokens.iter().all(|token| token["id"].is_u64() && token["drafted"].is_boolean()), "{tokens:?}");
    assert!(spans.last().unwrap()["finish"].is_string(), "{spans:?}");
}

#[tokio::test]
async fn bad_requests_get_the_same_errors_as_on_the_client_api() {
    let router = TestRouter::start().with_reply(" fine");
    for (fields, status, words) in [
        (json!({ "temperature": -1 }), 400, "temperature"),
        (json!({ "model": "none" }), 404, "none"),
        (json!({ "nonsense": 1 }), 400, "nonsense"),
    ] {
        let answer = router.console(generate_request(fields)).await;
        assert_eq!(answer.status, status, "{}", answer.text());
        assert!(answer.json()["error"]["message"].as_str().unwrap().contains(words), "{}", answer.text());
    }
    let form = Request::post(GENERATE).header("content-type", "text/plain").body(Body::from("{}")).unwrap();
    assert_eq!(router.console(form).await.status, 415, "a page of another origin may send this one");
}

#[tokio::test]
async fn a_panic_fails_only_its_request() {
    let router = TestRouter::start();
    router.lanes.set_script(Script::Panic);
    let answer = router.console(generate_request(json!({}))).await;
    assert_eq!(answer.status, 500, "{}", answer.text());
    let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("the request handler panicked"), "{message}");
    let page = router.metrics().await;
    assert!(page.contains(r#"outrider_requests_total{protocol="http",outcome="internal"} 1"#), "{page}");
    let router = router.with_reply(" fine");
    assert_eq!(router.console(generate_request(json!({}))).await.status, 200);
    assert_eq!(router.state.admission.available(), 1_024, "the failed request returned its permit");
}

#[tokio::test]
async fn the_console_requires_a_key_if_clients_need_one() {
    let router = TestRouter::with_keys("sk-one\nsk-operator admin=true\n").with_reply(" fine");
    for request in [
        generate_request(json!({})),
        get(MODELS),
        get("/console/requests"),
        get(PAIR),
        post(PAIR, String::new()),
    ] {
        assert_eq!(router.console(request).await.status, 401);
    }
    assert_eq!(router.console(get("/")).await.status, 200, "the page itself contains no data");
    let with_key = async |mut request: Request<Body>, key: &str| {
        request.headers_mut().insert("authorization", key.parse().unwrap());
        router.console(request).await
    };
    let client = "Bearer sk-one";
    assert_eq!(with_key(generate_request(json!({})), client).await.status, 200, "as at the client address");
    for request in [get("/console/requests"), get(PAIR), post(PAIR, String::new())] {
        assert_eq!(with_key(request, client).await.status, 403, "other clients' requests");
    }
    let answer = with_key(get("/console/requests"), "Bearer sk-operator").await;
    assert_eq!(answer.status.as_u16(), 200);
}

/// The playground takes any key, so its page must not need an operator's.
#[tokio::test]
async fn the_playground_lists_the_models_that_the_key_may_use() {
    let router = TestRouter::start();
    let script = router.console(get("/console/playground.js")).await;
    assert!(script.text().contains(MODELS) && !script.text().contains("/debug/"), "{}", script.text());

    let router = TestRouter::with_keys(&format!("sk-one models={MODEL}\nsk-all\n"));
    for (key, only) in [("Bearer sk-one", Some(MODEL)), ("Bearer sk-all", None)] {
        let with_key =
            |path: &str| Request::get(path).header("authorization", key).body(Body::empty()).unwrap();
        let listed = router.console(with_key(MODELS)).await;
        assert_eq!(listed.status, 200, "{}", listed.text());
        assert_eq!(listed.json(), router.send(with_key("/v1/models")).await.json());
        let listed = listed.json();
        let ids: Vec<&str> =
            listed["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
        assert!(ids.contains(&MODEL) && only.is_none_or(|only| ids == [only]), "{key}: {ids:?}");
    }
}

#[tokio::test]
async fn a_pair_is_checked_only_by_the_configured_program() {
    let router = TestRouter::start();
    let state = async |request| router.console(request).await.json()["state"].as_str().unwrap().to_owned();
    assert_eq!(state(get(PAIR)).await, "not_configured");
    assert_eq!(state(post(PAIR, String::new())).await, "not_configured");

    let report = r#"[{"draft":"d"}]"#;
    let router = TestRouter::start().with_pair_check(["echo", report]);
    assert_eq!(
        router.console(get(PAIR)).await.json(),
        json!({ "state": "not_run", "command": ["echo", report] })
    );
    let mut other_origin = post(PAIR, String::new());
    for (name, value) in [("origin", "http://elsewhere"), ("host", "127.0.0.1:8002")] {
        other_origin.headers_mut().insert(name, value.parse().unwrap());
    }
    assert_eq!(router.console(other_origin).await.status, 403, "a page of another origin");
    assert_eq!(router.console_at_public_address(post(PAIR, String::new())).await.status, 400);
    assert_eq!(router.console(get(PAIR)).await.json()["state"], "not_run", "neither started a check");

    assert_eq!(router.console(post(PAIR, String::new())).await.status, 200);
    let done = loop {
        let page = router.console(get(PAIR)).await.json();
        if page["state"] != "running" {
            break page;
        }
        tokio::task::yield_now().await;
    };
    assert_eq!((&done["state"], &done["reports"]), (&json!("done"), &json!([{ "draft": "d" }])));
}

#[tokio::test]
async fn what_only_operators_may_see_is_refused_to_pages_of_other_origins() {
    let router = TestRouter::start();
    for (origin, status) in [("http://elsewhere", 403), ("http://127.0.0.1:8002", 200)] {
        for mut request in [get("/console/requests"), get(PAIR), post(PAIR, String::new())] {
            for (name, value) in [("origin", origin), ("host", "127.0.0.1:8002")] {
                request.headers_mut().insert(name, value.parse().unwrap());
            }
            let asked = format!("{} {} from {origin}", request.method(), request.uri());
            assert_eq!(router.console(request).await.status, status, "{asked}");
        }
    }
}

#[tokio::test]
async fn a_public_address_without_keys_refuses_generation() {
    let router = TestRouter::start().with_reply(" fine");
    let answer = router.console_at_public_address(generate_request(json!({}))).await;
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("--api-keys"), "{}", answer.text());
    assert!(router.lanes.take_submitted().is_empty());
}
