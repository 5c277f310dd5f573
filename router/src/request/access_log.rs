//! [`AccessLine`]: one line of the log per request, if `--access-log` is set. It has the numbers that
//! operators sort and sum by, and no text of a prompt or an answer. docs/operating.md lists its fields.

use std::net::SocketAddr;
use std::time::Duration;

use http::{Extensions, HeaderMap, HeaderValue, StatusCode};
use service::accept::PeerAddress;
use tracing::span::Id;

use super::Usage;
use crate::error::clip;
use crate::metrics::Protocol;

/// Target of the lines, for the filter of `--log`.
const TARGET: &str = "router::access";

/// Header to which each proxy appends the address of its peer.
const FORWARDED_FOR: &str = "x-forwarded-for";

/// Maximum size of its text in a line, in bytes: some proxies and a client.
const FORWARDED_FOR_BYTES_MAX: usize = 256;

/// What is known of a request before it ends.
#[derive(Debug)]
pub(super) struct AccessLine {
    request_id: String,
    /// Who sent the request: the client, or the last proxy; `None` without a listener.
    peer: Option<SocketAddr>,
    /// Whom it was sent for, as the peer says: a client may write anything.
    forwarded_for: Option<String>,
    /// Name of the API key.
    pub(super) key: Option<String>,
    /// As the client named it; only of a model that is served.
    pub(super) model: Option<String>,
    /// Known once the prompts are tokenized.
    pub(super) prompt_tokens: Option<u64>,
    /// Received so far, of all choices.
    pub(super) output_tokens: u64,
}

/// How a request ended.
#[derive(Debug)]
pub(super) struct Ending<'a> {
    pub(super) protocol: Protocol,
    pub(super) status: StatusCode,
    /// As in `outrider_requests_total`.
    pub(super) outcome: &'static str,
    /// From the arrival to the first token of any choice.
    pub(super) ttft: Option<Duration>,
    /// From the arrival to the end.
    pub(super) duration: Duration,
    /// Of a complete answer.
    pub(super) usage: Option<&'a Usage>,
}

impl AccessLine {
    pub(super) fn new(request_id: &str, headers: &HeaderMap, extensions: &Extensions) -> Self {
        Self {
            request_id: request_id.to_owned(),
            peer: extensions.get::<PeerAddress>().map(|peer| peer.0),
            forwarded_for: forwarded_for(headers),
            key: None,
            model: None,
            prompt_tokens: None,
            output_tokens: 0,
        }
    }

    /// Writes the line. Its span is not written with it: the fields are the same.
    pub(super) fn write(&self, ending: &Ending<'_>) {
        let usage = ending.usage;
        tracing::info!(
            target: TARGET,
            parent: None::<Id>,
            request_id = self.request_id.as_str(),
            peer = self.peer.map(tracing::field::display),
            forwarded_for = self.forwarded_for.as_deref(),
            key = self.key.as_deref(),
            model = self.model.as_deref(),
            protocol = ending.protocol.as_str(),
            status = ending.status.as_u16(),
            outcome = ending.outcome,
            prompt_tokens = self.prompt_tokens,
            output_tokens = usage.map_or(self.output_tokens, |usage| usage.completion_tokens),
            ttft_seconds = ending.ttft.map(|ttft| ttft.as_secs_f64()),
            duration_seconds = ending.duration.as_secs_f64(),
            draft_tokens = usage.map(|usage| usage.speculation.draft_tokens),
            accepted_tokens = usage.map(|usage| usage.speculation.accepted_tokens),
            "request"
        );
    }
}

/// The values of the header; of a long text the middle is left out.
fn forwarded_for(headers: &HeaderMap) -> Option<String> {
    let values = headers.get_all(FORWARDED_FOR).into_iter().map(HeaderValue::as_bytes);
    let values: Vec<_> = values.map(String::from_utf8_lossy).collect();
    (!values.is_empty()).then(|| clip(&values.join(", "), FORWARDED_FOR_BYTES_MAX).into_owned())
}

#[cfg(test)]
mod tests {
    use std::io::Seek as _;
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;
    use crate::generation::SpeculationUsage;

    /// The fields of the line that a request writes.
    fn written(line: &AccessLine, ending: &Ending<'_>) -> Value {
        let file = Arc::new(tempfile::tempfile().unwrap());
        let subscriber =
            tracing_subscriber::fmt().json().flatten_event(true).with_writer(Arc::clone(&file)).finish();
        tracing::subscriber::with_default(subscriber, || line.write(ending));
        (&*file).rewind().unwrap();
        let mut fields: Value = serde_json::from_reader(&*file).unwrap();
        assert!(fields.as_object_mut().unwrap().remove("timestamp").is_some());
        fields
    }

    #[test]
    fn a_long_list_of_proxies_loses_its_middle() {
        let mut headers = HeaderMap::new();
        headers.append(FORWARDED_FOR, HeaderValue::from_str(&"203.0.113.9, ".repeat(1_000)).unwrap());
        headers.append(FORWARDED_FOR, HeaderValue::from_static("10.0.0.8"));
        let kept = forwarded_for(&headers).unwrap();
        assert_eq!(kept.len(), FORWARDED_FOR_BYTES_MAX);
        assert!(kept.starts_with("203.0.113.9, 203.") && kept.ends_with(", 10.0.0.8"), "{kept}");
    }

    #[test]
    fn a_line_has_exactly_these_fields() {
        let (mut headers, mut extensions) = (HeaderMap::new(), Extensions::new());
        let mut line = AccessLine::new("chatcmpl-1", &headers, &extensions);
        let mut ending = Ending {
            protocol: Protocol::Http,
            status: StatusCode::UNAUTHORIZED,
            outcome: "unauthenticated",
            ttft: None,
            duration: Duration::from_millis(250),
            usage: None,
        };
        let expected = json!({
            "level": "INFO", "target": "router::access", "message": "request", "request_id": "chatcmpl-1",
            "protocol": "http", "status": 401, "outcome": "unauthenticated", "output_tokens": 0,
            "duration_seconds": 0.25,
        });
        assert_eq!(written(&line, &ending), expected);
        extensions.insert(PeerAddress(SocketAddr::from(([10, 0, 0, 7], 40_000))));
        for client in ["203.0.113.9", "10.0.0.8"] {
            headers.append(FORWARDED_FOR, HeaderValue::from_static(client));
        }
        line = AccessLine::new("chatcmpl-1", &headers, &extensions);
        line.key = Some("alice".to_owned());
        line.model = Some("demo".to_owned());
        line.prompt_tokens = Some(7);
        line.output_tokens = 2;
        (ending.status, ending.outcome) = (StatusCode::SERVICE_UNAVAILABLE, "unavailable");
        ending.ttft = Some(Duration::from_millis(125));
        let mut expected = json!({
            "level": "INFO", "target": "router::access", "message": "request", "request_id": "chatcmpl-1",
            "peer": "10.0.0.7:40000", "forwarded_for": "203.0.113.9, 10.0.0.8",
            "key": "alice", "model": "demo", "protocol": "http", "status": 503, "outcome": "unavailable",
            "prompt_tokens": 7, "output_tokens": 2, "ttft_seconds": 0.125, "duration_seconds": 0.25,
        });
        assert_eq!(written(&line, &ending), expected, "it failed after two tokens");
        let speculation =
            SpeculationUsage { draft_tokens: 6, accepted_tokens: 4, ..SpeculationUsage::default() };
        let usage = Usage { prompt_tokens: 7, completion_tokens: 9, speculation, ..Usage::default() };
        (ending.status, ending.outcome, ending.usage) = (StatusCode::OK, "ok", Some(&usage));
        let fields = expected.as_object_mut().unwrap();
        for (name, value) in [
            ("status", json!(200)),
            ("outcome", json!("ok")),
            ("output_tokens", json!(9)),
            ("draft_tokens", json!(6)),
            ("accepted_tokens", json!(4)),
        ] {
            fields.insert(name.to_owned(), value);
        }
        assert_eq!(written(&line, &ending), expected);
    }
}
