//! [`CallArray`]: an output that a grammar constrains to a JSON list of calls. Each call is emitted when it
//! is complete; a truncated one is dropped.

use super::call::{Strings, ToolCall};
use super::{Piece, ToolCallParser};

#[derive(Debug, Default)]
pub(super) struct CallArray {
    /// Number of open brackets and braces.
    depth: usize,
    strings: Strings,
    /// The current item so far.
    item: String,
}

impl ToolCallParser for CallArray {
    fn push(&mut self, character: char, pieces: &mut Vec<Piece>) {
        if self.depth > 1 || (self.depth == 1 && character == '{') {
            self.item.push(character);
        }
        if !self.strings.is_outside(character) {
            return;
        }
        match character {
            '[' | '{' => self.depth += 1,
            ']' | '}' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        if self.depth == 1 && !self.item.is_empty() {
            let item = std::mem::take(&mut self.item);
            pieces.extend(ToolCall::from_json(&item, None).map(Piece::Call));
        }
    }
}
