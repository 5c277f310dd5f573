//! Calls by web pages of other origins.

use axum::body::Body;
use http::{HeaderMap, Request, StatusCode};
use router::api::allowed_hosts::AllowedHosts;
use router::api::cors::{AllowedOrigins, allow_origins};
use router::api::http::http_app;
use serde_json::json;
use tower::ServiceExt as _;

use crate::client::{MODEL, TestRouter};

const ALLOWED: &str = "https://chat.example";
const FOREIGN: &str = "https://other.example";

async fn send(router: &TestRouter, origins: &[&str], request: Request<Body>) -> (StatusCode, HeaderMap) {
    let origins: Vec<String> = origins.iter().map(|&origin| origin.to_owned()).collect();
    let origins = AllowedOrigins::parse(&origins).unwrap();
    let app = allow_origins(http_app(router.state.clone(), AllowedHosts::Any), &origins);
    let response = app.oneshot(request).await.unwrap();
    (response.status(), response.headers().clone())
}

fn preflight(origin: &str) -> Request<Body> {
    Request::options("/v1/chat/completions")
        .header("origin", origin)
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "authorization,content-type,x-stainless-os")
        .body(Body::empty())
        .unwrap()
}

fn chat(origin: &str) -> Request<Body> {
    let body = json!({ "model": MODEL, "messages": [{ "role": "user", "content": "hi" }] });
    Request::post("/v1/chat/completions")
        .header("origin", origin)
        .header("content-type", "application/json")
        .body(Body::from(body.to_string()))
        .unwrap()
}

#[tokio::test]
async fn pages_of_allowed_origins_may_call_the_api() {
    let router = TestRouter::start().with_reply(" fine");
    for (origins, origin, allowed) in [
        (&[ALLOWED, "http://localhost:3000"][..], ALLOWED, Some(ALLOWED)),
        (&[ALLOWED], FOREIGN, None),
        (&["*"], FOREIGN, Some("*")),
        (&[], ALLOWED, None),
    ] {
        let (status, headers) = send(&router, origins, preflight(origin)).await;
        let header = |headers: &HeaderMap, name: &str| {
            headers.get(name).map(|value| value.to_str().unwrap().to_owned())
        };
        assert_eq!(header(&headers, "access-control-allow-origin").as_deref(), allowed, "{origins:?}");
        if origins.is_empty() {
            assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED, "as without this setting");
            assert!(headers.keys().all(|name| !name.as_str().starts_with("access-control")));
        } else {
            assert_eq!(status, StatusCode::OK);
            assert_eq!(header(&headers, "access-control-allow-methods").unwrap(), "GET,POST,DELETE");
            let names = header(&headers, "access-control-allow-headers").unwrap();
            assert_eq!(names, "authorization,content-type,x-stainless-os");
            assert_eq!(header(&headers, "access-control-max-age").unwrap(), "3600");
        }
        let (status, headers) = send(&router, origins, chat(origin)).await;
        assert_eq!(status, StatusCode::OK, "the browser, not the router, refuses the answer to a page");
        assert_eq!(header(&headers, "access-control-allow-origin").as_deref(), allowed, "{origins:?}");
        assert!(!headers.contains_key("access-control-allow-credentials"));
    }
}

#[tokio::test]
async fn errors_and_unknown_routes_can_be_read_too() {
    let router = TestRouter::start();
    for path in ["/v1/chat/completions", "/nowhere"] {
        let request = Request::get(path).header("origin", ALLOWED).body(Body::empty()).unwrap();
        let (status, headers) = send(&router, &[ALLOWED], request).await;
        assert!(status.is_client_error(), "{path}: {status}");
        assert_eq!(headers["access-control-allow-origin"], ALLOWED, "{path}");
        assert_eq!(headers["access-control-expose-headers"], "*");
    }
}
