//! `/health/live`, `/health/ready` and `/metrics` over HTTP, for an admin address; only the two probes for
//! the clients' address.

use axum::extract::State as Shared;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::get;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::{Health, State};
use crate::accept::{Connections, Listener};
use crate::metrics::Metrics;
use crate::shutdown::Lifetime;

#[derive(Serialize)]
struct Status<'a> {
    status: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
}

/// Routes of the probes and the metrics, for an admin address.
pub fn router(health: Health, metrics: Metrics) -> axum::Router {
    axum::Router::new()
        .route("/health/live", get(live))
        .route("/health/ready", get(ready))
        .with_state(health)
        .route("/metrics", get(scrape).with_state(metrics))
}

/// Routes of the probes without reasons, for an address that clients reach.
pub fn probes(health: Health) -> axum::Router {
    let shown = |code: StatusCode, status: &'static str| (code, Json(Status { status, reason: None }));
    let live = async move |Shared(health): Shared<Health>| match health.state() {
        State::Failed(_) => shown(StatusCode::SERVICE_UNAVAILABLE, "failed"),
        _ => shown(StatusCode::OK, "live"),
    };
    let ready = async move |Shared(health): Shared<Health>| {
        let code = if health.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        shown(code, health.state().as_str())
    };
    axum::Router::new().route("/health/live", get(live)).route("/health/ready", get(ready)).with_state(health)
}

/// Serves an operator's routes ([`router`] and possibly others) until the lifetime is cancelled, so that a
/// draining process can still be observed. Its connections are counted apart from `connections`, which may
/// all be in use.
pub fn serve_admin(
    socket: TcpListener,
    routes: axum::Router,
    connections: &Connections,
    lifetime: &Lifetime,
) -> JoinHandle<()> {
    Listener::new(socket, None, &connections.for_admin())
        .with_reserve_descriptor()
        .serve_http("admin", routes, lifetime)
}

async fn live(Shared(health): Shared<Health>) -> Response {
    match health.state() {
        state @ State::Failed(_) => answer(StatusCode::SERVICE_UNAVAILABLE, &state),
        _ => Json(Status { status: "live", reason: None }).into_response(),
    }
}

async fn ready(Shared(health): Shared<Health>) -> Response {
    match health.state() {
        State::Ready => answer(StatusCode::OK, &State::Ready),
        state => answer(StatusCode::SERVICE_UNAVAILABLE, &state),
    }
}

async fn scrape(Shared(metrics): Shared<Metrics>, headers: HeaderMap) -> Response {
    metrics.respond(&headers)
}

fn answer(code: StatusCode, state: &State) -> Response {
    (code, Json(Status { status: state.as_str(), reason: state.reason() })).into_response()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::accept::RawListener;
    use crate::config::Faults;
    use crate::metrics::GaugeName;
    use crate::shutdown::ShutdownOutcome;

    const ROWS: GaugeName = GaugeName::new("outrider_rows", "Rows of the last step");

    struct Admin {
        base: String,
        health: Health,
        lifetime: Lifetime,
    }

    impl Admin {
        async fn start() -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let base = format!("http://{}", listener.local_addr().unwrap());
            let (health, metrics, lifetime) = (Health::new(), Metrics::new(), Lifetime::new());
            metrics.gauge(&ROWS).set(7);
            let connections = Connections::new(RawListener::default().validate(&mut Faults::new()), &metrics);
            let routes = router(health.clone(), metrics);
            let _server = serve_admin(listener, routes, &connections, &lifetime);
            Self { base, health, lifetime }
        }

        async fn get(&self, path: &str) -> (u16, String) {
            let response = reqwest::get(format!("{}{path}", self.base)).await.unwrap();
            (response.status().as_u16(), response.text().await.unwrap())
        }
    }

    #[tokio::test]
    async fn the_probes_follow_the_state() {
        let admin = Admin::start().await;
        let live = (200, r#"{"status":"live"}"#.to_owned());

        let loading = (503, r#"{"status":"not_ready","reason":"starting"}"#.to_owned());
        assert_eq!(
            (admin.get("/health/live").await, admin.get("/health/ready").await),
            (live.clone(), loading)
        );

        admin.health.set_ready();
        assert_eq!(admin.get("/health/ready").await, (200, r#"{"status":"ready"}"#.to_owned()));

        admin.health.set_draining("SIGTERM");
        let draining = (503, r#"{"status":"draining","reason":"SIGTERM"}"#.to_owned());
        assert_eq!((admin.get("/health/live").await, admin.get("/health/ready").await), (live, draining));

        admin.health.set_failed("device thread died");
        let failed = (503, r#"{"status":"failed","reason":"device thread died"}"#.to_owned());
        assert_eq!(
            (admin.get("/health/live").await, admin.get("/health/ready").await),
            (failed.clone(), failed)
        );
    }

    #[tokio::test]
    async fn metrics_are_served_while_draining_and_the_server_ends_with_the_lifetime() {
        let admin = Admin::start().await;
        assert_eq!(admin.lifetime.drain(Duration::ZERO).await, ShutdownOutcome::Clean);
        let response = reqwest::get(format!("{}/metrics", admin.base)).await.unwrap();
        assert_eq!(response.headers()["content-type"], "text/plain; version=0.0.4; charset=utf-8");
        assert!(response.text().await.unwrap().contains("\noutrider_rows 7\n"));
        assert_eq!(admin.lifetime.shut_down(Duration::from_secs(20)).await, ShutdownOutcome::Clean);
        assert!(reqwest::get(format!("{}/metrics", admin.base)).await.is_err());
    }
}
