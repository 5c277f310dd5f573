//! [`buffered_response`]: a response that is sent as a whole. The memory reserved for it is released once its
//! body was sent or dropped: a client may read it slowly.

use axum::body::{Body, Bytes};
use axum::response::{IntoResponse as _, Response};
use http::{HeaderValue, header};

use crate::pipeline::buffer_memory::MemoryReservation;

/// The body, with the memory reserved for it.
struct ReservedJson<J> {
    json: J,
    _reservation: MemoryReservation,
}

impl<J: AsRef<[u8]>> AsRef<[u8]> for ReservedJson<J> {
    fn as_ref(&self) -> &[u8] {
        self.json.as_ref()
    }
}

/// Response with the given JSON body.
pub(super) fn buffered_response(
    json: impl AsRef<[u8]> + Send + 'static,
    reservation: MemoryReservation,
) -> Response {
    let body = Body::from(Bytes::from_owner(ReservedJson { json, _reservation: reservation }));
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], body).into_response()
}
