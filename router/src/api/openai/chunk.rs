//! [`ChunkWriter`]: writes text deltas as OpenAI's chunks, each as one server-sent event.

use serde::Serialize;
use speculation::FinishReason;

use super::body::{AnswerForm, StreamForm};
use super::chunk_choice::ChunkChoice;
use super::error::ErrorBody;
use super::logprobs::{ChatLogprobs, CompletionLogprobs};
use super::response::{
    ASSISTANT, ChatChunkChoice, ChatDelta, ChunkSpeculation, CompletionChoice, Envelope, UsageBody,
};
use super::tools::{Addition, ChoiceReader};
use crate::api::sse::{Events, event};
use crate::error::RouterError;
use crate::pipeline::text_delta::{Part, ResponseInfo, TextDelta};
use crate::pipeline::text_stream::TextStream;
use crate::request::span::finish_word;
use crate::request::{Operation, Usage};
use text::Vocabulary;

/// Writes the chunks of one response.
#[derive(Debug)]
pub(super) struct ChunkWriter {
    operation: Operation,
    form: StreamForm,
    timings: bool,
    /// Whether each choice has sent its role.
    introduced: Vec<bool>,
    /// One reader per choice of a chat completion whose output has more than content.
    readers: Vec<ChoiceReader>,
    /// JSON before and after the choice, equal in every chunk.
    frame: [Vec<u8>; 2],
    /// Number of output tokens in chunks written so far; usage at that point, if every chunk reports it.
    num_tokens: u64,
    cost: Option<Usage>,
}

impl ChunkWriter {
    pub(super) fn new(operation: Operation, form: AnswerForm, info: &ResponseInfo) -> Self {
        let AnswerForm { stream, timings } = form;
        let form = stream.unwrap_or_default();
        let frame = frame(&envelope((operation, form), info, NO_CHOICES));
        let readers = if operation == Operation::Chat { ChoiceReader::all(info) } else { Vec::new() };
        let introduced = vec![false; info.num_choices as usize];
        Self { operation, form, timings, introduced, readers, frame, num_tokens: 0, cost: None }
    }

    /// Appends the chunk of a delta; nothing if there is nothing to send yet.
    fn append(
        &mut self,
        (info, vocabulary): (&ResponseInfo, &Vocabulary),
        delta: TextDelta,
        events: &mut Vec<u8>,
    ) {
        if !self.readers.is_empty() {
            return self.parts((info, vocabulary), &delta, events);
        }
        let shows_tokens = (info.logprobs || self.form.include_speculation) && !delta.tokens.is_empty();
        if delta.text.is_empty() && delta.finish.is_none() && !shows_tokens {
            return;
        }
        let speculation = self.speculation(&delta);
        let finish_reason: Option<&'static str> =
            delta.finish.map(|reason: FinishReason| finish_word(reason));
        let has_logprobs = info.logprobs && !delta.tokens.is_empty();
        match self.operation {
            Operation::Chat => {
                let introduced = std::mem::replace(&mut self.introduced[delta.choice as usize], true);
                let is_farewell = delta.text.is_empty() && delta.finish.is_some() && introduced;
                let choice = ChatChunkChoice {
                    index: delta.choice,
                    delta: ChatDelta {
                        role: (!introduced).then_some(ASSISTANT),
                        content: (!is_farewell).then_some(delta.text),
                        ..ChatDelta::default()
                    },
                    logprobs: has_logprobs.then(|| ChatLogprobs::of(vocabulary, &delta.tokens)),
                    finish_reason,
                    speculation,
                };
                self.write(&choice, events);
            }
            Operation::Completion => {
                let choice = CompletionChoice {
                    index: delta.choice,
                    text: delta.text,
                    logprobs: has_logprobs.then(|| CompletionLogprobs::of(vocabulary, &delta.tokens)),
                    finish_reason,
                    speculation,
                };
                self.write(&choice, events);
            }
        }
    }

    /// Appends the chunks of a delta whose text is parsed: one for each part, and one for its tokens and
    /// finish reason.
    fn parts(
        &mut self,
        (info, vocabulary): (&ResponseInfo, &Vocabulary),
        delta: &TextDelta,
        events: &mut Vec<u8>,
    ) {
        let index = delta.choice;
        let reader = &mut self.readers[index as usize];
        let additions = reader.read(&delta.text, delta.finish.is_some());
        let finish_reason = delta.finish.map(|reason| with_calls(finish_word(reason), reader.has_calls()));
        for addition in additions {
            let added = match addition {
                Addition::Content(text) => ChatDelta { content: Some(text), ..ChatDelta::default() },
                Addition::Reasoning(text) => {
                    ChatDelta { reasoning_content: Some(text), ..ChatDelta::default() }
                }
                Addition::Call(call) => ChatDelta { tool_calls: vec![call], ..ChatDelta::default() },
            };
            let choice = ChatChunkChoice {
                index,
                delta: ChatDelta { role: self.introduce(index), ..added },
                logprobs: None,
                finish_reason: None,
                speculation: None,
            };
            self.write(&choice, events);
        }
        let logprobs =
            (info.logprobs && !delta.tokens.is_empty()).then(|| ChatLogprobs::of(vocabulary, &delta.tokens));
        let speculation = self.speculation(delta).filter(|said| said.num_tokens > 0);
        if logprobs.is_some() || speculation.is_some() || finish_reason.is_some() {
            let delta = ChatDelta { role: self.introduce(index), ..ChatDelta::default() };
            self.write(&ChatChunkChoice { index, delta, logprobs, finish_reason, speculation }, events);
        }
    }

    /// Returns the role for the first chunk of a choice.
    fn introduce(&mut self, choice: u32) -> Option<&'static str> {
        let introduced = std::mem::replace(&mut self.introduced[choice as usize], true);
        (!introduced).then_some(ASSISTANT)
    }

    fn speculation(&self, delta: &TextDelta) -> Option<ChunkSpeculation> {
        (self.form.include_speculation && delta.part == Part::Output).then_some(ChunkSpeculation {
            num_tokens: delta.tokens.len() as u32,
            num_drafted: delta.num_drafted,
        })
    }

    /// Appends the chunk after the last choice, if requested.
    fn append_totals(&self, text: &TextStream, events: &mut Vec<u8>) {
        let (usage, wants_usage) = (text.usage(), self.form.include_usage);
        if !(wants_usage || self.timings) {
            return;
        }
        let mut last = envelope((self.operation, self.form), text.info(), NO_CHOICES);
        if wants_usage {
            last = last.with_usage(Some(&usage));
        }
        if self.timings {
            last = last.with_timings(&usage, text.times());
        }
        event(&last, events);
    }

    fn write(&self, choice: &impl ChunkChoice, events: &mut Vec<u8>) {
        let [before, behind] = &self.frame;
        events.extend_from_slice(before);
        choice.append_to(events);
        let Some(cost) = &self.cost else { return events.extend_from_slice(behind) };
        // After the list of choices, which ends here.
        let (list_end, rest) = behind.split_at(1);
        events.extend_from_slice(list_end);
        events.extend_from_slice(b",\"usage\":");
        serde_json::to_writer(&mut *events, &UsageBody::from(cost)).expect(WRITABLE);
        events.extend_from_slice(rest);
    }

    /// Updates the usage up to this delta; the stream may already have received more tokens.
    fn add_cost(&mut self, text: &TextStream, delta: &TextDelta) {
        if self.form.continuous_usage && delta.part == Part::Output {
            self.num_tokens += delta.tokens.len() as u64;
        }
        self.cost =
            self.form.continuous_usage.then(|| Usage { completion_tokens: self.num_tokens, ..text.usage() });
    }
}

/// Finish reason of a choice that may contain calls.
pub(super) fn with_calls(reason: &'static str, has_calls: bool) -> &'static str {
    if has_calls && reason == finish_word(FinishReason::Stop) { "tool_calls" } else { reason }
}

impl Events for ChunkWriter {
    fn begin(&mut self, _text: &TextStream, _events: &mut Vec<u8>) {}

    fn piece(&mut self, text: &TextStream, delta: TextDelta, events: &mut Vec<u8>) {
        self.add_cost(text, &delta);
        self.append((text.info(), text.model().vocabulary()), delta, events);
    }

    fn end(&mut self, text: &TextStream, events: &mut Vec<u8>) {
        self.append_totals(text, events);
        events.extend_from_slice(DONE);
    }

    fn fail(&mut self, _text: &TextStream, error: &RouterError, events: &mut Vec<u8>) {
        event(&ErrorBody::from(error), events);
        events.extend_from_slice(DONE);
    }
}

/// Follows the last event.
const DONE: &[u8] = b"data: [DONE]\n\n";

const NO_CHOICES: [(); 0] = [];

/// Creates the fields around the choices of a chunk.
fn envelope<C: Serialize>(
    (operation, form): (Operation, StreamForm),
    info: &ResponseInfo,
    choices: C,
) -> Envelope<'_, C> {
    let object = match operation {
        Operation::Chat => "chat.completion.chunk",
        Operation::Completion => "text_completion",
    };
    let envelope = Envelope::new(info, object, choices);
    // Clients that request the usage once expect null in all chunks but the last.
    if form.include_usage && !form.continuous_usage { envelope.with_usage(None) } else { envelope }
}

/// Splits the event of a chunk without choices at the place of the choice, the only part that changes between
/// chunks.
fn frame(envelope: &Envelope<'_, [(); 0]>) -> [Vec<u8>; 2] {
    let mut whole = Vec::new();
    event(envelope, &mut whole);
    // The last match: a model's name may contain brackets, and no client text follows the list.
    let list = whole.windows(2).rposition(|pair| pair == b"[]").expect("a chunk has a list of choices");
    let behind = whole.split_off(list + 1);
    [whole, behind]
}

pub(super) const WRITABLE: &str = "a response has only serializable values: string keys, numbers, text";

/// Serializes as one line of JSON.
pub(super) fn json<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect(WRITABLE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::OutputFormat;

    #[test]
    fn a_chunk_put_together_is_the_envelope_written_whole() {
        let info = ResponseInfo {
            id: "cmpl-[]".to_owned(),
            created: 1,
            model: "a \"model\" [] ]}".to_owned(),
            system_fingerprint: "[]".to_owned(),
            seed: u64::MAX,
            num_choices: 2,
            logprobs: false,
            output: OutputFormat::default(),
        };
        let choice = || CompletionChoice {
            index: 1,
            text: "[] \"\u{1F600}\n".to_owned(),
            logprobs: None,
            finish_reason: None,
            speculation: None,
        };
        for operation in [Operation::Chat, Operation::Completion] {
            for include_usage in [false, true] {
                let form = StreamForm { include_usage, ..StreamForm::default() };
                let mut put_together = Vec::new();
                let answer = AnswerForm { stream: Some(form), timings: false };
                ChunkWriter::new(operation, answer, &info).write(&choice(), &mut put_together);
                let mut whole = Vec::new();
                event(&envelope((operation, form), &info, [choice()]), &mut whole);
                assert_eq!(String::from_utf8(put_together), String::from_utf8(whole));
            }
        }
    }
}
