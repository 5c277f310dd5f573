//! [`ResponseEvents`]: the events by which a streamed response grows, in OpenAI's order. Each has its place in the stream as
//! `sequence_number`; the last one holds the whole response.

use serde::Serialize;
use speculation::FinishReason;

use super::answer::{Outcome, OutputMessage, OutputText, ResponseObject, message_id, status_of};
use super::body::ResponseForm;
use crate::api::sse::{Events, named_event};
use crate::error::RouterError;
use crate::pipeline::response_store::ResponseStore;
use crate::pipeline::text_stream::{ResponseInfo, TextDelta, TextStream};

/// Writes the events of one response.
pub(super) struct ResponseEvents {
    form: ResponseForm,
    responses: ResponseStore,
    item_id: String,
    sequence_number: u64,
    said: String,
    finish: Option<FinishReason>,
}

/// What every event begins with.
#[derive(Serialize)]
struct Numbered<'a, T> {
    r#type: &'a str,
    sequence_number: u64,
    #[serde(flatten)]
    rest: T,
}

#[derive(Serialize)]
struct OfResponse<'a> {
    response: ResponseObject<'a>,
}

#[derive(Serialize)]
struct OfItem<'a> {
    output_index: u32,
    item: OutputMessage<'a>,
}

/// Where a piece of text stands, and the piece.
#[derive(Serialize)]
struct OfPart<'a, T> {
    item_id: &'a str,
    output_index: u32,
    content_index: u32,
    #[serde(flatten)]
    rest: T,
}

#[derive(Serialize)]
struct Part<'a> {
    part: OutputText<'a>,
}

#[derive(Serialize)]
struct Delta<'a> {
    delta: &'a str,
    logprobs: [(); 0],
}

#[derive(Serialize)]
struct Done<'a> {
    text: &'a str,
    logprobs: [(); 0],
}

impl ResponseEvents {
    pub(super) fn new(form: ResponseForm, responses: ResponseStore, info: &ResponseInfo) -> Self {
        let item_id = message_id(&info.id);
        Self { form, responses, item_id, sequence_number: 0, said: String::new(), finish: None }
    }

    fn write<T: Serialize>(sequence_number: &mut u64, name: &str, rest: T, events: &mut Vec<u8>) {
        named_event(name, &Numbered { r#type: name, sequence_number: *sequence_number, rest }, events);
        *sequence_number += 1;
    }

    fn part<'a, T>(item_id: &'a str, rest: T) -> OfPart<'a, T> {
        OfPart { item_id, output_index: 0, content_index: 0, rest }
    }
}

impl Events for ResponseEvents {
    fn begin(&mut self, text: &TextStream, events: &mut Vec<u8>) {
        let Self { form, item_id, sequence_number: number, .. } = self;
        for name in ["response.created", "response.in_progress"] {
            let response = ResponseObject::of(form, text.info(), Outcome::Running);
            Self::write(number, name, OfResponse { response }, events);
        }
        let item = OutputMessage::of(&text.info().id, "in_progress", None);
        Self::write(number, "response.output_item.added", OfItem { output_index: 0, item }, events);
        let part = Self::part(item_id, Part { part: OutputText::of("") });
        Self::write(number, "response.content_part.added", part, events);
    }

    fn piece(&mut self, _text: &TextStream, delta: TextDelta, events: &mut Vec<u8>) {
        self.finish = self.finish.or(delta.finish);
        if delta.text.is_empty() {
            return;
        }
        self.said.push_str(&delta.text);
        let part = Self::part(&self.item_id, Delta { delta: &delta.text, logprobs: [] });
        Self::write(&mut self.sequence_number, "response.output_text.delta", part, events);
    }

    fn end(&mut self, text: &TextStream, events: &mut Vec<u8>) {
        let Some(finish) = self.finish else {
            let error = RouterError::Internal("the text ended before its choice did".into());
            return self.fail(text, &error, events);
        };
        let Self { form, item_id, sequence_number: number, said, .. } = self;
        let done = Self::part(item_id, Done { text: said, logprobs: [] });
        Self::write(number, "response.output_text.done", done, events);
        let part = Self::part(item_id, Part { part: OutputText::of(said) });
        Self::write(number, "response.content_part.done", part, events);
        let item = OutputMessage::of(&text.info().id, status_of(finish), Some(said));
        Self::write(number, "response.output_item.done", OfItem { output_index: 0, item }, events);
        let outcome = Outcome::Ended { text: said, finish, usage: &text.usage() };
        let response = ResponseObject::of(form, text.info(), outcome);
        form.store(&self.responses, &text.info().id, said, &response.to_json());
        let name = match finish {
            FinishReason::Stop => "response.completed",
            FinishReason::Length => "response.incomplete",
        };
        Self::write(number, name, OfResponse { response }, events);
    }

    fn fail(&mut self, text: &TextStream, error: &RouterError, events: &mut Vec<u8>) {
        let response = ResponseObject::of(&self.form, text.info(), Outcome::Failed(error));
        Self::write(&mut self.sequence_number, "response.failed", OfResponse { response }, events);
    }
}
