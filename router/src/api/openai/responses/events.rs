//! [`ResponseEvents`]: the events of a streamed response, in OpenAI's order. Each has its position in the
//! stream as `sequence_number`; the last one contains the whole response.

use serde::Serialize;
use speculation::FinishReason;

use super::answer::{Content, Item, ItemKind, ResponseObject, ResponseState, item_id, item_status};
use super::body::ResponseOptions;
use super::custom_tools::input_of;
use crate::api::handler::unfinished;
use crate::api::json::to_json;
use crate::api::parsed_output::{OutputPart, ParsedOutput, PartEvent};
use crate::api::sse::{EventEncoder, write_named_event};
use crate::error::RouterError;
use crate::pipeline::response_store::ResponseStore;
use crate::pipeline::text_delta::{ResponseInfo, TextDelta};
use crate::pipeline::text_stream::TextStream;

/// Writes the events of one response.
pub(super) struct ResponseEvents {
    options: ResponseOptions,
    responses: ResponseStore,
    response_id: String,
    output: ParsedOutput,
    finish: Option<FinishReason>,
    sequence_number: u64,
}

/// Fields common to all events.
#[derive(Serialize)]
struct SequencedEvent<'a, T> {
    r#type: &'a str,
    sequence_number: u64,
    #[serde(flatten)]
    rest: T,
}

#[derive(Serialize)]
struct ResponseEvent<'a> {
    response: ResponseObject<'a>,
}

#[derive(Serialize)]
struct ItemEvent<'a> {
    output_index: usize,
    item: Item<'a>,
}

/// Event about the content of an item: its position, and one of the other fields.
#[derive(Serialize, Default)]
struct ContentEvent<'a> {
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
    input: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<[(); 0]>,
}

impl ResponseEvents {
    pub(super) fn new(options: ResponseOptions, responses: ResponseStore, info: &ResponseInfo) -> Self {
        let (response_id, output) = (info.id.clone(), ParsedOutput::new(&info.output));
        Self { options, responses, response_id, output, finish: None, sequence_number: 0 }
    }

    /// Appends the events of a change.
    fn write_part_event(&mut self, part_event: &PartEvent, events: &mut Vec<u8>) {
        let (PartEvent::Started(idx) | PartEvent::Delta(idx, _) | PartEvent::Done(idx)) = *part_event;
        let (parts, number) = (self.output.parts(), &mut self.sequence_number);
        let (part, client_tools) = (&parts[idx], &self.options.client_tools);
        let kind = ItemKind::new(part, client_tools);
        let id = item_id(&self.response_id, kind, idx);
        let is_text = !matches!(part, OutputPart::Call { .. });
        let base_event = || ContentEvent {
            item_id: &id,
            output_index: idx,
            content_index: is_text.then_some(0),
            ..ContentEvent::default()
        };
        let item = |status| Item::new(id.clone(), status, &self.response_id, part, client_tools);
        let logprobs = matches!(part, OutputPart::Text(_)).then_some([]);
        match part_event {
            PartEvent::Started(_) => {
                let item = ItemEvent { output_index: idx, item: item("").in_progress() };
                write(number, "response.output_item.added", item, events);
                if is_text {
                    let empty = part.without_content();
                    let content_event = ContentEvent { part: Content::from_part(&empty), ..base_event() };
                    write(number, "response.content_part.added", content_event, events);
                }
            }
            // The input of a custom tool is known once the arguments that contain it are complete.
            PartEvent::Delta(..) if kind == ItemKind::CustomToolCall => {}
            PartEvent::Delta(_, more) => {
                if let Some(content) = content_name(kind) {
                    let content_event = ContentEvent { delta: Some(more), logprobs, ..base_event() };
                    write(number, &format!("response.{content}.delta"), content_event, events);
                }
            }
            PartEvent::Done(_) => {
                let input;
                let whole = match part {
                    OutputPart::Text(text) | OutputPart::Reasoning(text) => {
                        ContentEvent { text: Some(text), logprobs, ..base_event() }
                    }
                    OutputPart::Call { call, .. } if kind == ItemKind::CustomToolCall => {
                        input = input_of(&call.arguments);
                        let content_event = ContentEvent { delta: Some(&input), ..base_event() };
                        write(number, "response.custom_tool_call_input.delta", content_event, events);
                        ContentEvent { input: Some(&input), ..base_event() }
                    }
                    OutputPart::Call { call, .. } => ContentEvent {
                        name: Some(client_tools.get(&call.name).name),
                        arguments: Some(&call.arguments),
                        ..base_event()
                    },
                };
                if let Some(content) = content_name(kind) {
                    write(number, &format!("response.{content}.done"), whole, events);
                }
                if is_text {
                    let content_event = ContentEvent { part: Content::from_part(part), ..base_event() };
                    write(number, "response.content_part.done", content_event, events);
                }
                let item = item(item_status(idx, parts, self.finish));
                write(number, "response.output_item.done", ItemEvent { output_index: idx, item }, events);
            }
        }
    }
}

/// Name of an item's content in event names; `None` if the content is only sent with the whole item.
fn content_name(kind: ItemKind) -> Option<&'static str> {
    match kind {
        ItemKind::Message => Some("output_text"),
        ItemKind::Reasoning => Some("reasoning_text"),
        ItemKind::FunctionCall => Some("function_call_arguments"),
        ItemKind::CustomToolCall => Some("custom_tool_call_input"),
        ItemKind::ToolSearchCall => None,
    }
}

fn write<T: Serialize>(sequence_number: &mut u64, name: &str, rest: T, events: &mut Vec<u8>) {
    write_named_event(
        name,
        &SequencedEvent { r#type: name, sequence_number: *sequence_number, rest },
        events,
    );
    *sequence_number += 1;
}

impl EventEncoder for ResponseEvents {
    fn on_start(&mut self, text: &TextStream, events: &mut Vec<u8>) {
        for name in ["response.created", "response.in_progress"] {
            let response = ResponseObject::new(&self.options, text.info(), ResponseState::Running);
            write(&mut self.sequence_number, name, ResponseEvent { response }, events);
        }
    }

    fn on_delta(&mut self, _text: &TextStream, delta: TextDelta, events: &mut Vec<u8>) {
        self.finish = self.finish.or(delta.finish);
        for part_event in self.output.push(&delta.text, delta.finish.is_some()) {
            self.write_part_event(&part_event, events);
        }
    }

    fn on_end(&mut self, text: &TextStream, events: &mut Vec<u8>) {
        let Some(finish) = self.finish else {
            return self.on_error(text, &unfinished(), events);
        };
        let (parts, usage) = (self.output.parts(), text.usage());
        let response = ResponseObject::new(
            &self.options,
            text.info(),
            ResponseState::Ended { parts, finish, usage: &usage },
        );
        self.options.store(&self.responses, &self.response_id, parts, &to_json(&response));
        let name = match finish {
            FinishReason::Stop => "response.completed",
            FinishReason::Length => "response.incomplete",
        };
        write(&mut self.sequence_number, name, ResponseEvent { response }, events);
    }

    fn on_error(&mut self, text: &TextStream, error: &RouterError, events: &mut Vec<u8>) {
        let response = ResponseObject::new(&self.options, text.info(), ResponseState::Failed(error));
        write(&mut self.sequence_number, "response.failed", ResponseEvent { response }, events);
    }
}
