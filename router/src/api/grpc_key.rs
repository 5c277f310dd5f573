//! The check of the API key of a gRPC call before its message is read. A handler runs only once its message
//! is decoded: by then a peer without a key would have made the router keep as much as a message may have.
//! The handler takes the caller from the call's extensions.

use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use http::{HeaderValue, header};
use tonic::service::Routes;
use tonic::{Extensions, Status};

use crate::error::RouterError;
use crate::metrics::Protocol;
use crate::pipeline::{AppState, RequestContext};
use crate::request::{Caller, Operation};

/// Calls that need no key, by the start of their path: probes.
const WITHOUT_KEY: [&str; 2] = ["/grpc.health.v1.Health/", "/vllm.grpc.engine.VllmEngine/HealthCheck"];
/// End of the paths that generate, which alone count as requests.
const GENERATE: &str = "/Generate";

/// `services` behind the check.
pub fn require_key(state: AppState, services: Routes) -> Routes {
    Routes::from(services.into_axum_router().layer(from_fn_with_state(state, check_key)))
}

/// Returns the caller of a call whose key was checked.
pub(super) fn checked_caller(extensions: &Extensions) -> Result<Caller, RouterError> {
    let unchecked = || RouterError::Internal("this call's key was not checked".into());
    extensions.get::<Caller>().cloned().ok_or_else(unchecked)
}

async fn check_key(State(state): State<AppState>, mut request: Request, next: Next) -> Response {
    let path = request.uri().path();
    if WITHOUT_KEY.iter().any(|start| path.starts_with(start)) {
        return next.run(request).await;
    }
    match state.auth.authenticate(request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes)) {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(error) => {
            let is_request = path.ends_with(GENERATE);
            Status::from(if is_request { refuse(&state, &request, error) } else { error }).into_http()
        }
    }
}

/// Records a refused request. Its message is not read, so it is unknown whether it is a chat.
fn refuse(state: &AppState, request: &Request, error: RouterError) -> RouterError {
    let operation = Operation::Completion;
    let (kind, request_id) = ((Protocol::Grpc, operation), operation.new_request_id());
    RequestContext::open(state, kind, request_id, request.headers(), request.extensions()).refuse(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_whose_key_was_not_checked_is_refused() {
        assert!(matches!(checked_caller(&Extensions::new()), Err(RouterError::Internal(_))));
        let mut extensions = Extensions::new();
        extensions.insert(Caller { isolation_key: 7, ..Caller::default() });
        assert_eq!(checked_caller(&extensions).map(|caller| caller.isolation_key), Ok(7));
    }
}
