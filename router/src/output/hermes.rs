//! [`Hermes`]: calls as JSON between `<tool_call>` and `</tool_call>`, with text around them.

use super::call::ToolCall;
use super::marker::{Marker, MarkerMatch};
use super::{Piece, ToolCallParser, push_content};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

#[derive(Debug)]
pub(super) struct Hermes {
    tools: Vec<String>,
    open: Marker,
    /// Text of the current call, if any.
    call: Option<(String, Marker)>,
    /// Whitespace between calls or before text.
    space: String,
    /// Only whitespace has followed the last call.
    is_after_call: bool,
}

impl Hermes {
    pub(super) fn new(tools: Vec<String>) -> Self {
        Self { tools, open: Marker::new(OPEN), call: None, space: String::new(), is_after_call: false }
    }

    /// Emits text outside of calls. Whitespace around a call belongs to the format.
    fn content(&mut self, text: &str, pieces: &mut Vec<Piece>) {
        for character in text.chars() {
            self.space.push(character);
            if !character.is_whitespace() {
                push_content(&std::mem::take(&mut self.space), pieces);
                self.is_after_call = false;
            }
        }
    }

    fn close(&mut self, body: &str, end: &str, pieces: &mut Vec<Piece>) {
        match ToolCall::list_from_json(body.trim(), &self.tools) {
            Some(calls) => {
                self.space.clear();
                self.is_after_call = true;
                pieces.extend(calls.into_iter().map(Piece::Call));
            }
            // Not a call of a known tool: plain text.
            None => self.content(&[OPEN, body, end].concat(), pieces),
        }
    }
}

impl ToolCallParser for Hermes {
    fn push(&mut self, character: char, pieces: &mut Vec<Piece>) {
        let Some((body, close)) = &mut self.call else {
            let (text, is_opened) = match self.open.push(character) {
                MarkerMatch::Text(text) => (text, false),
                MarkerMatch::Marker(text) => (text, true),
            };
            self.content(&text, pieces);
            if is_opened {
                self.call = Some((String::new(), Marker::new(CLOSE)));
            }
            return;
        };
        match close.push(character) {
            MarkerMatch::Text(text) => body.push_str(&text),
            MarkerMatch::Marker(text) => {
                let body = std::mem::take(body) + &text;
                self.call = None;
                self.close(&body, CLOSE, pieces);
            }
        }
    }

    fn finish(&mut self, pieces: &mut Vec<Piece>) {
        if let Some((body, mut close)) = self.call.take() {
            // A call that lacks only its end marker is accepted, because a stop token often replaces the
            // marker.
            self.close(&(body + &close.finish()), "", pieces);
        }
        let buffered = self.open.finish();
        self.content(&buffered, pieces);
        if !self.is_after_call {
            push_content(&std::mem::take(&mut self.space), pieces);
        }
    }
}
