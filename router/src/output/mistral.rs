//! [`Mistral`]: text, then `[TOOL_CALLS]` and a JSON list of calls; newer models write each call as
//! `[TOOL_CALLS]name[ARGS]{..}` or `name{..}`, some of them with `[CALL_ID]` and an id behind the name.

use super::call::{ToolCall, first_value};
use super::marker::{Marker, MarkerMatch};
use super::{Piece, ToolCallParser, push_content};

const OPEN: &str = "[TOOL_CALLS]";
const CALL_ID: &str = "[CALL_ID]";
const ARGS: &str = "[ARGS]";

#[derive(Debug)]
pub(super) struct Mistral {
    tools: Vec<String>,
    open: Marker,
    /// Text after the first marker, if any.
    calls: Option<String>,
}

impl Mistral {
    pub(super) fn new(tools: Vec<String>) -> Self {
        Self { tools, open: Marker::new(OPEN), calls: None }
    }

    fn calls(&self, text: &str) -> Option<Vec<ToolCall>> {
        let mut calls = Vec::new();
        let mut rest = text.trim();
        while !rest.is_empty() {
            if rest.starts_with(['[', '{']) {
                let (value, after) = first_value(rest)?;
                calls.extend(ToolCall::list_from_json(value, &self.tools)?);
                rest = after.trim_start();
            } else {
                let (head, body) = rest.split_at(rest.find('{')?);
                let (arguments, after) = first_value(body)?;
                // The id is dropped: calls in answers have the router's.
                let name = head.split_once(CALL_ID).map_or(head, |(name, _)| name);
                let name = name.trim().trim_end_matches(ARGS).trim();
                calls.push(ToolCall::new(name, Some(arguments), Some(&self.tools))?);
                rest = after.trim_start();
            }
            rest = rest.strip_prefix(OPEN).unwrap_or(rest).trim_start();
        }
        (!calls.is_empty()).then_some(calls)
    }
}

impl ToolCallParser for Mistral {
    fn push(&mut self, character: char, pieces: &mut Vec<Piece>) {
        if let Some(calls) = &mut self.calls {
            return calls.push(character);
        }
        match self.open.push(character) {
            MarkerMatch::Text(text) => push_content(&text, pieces),
            MarkerMatch::Marker(text) => {
                push_content(&text, pieces);
                self.calls = Some(String::new());
            }
        }
    }

    fn finish(&mut self, pieces: &mut Vec<Piece>) {
        push_content(&self.open.finish(), pieces);
        let Some(text) = self.calls.take() else { return };
        match self.calls(&text) {
            Some(calls) => pieces.extend(calls.into_iter().map(Piece::Call)),
            None => push_content(&[OPEN, &text].concat(), pieces),
        }
    }
}
