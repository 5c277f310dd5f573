//! The check of the API key of a gRPC call before its message is read. A handler runs only once its message is
//! decoded: by then a peer without a key would have made the router keep as much as a message may have.

use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use http::{HeaderValue, header};
use tonic::Status;
use tonic::service::Routes;

use crate::metrics::Protocol;
use crate::pipeline::AppState;

/// Calls that need no key, by the start of their path: probes.
const WITHOUT_KEY: [&str; 2] = ["/grpc.health.v1.Health/", "/vllm.grpc.engine.VllmEngine/HealthCheck"];
/// End of the paths that generate, which alone count as requests.
const GENERATE: &str = "/Generate";

/// `services` behind the check.
pub fn require_key(state: AppState, services: Routes) -> Routes {
    Routes::from(services.into_axum_router().layer(from_fn_with_state(state, check_key)))
}

async fn check_key(State(state): State<AppState>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    if WITHOUT_KEY.iter().any(|start| path.starts_with(start)) {
        return next.run(request).await;
    }
    match state.auth.authenticate(request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes)) {
        Ok(_) => next.run(request).await,
        Err(error) => {
            if path.ends_with(GENERATE) {
                state.metrics.request_failed(Protocol::Grpc, &error);
            }
            Status::from(error).into_http()
        }
    }
}
