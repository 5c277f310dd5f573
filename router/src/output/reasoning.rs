//! [`Reasoning`]: parses the text between `<think>` and `</think>` at the start of an output.

use super::marker::{Marker, Seen};
use super::{CallReader, Piece, ReasoningFormat};

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// Current position in the output.
#[derive(Debug)]
enum State {
    /// Only whitespace so far, and possibly a prefix of the opening marker.
    Before(String),
    /// Inside the reasoning.
    Inside(Marker),
    /// After it: everything goes to the parser of calls.
    Behind,
}

#[derive(Debug)]
pub(super) struct Reasoning {
    state: State,
}

impl Reasoning {
    pub(super) fn new(format: ReasoningFormat) -> Self {
        let state = match format {
            ReasoningFormat::None => State::Behind,
            ReasoningFormat::Marked => State::Before(String::new()),
            ReasoningFormat::Begun => State::Inside(Marker::new(CLOSE)),
        };
        Self { state }
    }

    pub(super) fn push(&mut self, character: char, calls: &mut dyn CallReader, pieces: &mut Vec<Piece>) {
        match &mut self.state {
            State::Behind => calls.push(character, pieces),
            State::Inside(close) => {
                let (text, is_over) = match close.push(character) {
                    Seen::Text(text) => (text, false),
                    Seen::Marker(text) => (text, true),
                };
                think(text, pieces);
                if is_over {
                    self.state = State::Behind;
                }
            }
            State::Before(held) => {
                held.push(character);
                let mark = held.trim_start();
                if mark == OPEN {
                    self.state = State::Inside(Marker::new(CLOSE));
                } else if !OPEN.starts_with(mark) {
                    self.stop_waiting(calls, pieces);
                }
            }
        }
    }

    /// Ends the text and emits what was withheld.
    pub(super) fn finish(&mut self, calls: &mut dyn CallReader, pieces: &mut Vec<Piece>) {
        match &mut self.state {
            State::Behind => {}
            State::Inside(close) => think(close.finish(), pieces),
            State::Before(_) => self.stop_waiting(calls, pieces),
        }
    }

    /// The output does not begin with reasoning: pass on the withheld text.
    fn stop_waiting(&mut self, calls: &mut dyn CallReader, pieces: &mut Vec<Piece>) {
        if let State::Before(held) = std::mem::replace(&mut self.state, State::Behind) {
            held.chars().for_each(|character| calls.push(character, pieces));
        }
    }
}

fn think(text: String, pieces: &mut Vec<Piece>) {
    if text.is_empty() {
        return;
    }
    match pieces.last_mut() {
        Some(Piece::Reasoning(thought)) => thought.push_str(&text),
        _ => pieces.push(Piece::Reasoning(text)),
    }
}
