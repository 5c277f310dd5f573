//! Reads the parts common to all HTTP requests: the caller, and the body, within its limit of size.

use std::error::Error as _;
use std::io;

use axum::body::{Body, Bytes, HttpBody as _};
use axum::extract::rejection::QueryRejection;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use http_body_util::BodyExt as _;
use serde::de::DeserializeOwned;
use service::accept::BodyTimedOut;
use tracing::Span;

use super::json;
use super::object::Object;
use crate::error::RouterError;
use crate::pipeline::AppState;
use crate::pipeline::body_memory::{BodyMemory, BodyReservation};
use crate::pipeline::deadline::{Deadline, REQUEST_TIMEOUT_HEADER};
use crate::request::bounds::header_id;
use crate::request::gateway::{GatewayHeaders, Slo};
use crate::request::limits::{BODY_BYTES_MAX, BODY_DISCARD_BYTES_MAX};
use crate::request::{Caller, span};

/// Header that Anthropic's clients use for the key.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// Header and metadata that name the task type.
pub(super) const TASK_TYPE: &str = "x-task-type";

/// Authenticates a request by its `authorization` header, or by Anthropic's `x-api-key`.
pub(super) fn authenticate(state: &AppState, headers: &HeaderMap) -> Result<Caller, RouterError> {
    let authorization = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
    match (authorization, headers.get(API_KEY)) {
        (None, Some(key)) => state.auth.authenticate(Some(&[b"Bearer ", key.as_bytes()].concat())),
        (authorization, _) => state.auth.authenticate(authorization),
    }
}

/// The client's ids of its request and session.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Identity<'a> {
    pub(super) request_id: Option<&'a str>,
    pub(super) session_id: Option<&'a str>,
}

/// Reads `x-request-id` and `x-session-id`.
pub(super) fn identity_from_headers(headers: &HeaderMap) -> Result<Identity<'_>, RouterError> {
    let id_header =
        |name: &'static str| headers.get(name).map(|value| header_id(name, value.as_bytes())).transpose();
    Ok(Identity { request_id: id_header("x-request-id")?, session_id: id_header("x-session-id")? })
}

/// Reads the client's deadline for the whole answer, if any.
pub(super) fn deadline_from_headers(headers: &HeaderMap) -> Result<Option<Deadline>, RouterError> {
    let timeout = headers.get(REQUEST_TIMEOUT_HEADER).map(HeaderValue::as_bytes);
    Ok(timeout.map(Deadline::from_millis_header).transpose()?.flatten())
}

/// What the head of a request says, whatever its body.
pub(super) struct RequestHead {
    /// The authenticated caller, with a gateway's headers applied.
    pub(super) caller: Caller,
    /// Latency objectives set by a gateway.
    pub(super) slo: Slo,
    /// Time by which the whole answer is due.
    pub(super) deadline: Option<Deadline>,
}

/// Reads the head of an authenticated caller's request.
pub(super) fn read_head(
    state: &AppState,
    mut caller: Caller,
    headers: &HeaderMap,
) -> Result<RequestHead, RouterError> {
    let slo = apply_gateway_headers(state, &mut caller, |name| headers.get(name).map(HeaderValue::as_bytes))?;
    Ok(RequestHead { caller, slo, deadline: deadline_from_headers(headers)? })
}

/// Applies a gateway's headers to the caller; `header` returns the value of a header or of metadata.
pub(super) fn apply_gateway_headers<'a>(
    state: &AppState,
    caller: &mut Caller,
    header: impl Fn(&'static str) -> Option<&'a [u8]>,
) -> Result<Slo, RouterError> {
    let gateway = GatewayHeaders::read(header)?;
    span::record_gateway(&Span::current(), &gateway);
    gateway.apply(caller, &state.objectives);
    Ok(gateway.slo)
}

/// The error for a query parameter that would change the answer.
pub(super) fn unsupported_parameter(name: &str) -> RouterError {
    RouterError::invalid(name, format!("the query parameter {name} is not supported: leave it out"))
}

/// The error for query parameters that cannot be read; the reason names the parameter first, or in backticks.
pub(super) fn invalid_query(rejection: &QueryRejection) -> RouterError {
    let reason = rejection.source().map_or_else(|| rejection.body_text(), ToString::to_string);
    let name = match reason.split_once('`') {
        Some((before, rest)) if before.ends_with("field ") => rest.split('`').next(),
        _ => reason.split_once(':').map(|(name, _)| name),
    };
    let param = name.map(str::to_owned);
    RouterError::InvalidRequest { message: format!("the query parameters are invalid: {reason}"), param }
}

/// Reads the task type named by the client.
pub(super) fn task_type_from_headers(headers: &HeaderMap) -> Result<Option<String>, RouterError> {
    let not_ascii =
        |_| RouterError::invalid(TASK_TYPE, format!("the header {TASK_TYPE} must be plain ASCII"));
    headers.get(TASK_TYPE).map(|value| value.to_str().map(str::to_owned).map_err(not_ascii)).transpose()
}

/// Reads the body as a JSON object, in memory that is reserved as it arrives.
pub(super) async fn read_object<T: DeserializeOwned>(
    memory: BodyReservation,
    headers: &HeaderMap,
    body: Body,
    deadline: Option<Deadline>,
) -> Result<T, RouterError> {
    check_content_type(headers)?;
    check_content_encoding(headers)?;
    let (bytes, _reservation) = Deadline::enforce(deadline, read_body(body, memory)).await?;
    let Object(body) = json::parse_body(&bytes)?;
    Ok(body)
}

/// Reads an operator's order. It needs none of the memory that clients share, which may be full.
pub(super) async fn read_order<T: DeserializeOwned>(
    headers: &HeaderMap,
    body: Body,
    deadline: Option<Deadline>,
) -> Result<T, RouterError> {
    read_object(BodyMemory::default().reserve(0), headers, body, deadline).await
}

/// Browsers send other content types across origins without a preflight request; a router on loopback must
/// not answer those.
fn check_content_type(headers: &HeaderMap) -> Result<(), RouterError> {
    let content_type = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    let content_type = String::from_utf8_lossy(content_type).into_owned();
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    Err(RouterError::UnsupportedMediaType { content_type })
}

/// Refuses compressed bodies, which would otherwise be reported as invalid UTF-8.
fn check_content_encoding(headers: &HeaderMap) -> Result<(), RouterError> {
    for value in headers.get_all(header::CONTENT_ENCODING) {
        let encoding = String::from_utf8_lossy(value.as_bytes());
        let is_identity = |name: &str| name.trim().is_empty() || name.trim().eq_ignore_ascii_case("identity");
        if !encoding.split(',').all(is_identity) {
            return Err(RouterError::UnsupportedEncoding { encoding: encoding.into_owned() });
        }
    }
    Ok(())
}

/// Reads a whole body of limited size. Returns it with the memory reserved for it. The listener limits the
/// time.
async fn read_body(mut body: Body, memory: BodyReservation) -> Result<(Bytes, BodyReservation), RouterError> {
    let too_large = || RouterError::BodyTooLarge { limit: BODY_BYTES_MAX };
    // Refuse a body announced as larger than this without reading it.
    if body.size_hint().lower() > BODY_DISCARD_BYTES_MAX as u64 {
        return Err(too_large());
    }
    let (mut bytes, mut num_bytes) = (Vec::new(), 0);
    // An error releases what was reserved.
    let mut reserved = Ok(memory);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(body_error)?;
        let Some(data) = frame.data_ref() else { continue };
        num_bytes += data.len();
        if num_bytes > BODY_BYTES_MAX {
            reserved = Err(too_large());
        } else if let Ok(reservation) = &mut reserved
            && let Err(error) = reservation.grow(data.len())
        {
            reserved = Err(error);
        }
        match &reserved {
            Ok(_) => bytes.extend_from_slice(data),
            Err(_) if num_bytes > BODY_DISCARD_BYTES_MAX => break,
            // A client that is still writing when the connection closes never reads the response, so read the
            // rest first.
            Err(_) => bytes = Vec::new(),
        }
    }
    Ok((bytes.into(), reserved?))
}

fn body_error(error: axum::Error) -> RouterError {
    if let Some(&BodyTimedOut { limit }) = BodyTimedOut::find(&error) {
        return RouterError::BodyTimeout { limit };
    }
    match invalid_framing(&error) {
        Some(reason) => {
            let message = format!("the body's transfer encoding is invalid: {reason}");
            RouterError::InvalidRequest { message, param: None }
        }
        None => RouterError::ClientGone,
    }
}

/// Returns what is wrong with a body that arrived, but not in valid chunks. If the connection ended, the
/// error's kind is another.
fn invalid_framing(error: &axum::Error) -> Option<String> {
    let io = anyhow::Chain::new(error).find_map(|cause| cause.downcast_ref::<io::Error>())?;
    let is_invalid = matches!(io.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData);
    is_invalid.then(|| io.to_string())
}
