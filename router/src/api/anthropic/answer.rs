//! Responses in Anthropic's format: a message, the events of a streamed message, and errors.

use serde::Serialize;
use serde_json::json;
use serde_json::value::RawValue;
use speculation::FinishReason;

use crate::api::functions::{call_id, json_arguments};
use crate::api::handler::unfinished;
use crate::api::parsed_output::{OutputPart, ParsedOutput, PartEvent};
use crate::api::sse::{EventEncoder, write_named_event};
use crate::error::{Excess, RouterError};
use crate::pipeline::text_delta::{ResponseInfo, TextDelta};
use crate::pipeline::text_stream::TextStream;
use crate::request::Usage;

/// A message, complete or not.
#[derive(Debug, Serialize)]
pub(super) struct Message<'a> {
    id: &'a str,
    r#type: &'static str,
    role: &'static str,
    model: &'a str,
    content: Vec<Block<'a>>,
    stop_reason: Option<&'static str>,
    stop_sequence: Option<&'a str>,
    usage: MessageUsage,
    /// Outrider's, as in chat completions.
    system_fingerprint: &'a str,
    seed: i64,
}

/// A content block of a message.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Block<'a> {
    Text {
        text: &'a str,
    },
    /// The signature is empty: only this router creates these blocks, so there is nothing to sign.
    Thinking {
        thinking: &'a str,
        signature: &'static str,
    },
    ToolUse {
        id: String,
        name: &'a str,
        input: &'a RawValue,
    },
}

impl<'a> Block<'a> {
    /// Creates the block of a part.
    fn new(message_id: &str, part: &'a OutputPart) -> Self {
        match part {
            OutputPart::Text(text) => Self::Text { text },
            OutputPart::Reasoning(thinking) => Self::Thinking { thinking, signature: "" },
            OutputPart::Call { idx, call } => Self::ToolUse {
                id: call_id("toolu_", message_id, 0, *idx),
                name: &call.name,
                input: json_arguments(&call.arguments),
            },
        }
    }
}

/// Usage; cached tokens are counted separately from `input_tokens`.
#[derive(Debug, Serialize)]
struct MessageUsage {
    input_tokens: u64,
    cache_creation_input_tokens: u64,
    cache_read_input_tokens: u64,
    output_tokens: u64,
}

/// Why a message ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct StopReason<'a> {
    reason: &'static str,
    sequence: Option<&'a str>,
}

impl<'a> StopReason<'a> {
    /// Maps a finish reason to Anthropic's; `stop_string` is the one that ended the text, if any.
    pub(super) fn new(finish: FinishReason, has_calls: bool, stop_string: Option<&'a str>) -> Self {
        let reason = match (finish, stop_string) {
            (FinishReason::Length, _) => "max_tokens",
            (FinishReason::Stop, Some(_)) => "stop_sequence",
            (FinishReason::Stop, None) if has_calls => "tool_use",
            (FinishReason::Stop, None) => "end_turn",
        };
        Self { reason, sequence: stop_string }
    }
}

impl From<&Usage> for MessageUsage {
    fn from(usage: &Usage) -> Self {
        Self {
            input_tokens: usage.prompt_tokens - usage.cached_tokens,
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: usage.cached_tokens,
            output_tokens: usage.completion_tokens,
        }
    }
}

impl<'a> Message<'a> {
    /// A message without content.
    fn started(info: &'a ResponseInfo, usage: &Usage) -> Self {
        Self {
            id: &info.id,
            r#type: "message",
            role: "assistant",
            model: &info.model,
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            usage: usage.into(),
            system_fingerprint: &info.system_fingerprint,
            seed: info.seed as i64,
        }
    }

    /// A complete message.
    pub(super) fn complete(
        info: &'a ResponseInfo,
        parts: &'a [OutputPart],
        stop: StopReason<'a>,
        usage: &Usage,
    ) -> Self {
        Self {
            content: parts.iter().map(|part| Block::new(&info.id, part)).collect(),
            stop_reason: Some(stop.reason),
            stop_sequence: stop.sequence,
            ..Self::started(info, usage)
        }
    }
}

/// Writes the events of one message.
#[derive(Debug)]
pub(super) struct MessageEvents {
    message_id: String,
    output: ParsedOutput,
    finish: Option<FinishReason>,
}

impl MessageEvents {
    pub(super) fn new(info: &ResponseInfo) -> Self {
        Self { message_id: info.id.clone(), output: ParsedOutput::new(&info.output), finish: None }
    }

    /// Appends the event of a change.
    fn write_part_event(&self, part_event: PartEvent, events: &mut Vec<u8>) {
        let (name, rest) = match part_event {
            PartEvent::Started(index) => {
                let empty = self.output.parts()[index].without_content();
                let block = Block::new(&self.message_id, &empty);
                let name = "content_block_start";
                (name, json!({ "type": name, "index": index, "content_block": block }))
            }
            PartEvent::Delta(index, more) => {
                let delta = match self.output.parts()[index] {
                    OutputPart::Text(_) => json!({ "type": "text_delta", "text": more }),
                    OutputPart::Reasoning(_) => json!({ "type": "thinking_delta", "thinking": more }),
                    OutputPart::Call { .. } => json!({ "type": "input_json_delta", "partial_json": more }),
                };
                let name = "content_block_delta";
                (name, json!({ "type": name, "index": index, "delta": delta }))
            }
            PartEvent::Done(index) => {
                let name = "content_block_stop";
                (name, json!({ "type": name, "index": index }))
            }
        };
        write_named_event(name, &rest, events);
    }
}

impl EventEncoder for MessageEvents {
    fn on_start(&mut self, text: &TextStream, events: &mut Vec<u8>) {
        let message = Message::started(text.info(), &text.usage());
        write_named_event("message_start", &json!({ "type": "message_start", "message": message }), events);
    }

    fn on_delta(
        &mut self,
        _text: &TextStream,
        delta: TextDelta,
        events: &mut Vec<u8>,
    ) -> Result<(), RouterError> {
        self.finish = self.finish.or(delta.finish);
        for part_event in self.output.push(&delta.text, delta.finish.is_some()) {
            self.write_part_event(part_event, events);
        }
        Ok(())
    }

    fn on_end(&mut self, text: &TextStream, events: &mut Vec<u8>) {
        let Some(finish) = self.finish else {
            return self.on_error(text, &unfinished(), events);
        };
        let StopReason { reason, sequence } =
            StopReason::new(finish, self.output.has_calls(), text.stop_string(0));
        let delta = json!({ "stop_reason": reason, "stop_sequence": sequence });
        let usage = MessageUsage::from(&text.usage());
        write_named_event(
            "message_delta",
            &json!({ "type": "message_delta", "delta": delta, "usage": usage }),
            events,
        );
        write_named_event("message_stop", &json!({ "type": "message_stop" }), events);
    }

    fn on_error(&mut self, _text: &TextStream, error: &RouterError, events: &mut Vec<u8>) {
        write_named_event("error", &ErrorMessage::new(error), events);
    }
}

/// An error in Anthropic's format.
#[derive(Debug, Serialize)]
pub(super) struct ErrorMessage<'a> {
    r#type: &'static str,
    error: ErrorDetail,
    /// Absent in streams, whose head has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<&'a str>,
}

#[derive(Debug, Serialize)]
struct ErrorDetail {
    r#type: &'static str,
    message: String,
}

impl<'a> ErrorMessage<'a> {
    pub(super) fn new(error: &RouterError) -> Self {
        let r#type = match error.mapping().status.as_u16() {
            401 => "authentication_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            504 => "timeout_error",
            status if status < 500 => "invalid_request_error",
            _ => "api_error",
        };
        let error = ErrorDetail { r#type, message: message_of(error) };
        Self { r#type: "error", error, request_id: None }
    }

    /// Adds the id of the request.
    pub(super) fn with_request_id(self, request_id: &'a str) -> Self {
        Self { request_id: Some(request_id), ..self }
    }
}

/// The text of an error. Clients recognize a conversation that is too long by Anthropic's own words, and then
/// shorten it or lower `max_tokens` by the numbers.
fn message_of(error: &RouterError) -> String {
    match *error {
        RouterError::ContextLengthExceeded { max_model_len, prompt_tokens, excess, .. } => match excess {
            Excess::Prompt => {
                // One position is for the output.
                let max = max_model_len.saturating_sub(1);
                format!("prompt is too long: {prompt_tokens} tokens > {max} maximum")
            }
            Excess::Output(tokens) | Excess::DefaultOutput(tokens) => format!(
                "input length and `max_tokens` exceed context limit: {prompt_tokens} + {tokens} > \
                 {max_model_len}, decrease input length or `max_tokens` and try again"
            ),
        },
        RouterError::PromptTooLong { .. } => format!("prompt is too long: {}", error.message()),
        _ => error.message(),
    }
}
