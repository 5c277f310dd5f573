//! An operator's order to log more or less.

use axum::body::Body;
use http::Request;
use serde_json::json;
use service::telemetry::{self, LogFormat, TelemetryConfig};

use crate::client::TestRouter;

const PATH: &str = "/admin/log";

fn request(method: &str, body: &str, headers: &[(&str, &str)]) -> Request<Body> {
    let mut request = Request::builder().method(method).uri(PATH).header("host", "127.0.0.1:8002");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.header("content-type", "application/json").body(Body::from(body.to_owned())).unwrap()
}

#[tokio::test]
async fn an_operator_replaces_the_filter_of_the_log() {
    let router = TestRouter::with_keys("sk-one\nsk-operator admin=true\n");
    assert_eq!(router.get(PATH).await.status, 404, "not on the client address");
    let operator = [("authorization", "Bearer sk-operator")];
    let answer = router.admin(request("GET", "", &operator)).await;
    assert_eq!(answer.status, 500, "a test has no log: {}", answer.text());
    let config = TelemetryConfig {
        service_name: "test".to_owned(),
        log_format: LogFormat::Text,
        log_filter: "error".parse().unwrap(),
    };
    let _log = telemetry::init(&config).unwrap();
    let client = [("authorization", "Bearer sk-one")];
    for (headers, status) in [(&[][..], 401), (&client[..], 403)] {
        for method in ["GET", "PUT"] {
            let answer = router.admin(request(method, r#"{"filter": "debug"}"#, headers)).await;
            assert_eq!(answer.status, status, "{method} {headers:?}");
        }
    }
    for (body, expected) in [
        (r#"{"filter": "router=loud"}"#, "filter: "),
        (r#"{"level": "debug"}"#, "level is not a field of this endpoint"),
        ("{}", "missing field `filter`"),
    ] {
        let answer = router.admin(request("PUT", body, &operator)).await;
        assert_eq!(answer.status, 400, "{body}");
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(expected), "{body}: {message}");
    }
    assert_eq!(router.admin(request("GET", "", &operator)).await.json(), json!({ "filter": "error" }));
    let is_logged = || tracing::enabled!(target: "router::scheduler", tracing::Level::DEBUG);
    assert!(!is_logged());
    let order = json!({ "filter": "error,router=debug" });
    for (method, body) in [("PUT", order.to_string()), ("GET", String::new())] {
        let answer = router.admin(request(method, &body, &operator)).await;
        assert_eq!((answer.status.as_u16(), answer.json()), (200, order.clone()), "{method}");
    }
    assert!(is_logged());
}
