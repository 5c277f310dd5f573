//! Parses a response: the bytes of one exchange as an OpenAI stream, with the arrival time of each piece.
//!
//! Runs after the measured time. Fields that only some servers send (`usage.speculation` and
//! `choices[].speculation` of outrider, `timings` of llama.cpp, `metrics` of vLLM) are read if present.
//! Invalid responses are a [`RequestOutcome`], not an error.

use std::hash::{DefaultHasher, Hasher as _};
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::connection::{BodyRead, Exchange, ExchangeEnd};
use super::sample::RequestOutcome;
use super::sse;

/// A parsed response.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Whether the response is complete, and if not, why.
    pub outcome: RequestOutcome,
    /// Chunks that contain tokens, in order.
    pub token_chunks: Vec<TokenChunk>,
    /// Prompt and output tokens, as counted by the server.
    pub usage: Option<(u64, u64)>,
    /// Speculation counters, if the server reports them.
    pub speculation: Option<SpeculationCounts>,
    /// Number of verifications that accepted exactly 0, 1, 2, .. drafted tokens, if the server reports it.
    pub acceptance_histogram: Option<Vec<u64>>,
    /// Hash for comparing texts.
    pub text_hash: u64,
}

/// A chunk that contains tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenChunk {
    /// Arrival time of its last byte.
    pub arrived: Instant,
    /// Number of tokens in it, if the server reports it.
    pub num_tokens: Option<u32>,
    /// How many of them were drafted, if the server reports it.
    pub num_drafted: Option<u32>,
}

/// Speculation counters of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpeculationCounts {
    /// Verifications; 0 if the server does not report them.
    pub rounds: u64,
    /// Drafted tokens that were verified.
    pub draft_tokens: u64,
    /// Accepted of these.
    pub accepted_tokens: u64,
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    timings: Option<Timings>,
    metrics: Option<Metrics>,
    error: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Choice {
    text: Option<String>,
    delta: Option<Delta>,
    finish_reason: Option<String>,
    speculation: Option<ChunkSpeculation>,
}

#[derive(Deserialize)]
struct Delta {
    content: Option<String>,
    reasoning_content: Option<String>,
    /// vLLM's newer name of the former.
    reasoning: Option<String>,
}

impl Delta {
    fn text(&self) -> &str {
        let texts = [&self.content, &self.reasoning_content, &self.reasoning];
        texts.into_iter().flatten().find(|text| !text.is_empty()).map_or("", String::as_str)
    }
}

#[derive(Deserialize)]
struct ChunkSpeculation {
    num_tokens: u32,
    num_drafted: u32,
}

/// Counts of more than 32 bits make an answer malformed: their sums would overflow.
#[derive(Deserialize)]
struct Usage {
    #[serde(default)]
    prompt_tokens: u32,
    #[serde(default)]
    completion_tokens: u32,
    speculation: Option<UsageSpeculation>,
}

#[derive(Deserialize)]
struct UsageSpeculation {
    rounds: u32,
    draft_tokens: u32,
    accepted_tokens: u32,
}

/// Sent by llama.cpp.
#[derive(Deserialize)]
struct Timings {
    prompt_n: Option<u32>,
    predicted_n: Option<u32>,
    draft_n: Option<u32>,
    draft_n_accepted: Option<u32>,
}

/// Sent by vLLM next to the usage in the last chunk, if it was started with
/// `--per-request-spec-decode-metrics` (<https://github.com/vllm-project/vllm/pull/48915>).
#[derive(Deserialize)]
struct Metrics {
    speculative_decoding: Option<SpeculativeDecoding>,
}

#[derive(Deserialize)]
struct SpeculativeDecoding {
    /// Verifications of drafts, without plain steps.
    num_spec_steps: u32,
    num_draft_tokens: u32,
    num_accepted_draft_tokens: u32,
    acceptance_histogram: Option<Vec<u32>>,
}

impl Answer {
    /// Parses an exchange.
    pub fn of(exchange: &Exchange) -> Self {
        let mut answer = Self {
            outcome: RequestOutcome::Completed,
            token_chunks: Vec::new(),
            usage: None,
            speculation: None,
            acceptance_histogram: None,
            text_hash: 0,
        };
        if let Some(failure) = failure_before_events(exchange) {
            answer.outcome = failure;
            return answer;
        }
        let (mut finished, mut fault) = (false, None);
        let mut text = DefaultHasher::new();
        for event in sse::events(&exchange.bytes) {
            if event.data == "[DONE]" {
                finished = true;
                break;
            }
            match serde_json::from_str::<Chunk>(&event.data) {
                Err(error) => fault = fault.or(Some(RequestOutcome::Malformed(error.to_string()))),
                Ok(Chunk { error: Some(error), .. }) => {
                    fault = fault.or(Some(RequestOutcome::FailedInStream(error.to_string())));
                }
                Ok(chunk) => {
                    finished |= chunk.choices.iter().any(|choice| choice.finish_reason.is_some());
                    answer.take(chunk, arrival(&exchange.reads, event.complete_at), &mut text);
                }
            }
        }
        answer.text_hash = text.finish();
        answer.outcome = match (fault, &exchange.end, finished) {
            (Some(fault), ..) => fault,
            (None, ExchangeEnd::TimedOut, _) => RequestOutcome::TimedOut,
            (None, ExchangeEnd::TooLong, _) => {
                RequestOutcome::Malformed("the response exceeds the size limit".to_owned())
            }
            (None, ExchangeEnd::Broken(reason), false) => RequestOutcome::Cut(reason.clone()),
            (None, _, false) => RequestOutcome::Cut("the body ended before the end of the stream".to_owned()),
            (None, _, true) => RequestOutcome::Completed,
        };
        answer
    }

    fn take(&mut self, chunk: Chunk, arrived: Instant, text: &mut DefaultHasher) {
        for choice in chunk.choices {
            let content = match (&choice.text, &choice.delta) {
                (Some(text), _) => text.as_str(),
                (None, Some(delta)) => delta.text(),
                (None, None) => "",
            };
            text.write(content.as_bytes());
            let num_tokens = choice.speculation.as_ref().map(|counts| counts.num_tokens);
            if !content.is_empty() || num_tokens.is_some_and(|count| count > 0) {
                let num_drafted = choice.speculation.as_ref().map(|counts| counts.num_drafted);
                self.token_chunks.push(TokenChunk { arrived, num_tokens, num_drafted });
            }
        }
        if let Some(Metrics { speculative_decoding: Some(counts) }) = chunk.metrics {
            self.speculation = Some(SpeculationCounts {
                rounds: counts.num_spec_steps.into(),
                draft_tokens: counts.num_draft_tokens.into(),
                accepted_tokens: counts.num_accepted_draft_tokens.into(),
            });
            let histogram = counts.acceptance_histogram;
            self.acceptance_histogram = histogram.map(|counts| counts.into_iter().map(u64::from).collect());
        }
        if let Some(usage) = chunk.usage {
            self.usage = Some((usage.prompt_tokens.into(), usage.completion_tokens.into()));
            // Takes precedence over `metrics`, which count no plain rounds and are absent without drafts.
            if let Some(counts) = usage.speculation {
                self.speculation = Some(SpeculationCounts {
                    rounds: counts.rounds.into(),
                    draft_tokens: counts.draft_tokens.into(),
                    accepted_tokens: counts.accepted_tokens.into(),
                });
            }
        }
        if let Some(timings) = chunk.timings {
            let counted = timings.prompt_n.zip(timings.predicted_n);
            self.usage = self.usage.or(counted.map(|(input, output)| (input.into(), output.into())));
            if let Some((drafted, accepted)) = timings.draft_n.zip(timings.draft_n_accepted) {
                self.speculation = Some(SpeculationCounts {
                    rounds: 0,
                    draft_tokens: drafted.into(),
                    accepted_tokens: accepted.into(),
                });
            }
        }
    }

    /// Number of output tokens: as counted by the server, else the sum over chunks, with one token for a
    /// chunk without a count.
    pub fn output_tokens(&self) -> u64 {
        let counted = self.usage.map(|(_, output)| output).filter(|output| *output > 0);
        let from_chunks =
            || self.token_chunks.iter().map(|piece| u64::from(piece.num_tokens.unwrap_or(1))).sum();
        counted.unwrap_or_else(from_chunks)
    }

    /// Number of verifications that accepted at least as far as each position, in order; `None` if the server
    /// does not report it. A chunk whose text was withheld counts as one verification together with the chunk
    /// that contains it.
    pub fn accepted_by_position(&self) -> Option<Vec<u64>> {
        if let Some([_, accepted @ ..]) = self.acceptance_histogram.as_deref() {
            return Some((0..accepted.len()).map(|i| accepted[i..].iter().sum()).collect());
        }
        let mut counts: Vec<u64> = Vec::new();
        for piece in &self.token_chunks {
            let drafted = piece.num_drafted? as usize;
            counts.resize(counts.len().max(drafted), 0);
            counts[..drafted].iter_mut().for_each(|count| *count += 1);
        }
        Some(counts)
    }

    /// Times between consecutive chunks.
    pub fn gaps(&self) -> impl Iterator<Item = Duration> {
        self.token_chunks.windows(2).map(|pair| pair[1].arrived.saturating_duration_since(pair[0].arrived))
    }
}

/// The failure before a stream could be read, if any.
fn failure_before_events(exchange: &Exchange) -> Option<RequestOutcome> {
    match (&exchange.end, exchange.status) {
        (ExchangeEnd::NotConnected(reason), _) => Some(RequestOutcome::NotConnected(reason.clone())),
        (ExchangeEnd::Broken(reason), None) => Some(RequestOutcome::Cut(reason.clone())),
        (_, None) => Some(RequestOutcome::TimedOut),
        (_, Some(200)) => None,
        (_, Some(status)) => {
            let text = String::from_utf8_lossy(&exchange.bytes);
            let text: String = text.chars().take(200).collect();
            Some(RequestOutcome::Refused { status, message: text.trim().to_owned() })
        }
    }
}

/// Arrival time of the byte before `end`.
fn arrival(reads: &[BodyRead], end: usize) -> Instant {
    let i = reads.partition_point(|read| read.end_offset < end);
    reads[i.min(reads.len() - 1)].arrived
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An exchange whose events arrived 10 ms apart, one per read.
    fn exchange(events: &[&str]) -> Exchange {
        let mut exchange = Exchange::new(Instant::now());
        (exchange.status, exchange.end) = (Some(200), ExchangeEnd::Complete);
        for (i, data) in events.iter().enumerate() {
            exchange.bytes.extend_from_slice(format!("data: {data}\n\n").as_bytes());
            exchange.reads.push(BodyRead {
                end_offset: exchange.bytes.len(),
                arrived: exchange.intended + Duration::from_millis(10 * (i as u64 + 1)),
                read_delay: Duration::ZERO,
            });
        }
        exchange
    }

    fn arrivals(answer: &Answer, exchange: &Exchange) -> Vec<u128> {
        answer.token_chunks.iter().map(|piece| (piece.arrived - exchange.intended).as_millis()).collect()
    }

    #[test]
    fn ours_tells_tokens_and_drafted_tokens_of_each_chunk() {
        let exchange = exchange(&[
            r#"{"choices":[{"index":0,"text":"ab","finish_reason":null,"speculation":{"num_tokens":3,"num_drafted":2}}]}"#,
            r#"{"choices":[{"index":0,"text":"","finish_reason":null,"speculation":{"num_tokens":1,"num_drafted":0}}]}"#,
            r#"{"choices":[{"index":0,"text":"c","finish_reason":"stop","speculation":{"num_tokens":2,"num_drafted":1}}]}"#,
            r#"{"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":6,"total_tokens":10,"speculation":{"rounds":3,"draft_tokens":9,"accepted_tokens":3,"acceptance_length":2.0,"disabled_reason":null}},"metrics":{"speculative_decoding":{"acceptance_histogram":[0,1,1],"num_spec_steps":2,"num_accepted_draft_tokens":3,"num_draft_tokens":9}}}"#,
            "[DONE]",
        ]);
        let answer = Answer::of(&exchange);
        assert_eq!(answer.outcome, RequestOutcome::Completed);
        assert_eq!(arrivals(&answer, &exchange), [10, 20, 30]);
        assert_eq!((answer.output_tokens(), answer.usage), (6, Some((4, 6))));
        assert_eq!(answer.accepted_by_position(), Some(vec![2, 1]));
        let expected = SpeculationCounts { rounds: 3, draft_tokens: 9, accepted_tokens: 3 };
        assert_eq!(answer.speculation, Some(expected));
    }

    #[test]
    fn foreign_answers_are_read_as_far_as_they_go() {
        // A chat chunk with only the role contains no token; llama.cpp counts drafts in `timings`.
        let chat = exchange(&[
            r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":null},"finish_reason":null}]}"#,
            r#"{"choices":[{"index":0,"delta":{"reasoning_content":"hm"},"finish_reason":null}]}"#,
            r#"{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}"#,
            r#"{"choices":[{"index":0,"delta":{},"finish_reason":"length"}],"timings":{"prompt_n":5,"predicted_n":7,"draft_n":12,"draft_n_accepted":4}}"#,
        ]);
        let answer = Answer::of(&chat);
        assert_eq!((answer.outcome.label(), arrivals(&answer, &chat)), ("completed", vec![20, 30]));
        assert_eq!((answer.output_tokens(), answer.usage), (7, Some((5, 7))));
        assert_eq!(
            answer.speculation.map(|counts| (counts.draft_tokens, counts.accepted_tokens)),
            Some((12, 4))
        );
        assert_eq!(answer.accepted_by_position(), None);
        // vLLM: the first chat chunk has empty content, a chunk contains the tokens of one step, the totals
        // are next to the usage.
        let vllm = exchange(&[
            r#"{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}"#,
            r#"{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"reasoning":"hm"},"logprobs":null,"finish_reason":null,"token_ids":null}]}"#,
            r#"{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"a b c"},"logprobs":null,"finish_reason":null,"token_ids":null}]}"#,
            r#"{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":" d"},"logprobs":null,"finish_reason":"stop","stop_reason":null,"token_ids":null}]}"#,
            r#"{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[],"usage":{"prompt_tokens":9,"total_tokens":62,"completion_tokens":53,"prompt_tokens_details":null},"metrics":{"speculative_decoding":{"mean_acceptance_length":1.2325581395348837,"draft_acceptance_rate":0.07751937984496124,"acceptance_histogram":[39,1,0,3],"num_spec_steps":43,"num_accepted_draft_tokens":10,"num_draft_tokens":129,"num_spec_tokens":3}}}"#,
            "[DONE]",
        ]);
        let answer = Answer::of(&vllm);
        assert_eq!((answer.outcome.label(), arrivals(&answer, &vllm)), ("completed", vec![20, 30, 40]));
        let expected = SpeculationCounts { rounds: 43, draft_tokens: 129, accepted_tokens: 10 };
        assert_eq!((answer.output_tokens(), answer.speculation), (53, Some(expected)));
        assert_eq!(answer.accepted_by_position(), Some(vec![4, 3, 3]));
        // Without usage the chunks are counted.
        let bare = exchange(&[r#"{"choices":[{"text":"a"}]}"#, r#"{"choices":[{"text":"b"}]}"#, "[DONE]"]);
        assert_eq!(Answer::of(&bare).output_tokens(), 2);
        assert_ne!(Answer::of(&bare).text_hash, answer.text_hash);
        let endless =
            r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":18446744073709551615}}"#;
        assert_eq!(Answer::of(&exchange(&[endless, "[DONE]"])).outcome.label(), "malformed");
    }

    /// Events in one read share its arrival time; an event split over several reads counts from the last.
    #[test]
    fn an_event_has_arrived_when_its_last_byte_has() {
        let mut exchange = exchange(&[r#"{"choices":[{"text":"a"}]}"#, r#"{"choices":[{"text":"b"}]}"#]);
        let (first, second) = (exchange.reads[0], exchange.reads[1]);
        exchange.reads = vec![BodyRead { end_offset: first.end_offset - 1, ..first }, second];
        assert_eq!(arrivals(&Answer::of(&exchange), &exchange), [20, 20]);
        exchange.reads = vec![first, BodyRead { end_offset: first.end_offset + 4, ..first }, second];
        assert_eq!(arrivals(&Answer::of(&exchange), &exchange), [10, 20]);
    }
}
