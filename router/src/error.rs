//! [`RouterError`]: all the ways a request can fail, with one table of their meaning over HTTP, over gRPC, in
//! metrics, and for retries.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Display;
use std::time::Duration;

use http::StatusCode;
use tonic::Code;
use tonic_types::{ErrorDetails, StatusExt as _};

/// Default wait sent to clients that are refused for overload.
pub const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Maximum size of a message sent to a client, in bytes. An error may repeat a value of any size. With gRPC,
/// the message and the details that repeat it must fit the 8 KiB of metadata that clients accept.
const MESSAGE_BYTES_MAX: usize = 1_024;
/// Maximum size of a field's name sent to a client, in bytes.
const PARAM_BYTES_MAX: usize = 256;

/// Why a request was refused or failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RouterError {
    /// The request is invalid; the message names field, limit and value.
    #[error("{message}")]
    InvalidRequest {
        /// What is wrong and what is expected.
        message: String,
        /// The field, as the client named it.
        param: Option<String>,
    },
    /// The prompt, or prompt and requested output together, do not fit the model's window.
    #[error("this model's maximum context length is {max_model_len} tokens{}", excess.explain(*prompt_tokens, param))]
    ContextLengthExceeded {
        /// Limit for prompt and output together, in tokens.
        max_model_len: u32,
        /// Tokens of this prompt.
        prompt_tokens: u32,
        /// What does not fit.
        excess: Excess,
        /// The field at fault.
        param: &'static str,
    },
    /// The prompt's text is longer than any that fits the model's window. It was not tokenized.
    #[error(
        "this model's maximum context length is {max_model_len} tokens, which are at most {limit} bytes of text, but \
         {prompt_bytes} bytes were sent: shorten the prompt"
    )]
    PromptTooLong {
        /// Limit for prompt and output together, in tokens.
        max_model_len: u32,
        /// Bytes of this prompt.
        prompt_bytes: usize,
        /// Maximum number of bytes, given the longest tokens.
        limit: usize,
        /// The field at fault.
        param: &'static str,
    },
    /// No API key, or an unknown one.
    #[error("{0}")]
    Unauthenticated(&'static str),
    /// No target has served the model since this router started.
    #[error("the model `{model}` does not exist; GET /v1/models lists the available models")]
    ModelNotFound {
        /// As requested.
        model: String,
    },
    /// No worker at this address is connected or drained.
    #[error(
        "no worker at `{worker}`: send its address, percent-encoded, or HOST:PORT; GET /debug/lanes lists all workers"
    )]
    WorkerNotFound {
        /// As requested.
        worker: String,
    },
    /// The API key is valid, but does not belong to an operator.
    #[error(
        "this API key does not belong to an operator: give its line in the file of --api-keys the setting admin=true"
    )]
    NotAnOperator,
    /// The request comes from a web page of another origin.
    #[error("cross-origin requests are not allowed here: send no Origin header")]
    CrossOrigin,
    /// The response is not in this router's store.
    #[error("{message}")]
    ResponseNotFound {
        /// Names the response.
        message: String,
        /// The field, as the client named it.
        param: &'static str,
    },
    /// No such path.
    #[error("no route for {method} {path}")]
    RouteNotFound {
        /// As sent.
        method: String,
        /// As sent.
        path: String,
    },
    /// The path exists, but does not support the method.
    #[error("method {method} is not allowed on {path}")]
    MethodNotAllowed {
        /// As sent.
        method: String,
        /// As sent.
        path: String,
    },
    /// The body did not arrive in time.
    #[error("the request body did not arrive within {} seconds", .limit.as_secs_f64())]
    BodyTimeout {
        /// Maximum time.
        limit: Duration,
    },
    /// The body is too large.
    #[error("the request body is larger than {limit} bytes")]
    BodyTooLarge {
        /// In bytes.
        limit: usize,
    },
    /// The body is compressed.
    #[error("the content-encoding must be identity, not `{encoding}`: send the body uncompressed")]
    UnsupportedEncoding {
        /// As sent.
        encoding: String,
    },
    /// The content type is not JSON.
    #[error("the content type must be application/json, not `{content_type}`")]
    UnsupportedMediaType {
        /// As sent; empty when absent.
        content_type: String,
    },
    /// A limit on load is reached; retry later.
    #[error("{what} is full: retry after {} s", RETRY_AFTER.as_secs())]
    Overloaded {
        /// Which limit.
        what: &'static str,
    },
    /// All capacity was in use for as long as a request may wait; retry later.
    #[error(
        "{what} had no capacity within {0} s: retry after {0} s, or send fewer or shorter requests",
        ceil_seconds(*.waited)
    )]
    WaitedTooLong {
        /// What has the capacity, such as "the router".
        what: &'static str,
        /// How long the request waited. Others wait as well, so a retry before the same time has passed would
        /// most likely wait in vain again.
        waited: Duration,
    },
    /// A limit of the API key is reached; retry later.
    #[error("this API key is limited to {limit}: retry after {} s", ceil_seconds(*.retry_after))]
    RateLimited {
        /// Such as "60 requests per minute".
        limit: String,
        /// Time until the limit permits a request.
        retry_after: Duration,
    },
    /// The client's deadline has passed.
    #[error("the request did not finish within its time limit of {} ms", .timeout.as_millis())]
    DeadlineExceeded {
        /// Timeout as set by the client.
        timeout: Duration,
    },
    /// An answer that is not streamed is too large to buffer.
    #[error(
        "the response is larger than {limit} bytes: stream it, or request fewer tokens, choices or log probabilities"
    )]
    ResponseTooLarge {
        /// In bytes.
        limit: usize,
    },
    /// The client reads too slowly; its stream was closed.
    #[error("the client reads too slowly: its stream was closed with too many unread tokens")]
    SlowClient,
    /// The client disconnected; the error is not sent.
    #[error("the client closed the connection")]
    ClientGone,
    /// No worker can take the request now.
    #[error("{reason}: retry after {} s", RETRY_AFTER.as_secs())]
    Unavailable {
        /// Such as "no target worker is ready for model `x`".
        reason: String,
    },
    /// This process is shutting down.
    #[error("the router is shutting down: retry after {} s", RETRY_AFTER.as_secs())]
    Draining,
    /// A worker cannot serve the request.
    #[error(
        "the target refused the sequence: {reason}; operators: see the target's log (docs/runbook.md, \
         OutriderRequestsFail)"
    )]
    Refused {
        /// The worker's message.
        reason: String,
    },
    /// Several targets failed in turn while running this request.
    #[error("{reason}")]
    Quarantined {
        /// How many, and how the last one failed.
        reason: String,
    },
    /// A broken invariant of the router; fails only this request.
    #[error("internal error: {0}")]
    Internal(String),
}

/// One row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErrorMapping {
    /// HTTP status.
    pub status: StatusCode,
    /// gRPC status code.
    pub grpc: Code,
    /// `error.type` in OpenAI's error object.
    pub kind: &'static str,
    /// `error.code` in OpenAI's error object.
    pub code: Option<&'static str>,
    /// Label in metrics and traces.
    pub label: &'static str,
    /// Whether the same request may succeed later; such responses carry Retry-After.
    pub retryable: bool,
}

const INVALID: &str = "invalid_request_error";
const SERVER: &str = "server_error";

impl From<text::TextError> for RouterError {
    fn from(error: text::TextError) -> Self {
        match error {
            text::TextError::Refused(message)
            | text::TextError::Conversation(message)
            | text::TextError::TooLong(message) => Self::invalid("messages", message),
            text::TextError::Internal(message) => Self::Internal(message),
        }
    }
}

impl RouterError {
    /// Creates an error about a field.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::InvalidRequest { message: message.into(), param: Some(param.into()) }
    }

    /// Creates the error of a field whose value is not what it must be.
    pub fn must_be(field: &str, expected: impl Display) -> Self {
        Self::invalid(field, format!("{field} must be {expected}"))
    }

    /// Creates the error of a field whose value is none of the known ones.
    pub fn not_one_of(field: &str, known: &[&str], value: &str) -> Self {
        Self::must_be(field, format_args!("one of {}, not `{value}`", known.join(", ")))
    }

    /// Returns the row of this error.
    pub fn mapping(&self) -> ErrorMapping {
        use StatusCode as S;
        // The label equals the code, with three exceptions.
        let row = |status, grpc, kind, code| ErrorMapping {
            status,
            grpc,
            kind,
            code: Some(code),
            label: code,
            retryable: false,
        };
        let server = |grpc, code| row(S::INTERNAL_SERVER_ERROR, grpc, SERVER, code);
        let as_retryable = |row| ErrorMapping { retryable: true, ..row };
        let bad_request = |code| row(S::BAD_REQUEST, Code::InvalidArgument, INVALID, code);
        let forbidden = |code| row(S::FORBIDDEN, Code::PermissionDenied, INVALID, code);
        let unsupported = |code| row(S::UNSUPPORTED_MEDIA_TYPE, Code::InvalidArgument, INVALID, code);
        let rate_limited =
            |code| row(S::TOO_MANY_REQUESTS, Code::ResourceExhausted, "rate_limit_error", code);
        let unavailable = |code| as_retryable(row(S::SERVICE_UNAVAILABLE, Code::Unavailable, SERVER, code));
        match self {
            Self::InvalidRequest { .. } => ErrorMapping { code: None, ..bad_request("invalid_request") },
            Self::ContextLengthExceeded { .. } | Self::PromptTooLong { .. } => {
                bad_request("context_length_exceeded")
            }
            Self::Unauthenticated(_) => {
                let kind = "authentication_error";
                let row = row(S::UNAUTHORIZED, Code::Unauthenticated, kind, "invalid_api_key");
                ErrorMapping { label: "unauthenticated", ..row }
            }
            Self::ModelNotFound { .. } => row(S::NOT_FOUND, Code::NotFound, INVALID, "model_not_found"),
            Self::WorkerNotFound { .. } => row(S::NOT_FOUND, Code::NotFound, INVALID, "worker_not_found"),
            Self::NotAnOperator => forbidden("operator_key_required"),
            Self::CrossOrigin => forbidden("cross_origin"),
            // Retrieving a missing response is "not found"; continuing one is an invalid field.
            Self::ResponseNotFound { param: "previous_response_id", .. } => {
                bad_request("previous_response_not_found")
            }
            Self::ResponseNotFound { .. } => row(S::NOT_FOUND, Code::NotFound, INVALID, "response_not_found"),
            Self::RouteNotFound { .. } => row(S::NOT_FOUND, Code::Unimplemented, INVALID, "route_not_found"),
            Self::MethodNotAllowed { .. } => {
                row(S::METHOD_NOT_ALLOWED, Code::Unimplemented, INVALID, "method_not_allowed")
            }
            Self::BodyTimeout { .. } => {
                row(S::REQUEST_TIMEOUT, Code::DeadlineExceeded, INVALID, "body_timeout")
            }
            Self::BodyTooLarge { .. } => {
                row(S::PAYLOAD_TOO_LARGE, Code::OutOfRange, INVALID, "request_too_large")
            }
            Self::UnsupportedMediaType { .. } => unsupported("unsupported_media_type"),
            Self::UnsupportedEncoding { .. } => unsupported("unsupported_encoding"),
            Self::Overloaded { .. } | Self::WaitedTooLong { .. } => as_retryable(rate_limited("overloaded")),
            Self::RateLimited { .. } => {
                ErrorMapping { label: "rate_limited", ..as_retryable(rate_limited("rate_limit_exceeded")) }
            }
            Self::DeadlineExceeded { .. } => {
                row(S::GATEWAY_TIMEOUT, Code::DeadlineExceeded, "timeout_error", "deadline_exceeded")
            }
            Self::ResponseTooLarge { .. } => {
                row(S::BAD_REQUEST, Code::OutOfRange, INVALID, "answer_too_large")
            }
            Self::SlowClient => row(S::REQUEST_TIMEOUT, Code::Aborted, INVALID, "slow_client"),
            Self::ClientGone => row(client_closed_request(), Code::Cancelled, INVALID, "client_gone"),
            Self::Unavailable { .. } => unavailable("unavailable"),
            Self::Draining => unavailable("draining"),
            Self::Refused { .. } => server(Code::FailedPrecondition, "refused"),
            Self::Quarantined { .. } => server(Code::Internal, "quarantined"),
            Self::Internal(_) => server(Code::Internal, "internal"),
        }
    }

    /// Seconds to wait before a retry; `None` if a retry cannot succeed.
    pub fn retry_after_seconds(&self) -> Option<u64> {
        match self {
            Self::RateLimited { retry_after: wait, .. } | Self::WaitedTooLong { waited: wait, .. } => {
                Some(ceil_seconds(*wait))
            }
            _ => self.mapping().retryable.then_some(RETRY_AFTER.as_secs()),
        }
    }

    /// Whether to tell the client not to retry. Client libraries retry every 408 and 5xx, but repeating one
    /// of these requests only fails again and takes the same work once more. An internal error is a fault of
    /// the router in one request: a retry may succeed, and libraries retry only a few times.
    pub fn is_final(&self) -> bool {
        let ErrorMapping { status, retryable, .. } = self.mapping();
        let is_retried = status == StatusCode::REQUEST_TIMEOUT || status.is_server_error();
        is_retried && !retryable && !matches!(self, Self::Internal(_))
    }

    /// Returns the text for the client. Of a long text the middle is left out: the beginning names the field,
    /// the end says what to do.
    pub fn message(&self) -> String {
        clip(&self.to_string(), MESSAGE_BYTES_MAX).into_owned()
    }

    /// `error.param` in OpenAI's error object.
    pub fn param(&self) -> Option<Cow<'_, str>> {
        let param = match self {
            Self::InvalidRequest { param, .. } => param.as_deref()?,
            Self::ContextLengthExceeded { param, .. } | Self::PromptTooLong { param, .. } => param,
            Self::ModelNotFound { .. } => "model",
            Self::ResponseNotFound { param, .. } => param,
            _ => return None,
        };
        Some(clip(param, PARAM_BYTES_MAX))
    }
}

/// Replaces the middle of a text of more than `max` bytes by an ellipsis.
pub(crate) fn clip(text: &str, max: usize) -> Cow<'_, str> {
    const ELLIPSIS: &str = "\u{2026}";
    if text.len() <= max {
        return Cow::Borrowed(text);
    }
    let num_kept = max - ELLIPSIS.len();
    let (mut head, mut tail) = (num_kept - num_kept / 3, text.len() - num_kept / 3);
    while !text.is_char_boundary(head) {
        head -= 1;
    }
    while !text.is_char_boundary(tail) {
        tail += 1;
    }
    Cow::Owned([&text[..head], ELLIPSIS, &text[tail..]].concat())
}

/// What does not fit the model's window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Excess {
    /// The prompt alone.
    Prompt,
    /// The prompt with this number of output tokens, as requested.
    Output(u32),
    /// The prompt with this number of output tokens, the default.
    DefaultOutput(u32),
}

impl Excess {
    /// Says what was requested and what to do.
    fn explain(self, prompt_tokens: u32, param: &str) -> String {
        match self {
            Self::Prompt => {
                format!(
                    " for prompt and output, but the prompt alone has {prompt_tokens}: shorten the prompt"
                )
            }
            Self::Output(max_tokens) => format!(
                ", but {prompt_tokens} prompt tokens and {max_tokens} output tokens were requested: shorten the \
                 prompt or lower {param}"
            ),
            Self::DefaultOutput(max_tokens) => format!(
                ", but {prompt_tokens} prompt tokens and {max_tokens} output tokens (the default of {param}) were \
                 requested: shorten the prompt or send a lower {param}"
            ),
        }
    }
}

/// Rounds up, to at least 1.
fn ceil_seconds(wait: Duration) -> u64 {
    (wait.as_secs() + u64::from(wait.subsec_nanos() > 0)).max(1)
}

/// 499 is not a registered status; it appears only in metrics and logs.
fn client_closed_request() -> StatusCode {
    StatusCode::from_u16(499).expect("499 is in the range of status codes")
}

impl From<RouterError> for tonic::Status {
    fn from(error: RouterError) -> Self {
        let mapping = error.mapping();
        let retry_after = error.retry_after_seconds();
        let message = error.message();
        let mut details = ErrorDetails::with_error_info(mapping.label, "outrider", HashMap::new());
        if let Some(param) = error.param() {
            details.add_bad_request_violation(param.as_ref(), message.as_str());
        }
        if let Some(seconds) = retry_after {
            details.set_retry_info(Some(Duration::from_secs(seconds)));
        }
        let mut status = Self::with_error_details(mapping.grpc, message, details);
        let metadata = status.metadata_mut();
        metadata.insert("x-error-code", tonic::metadata::MetadataValue::from_static(mapping.label));
        if let Some(seconds) = retry_after {
            metadata.insert("retry-after", seconds.into());
        }
        status
    }
}

#[cfg(test)]
mod tests;
