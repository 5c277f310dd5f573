//! [`ChunkWriter`]: pieces of text to OpenAI's chunks, each as one server-sent event.

use serde::Serialize;
use speculation::FinishReason;

use crate::ingress::Operation;
use crate::ingress::openai::body::StreamForm;
use crate::ingress::openai::logprobs::{ChatLogprobs, CompletionLogprobs};
use crate::ingress::openai::response::{
    ASSISTANT, ChatChunkChoice, ChatDelta, ChunkSpeculation, CompletionChoice, Envelope,
};
use crate::request_span::finish_word;
use crate::text::Vocabulary;
use crate::token_span::text_stream::{Part, ResponseInfo, TextDelta, Usage};

/// Writes the chunks of one response.
#[derive(Debug)]
pub(super) struct ChunkWriter {
    operation: Operation,
    form: StreamForm,
    /// Which choices have shown their role.
    introduced: Vec<bool>,
}

impl ChunkWriter {
    pub(super) fn new(operation: Operation, form: StreamForm, info: &ResponseInfo) -> Self {
        Self { operation, form, introduced: vec![false; info.num_choices as usize] }
    }

    /// Appends the chunk of a piece; nothing where it has nothing to say yet.
    pub(super) fn piece(
        &mut self,
        (info, vocabulary): (&ResponseInfo, &Vocabulary),
        delta: TextDelta,
        events: &mut Vec<u8>,
    ) {
        let shows_tokens = (info.logprobs || self.form.include_speculation) && !delta.tokens.is_empty();
        if delta.text.is_empty() && delta.finish.is_none() && !shows_tokens {
            return;
        }
        let speculation =
            (self.form.include_speculation && delta.part == Part::Output).then_some(ChunkSpeculation {
                num_tokens: delta.tokens.len() as u32,
                num_drafted: delta.num_drafted,
            });
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
                    },
                    logprobs: has_logprobs.then(|| ChatLogprobs::of(vocabulary, &delta.tokens)),
                    finish_reason,
                    speculation,
                };
                self.write(info, [choice], events);
            }
            Operation::Completion => {
                let choice = CompletionChoice {
                    index: delta.choice,
                    text: delta.text,
                    logprobs: has_logprobs.then(|| CompletionLogprobs::of(vocabulary, &delta.tokens)),
                    finish_reason,
                    speculation,
                };
                self.write(info, [choice], events);
            }
        }
    }

    /// Appends the chunk after the last choice, where it was asked for.
    pub(super) fn usage(&self, info: &ResponseInfo, usage: &Usage, events: &mut Vec<u8>) {
        if self.form.include_usage {
            let no_choices: [(); 0] = [];
            event(&Envelope::new(info, self.object(), no_choices).with_usage(Some(usage)), events);
        }
    }

    fn write<C: Serialize>(&self, info: &ResponseInfo, choices: [C; 1], events: &mut Vec<u8>) {
        let envelope = Envelope::new(info, self.object(), choices);
        // Clients that asked for usage expect a null in every chunk but the last.
        event(&if self.form.include_usage { envelope.with_usage(None) } else { envelope }, events);
    }

    fn object(&self) -> &'static str {
        match self.operation {
            Operation::Chat => "chat.completion.chunk",
            Operation::Completion => "text_completion",
        }
    }
}

const WRITABLE: &str = "answers hold only what JSON can hold: string keys, numbers, text";

/// One line of JSON.
pub(super) fn json<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect(WRITABLE)
}

/// Appends an event whose data is one line of JSON.
pub(super) fn event<T: Serialize>(value: &T, events: &mut Vec<u8>) {
    events.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut *events, value).expect(WRITABLE);
    events.extend_from_slice(b"\n\n");
}
