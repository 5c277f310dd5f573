//! [`ResponseEvents`]: the events of a streamed response, in OpenAI's order. Each has its position in the
//! stream as `sequence_number`; the last one contains the whole response.

use serde::Serialize;
use speculation::FinishReason;
use text::Vocabulary;

use super::answer::{Content, Item, ItemKind, ResponseObject, ResponseState, item_id, item_status};
use super::body::ResponseOptions;
use super::custom_tools::input_of;
use super::scored_output::{ScoredEvent, ScoredOutput, ScoredPart};
use crate::api::handler::unfinished;
use crate::api::json::to_json;
use crate::api::openai::logprobs::{TextScores, json_bytes};
use crate::api::parsed_output::{OutputPart, PartEvent};
use crate::api::sse::{EventEncoder, write_named_event};
use crate::error::RouterError;
use crate::pipeline::AppState;
use crate::pipeline::buffer_memory::MemoryReservation;
use crate::pipeline::response_store::ResponseStore;
use crate::pipeline::text_delta::{ResponseInfo, TextDelta};
use crate::pipeline::text_stream::TextStream;

/// Writes the events of one response.
pub(super) struct ResponseEvents {
    options: ResponseOptions,
    responses: ResponseStore,
    response_id: String,
    output: ScoredOutput,
    finish: Option<FinishReason>,
    sequence_number: u64,
    /// For log probabilities, which the last events repeat; `None` once there was too little memory.
    reservation: Option<MemoryReservation>,
}

/// Events at the end that contain the log probabilities of a text: those of its content, which are
/// `output_text.done` and `content_part.done`, and those of its item and of the response.
const NUM_LAST_EVENTS: usize = 4;

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
    logprobs: Option<TextScores<'a>>,
}

impl ResponseEvents {
    pub(super) fn new(options: ResponseOptions, state: &AppState, info: &ResponseInfo) -> Self {
        Self {
            options,
            responses: state.responses.clone(),
            response_id: info.id.clone(),
            output: ScoredOutput::new(info),
            finish: None,
            sequence_number: 0,
            reservation: Some(state.response_memory.reserve()),
        }
    }

    /// Reserves memory for log probabilities that the last events repeat. If there is too little, they have
    /// none: each was sent before, with its text, and the response ends as its text does.
    fn keep_scores(&mut self, num_bytes: usize) {
        if let Some(reservation) = &mut self.reservation
            && reservation.grow(num_bytes).is_err()
        {
            self.reservation = None;
            self.output.forget_tokens();
        }
    }

    /// Appends the events of a change.
    fn write_part_event(&mut self, vocabulary: &Vocabulary, change: &ScoredEvent, events: &mut Vec<u8>) {
        let (PartEvent::Started(idx) | PartEvent::Delta(idx, _) | PartEvent::Done(idx)) = change.event;
        let (output, number) = (self.output.parts(vocabulary), &mut self.sequence_number);
        let scored = output.get(idx);
        let (ScoredPart { part, scores }, client_tools) = (scored, &self.options.client_tools);
        let kind = ItemKind::new(part, client_tools);
        let id = item_id(&self.response_id, kind, idx);
        let is_text = !matches!(part, OutputPart::Call { .. });
        let base_event = || ContentEvent {
            item_id: &id,
            output_index: idx,
            content_index: is_text.then_some(0),
            ..ContentEvent::default()
        };
        let item = |status| Item::new(id.clone(), status, &self.response_id, scored, client_tools);
        let of_text = |scores| matches!(part, OutputPart::Text(_)).then_some(scores);
        match &change.event {
            PartEvent::Started(_) => {
                let item = ItemEvent { output_index: idx, item: item("").in_progress() };
                write(number, "response.output_item.added", item, events);
                if is_text {
                    let empty = part.without_content();
                    let empty = ScoredPart { part: &empty, scores: scores.without_tokens() };
                    let content_event = ContentEvent { part: Content::from_part(empty), ..base_event() };
                    write(number, "response.content_part.added", content_event, events);
                }
            }
            // The input of a custom tool is known once the arguments that contain it are complete.
            PartEvent::Delta(..) if kind == ItemKind::CustomToolCall => {}
            PartEvent::Delta(_, more) => {
                if let Some(content) = content_name(kind) {
                    let logprobs = of_text(TextScores::new(vocabulary, &change.tokens));
                    let content_event = ContentEvent { delta: Some(more), logprobs, ..base_event() };
                    write(number, &format!("response.{content}.delta"), content_event, events);
                }
            }
            PartEvent::Done(_) => {
                let input;
                let whole = match part {
                    OutputPart::Text(text) | OutputPart::Reasoning(text) => {
                        ContentEvent { text: Some(text), logprobs: of_text(scores), ..base_event() }
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
                    let content_event = ContentEvent { part: Content::from_part(scored), ..base_event() };
                    write(number, "response.content_part.done", content_event, events);
                }
                let item = item(item_status(idx, output.parts, self.finish));
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

    fn on_delta(
        &mut self,
        text: &TextStream,
        delta: TextDelta,
        events: &mut Vec<u8>,
    ) -> Result<(), RouterError> {
        self.finish = self.finish.or(delta.finish);
        let changes = self.output.push(&delta.text, delta.tokens, delta.finish.is_some());
        let num_bytes: usize = changes.iter().map(|change| json_bytes(&change.tokens)).sum();
        if num_bytes > 0 {
            self.keep_scores(NUM_LAST_EVENTS * num_bytes);
        }
        for change in changes {
            self.write_part_event(text.model().vocabulary(), &change, events);
        }
        Ok(())
    }

    fn on_end(&mut self, text: &TextStream, events: &mut Vec<u8>) {
        let Some(finish) = self.finish else {
            return self.on_error(text, &unfinished(), events);
        };
        let (output, usage) = (self.output.parts(text.model().vocabulary()), text.usage());
        let response = ResponseObject::new(
            &self.options,
            text.info(),
            ResponseState::Ended { output, finish, usage: &usage },
        );
        self.options.store(&self.responses, &self.response_id, output.parts, || to_json(&response));
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
