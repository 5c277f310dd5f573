//! [`OutputDeltas`]: parses one output as its text arrives, for every API. Keeps only text that is withheld.

use crate::output::{OutputFormat, OutputParser, Piece, ToolCall, merge_adjacent};

/// What new text adds to an output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum OutputDelta {
    /// Content.
    Text(String),
    /// Reasoning.
    Reasoning(String),
    /// A tool call begins.
    Call {
        /// Index among the output's calls, from 0.
        idx: u32,
        /// The call, with the arguments known so far.
        call: ToolCall,
    },
    /// More arguments of the latest call.
    Arguments {
        /// Index of the call.
        idx: u32,
        /// Text to append.
        more: String,
    },
}

/// Parser of one output.
#[derive(Debug)]
pub(super) struct OutputDeltas {
    parser: OutputParser,
    num_calls: u32,
}

impl OutputDeltas {
    /// Starts an output.
    pub(super) fn new(format: &OutputFormat) -> Self {
        Self { parser: OutputParser::new(format), num_calls: 0 }
    }

    /// Appends text and returns what it adds. At the end, withheld text is added.
    pub(super) fn push(&mut self, text: &str, is_end: bool) -> Vec<OutputDelta> {
        let mut pieces = self.parser.push(text);
        if is_end {
            pieces.extend(self.parser.finish());
        }
        merge_adjacent(pieces).into_iter().map(|piece| self.delta(piece)).collect()
    }

    /// Whether the output contains a tool call.
    pub(super) fn has_calls(&self) -> bool {
        self.num_calls > 0
    }

    fn delta(&mut self, piece: Piece) -> OutputDelta {
        match piece {
            Piece::Content(text) => OutputDelta::Text(text),
            Piece::Reasoning(text) => OutputDelta::Reasoning(text),
            Piece::Call(call) => {
                let idx = self.num_calls;
                self.num_calls += 1;
                OutputDelta::Call { idx, call }
            }
            Piece::Arguments(more) => OutputDelta::Arguments { idx: self.num_calls.saturating_sub(1), more },
        }
    }
}
