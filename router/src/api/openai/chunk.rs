//! [`ChunkWriter`]: writes text deltas as OpenAI's chunks, each as one server-sent event.

use serde::Serialize;
use speculation::TokenId;

use super::body::{CompletionOptions, StreamingOptions};
use super::chunk_choice::ChunkChoice;
use super::error::ErrorBody;
use super::logprobs::{ChatLogprobs, CompletionLogprobs};
use super::response::{
    ASSISTANT, ChatChunkChoice, ChatDelta, ChunkSpeculation, CompletionChoice, Envelope, UsageBody,
};
use super::tools::{CallField, FunctionBody, ToolCallBody};
use crate::api::functions::call_id;
use crate::api::json::SERIALIZABLE;
use crate::api::sse::{EventEncoder, write_event};
use crate::error::RouterError;
use crate::output::{OutputDelta, OutputParser};
use crate::pipeline::text_delta::{Part, ResponseInfo, TextDelta};
use crate::pipeline::text_stream::TextStream;
use crate::request::{Operation, Usage};

/// Writes the chunks of one response.
#[derive(Debug)]
pub(super) struct ChunkWriter {
    operation: Operation,
    options: StreamingOptions,
    timings: bool,
    token_ids: bool,
    call_field: CallField,
    /// Whether each choice has sent its first chunk.
    has_begun: Vec<bool>,
    /// One parser per choice of a chat completion whose output has more than content.
    parsers: Vec<OutputParser>,
    /// JSON before and after the choice, equal in every chunk.
    frame: [Vec<u8>; 2],
    /// Number of output tokens in chunks written so far; usage at that point, if every chunk reports it.
    num_tokens: u64,
    usage: Option<Usage>,
}

impl ChunkWriter {
    pub(super) fn new(operation: Operation, options: CompletionOptions, info: &ResponseInfo) -> Self {
        let CompletionOptions { stream, timings, token_ids, call_field, .. } = options;
        let options = stream.unwrap_or_default();
        let frame = frame(&envelope((operation, options), info, NO_CHOICES));
        let is_parsed = operation == Operation::Chat && !info.output.is_plain();
        let num_parsers = if is_parsed { info.num_choices } else { 0 };
        let parsers = (0..num_parsers).map(|_| OutputParser::new(&info.output)).collect();
        Self {
            operation,
            options,
            timings,
            token_ids,
            call_field,
            has_begun: vec![false; info.num_choices as usize],
            parsers,
            frame,
            num_tokens: 0,
            usage: None,
        }
    }

    /// Appends the chunk of a delta; nothing if there is nothing to send yet.
    fn append(&mut self, text: &TextStream, delta: TextDelta, events: &mut Vec<u8>) {
        if !self.parsers.is_empty() {
            return self.append_parts(text, &delta, events);
        }
        let (info, vocabulary) = (text.info(), text.model().vocabulary());
        let is_reported = info.logprobs || self.token_ids || self.options.include_speculation;
        let has_token_fields = is_reported && !delta.tokens.is_empty();
        if delta.text.is_empty() && delta.finish.is_none() && !has_token_fields {
            return;
        }
        let speculation = self.speculation(&delta);
        let finish_reason = delta.finish.map(|reason| reason.as_str());
        let stop_reason = delta.finish.map(|_| text.stop_reason(delta.choice as usize));
        let has_logprobs = info.logprobs && !delta.tokens.is_empty();
        let token_ids = self.token_ids_of(&delta);
        let (role, prompt_token_ids) = self.begin(text, delta.choice);
        match self.operation {
            Operation::Chat => {
                let is_final = delta.text.is_empty() && delta.finish.is_some() && role.is_none();
                let choice = ChatChunkChoice {
                    index: delta.choice,
                    delta: ChatDelta {
                        role,
                        content: (!is_final).then_some(delta.text),
                        ..ChatDelta::default()
                    },
                    logprobs: has_logprobs.then(|| ChatLogprobs::new(vocabulary, &delta.tokens)),
                    finish_reason,
                    stop_reason,
                    token_ids,
                    speculation,
                };
                self.write(&choice, prompt_token_ids, events);
            }
            Operation::Completion => {
                let choice = CompletionChoice {
                    index: delta.choice,
                    text: delta.text,
                    logprobs: has_logprobs.then(|| CompletionLogprobs::new(vocabulary, &delta.tokens)),
                    finish_reason,
                    stop_reason: stop_reason.flatten(),
                    token_ids,
                    prompt_token_ids,
                    prompt_logprobs: None,
                    speculation,
                };
                self.write(&choice, None, events);
            }
        }
    }

    /// Appends the chunks of a delta whose text is parsed: one for each part, and one for its tokens and
    /// finish reason.
    fn append_parts(&mut self, text: &TextStream, delta: &TextDelta, events: &mut Vec<u8>) {
        let (info, vocabulary) = (text.info(), text.model().vocabulary());
        let index = delta.choice;
        let parser = &mut self.parsers[index as usize];
        let output_deltas = parser.push(&delta.text, delta.finish.is_some());
        let finish_reason =
            delta.finish.map(|reason| self.call_field.finish_reason(reason, parser.has_calls()));
        for output_delta in output_deltas {
            let (role, prompt_token_ids) = self.begin(text, index);
            let choice = ChatChunkChoice {
                index,
                delta: ChatDelta { role, ..self.chat_delta(info, index, output_delta) },
                logprobs: None,
                finish_reason: None,
                stop_reason: None,
                token_ids: None,
                speculation: None,
            };
            self.write(&choice, prompt_token_ids, events);
        }
        let logprobs =
            (info.logprobs && !delta.tokens.is_empty()).then(|| ChatLogprobs::new(vocabulary, &delta.tokens));
        let speculation = self.speculation(delta).filter(|speculation| speculation.num_tokens > 0);
        let token_ids = self.token_ids_of(delta).filter(|ids| !ids.is_empty() || finish_reason.is_some());
        if logprobs.is_some() || speculation.is_some() || token_ids.is_some() || finish_reason.is_some() {
            let (role, prompt_token_ids) = self.begin(text, index);
            let choice = ChatChunkChoice {
                index,
                delta: ChatDelta { role, ..ChatDelta::default() },
                logprobs,
                finish_reason,
                stop_reason: finish_reason.map(|_| text.stop_reason(index as usize)),
                token_ids,
                speculation,
            };
            self.write(&choice, prompt_token_ids, events);
        }
    }

    /// Creates the delta of a choice, without its role.
    fn chat_delta(&self, info: &ResponseInfo, choice: u32, output_delta: OutputDelta) -> ChatDelta {
        let empty = ChatDelta::default();
        let function = |function| ChatDelta { function_call: Some(function), ..ChatDelta::default() };
        match (output_delta, self.call_field) {
            (OutputDelta::Text(text), _) => ChatDelta { content: Some(text), ..empty },
            (OutputDelta::Reasoning(text), _) => ChatDelta { reasoning_content: Some(text), ..empty },
            (OutputDelta::Call { call, .. }, CallField::FunctionCall) => function(call.into()),
            (OutputDelta::Arguments { more, .. }, CallField::FunctionCall) => {
                function(FunctionBody::continued(more))
            }
            (OutputDelta::Call { idx, call }, CallField::ToolCalls) => {
                let id = call_id("call_", &info.id, choice, idx);
                ChatDelta { tool_calls: vec![ToolCallBody::started(id, idx, call)], ..empty }
            }
            (OutputDelta::Arguments { idx, more }, CallField::ToolCalls) => {
                ChatDelta { tool_calls: vec![ToolCallBody::continued(idx, more)], ..empty }
            }
        }
    }

    /// Returns the fields that only the first chunk of a choice has: the role, and the ids of the prompt, if
    /// requested.
    fn begin<'a>(
        &mut self,
        text: &'a TextStream,
        choice: u32,
    ) -> (Option<&'static str>, Option<&'a [TokenId]>) {
        if std::mem::replace(&mut self.has_begun[choice as usize], true) {
            return (None, None);
        }
        (Some(ASSISTANT), self.token_ids.then(|| text.prompt_token_ids(choice as usize)))
    }

    /// The ids of the delta's output, if requested.
    fn token_ids_of(&self, delta: &TextDelta) -> Option<Vec<TokenId>> {
        let is_requested = self.token_ids && delta.part == Part::Output;
        is_requested.then(|| delta.tokens.iter().map(|token| token.id).collect())
    }

    fn speculation(&self, delta: &TextDelta) -> Option<ChunkSpeculation> {
        (self.options.include_speculation && delta.part == Part::Output).then_some(ChunkSpeculation {
            num_tokens: delta.tokens.len() as u32,
            num_drafted: delta.num_drafted,
        })
    }

    /// Appends the chunk after the last choice, if requested.
    fn append_totals(&self, text: &TextStream, events: &mut Vec<u8>) {
        let (usage, wants_usage) = (text.usage(), self.options.include_usage);
        if !(wants_usage || self.timings) {
            return;
        }
        let mut last = envelope((self.operation, self.options), text.info(), NO_CHOICES);
        if wants_usage {
            last = last.with_usage(Some(&usage));
        }
        if self.timings {
            last = last.with_timings(&usage, text.timings());
        }
        write_event(&last, events);
    }

    /// Appends a chunk with this choice. `prompt_token_ids` are written beside the choices.
    fn write(&self, choice: &impl ChunkChoice, prompt_token_ids: Option<&[TokenId]>, events: &mut Vec<u8>) {
        let [prefix, suffix] = &self.frame;
        events.extend_from_slice(prefix);
        choice.append_to(events);
        // The list of choices ends here.
        let (list_end, rest) = suffix.split_at(1);
        events.extend_from_slice(list_end);
        if let Some(ids) = prompt_token_ids {
            events.extend_from_slice(b",\"prompt_token_ids\":");
            serde_json::to_writer(&mut *events, ids).expect(SERIALIZABLE);
        }
        if let Some(usage) = &self.usage {
            events.extend_from_slice(b",\"usage\":");
            serde_json::to_writer(&mut *events, &UsageBody::from(usage)).expect(SERIALIZABLE);
        }
        events.extend_from_slice(rest);
    }

    /// Updates the usage up to this delta; the stream may already have received more tokens.
    fn update_usage(&mut self, text: &TextStream, delta: &TextDelta) {
        if self.options.continuous_usage && delta.part == Part::Output {
            self.num_tokens += delta.tokens.len() as u64;
        }
        self.usage = self
            .options
            .continuous_usage
            .then(|| Usage { completion_tokens: self.num_tokens, ..text.usage() });
    }
}

impl EventEncoder for ChunkWriter {
    fn on_start(&mut self, _text: &TextStream, _events: &mut Vec<u8>) {}

    fn on_delta(
        &mut self,
        text: &TextStream,
        delta: TextDelta,
        events: &mut Vec<u8>,
    ) -> Result<(), RouterError> {
        self.update_usage(text, &delta);
        self.append(text, delta, events);
        Ok(())
    }

    fn on_end(&mut self, text: &TextStream, events: &mut Vec<u8>) {
        self.append_totals(text, events);
        events.extend_from_slice(DONE);
    }

    fn on_error(&mut self, _text: &TextStream, error: &RouterError, events: &mut Vec<u8>) {
        write_event(&ErrorBody::from(error), events);
        events.extend_from_slice(DONE);
    }
}

/// Follows the last event.
const DONE: &[u8] = b"data: [DONE]\n\n";

const NO_CHOICES: [(); 0] = [];

/// Creates the fields around the choices of a chunk.
fn envelope<C: Serialize>(
    (operation, options): (Operation, StreamingOptions),
    info: &ResponseInfo,
    choices: C,
) -> Envelope<'_, C> {
    let object = match operation {
        Operation::Chat => "chat.completion.chunk",
        Operation::Completion => "text_completion",
    };
    let envelope = Envelope::new(info, object, choices);
    // Clients that request the usage once expect null in all chunks but the last.
    if options.include_usage && !options.continuous_usage { envelope.with_usage(None) } else { envelope }
}

/// Splits the event of a chunk without choices at the place of the choice, the only part that changes between
/// chunks.
fn frame(envelope: &Envelope<'_, [(); 0]>) -> [Vec<u8>; 2] {
    let mut whole = Vec::new();
    write_event(envelope, &mut whole);
    // The last match: a model's name may contain brackets, and no client text follows the list.
    let list = whole.windows(2).rposition(|pair| pair == b"[]").expect("a chunk has a list of choices");
    let suffix = whole.split_off(list + 1);
    [whole, suffix]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::OutputFormat;

    #[test]
    fn an_assembled_chunk_equals_the_serialized_envelope() {
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
            stop_reason: None,
            token_ids: None,
            prompt_token_ids: None,
            prompt_logprobs: None,
            speculation: None,
        };
        for operation in [Operation::Chat, Operation::Completion] {
            for include_usage in [false, true] {
                let options = StreamingOptions { include_usage, ..StreamingOptions::default() };
                let mut assembled = Vec::new();
                let completion_options = CompletionOptions { stream: Some(options), ..Default::default() };
                ChunkWriter::new(operation, completion_options, &info).write(&choice(), None, &mut assembled);
                let mut whole = Vec::new();
                write_event(&envelope((operation, options), &info, [choice()]), &mut whole);
                assert_eq!(String::from_utf8(assembled), String::from_utf8(whole));
            }
        }
    }
}
