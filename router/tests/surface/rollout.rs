//! An operator's orders about the rollout of a draft.

use axum::body::Body;
use http::Request;
use serde_json::{Value, json};

use crate::client::TestRouter;

const PATH: &str = "/admin/rollout";

fn admin_request(method: &str, path: &str, (body, headers): (&str, &[(&str, &str)])) -> Request<Body> {
    let mut request = Request::builder().method(method).uri(path).header("host", "127.0.0.1:8002");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.header("content-type", "application/json").body(Body::from(body.to_owned())).unwrap()
}

#[tokio::test]
async fn a_rollout_is_started_and_reported() {
    let router = TestRouter::start();
    assert_eq!(router.get(PATH).await.status, 404, "not on the client address");
    let body = r#"{"draft": "new", "share": 0.25, "min_drafts": 50, "decides": false}"#;
    let answer = router.admin(admin_request("POST", PATH, (body, &[]))).await;
    assert_eq!(answer.status.as_u16(), 200);
    let rollout = &answer.json()["rollout"];
    let shown = ["draft", "share", "decides", "stage", "verdict"].map(|field| rollout[field].clone());
    assert_eq!(shown, [json!("new"), json!(0.25), json!(false), json!("canary"), json!("undecided")]);
    assert_eq!((&rollout["min_drafts"], &rollout["margin"]), (&json!(50), &json!(0.03)));
    let warning = answer.json()["warning"].as_str().unwrap().to_owned();
    assert!(warning.contains("no connected draft worker has the model id `new`"), "{warning}");
    for (method, path) in [("GET", PATH), ("DELETE", PATH)] {
        let answer = router.admin(admin_request(method, path, ("", &[]))).await;
        assert_eq!((answer.status.as_u16(), &answer.json()["rollout"]), (200, &Value::Null), "{method}");
    }
    let answer = router.admin(admin_request("POST", "/admin/rollout/promote", ("", &[]))).await;
    assert_eq!(answer.status.as_u16(), 400, "no rollout is in progress");
}

#[tokio::test]
async fn invalid_orders_are_refused_with_the_fault() {
    let router = TestRouter::start();
    for (body, expected) in [
        (r#"{"draft": "new", "share": 2}"#, "share must be between 0 and 1, not 2"),
        (r#"{"draft": ""}"#, "draft must be the model id of the candidate"),
        (r#"{"share": 0.5}"#, "missing field `draft`"),
        (r#"{"draft": "new", "shares": 0.5}"#, "shares is not a field of this endpoint"),
        ("{", "not valid JSON"),
    ] {
        let answer = router.admin(admin_request("POST", PATH, (body, &[]))).await;
        assert_eq!(answer.status.as_u16(), 400, "{body}");
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(expected), "{body}: {message}");
    }
    let other_origin = [("origin", "http://evil.example")];
    assert_eq!(router.admin(admin_request("DELETE", PATH, ("", &other_origin))).await.status, 403);
    let router = TestRouter::with_keys("sk-one\nsk-operator admin=true\n");
    assert_eq!(router.admin(admin_request("GET", PATH, ("", &[]))).await.status, 401);
    for (key, status) in [("Bearer sk-one", 403), ("Bearer sk-operator", 200)] {
        let answer = router.admin(admin_request("GET", PATH, ("", &[("authorization", key)]))).await;
        assert_eq!(answer.status, status, "{key}");
    }
}
