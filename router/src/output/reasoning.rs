//! [`Reasoning`]: parses the text between two markers at the start of an output.

use super::marker::{Marker, MarkerMatch};
use super::{Piece, ReasoningFormat, ReasoningSyntax, ToolCallParser};

/// Current position in the output.
#[derive(Debug)]
enum State {
    /// Only whitespace so far, which may be long, and possibly a prefix of the opening marker.
    Before { syntax: ReasoningSyntax, space: String, prefix: String },
    /// Inside the reasoning.
    Inside(Marker),
    /// After it: everything goes to the parser of calls.
    After,
}

#[derive(Debug)]
pub(super) struct Reasoning {
    state: State,
}

impl Reasoning {
    pub(super) fn new(format: ReasoningFormat) -> Self {
        let state = match format {
            ReasoningFormat::None => State::After,
            ReasoningFormat::Optional(syntax) => {
                State::Before { syntax, space: String::new(), prefix: String::new() }
            }
            ReasoningFormat::OpenedByPrompt(syntax) => {
                let [_, close] = syntax.markers();
                State::Inside(Marker::new(close))
            }
        };
        Self { state }
    }

    pub(super) fn push(&mut self, character: char, calls: &mut dyn ToolCallParser, pieces: &mut Vec<Piece>) {
        match &mut self.state {
            State::After => calls.push(character, pieces),
            State::Inside(close) => {
                let (text, is_closed) = match close.push(character) {
                    MarkerMatch::Text(text) => (text, false),
                    MarkerMatch::Marker(text) => (text, true),
                };
                push_reasoning(text, pieces);
                if is_closed {
                    self.state = State::After;
                }
            }
            State::Before { space, prefix, .. } if prefix.is_empty() && character.is_whitespace() => {
                space.push(character);
            }
            State::Before { syntax, prefix, .. } => {
                let [open, close] = syntax.markers();
                prefix.push(character);
                if prefix == open {
                    self.state = State::Inside(Marker::new(close));
                } else if !open.starts_with(prefix.as_str()) {
                    self.flush_buffered(calls, pieces);
                }
            }
        }
    }

    /// Ends the text and emits what was withheld.
    pub(super) fn finish(&mut self, calls: &mut dyn ToolCallParser, pieces: &mut Vec<Piece>) {
        match &mut self.state {
            State::After => {}
            State::Inside(close) => push_reasoning(close.finish(), pieces),
            State::Before { .. } => self.flush_buffered(calls, pieces),
        }
    }

    /// The output does not begin with reasoning: pass on the withheld text.
    fn flush_buffered(&mut self, calls: &mut dyn ToolCallParser, pieces: &mut Vec<Piece>) {
        if let State::Before { space, prefix, .. } = std::mem::replace(&mut self.state, State::After) {
            space.chars().chain(prefix.chars()).for_each(|character| calls.push(character, pieces));
        }
    }
}

fn push_reasoning(text: String, pieces: &mut Vec<Piece>) {
    if text.is_empty() {
        return;
    }
    match pieces.last_mut() {
        Some(Piece::Reasoning(reasoning)) => reasoning.push_str(&text),
        _ => pieces.push(Piece::Reasoning(text)),
    }
}
