//! Web pages that point their own host name at a router without keys on loopback (DNS rebinding).

use axum::Router;
use axum::body::Body;
use http::Request;
use router::api::allowed_hosts::{AllowedHosts, check_host};
use router::api::http::{admin_app, http_app};
use serde_json::json;
use tower::ServiceExt as _;

use crate::client::{Answer, MODEL, TestRouter, post};

async fn send(app: &Router, mut request: Request<Body>, host: Option<&str>) -> Answer {
    if let Some(host) = host {
        request.headers_mut().insert("host", host.parse().unwrap());
    }
    Answer::of(app.clone().oneshot(request).await.unwrap()).await
}

fn requests_to_http() -> [Request<Body>; 5] {
    let get = |path: &str| Request::get(path).body(Body::empty()).unwrap();
    let body = json!({ "model": MODEL, "prompt": "hi" }).to_string();
    [get("/v1/models"), get("/metrics"), get("/health"), get("/nowhere"), post("/v1/completions", body)]
}

type Requests = fn() -> [Request<Body>; 5];

fn requests_to_admin() -> [Request<Body>; 5] {
    let get = |path: &str| Request::get(path).body(Body::empty()).unwrap();
    let body = json!({ "model": MODEL, "messages": [{ "role": "user", "content": "hi" }] }).to_string();
    let drain = Request::post("/admin/workers/10.0.0.7:8110/drain").body(Body::empty()).unwrap();
    [get("/debug/lanes"), get("/console/requests"), get("/"), drain, post("/console/generate", body)]
}

#[tokio::test]
async fn a_foreign_host_is_refused_on_loopback_without_keys() {
    let router = TestRouter::start().with_reply(" fine");
    let http = http_app(router.state.clone(), AllowedHosts::Local);
    let admin = check_host(admin_app(router.state.clone()).merge(router.console_app()), AllowedHosts::Local);
    let apps: [(&Router, Requests); 2] = [(&http, requests_to_http), (&admin, requests_to_admin)];
    for (app, requests) in apps {
        for mut request in requests() {
            let path = request.uri().path().to_owned();
            // The page and its requests are of one origin.
            request.headers_mut().insert("origin", "http://evil.example:8002".parse().unwrap());
            let answer = send(app, request, Some("evil.example:8002")).await;
            assert_eq!(answer.status, 421, "{path}: {}", answer.text());
            assert_eq!(answer.json()["error"]["param"], "host", "{path}");
        }
        for host in [None, Some("localhost:8002"), Some("127.0.0.1:8002"), Some("[::1]:8002")] {
            for request in requests() {
                let path = request.uri().path().to_owned();
                let answer = send(app, request, host).await;
                assert_ne!(answer.status, 421, "{path} at {host:?}: {}", answer.text());
            }
        }
    }
    assert_eq!(router.lanes.take_submitted().len(), 8, "one for each host that is not foreign");
}

#[tokio::test]
async fn a_refused_host_is_answered_in_the_shape_of_the_api() {
    let router = TestRouter::start();
    let http = http_app(router.state.clone(), AllowedHosts::Local);
    let named = Request::get("http://evil.example/v1/models").body(Body::empty()).unwrap();
    let answer = send(&http, named, None).await;
    assert_eq!(answer.status, 421, "the URI names the host: {}", answer.text());
    assert!(answer.headers.contains_key("x-request-id"));
    assert_eq!(answer.json()["error"]["type"], "invalid_request_error");
    let answer = send(&http, post("/v1/messages", "{}"), Some("evil.example")).await;
    assert_eq!((answer.status.as_u16(), &answer.json()["type"]), (421, &json!("error")), "{}", answer.text());
}

#[tokio::test]
async fn any_host_is_allowed_elsewhere() {
    let router = TestRouter::start().with_reply(" fine");
    let http = http_app(router.state.clone(), AllowedHosts::Any);
    let answer = send(&http, Request::get("/v1/models").body(Body::empty()).unwrap(), Some("router")).await;
    assert_eq!(answer.status, 200, "a service's name");
}
