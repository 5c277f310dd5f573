//! [`Answer`]: the parts of one output, for APIs that represent each part separately. The parts
//! depend only on the text. A stream receives the changes; a full response reads the parts at the end.

use crate::output::{OutputFormat, OutputReader, Piece, ToolCall, joined};

/// A part of an output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum AnswerPart {
    /// Content.
    Text(String),
    /// Reasoning.
    Reasoning(String),
    /// A tool call.
    Call {
        /// Index among the output's calls, from 0.
        idx: u32,
        /// The call received so far.
        call: ToolCall,
    },
}

impl AnswerPart {
    /// Returns an empty part of the same kind.
    pub(super) fn emptied(&self) -> Self {
        match self {
            Self::Text(_) => Self::Text(String::new()),
            Self::Reasoning(_) => Self::Reasoning(String::new()),
            Self::Call { idx, call } => {
                let call = ToolCall { name: call.name.clone(), arguments: String::new() };
                Self::Call { idx: *idx, call }
            }
        }
    }
}

/// A change of the parts; refers to a part by its index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Change {
    /// A part begins. The name of a call is known.
    Began(usize),
    /// Text was appended to the part.
    Grew(usize, String),
    /// The part is complete.
    Ended(usize),
}

/// One output, parsed so far.
#[derive(Debug)]
pub(super) struct Answer {
    reader: OutputReader,
    parts: Vec<AnswerPart>,
    num_calls: u32,
}

impl Answer {
    /// Creates an empty output.
    pub(super) fn new(format: &OutputFormat) -> Self {
        Self { reader: OutputReader::new(format), parts: Vec::new(), num_calls: 0 }
    }

    /// Parses a complete output.
    pub(super) fn whole(format: &OutputFormat, text: &str) -> Self {
        let mut answer = Self::new(format);
        answer.read(text, true);
        answer
    }

    /// Appends text and returns the changes. At the end, withheld text is added, and an output without parts
    /// gets an empty text part, because clients expect one.
    pub(super) fn read(&mut self, text: &str, is_end: bool) -> Vec<Change> {
        let mut pieces = self.reader.push(text);
        if is_end {
            pieces.extend(self.reader.finish());
        }
        let mut changes = Vec::new();
        for piece in joined(pieces) {
            self.add(piece, &mut changes);
        }
        if is_end {
            if self.parts.is_empty() {
                self.begin(AnswerPart::Text(String::new()), &mut changes);
            }
            changes.push(Change::Ended(self.parts.len() - 1));
        }
        changes
    }

    /// All parts so far.
    pub(super) fn parts(&self) -> &[AnswerPart] {
        &self.parts
    }

    /// Whether the output contains a tool call.
    pub(super) fn has_calls(&self) -> bool {
        self.num_calls > 0
    }

    fn add(&mut self, piece: Piece, changes: &mut Vec<Change>) {
        let more = match piece {
            Piece::Content(text) => {
                if !matches!(self.parts.last(), Some(AnswerPart::Text(_))) {
                    self.begin(AnswerPart::Text(String::new()), changes);
                }
                text
            }
            Piece::Reasoning(text) => {
                if !matches!(self.parts.last(), Some(AnswerPart::Reasoning(_))) {
                    self.begin(AnswerPart::Reasoning(String::new()), changes);
                }
                text
            }
            Piece::Call(ToolCall { name, arguments }) => {
                let call = ToolCall { name, arguments: String::new() };
                self.begin(AnswerPart::Call { idx: self.num_calls, call }, changes);
                self.num_calls += 1;
                arguments
            }
            Piece::Arguments(arguments) => arguments,
        };
        match self.parts.last_mut() {
            Some(AnswerPart::Text(text) | AnswerPart::Reasoning(text)) => text.push_str(&more),
            Some(AnswerPart::Call { call, .. }) => call.arguments.push_str(&more),
            None => return,
        }
        if !more.is_empty() {
            changes.push(Change::Grew(self.parts.len() - 1, more));
        }
    }

    fn begin(&mut self, part: AnswerPart, changes: &mut Vec<Change>) {
        if let Some(last) = self.parts.len().checked_sub(1) {
            changes.push(Change::Ended(last));
        }
        changes.push(Change::Began(self.parts.len()));
        self.parts.push(part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::{CallFormat, ReasoningFormat, ToolSyntax};

    fn format() -> OutputFormat {
        let calls = CallFormat::Auto { syntax: ToolSyntax::Hermes, tools: vec!["f".to_owned()] };
        OutputFormat { calls, reasoning: ReasoningFormat::Begun, single_call: false }
    }

    /// However the text is split, the changes add up to the parts of the whole text.
    #[test]
    fn parts_grow_to_what_the_whole_text_holds() {
        let text = "hm</think>I look\n<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>\
                    <tool_call>{\"name\": \"f\"}</tool_call> done";
        let whole = Answer::whole(&format(), text);
        assert_eq!((whole.parts().len(), whole.has_calls()), (5, true), "{whole:?}");
        for cut in (0..=text.len()).filter(|cut| text.is_char_boundary(*cut)) {
            let mut answer = Answer::new(&format());
            let changes = [answer.read(&text[..cut], false), answer.read(&text[cut..], true)].concat();
            assert_eq!(answer.parts(), whole.parts());
            let (mut open, mut grown) = (None, vec![String::new(); whole.parts().len()]);
            for change in changes {
                match change {
                    Change::Began(idx) => assert_eq!(open.replace(idx), None),
                    Change::Grew(idx, more) => {
                        assert_eq!(open, Some(idx));
                        grown[idx].push_str(&more);
                    }
                    Change::Ended(idx) => assert_eq!(open.take(), Some(idx)),
                }
            }
            assert_eq!(open, None);
            for (part, grown) in whole.parts().iter().zip(grown) {
                let (AnswerPart::Text(text)
                | AnswerPart::Reasoning(text)
                | AnswerPart::Call { call: ToolCall { arguments: text, .. }, .. }) = part;
                assert_eq!(*text, grown);
            }
        }
    }

    #[test]
    fn an_answer_that_says_nothing_is_an_empty_text() {
        let changes = Answer::new(&OutputFormat::default()).read("", true);
        assert_eq!(changes, [Change::Began(0), Change::Ended(0)]);
    }
}
