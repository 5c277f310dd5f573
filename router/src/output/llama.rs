//! [`Llama`]: the whole output is one call as a JSON object, or several separated by `;`, optionally after
//! `<|python_tag|>`.

use super::call::{ToolCall, first_value};
use super::{Piece, ToolCallParser, push_content, push_content_char};

const TAG: &str = "<|python_tag|>";

#[derive(Debug)]
pub(super) struct Llama {
    tools: Vec<String>,
    /// Text that may be calls; `None` once it is known not to be.
    buffered: Option<String>,
    /// Where the text begins after leading whitespace, which may be long.
    text_start: usize,
}

impl Llama {
    pub(super) fn new(tools: Vec<String>) -> Self {
        Self { tools, buffered: Some(String::new()), text_start: 0 }
    }

    fn calls(&self, text: &str) -> Option<Vec<ToolCall>> {
        let mut rest = text.trim_start();
        rest = rest.strip_prefix(TAG).unwrap_or(rest).trim();
        let mut calls = Vec::new();
        while !rest.is_empty() {
            let (value, after) = first_value(rest)?;
            calls.extend(ToolCall::list_from_json(value, &self.tools)?);
            rest = after.trim_start_matches(|c: char| c == ';' || c.is_whitespace());
        }
        (!calls.is_empty()).then_some(calls)
    }
}

/// Whether the text, without leading whitespace, may still become calls.
fn may_be_calls(text: &str) -> bool {
    text.starts_with(['{', '[']) || text.starts_with(TAG) || TAG.starts_with(text)
}

impl ToolCallParser for Llama {
    fn push(&mut self, character: char, pieces: &mut Vec<Piece>) {
        let Some(buffered) = &mut self.buffered else { return push_content_char(character, pieces) };
        if self.text_start == buffered.len() && character.is_whitespace() {
            self.text_start += character.len_utf8();
        }
        buffered.push(character);
        if !may_be_calls(&buffered[self.text_start..]) {
            push_content(&self.buffered.take().unwrap_or_default(), pieces);
        }
    }

    fn finish(&mut self, pieces: &mut Vec<Piece>) {
        let Some(buffered) = self.buffered.take() else { return };
        match self.calls(&buffered) {
            Some(calls) => pieces.extend(calls.into_iter().map(Piece::Call)),
            None => push_content(&buffered, pieces),
        }
    }
}
