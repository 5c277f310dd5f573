//! [`ResponseEvents`]: the events of a streamed response, in OpenAI's order. Each has its position in the
//! stream as `sequence_number`; the last one contains the whole response.

use serde::Serialize;
use speculation::FinishReason;

use super::answer::{Content, Item, Outcome, ResponseObject, item_id, item_status};
use super::body::ResponseForm;
use crate::api::answer::{Answer, AnswerPart, Change};
use crate::api::sse::{Events, named_event};
use crate::error::RouterError;
use crate::pipeline::response_store::ResponseStore;
use crate::pipeline::text_delta::{ResponseInfo, TextDelta};
use crate::pipeline::text_stream::TextStream;

/// Writes the events of one response.
pub(super) struct ResponseEvents {
    form: ResponseForm,
    responses: ResponseStore,
    response_id: String,
    answer: Answer,
    finish: Option<FinishReason>,
    sequence_number: u64,
}

/// Fields common to all events.
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
    output_index: usize,
    item: Item<'a>,
}

/// Event about the content of an item: its position, and one of the other fields.
#[derive(Serialize, Default)]
struct Inside<'a> {
    item_id: &'a str,
    output_index: usize,
    /// Only for texts; an item has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    content_index: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    part: Option<Content<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    arguments: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<[(); 0]>,
}

impl ResponseEvents {
    pub(super) fn new(form: ResponseForm, responses: ResponseStore, info: &ResponseInfo) -> Self {
        let (response_id, answer) = (info.id.clone(), Answer::new(&info.output));
        Self { form, responses, response_id, answer, finish: None, sequence_number: 0 }
    }

    /// Appends the events of a change.
    fn show(&mut self, change: &Change, events: &mut Vec<u8>) {
        let (Change::Began(idx) | Change::Grew(idx, _) | Change::Ended(idx)) = *change;
        let (parts, number) = (self.answer.parts(), &mut self.sequence_number);
        let part = &parts[idx];
        let id = item_id(&self.response_id, part, idx);
        let is_text = !matches!(part, AnswerPart::Call { .. });
        let at = || Inside {
            item_id: &id,
            output_index: idx,
            content_index: is_text.then_some(0),
            ..Inside::default()
        };
        let item = |status| Item::of(id.clone(), status, &self.response_id, part);
        let logprobs = matches!(part, AnswerPart::Text(_)).then_some([]);
        match change {
            Change::Began(_) => {
                let item = OfItem { output_index: idx, item: item("").begun() };
                write(number, "response.output_item.added", item, events);
                if is_text {
                    let empty = part.emptied();
                    let inside = Inside { part: Content::of(&empty), ..at() };
                    write(number, "response.content_part.added", inside, events);
                }
            }
            Change::Grew(_, more) => {
                let inside = Inside { delta: Some(more), logprobs, ..at() };
                write(number, &format!("response.{}.delta", kind(part)), inside, events);
            }
            Change::Ended(_) => {
                let whole = match part {
                    AnswerPart::Text(text) | AnswerPart::Reasoning(text) => {
                        Inside { text: Some(text), logprobs, ..at() }
                    }
                    AnswerPart::Call { call, .. } => {
                        Inside { name: Some(&call.name), arguments: Some(&call.arguments), ..at() }
                    }
                };
                write(number, &format!("response.{}.done", kind(part)), whole, events);
                if is_text {
                    let inside = Inside { part: Content::of(part), ..at() };
                    write(number, "response.content_part.done", inside, events);
                }
                let item = item(item_status(idx, parts, self.finish));
                write(number, "response.output_item.done", OfItem { output_index: idx, item }, events);
            }
        }
    }
}

/// Name of a part's content in event names.
fn kind(part: &AnswerPart) -> &'static str {
    match part {
        AnswerPart::Text(_) => "output_text",
        AnswerPart::Reasoning(_) => "reasoning_text",
        AnswerPart::Call { .. } => "function_call_arguments",
    }
}

fn write<T: Serialize>(sequence_number: &mut u64, name: &str, rest: T, events: &mut Vec<u8>) {
    named_event(name, &Numbered { r#type: name, sequence_number: *sequence_number, rest }, events);
    *sequence_number += 1;
}

impl Events for ResponseEvents {
    fn begin(&mut self, text: &TextStream, events: &mut Vec<u8>) {
        for name in ["response.created", "response.in_progress"] {
            let response = ResponseObject::of(&self.form, text.info(), Outcome::Running);
            write(&mut self.sequence_number, name, OfResponse { response }, events);
        }
    }

    fn piece(&mut self, _text: &TextStream, delta: TextDelta, events: &mut Vec<u8>) {
        self.finish = self.finish.or(delta.finish);
        for change in self.answer.read(&delta.text, delta.finish.is_some()) {
            self.show(&change, events);
        }
    }

    fn end(&mut self, text: &TextStream, events: &mut Vec<u8>) {
        let Some(finish) = self.finish else {
            let error = RouterError::Internal("the stream ended before its choice finished".into());
            return self.fail(text, &error, events);
        };
        let (parts, usage) = (self.answer.parts(), text.usage());
        let response =
            ResponseObject::of(&self.form, text.info(), Outcome::Ended { parts, finish, usage: &usage });
        self.form.store(&self.responses, &self.response_id, parts, &response.to_json());
        let name = match finish {
            FinishReason::Stop => "response.completed",
            FinishReason::Length => "response.incomplete",
        };
        write(&mut self.sequence_number, name, OfResponse { response }, events);
    }

    fn fail(&mut self, text: &TextStream, error: &RouterError, events: &mut Vec<u8>) {
        let response = ResponseObject::of(&self.form, text.info(), Outcome::Failed(error));
        write(&mut self.sequence_number, "response.failed", OfResponse { response }, events);
    }
}
