//! [`CallArray`]: an output that is a JSON list of calls, as a grammar has it written. Each call is known at its end.

use super::call::ToolCall;
use super::{CallReader, Piece};

#[derive(Debug, Default)]
pub(super) struct CallArray {
    /// How many brackets and braces are open.
    depth: usize,
    in_string: bool,
    is_escaped: bool,
    /// The item so far.
    item: String,
}

impl CallReader for CallArray {
    fn push(&mut self, character: char, pieces: &mut Vec<Piece>) {
        if self.depth > 1 || (self.depth == 1 && character == '{') {
            self.item.push(character);
        }
        if self.in_string {
            match character {
                _ if self.is_escaped => self.is_escaped = false,
                '\\' => self.is_escaped = true,
                '"' => self.in_string = false,
                _ => {}
            }
            return;
        }
        match character {
            '"' => self.in_string = true,
            '[' | '{' => self.depth += 1,
            ']' | '}' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        if self.depth == 1 && !self.item.is_empty() {
            let item = std::mem::take(&mut self.item);
            let value = serde_json::from_str(&item).ok();
            pieces.extend(value.and_then(|value| ToolCall::of_json(&value, None)).map(Piece::Call));
        }
    }

    /// A call that the output's end cut off is no call.
    fn finish(&mut self, _pieces: &mut Vec<Piece>) {}
}
