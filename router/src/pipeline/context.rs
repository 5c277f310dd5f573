//! [`RequestContext`]: a request apart from its content, from its arrival on.

use std::panic::AssertUnwindSafe;

use futures::FutureExt as _;
use http::{Extensions, HeaderMap};
use service::accept::ResponseHandle;
use service::telemetry;
use tracing::{Instrument as _, Span};

use super::AppState;
use super::deadline::Deadline;
use crate::error::RouterError;
use crate::metrics::Protocol;
use crate::request::record::RequestRecord;
use crate::request::{Operation, span};

/// Metadata of a request, apart from its content.
#[derive(Debug)]
pub struct RequestContext {
    /// Identifier of the request.
    pub request_id: String,
    /// Latest end of the request.
    pub deadline: Option<Deadline>,
    /// Handle for closing the connection of the response; `None` without a listener.
    pub response: Option<ResponseHandle>,
    /// Collects the request's metrics and trace.
    pub record: RequestRecord,
}

impl RequestContext {
    /// Opens a request that has arrived with these headers, or metadata. Its span is a child of the one that
    /// they name.
    pub fn open(
        state: &AppState,
        (protocol, operation): (Protocol, Operation),
        request_id: String,
        headers: &HeaderMap,
        extensions: &Extensions,
    ) -> Self {
        let span = span::open(protocol, operation);
        telemetry::set_parent_from_headers(&span, headers);
        span::record_id(&span, &request_id);
        let record = RequestRecord::new(protocol, span, &state.metrics);
        let record = record.with_access_line(state.access_log, &request_id, headers, extensions);
        let response = extensions.get::<ResponseHandle>().cloned();
        Self { request_id, deadline: None, response, record }
    }

    /// Records why the request is refused before it starts.
    pub fn refuse(mut self, error: RouterError) -> RouterError {
        self.record.failed(&error);
        error
    }
}

/// Runs a request's handler in the request's span. A panic becomes an error, so that it fails only this
/// request.
pub fn run_caught<T>(
    span: Span,
    work: impl Future<Output = Result<T, RouterError>>,
) -> impl Future<Output = Result<T, RouterError>> {
    AssertUnwindSafe(work.instrument(span)).catch_unwind().map(|outcome| {
        outcome.unwrap_or_else(|_| Err(RouterError::Internal("the request handler panicked".into())))
    })
}
