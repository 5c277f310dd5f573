//! One request as numbers: all that figures and comparisons are computed from, whether it was measured or simulated.

use std::time::{Duration, Instant};

use super::answer::{Answer, SpeculationCounts};
use super::connection::Exchange;
use super::request::Request;

/// Whether an answer counts, and if not, why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It is whole.
    Completed,
    /// No connection could be made.
    NotConnected(String),
    /// Answered with another status than 200.
    Refused {
        /// HTTP.
        status: u16,
        /// The beginning of the body.
        message: String,
    },
    /// The server said so in the midst of its answer.
    FailedInStream(String),
    /// It ended before it was whole.
    Cut(String),
    /// It did not end in time.
    TimedOut,
    /// Not what an OpenAI endpoint answers.
    Malformed(String),
}

impl Outcome {
    /// One or two words.
    pub fn word(&self) -> &'static str {
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

    /// The word, with what the server or the connection said.
    pub fn explain(&self) -> String {
        match self {
            Self::Completed | Self::TimedOut => self.word().to_owned(),
            Self::Refused { status, message } => format!("refused with {status}: {message}"),
            Self::NotConnected(reason)
            | Self::FailedInStream(reason)
            | Self::Cut(reason)
            | Self::Malformed(reason) => format!("{}: {reason}", self.word()),
        }
    }
}

/// One request. Times count from its intended moment of sending.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Of the prompt.
    pub task: String,
    /// Which question this is: equal for samples that are to be compared.
    pub item: usize,
    /// In which pair of blocks it was sent.
    pub block: usize,
    /// Times and counts below mean something only for completed ones.
    pub outcome: Outcome,
    /// After the run's beginning.
    pub intended_after: Duration,
    /// To the first piece; `None` of an answer without tokens.
    pub ttft: Option<Duration>,
    /// To the last piece (the end, of an answer without tokens).
    pub e2el: Duration,
    /// Between pieces.
    pub gaps: Vec<Duration>,
    /// As the server counted; 0 where it does not say.
    pub input_tokens: u64,
    /// As the server counted, else pieces.
    pub output_tokens: u64,
    /// Where the server tells.
    pub speculation: Option<SpeculationCounts>,
    /// Where chunks tell: verifications accepted at least as far as each position.
    pub accepted_by_position: Option<Vec<u64>>,
    /// Tells texts apart.
    pub text_hash: u64,
}

impl Sample {
    /// Reads the answer.
    pub fn of(request: &Request, exchange: &Exchange, began: Instant) -> Self {
        let answer = Answer::of(exchange);
        let since = |moment: Instant| moment.saturating_duration_since(exchange.intended);
        let last = answer.pieces.last().map_or(exchange.ended, |piece| piece.arrived);
        Self {
            task: request.task.clone(),
            item: request.item,
            block: request.block,
            intended_after: exchange.intended.saturating_duration_since(began),
            ttft: answer.pieces.first().map(|piece| since(piece.arrived)),
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

    /// Whether times and counts mean something.
    pub fn is_completed(&self) -> bool {
        self.outcome == Outcome::Completed
    }

    /// Time per output token after the first; `None` of answers with fewer than two tokens.
    pub fn tpot(&self) -> Option<Duration> {
        let after_first =
            u32::try_from(self.output_tokens.checked_sub(1)?).ok().filter(|count| *count > 0)?;
        Some(self.e2el.saturating_sub(self.ttft?) / after_first)
    }

    /// The whole latency over all tokens, seconds: what comparisons rest on, for no late first read can shorten it.
    pub fn seconds_per_token(&self) -> Option<f64> {
        (self.output_tokens > 0).then(|| self.e2el.as_secs_f64() / self.output_tokens as f64)
    }
}
