//! [`ParsedOutput`]: the parts of one output, which depend only on the text. A full response reads them at
//! the end; a stream of an API that represents each part separately receives their changes.

use crate::output::{OutputDelta, OutputFormat, OutputParser, ToolCall};

/// A part of an output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum OutputPart {
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

impl OutputPart {
    /// Returns an empty part of the same kind.
    pub(super) fn without_content(&self) -> Self {
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
pub(super) enum PartEvent {
    /// A part begins. The name of a call is known.
    Started(usize),
    /// Text was appended to the part.
    Delta(usize, String),
    /// The part is complete.
    Done(usize),
}

/// One output, parsed so far.
#[derive(Debug)]
pub(super) struct ParsedOutput {
    parser: OutputParser,
    parts: Vec<OutputPart>,
}

impl ParsedOutput {
    /// Creates an empty output.
    pub(super) fn new(format: &OutputFormat) -> Self {
        Self { parser: OutputParser::new(format), parts: Vec::new() }
    }

    /// Parses a complete output.
    pub(super) fn parse(format: &OutputFormat, text: &str) -> Self {
        let mut output = Self::new(format);
        output.push(text, true);
        output
    }

    /// Appends text and returns the changes. At the end, withheld text is added, and an output without parts
    /// gets an empty text part, because clients expect one.
    pub(super) fn push(&mut self, text: &str, is_end: bool) -> Vec<PartEvent> {
        let mut events = Vec::new();
        for delta in self.parser.push(text, is_end) {
            self.add(delta, &mut events);
        }
        if is_end {
            if self.parts.is_empty() {
                self.start_part(OutputPart::Text(String::new()), &mut events);
            }
            events.push(PartEvent::Done(self.parts.len() - 1));
        }
        events
    }

    /// All parts so far.
    pub(super) fn parts(&self) -> &[OutputPart] {
        &self.parts
    }

    /// Returns all parts.
    pub(super) fn into_parts(self) -> Vec<OutputPart> {
        self.parts
    }

    /// Whether the output contains a tool call.
    pub(super) fn has_calls(&self) -> bool {
        self.parser.has_calls()
    }

    fn add(&mut self, delta: OutputDelta, events: &mut Vec<PartEvent>) {
        let more = match delta {
            OutputDelta::Text(text) => {
                if !matches!(self.parts.last(), Some(OutputPart::Text(_))) {
                    self.start_part(OutputPart::Text(String::new()), events);
                }
                text
            }
            OutputDelta::Reasoning(text) => {
                if !matches!(self.parts.last(), Some(OutputPart::Reasoning(_))) {
                    self.start_part(OutputPart::Reasoning(String::new()), events);
                }
                text
            }
            OutputDelta::Call { idx, call: ToolCall { name, arguments } } => {
                let call = ToolCall { name, arguments: String::new() };
                self.start_part(OutputPart::Call { idx, call }, events);
                arguments
            }
            OutputDelta::Arguments { more, .. } => more,
        };
        match self.parts.last_mut() {
            Some(OutputPart::Text(text) | OutputPart::Reasoning(text)) => text.push_str(&more),
            Some(OutputPart::Call { call, .. }) => call.arguments.push_str(&more),
            None => return,
        }
        if !more.is_empty() {
            events.push(PartEvent::Delta(self.parts.len() - 1, more));
        }
    }

    fn start_part(&mut self, part: OutputPart, events: &mut Vec<PartEvent>) {
        if let Some(last) = self.parts.len().checked_sub(1) {
            events.push(PartEvent::Done(last));
        }
        events.push(PartEvent::Started(self.parts.len()));
        self.parts.push(part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::{CallFormat, ReasoningFormat, ReasoningSyntax, ToolSyntax};

    fn format() -> OutputFormat {
        let calls = CallFormat::Auto { syntax: ToolSyntax::Hermes, tools: vec!["f".to_owned()] };
        let reasoning = ReasoningFormat::OpenedByPrompt(ReasoningSyntax::Tags);
        OutputFormat { calls, reasoning, single_call: false }
    }

    /// However the text is split, the changes add up to the parts of the whole text.
    #[test]
    fn events_add_up_to_the_parsed_text() {
        let text = "hm</think>I look\n<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>\
                    <tool_call>{\"name\": \"f\"}</tool_call> done";
        let whole = ParsedOutput::parse(&format(), text);
        assert_eq!((whole.parts().len(), whole.has_calls()), (5, true), "{whole:?}");
        for cut in (0..=text.len()).filter(|cut| text.is_char_boundary(*cut)) {
            let mut output = ParsedOutput::new(&format());
            let events = [output.push(&text[..cut], false), output.push(&text[cut..], true)].concat();
            assert_eq!(output.parts(), whole.parts());
            let (mut open, mut grown) = (None, vec![String::new(); whole.parts().len()]);
            for event in events {
                match event {
                    PartEvent::Started(idx) => assert_eq!(open.replace(idx), None),
                    PartEvent::Delta(idx, more) => {
                        assert_eq!(open, Some(idx));
                        grown[idx].push_str(&more);
                    }
                    PartEvent::Done(idx) => assert_eq!(open.take(), Some(idx)),
                }
            }
            assert_eq!(open, None);
            for (part, grown) in whole.parts().iter().zip(grown) {
                let (OutputPart::Text(text)
                | OutputPart::Reasoning(text)
                | OutputPart::Call { call: ToolCall { arguments: text, .. }, .. }) = part;
                assert_eq!(*text, grown);
            }
        }
    }

    #[test]
    fn an_empty_output_is_one_empty_text_part() {
        let events = ParsedOutput::new(&OutputFormat::default()).push("", true);
        assert_eq!(events, [PartEvent::Started(0), PartEvent::Done(0)]);
    }
}
