//! One line of evidence of what drafting gains on this machine. One seeded prompt is decoded without drafts
//! and with them, alternating and after a warm-up, and token ids are compared.
//!
//! Requests go to the router in the same way as from the console's race (`POST /console/generate` at its
//! admin address), because those responses contain ids. Parsing responses and formatting the line are pure.
//! It takes seconds; a slow model generates fewer tokens.

use std::fmt;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use speculation::TokenId;

/// The prompt, also used in the command that `up` prints for pasting.
pub(super) const PROMPT: &str = "Write a Python function that reverses a list.";
/// Sampling seed.
pub(super) const SEED: u64 = 7;
/// Maximum tokens per response, if the model is fast enough.
const TOKENS_MAX: f64 = 64.0;
const TOKENS_MIN: f64 = 16.0;
/// Approximate time of a response without drafts.
const ANSWER_SECONDS: f64 = 3.0;
/// Tokens of the warm-up responses, which are not timed: caches fill, and the lane sees its first drafts.
const WARM_UP_TOKENS: u32 = 24;
/// Rounds of one response with drafts and one without; even, because they alternate in starting.
const ROUNDS: usize = 2;
/// After this time the measurement is abandoned.
const MEASUREMENT_TIMEOUT: Duration = Duration::from_secs(30);

/// Result of the measurement.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Evidence {
    on: Arm,
    off: Arm,
    /// Tokens per response.
    tokens: usize,
    /// Why nothing was drafted, if the router reports it.
    disabled_reason: Option<String>,
}

/// Sum of the responses with drafts, or of those without.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Arm {
    tokens: usize,
    /// Time from a request's arrival to its last token.
    ms: f64,
    drafted: u64,
}

/// Why there is no evidence.
#[derive(Debug, PartialEq, thiserror::Error)]
pub(super) enum EvidenceError {
    /// Drafts changed a text.
    #[error(
        "drafting changed the text from token {position} on (seed {SEED}), which must never happen: \
         please report it with the model's name and this machine's CPU or GPU, and serve without drafts (--draft none) meanwhile"
    )]
    TextsDiffer {
        /// The first token that differs.
        position: usize,
    },
    /// A request failed, or it took too long.
    #[error("drafting: not measured: {0}")]
    NotMeasured(String),
}

impl Arm {
    fn add(&mut self, answer: &Answer) {
        self.tokens += answer.ids.len();
        self.ms += answer.ms;
        self.drafted += answer.drafted;
    }

    /// Tokens per second.
    fn tokens_per_second(&self) -> f64 {
        1e3 * self.tokens as f64 / self.ms
    }
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (on, off) = (self.on.tokens_per_second(), self.off.tokens_per_second());
        let ratio = on / off;
        let same = format!("identical text ({} tokens, seed {SEED})", self.tokens);
        if self.on.drafted == 0 {
            let reason = self.disabled_reason.as_deref().unwrap_or("no reason was given").replace('_', " ");
            return write!(f, "drafting: nothing was drafted ({reason}), {off:.1} tokens/s, {same}");
        }
        write!(f, "drafting: {on:.1} tokens/s against {off:.1} without, {ratio:.2} times as fast, {same}")?;
        if ratio < 1.0 { write!(f, "; it does not pay for this pair on this machine") } else { Ok(()) }
    }
}

/// Runs the measurement with `model` at the router's address `admin`.
pub(super) async fn measure(admin: &str, model: &str) -> Result<Evidence, EvidenceError> {
    let rounds = run_rounds(admin, model);
    tokio::time::timeout(MEASUREMENT_TIMEOUT, rounds).await.unwrap_or_else(|_| {
        Err(EvidenceError::NotMeasured(format!(
            "not finished after {} s; use the console's race instead",
            MEASUREMENT_TIMEOUT.as_secs()
        )))
    })
}

async fn run_rounds(admin: &str, model: &str) -> Result<Evidence, EvidenceError> {
    let client = reqwest::Client::builder().no_proxy().build();
    let client = client.map_err(|error| EvidenceError::NotMeasured(error.to_string()))?;
    let ask = async |drafts, max_tokens| ask(&client, admin, &body(model, drafts, max_tokens)).await;
    let warm = ask(false, WARM_UP_TOKENS).await?;
    ask(true, WARM_UP_TOKENS).await?;
    let tokens = answer_tokens(&warm);
    let (mut on, mut off) = (Arm::default(), Arm::default());
    let (mut first, mut disabled_reason): (Option<Vec<TokenId>>, _) = (None, None);
    for round in 0..ROUNDS {
        // The first in one round is the second in the next.
        for drafts in [round % 2 == 1, round % 2 == 0] {
            let answer = ask(drafts, tokens).await?;
            if drafts { &mut on } else { &mut off }.add(&answer);
            if let Some(position) = first.as_ref().and_then(|first| first_difference(first, &answer.ids)) {
                return Err(EvidenceError::TextsDiffer { position });
            }
            if drafts {
                disabled_reason = answer.disabled_reason;
            }
            first.get_or_insert(answer.ids);
        }
    }
    let tokens = first.map_or(0, |ids| ids.len());
    Ok(Evidence { on, off, tokens, disabled_reason })
}

fn body(model: &str, drafts: bool, max_tokens: u32) -> Value {
    let speculation = if drafts { json!({}) } else { json!({ "enabled": false }) };
    json!({
        "model": model,
        "messages": [{ "role": "user", "content": PROMPT }],
        "max_tokens": max_tokens,
        "ignore_eos": true,
        "seed": SEED,
        "speculation": speculation,
    })
}

/// The number of tokens that the model generates within [`ANSWER_SECONDS`] without drafts, within limits.
fn answer_tokens(warm: &Answer) -> u32 {
    let tokens_per_ms = warm.ids.len() as f64 / warm.ms.max(1.0);
    (tokens_per_ms * 1e3 * ANSWER_SECONDS).clamp(TOKENS_MIN, TOKENS_MAX) as u32
}

fn first_difference(a: &[TokenId], b: &[TokenId]) -> Option<usize> {
    let common = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    (common < a.len().max(b.len())).then_some(common)
}

async fn ask(client: &reqwest::Client, admin: &str, body: &Value) -> Result<Answer, EvidenceError> {
    let failed = |error: &dyn fmt::Display| EvidenceError::NotMeasured(error.to_string());
    let sent = client.post(format!("{admin}/console/generate")).json(body).send().await;
    let response = sent.map_err(|error| failed(&error))?;
    let status = response.status();
    let text = response.text().await.map_err(|error| failed(&error))?;
    if !status.is_success() {
        return Err(failed(&format_args!("the router answered {status} {}", text.trim())));
    }
    Answer::read(&text).map_err(|reason| failed(&reason))
}

/// Result of one request.
#[derive(Debug, Clone, PartialEq, Default)]
struct Answer {
    ids: Vec<TokenId>,
    ms: f64,
    drafted: u64,
    disabled_reason: Option<String>,
}

/// A line of `/console/generate`.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Start {},
    Span { ms: f64, tokens: Vec<Token> },
    End { draft_tokens: u64, disabled_reason: Option<String> },
    Failed(Value),
}

#[derive(Deserialize)]
struct Token {
    id: TokenId,
}

impl Answer {
    fn read(text: &str) -> Result<Self, String> {
        let (mut answer, mut is_whole) = (Self::default(), false);
        for line in text.lines() {
            match serde_json::from_str(line).map_err(|error| format!("`{line}`: {error}"))? {
                Line::Start {} => (),
                Line::Span { ms, tokens } => {
                    answer.ids.extend(tokens.iter().map(|token| token.id));
                    answer.ms = ms;
                }
                Line::End { draft_tokens, disabled_reason } => {
                    (answer.drafted, answer.disabled_reason, is_whole) =
                        (draft_tokens, disabled_reason, true);
                }
                Line::Failed(error) => return Err(format!("a request failed: {error}")),
            }
        }
        match is_whole && !answer.ids.is_empty() {
            true => Ok(answer),
            false => Err("an answer was cut short".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evidence(on_ms: f64, drafted: u64) -> Evidence {
        Evidence {
            on: Arm { tokens: 128, ms: on_ms, drafted },
            off: Arm { tokens: 128, ms: 8_590.6, drafted: 0 },
            tokens: 64,
            disabled_reason: (drafted == 0).then(|| "does_not_pay".to_owned()),
        }
    }

    #[test]
    fn the_line_says_what_was_found_also_where_that_is_little() {
        assert_eq!(
            evidence(4_102.6, 90).to_string(),
            "drafting: 31.2 tokens/s against 14.9 without, 2.09 times as fast, identical text (64 tokens, seed 7)"
        );
        assert_eq!(
            evidence(10_666.7, 90).to_string(),
            "drafting: 12.0 tokens/s against 14.9 without, 0.81 times as fast, identical text (64 tokens, seed 7); \
             it does not pay for this pair on this machine"
        );
        assert_eq!(
            evidence(8_600.0, 0).to_string(),
            "drafting: nothing was drafted (does not pay), 14.9 tokens/s, identical text (64 tokens, seed 7)"
        );
    }

    #[test]
    fn answers_are_read_line_by_line_and_a_cut_one_is_none() {
        let start = r#"{"start":{"request_id":"r","model":"m","system_fingerprint":"f","seed":7}}"#;
        let span = |ms: f64, ids: &[u32]| {
            let tokens: Vec<Value> =
                ids.iter().map(|id| json!({ "id": id, "text": "x", "drafted": false })).collect();
            json!({ "span": { "ms": ms, "tokens": tokens, "finish": null } }).to_string()
        };
        let end =
            r#"{"end":{"ms":31.0,"rounds":2,"draft_tokens":5,"accepted_tokens":1,"disabled_reason":null}}"#;
        let whole = [start, &span(10.0, &[4, 5]), &span(30.0, &[6]), end].join("\n");
        let answer = Answer::read(&whole).unwrap();
        assert_eq!(answer, Answer { ids: vec![4, 5, 6], ms: 30.0, drafted: 5, disabled_reason: None });
        assert!(Answer::read(start).unwrap_err().contains("cut short"));
        let failed = [start, r#"{"failed":{"error":{"message":"no room"}}}"#].join("\n");
        assert!(Answer::read(&failed).unwrap_err().contains("no room"));
        assert!(Answer::read("<html>").unwrap_err().contains("<html>"));
    }

    #[test]
    fn the_first_token_that_differs_is_found() {
        assert_eq!(first_difference(&[1, 2, 3], &[1, 2, 3]), None);
        assert_eq!(first_difference(&[1, 2, 3], &[1, 9, 3]), Some(1));
        assert_eq!(first_difference(&[1, 2], &[1, 2, 3]), Some(2));
    }

    #[test]
    fn a_slow_model_writes_less() {
        let warm = |tokens: usize, ms| Answer { ids: vec![1; tokens], ms, ..Answer::default() };
        assert_eq!(answer_tokens(&warm(24, 500.0)), 64);
        assert_eq!(answer_tokens(&warm(24, 2_400.0)), 30);
        assert_eq!(answer_tokens(&warm(24, 20_000.0)), 16);
    }
}
