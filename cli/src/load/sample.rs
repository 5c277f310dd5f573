//! One request as numbers: the input of all figures and comparisons, measured or simulated.

use std::time::{Duration, Instant};

use super::answer::{Answer, SpeculationCounts};
use super::connection::Exchange;
use super::request::Request;

/// Whether a response is complete, and if not, why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestOutcome {
    /// The response is complete.
    Completed,
    /// No connection could be established.
    NotConnected(String),
    /// The status is not 200.
    Refused {
        /// HTTP status.
        status: u16,
        /// The beginning of the body.
        message: String,
    },
    /// The server reported an error within the stream.
    FailedInStream(String),
    /// The stream ended early.
    Cut(String),
    /// The timeout expired.
    TimedOut,
    /// Not a valid response of an OpenAI endpoint.
    Malformed(String),
}

impl RequestOutcome {
    /// The outcome in one to three words.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::NotConnected(_) => "not connected",
            Self::Refused { .. } => "refused",
            Self::FailedInStream(_) => "failed in stream",
            Self::Cut(_) => "cut",
            Self::TimedOut => "timed out",
            Self::Malformed(_) => "malformed",
        }
    }

    /// The outcome with the message of the server or the connection.
    pub fn explain(&self) -> String {
        match self {
            Self::Completed | Self::TimedOut => self.label().to_owned(),
            Self::Refused { status, message } => format!("refused with {status}: {message}"),
            Self::NotConnected(reason)
            | Self::FailedInStream(reason)
            | Self::Cut(reason)
            | Self::Malformed(reason) => format!("{}: {reason}", self.label()),
        }
    }
}

/// One request. Times are measured from its intended sending time.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Task type of the prompt.
    pub task: String,
    /// Index of the question: equal for samples that are compared.
    pub item: usize,
    /// Index of the pair of blocks.
    pub block: usize,
    /// The outcome. Times and counts below are valid only if it is completed.
    pub outcome: RequestOutcome,
    /// Intended sending time after the start of the run.
    pub intended_after: Duration,
    /// Time to the first piece; `None` for a response without tokens.
    pub ttft: Option<Duration>,
    /// Time to the last piece; to the end for a response without tokens.
    pub e2el: Duration,
    /// Times between chunks.
    pub gaps: Vec<Duration>,
    /// Prompt tokens as counted by the server; 0 if it does not report them.
    pub input_tokens: u64,
    /// Output tokens as counted by the server, else by chunks.
    pub output_tokens: u64,
    /// Speculation counters, if the server reports them.
    pub speculation: Option<SpeculationCounts>,
    /// Verifications accepted at least as far as each position, if the server reports them.
    pub accepted_by_position: Option<Vec<u64>>,
    /// Hash for comparing texts.
    pub text_hash: u64,
}

impl Sample {
    /// Parses the response.
    pub fn of(request: &Request, exchange: &Exchange, began: Instant) -> Self {
        let answer = Answer::of(exchange);
        let since = |moment: Instant| moment.saturating_duration_since(exchange.intended);
        let last = answer.token_chunks.last().map_or(exchange.ended, |piece| piece.arrived);
        Self {
            task: request.task.clone(),
            item: request.item,
            block: request.block,
            intended_after: exchange.intended.saturating_duration_since(began),
            ttft: answer.token_chunks.first().map(|piece| since(piece.arrived)),
            e2el: since(last),
            gaps: answer.gaps().collect(),
            input_tokens: answer.usage.map_or(0, |(input, _)| input),
            output_tokens: answer.output_tokens(),
            accepted_by_position: answer.accepted_by_position(),
            speculation: answer.speculation,
            text_hash: answer.text_hash,
            outcome: answer.outcome,
        }
    }

    /// Whether times and counts are valid.
    pub fn is_completed(&self) -> bool {
        self.outcome == RequestOutcome::Completed
    }

    /// Time per output token after the first; `None` with fewer than two tokens.
    pub fn tpot(&self) -> Option<Duration> {
        let after_first =
            u32::try_from(self.output_tokens.checked_sub(1)?).ok().filter(|count| *count > 0)?;
        Some(self.e2el.saturating_sub(self.ttft?) / after_first)
    }

    /// End-to-end latency divided by all tokens, in seconds: the basis of comparisons, because a late first
    /// read cannot shorten it.
    pub fn seconds_per_token(&self) -> Option<f64> {
        (self.output_tokens > 0).then(|| self.e2el.as_secs_f64() / self.output_tokens as f64)
    }
}
