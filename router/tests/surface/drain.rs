//! An operator's orders to drain workers.

use axum::body::Body;
use http::Request;
use serde_json::json;

use crate::client::TestRouter;

fn admin_request(method: &str, path: &str, headers: &[(&str, &str)]) -> Request<Body> {
    let mut request = Request::builder().method(method).uri(path).header("host", "127.0.0.1:8002");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Body::empty()).unwrap()
}

#[tokio::test]
async fn workers_are_drained_by_operators_only() {
    let router = TestRouter::start();
    let path = "/admin/workers/10.0.0.7:8110/drain";
    assert_eq!(router.get(path).await.status, 404, "not on the client address");
    for (method, path, drained) in [
        ("POST", path.to_owned(), "10.0.0.7:8110 true false"),
        ("POST", format!("{path}?move=true"), "10.0.0.7:8110 true true"),
        ("DELETE", path.to_owned(), "10.0.0.7:8110 false false"),
        ("POST", path.replace("10.0", "http:%2F%2F10.0"), "http://10.0.0.7:8110 true false"),
    ] {
        let answer = router.admin(admin_request(method, &path, &[])).await;
        assert_eq!(
            (answer.status.as_u16(), answer.json()),
            (200, json!({ "workers": [], "drained": [drained] }))
        );
    }
    for (method, path, headers, status) in [
        ("POST", "/admin/workers/nobody/drain", vec![], 404),
        ("POST", "/admin/workers/a:1/drain?moves=true", vec![], 400),
        ("GET", path, vec![], 405),
        ("POST", path, vec![("origin", "http://evil.example")], 403),
        ("POST", path, vec![("origin", "http://127.0.0.1:8002")], 200),
    ] {
        let answer = router.admin(admin_request(method, path, &headers)).await;
        assert_eq!(answer.status.as_u16(), status, "{method} {path} {headers:?}");
    }
    let router = TestRouter::with_keys("sk-one\nsk-operator admin=true\n");
    assert_eq!(router.admin(admin_request("POST", path, &[])).await.status, 401);
    for (key, status) in [("Bearer sk-none", 401), ("Bearer sk-one", 403), ("Bearer sk-operator", 200)] {
        let answer = router.admin(admin_request("POST", path, &[("authorization", key)])).await;
        assert_eq!(answer.status, status, "{key}");
        assert!(
            status != 403 || answer.json()["error"]["code"] == "operator_key_required",
            "{}",
            answer.text()
        );
    }
}

#[tokio::test]
async fn an_address_that_others_reach_without_keys_takes_no_orders() {
    let router = TestRouter::start();
    for method in ["POST", "DELETE"] {
        let order = admin_request(method, "/admin/workers/10.0.0.7:8110/drain", &[]);
        let answer = router.admin_at_public_address(order).await;
        assert_eq!(answer.status, 400, "{method}");
        assert!(answer.text().contains("--api-keys"), "{}", answer.text());
    }
    assert_eq!(router.admin_at_public_address(admin_request("GET", "/debug/lanes", &[])).await.status, 200);
}
