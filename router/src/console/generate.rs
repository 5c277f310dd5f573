//! A request of the playground: a chat completion answered with a line of JSON per committed span, containing
//! the ids of its tokens and which of them were drafted. `outrider up` also uses it to compare ids.

use std::convert::Infallible;
use std::time::Instant;

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use futures::stream;
use http::{HeaderValue, header};
use serde::Serialize;
use speculation::TokenId;
use text::Vocabulary;

use super::Console;
use crate::api::openai::error::ErrorBody;
use crate::api::read_chat;
use crate::detokenize::OutputToken;
use crate::metrics::Protocol;
use crate::pipeline::text_delta::TextDelta;
use crate::pipeline::text_stream::TextStream;
use crate::pipeline::{RequestContext, run_caught, start_request};
use crate::request::Operation;

/// One line of the response.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    /// First line.
    Start { request_id: String, model: String, system_fingerprint: String, seed: u64 },
    /// A committed span; `ms` counts from the request's arrival.
    Span { ms: f64, tokens: Vec<Token>, finish: Option<&'static str> },
    /// Last line.
    End {
        ms: f64,
        rounds: u64,
        draft_tokens: u64,
        accepted_tokens: u64,
        disabled_reason: Option<&'static str>,
    },
    /// Last line, if the response failed.
    Failed(ErrorBody),
}

/// One token of a span.
#[derive(Debug, Serialize)]
struct Token {
    id: TokenId,
    text: String,
    /// Whether the token was drafted and accepted; otherwise it is the target's own.
    drafted: bool,
    /// If the request asked for log probabilities.
    #[serde(skip_serializing_if = "Option::is_none")]
    logprob: Option<f32>,
    /// Top tokens at this position.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    top: Vec<(String, f32)>,
}

/// `POST /console/generate`: the body of `/v1/chat/completions`; `stream` has no effect.
pub(super) async fn generate(State(console): State<Console>, request: Request) -> Response {
    let arrived = Instant::now();
    let (state, operation) = (&console.state, Operation::Chat);
    let (kind, request_id) = ((Protocol::Http, operation), operation.new_request_id());
    let mut context = RequestContext::open(state, kind, request_id, request.headers(), request.extensions());
    let span = context.record.span().clone();
    let started = async {
        match read_chat(state, request, &mut context.record).await {
            Ok((sent, caller, deadline)) => {
                context.deadline = deadline;
                start_request(state, sent, &caller, context).await
            }
            Err(error) => Err(context.refuse(error)),
        }
    };
    match run_caught(span, started).await {
        Ok(text) => respond(text, arrived),
        Err(error) => error.into_response(),
    }
}

fn respond(text: TextStream, arrived: Instant) -> Response {
    let info = text.info();
    let start = Line::Start {
        request_id: info.id.clone(),
        model: info.model.clone(),
        system_fingerprint: info.system_fingerprint.clone(),
        seed: info.seed,
    };
    let first = stream::once(async move { to_json_line(&start) });
    let rest = stream::unfold(Some(text), move |text| async move {
        let mut text = text?;
        let (line, has_more) = match text.next().await {
            Some(Ok(delta)) => (span_line(&text, delta, arrived), true),
            Some(Err(error)) => (Line::Failed(ErrorBody::from(&error)), false),
            None => (end_line(&text, arrived), false),
        };
        Some((to_json_line(&line), has_more.then_some(text)))
    });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, Body::from_stream(futures::StreamExt::chain(first, rest))).into_response()
}

fn span_line(text: &TextStream, delta: TextDelta, arrived: Instant) -> Line {
    let vocabulary = text.model().vocabulary();
    let token = |(i, token): (usize, &OutputToken)| Token {
        id: token.id,
        text: vocabulary.spell(token.id),
        drafted: i < delta.num_drafted as usize,
        logprob: token.logprobs.as_ref().map(|logprobs| logprobs.logprob).filter(|p| p.is_finite()),
        top: token.logprobs.iter().flat_map(|logprobs| &logprobs.top).map(to_top_token(vocabulary)).collect(),
    };
    Line::Span {
        ms: elapsed_ms(arrived),
        tokens: delta.tokens.iter().enumerate().map(token).collect(),
        finish: delta.finish.map(|reason| reason.as_str()),
    }
}

fn to_top_token(vocabulary: &Vocabulary) -> impl Fn(&(TokenId, f32)) -> (String, f32) + '_ {
    // JSON has no minus infinity.
    |&(id, logprob)| (vocabulary.spell(id), logprob.max(f32::MIN))
}

fn end_line(text: &TextStream, arrived: Instant) -> Line {
    let usage = text.usage().speculation;
    Line::End {
        ms: elapsed_ms(arrived),
        rounds: usage.rounds,
        draft_tokens: usage.draft_tokens,
        accepted_tokens: usage.accepted_tokens,
        disabled_reason: usage.disabled_reason,
    }
}

fn elapsed_ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

fn to_json_line(line: &Line) -> Result<Bytes, Infallible> {
    let mut bytes = serde_json::to_vec(line).expect("a line contains only JSON values");
    bytes.push(b'\n');
    Ok(bytes.into())
}
