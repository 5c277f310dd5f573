//! Parses an assistant's output into reasoning, content and tool calls, in the formats that models are
//! trained to write.
//!
//! [`OutputFormat`] describes the format of a request's output, [`OutputParser`] parses one choice. The
//! result depends only on the text and not on how it was split: every parser works character by character,
//! and the tests split recorded outputs everywhere. Must not depend on tokens, requests or protocols.

mod array;
mod call;
mod hermes;
mod llama;
mod marker;
mod mistral;
mod reasoning;

pub use call::ToolCall;

use self::array::CallArray;
use self::hermes::Hermes;
use self::llama::Llama;
use self::mistral::Mistral;
use self::reasoning::Reasoning;

/// What new text adds to an output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OutputDelta {
    /// Content.
    Text(String),
    /// Reasoning before the content.
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

/// An [`OutputDelta`] without the index of its call.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Piece {
    Content(String),
    Reasoning(String),
    Call(ToolCall),
    Arguments(String),
}

/// Syntax of tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolSyntax {
    /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`: Hermes, Qwen.
    Hermes,
    /// `{"name": .., "parameters": {..}}` as the whole output, several separated by `;`: Llama 3.
    Llama,
    /// `[TOOL_CALLS]` and a list of calls, or calls as `name{..}`: Mistral.
    Mistral,
}

impl ToolSyntax {
    /// Detects the syntax that a chat template describes; `None` if it is not supported.
    pub fn from_template(source: &str) -> Option<Self> {
        let contains = |words: &str| source.contains(words);
        // Calls in XML, such as those of Qwen3-Coder and GLM, may stand in `<tool_call>` as well.
        if !contains("tools") || contains("<function=") || contains("<arg_key>") {
            return None;
        }
        if contains("[TOOL_CALLS]") {
            return Some(Self::Mistral);
        }
        if contains("<tool_call>") {
            return Some(Self::Hermes);
        }
        let is_llama = contains("<|python_tag|>") || (contains("\"parameters\"") && contains("ipython"));
        is_llama.then_some(Self::Llama)
    }

    /// Special tokens of the syntax, which must be emitted as text for the parser.
    pub fn special_tokens(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &["<tool_call>", "</tool_call>"],
            Self::Llama => &["<|python_tag|>"],
            Self::Mistral => &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
        }
    }
}

/// Which part of an output is tool calls.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum CallFormat {
    /// None.
    #[default]
    None,
    /// Anything in this syntax that calls one of these tools.
    Auto {
        /// Syntax of the chat template.
        syntax: ToolSyntax,
        /// Names of the callable tools.
        tools: Vec<String>,
    },
    /// All of it: a JSON list of calls, enforced by a grammar.
    Required,
    /// All of it: the arguments of this tool, enforced by a grammar.
    Named(String),
}

/// Format of an output.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OutputFormat {
    /// Which part is tool calls.
    pub calls: CallFormat,
    /// Whether the model writes reasoning first.
    pub reasoning: ReasoningFormat,
    /// Drop all calls after the first.
    pub single_call: bool,
}

/// The markers around reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningSyntax {
    /// `<think>` and `</think>`: Qwen, DeepSeek and most others.
    Tags,
    /// `[THINK]` and `[/THINK]`: Mistral.
    Brackets,
}

impl ReasoningSyntax {
    /// The opening and the closing marker; special tokens of some models.
    fn markers(self) -> [&'static str; 2] {
        match self {
            Self::Tags => ["<think>", "</think>"],
            Self::Brackets => ["[THINK]", "[/THINK]"],
        }
    }
}

/// Whether the output begins with reasoning between two markers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReasoningFormat {
    /// It does not.
    #[default]
    None,
    /// It does if it begins with the opening marker.
    Optional(ReasoningSyntax),
    /// It does: the prompt already ends with the opening marker.
    OpenedByPrompt(ReasoningSyntax),
}

impl ReasoningFormat {
    /// Detects whether a model writes reasoning from its chat template. Some templates have only the closing
    /// marker, with which they remove the reasoning of earlier messages.
    pub fn from_template(source: &str) -> Self {
        let is_used =
            |syntax: &ReasoningSyntax| syntax.markers().into_iter().any(|marker| source.contains(marker));
        let syntaxes = [ReasoningSyntax::Tags, ReasoningSyntax::Brackets];
        syntaxes.into_iter().find(is_used).map_or(Self::None, Self::Optional)
    }
}

impl OutputFormat {
    /// Adapts the format to the prompt: a chat template may have opened the reasoning already.
    pub fn apply_prompt(&mut self, prompt: &str) {
        if let ReasoningFormat::Optional(syntax) = self.reasoning {
            let [open, _] = syntax.markers();
            if prompt.trim_end().ends_with(open) {
                self.reasoning = ReasoningFormat::OpenedByPrompt(syntax);
            }
        }
    }

    /// Whether the output is content only.
    pub fn is_plain(&self) -> bool {
        self.calls == CallFormat::None && self.reasoning == ReasoningFormat::None
    }

    /// Special tokens of the format, emitted as text for the parser.
    pub fn special_tokens(&self) -> Vec<&'static str> {
        let mut tokens = match &self.calls {
            CallFormat::Auto { syntax, .. } => syntax.special_tokens().to_vec(),
            _ => Vec::new(),
        };
        if let ReasoningFormat::Optional(syntax) | ReasoningFormat::OpenedByPrompt(syntax) = self.reasoning {
            tokens.extend(syntax.markers());
        }
        tokens
    }
}

/// Parser of tool calls in text that arrives in pieces.
trait ToolCallParser: Send + std::fmt::Debug {
    /// Appends a character.
    fn push(&mut self, character: char, pieces: &mut Vec<Piece>);

    /// Ends the text and emits what was withheld.
    fn finish(&mut self, _pieces: &mut Vec<Piece>) {}
}

/// Parses one choice as its text arrives. Keeps only text that is withheld.
#[derive(Debug)]
pub struct OutputParser {
    reasoning: Reasoning,
    calls: Box<dyn ToolCallParser>,
    /// Number of further calls to emit.
    remaining_calls: usize,
    num_calls: u32,
}

impl OutputParser {
    /// Creates a parser for one choice.
    pub fn new(format: &OutputFormat) -> Self {
        let calls: Box<dyn ToolCallParser> = match &format.calls {
            CallFormat::None => Box::new(ContentOnly),
            CallFormat::Auto { syntax: ToolSyntax::Hermes, tools } => Box::new(Hermes::new(tools.clone())),
            CallFormat::Auto { syntax: ToolSyntax::Llama, tools } => Box::new(Llama::new(tools.clone())),
            CallFormat::Auto { syntax: ToolSyntax::Mistral, tools } => Box::new(Mistral::new(tools.clone())),
            CallFormat::Required => Box::new(CallArray::default()),
            CallFormat::Named(name) => Box::new(SingleCall { name: Some(name.clone()) }),
        };
        let remaining_calls = if format.single_call { 1 } else { usize::MAX };
        Self { reasoning: Reasoning::new(format.reasoning), calls, remaining_calls, num_calls: 0 }
    }

    /// Appends text and returns what it adds, joined by kind. At the end, withheld text is added.
    pub fn push(&mut self, text: &str, is_end: bool) -> Vec<OutputDelta> {
        self.parse(text, is_end).into_iter().map(|piece| self.delta(piece)).collect()
    }

    /// Whether the output contains a tool call.
    pub fn has_calls(&self) -> bool {
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

    fn parse(&mut self, text: &str, is_end: bool) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for character in text.chars() {
            self.reasoning.push(character, &mut *self.calls, &mut pieces);
        }
        if is_end {
            self.reasoning.finish(&mut *self.calls, &mut pieces);
            self.calls.finish(&mut pieces);
        }
        pieces.retain(|piece| {
            let is_kept = !matches!(piece, Piece::Call(_)) || self.remaining_calls > 0;
            self.remaining_calls =
                self.remaining_calls.saturating_sub(usize::from(matches!(piece, Piece::Call(_))));
            is_kept
        });
        merge_adjacent(pieces)
    }
}

/// Joins neighboring pieces of one kind.
fn merge_adjacent(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut merged: Vec<Piece> = Vec::with_capacity(pieces.len());
    for piece in pieces {
        match (merged.last_mut(), piece) {
            (Some(Piece::Content(text)), Piece::Content(more))
            | (Some(Piece::Reasoning(text)), Piece::Reasoning(more))
            | (Some(Piece::Arguments(text)), Piece::Arguments(more)) => text.push_str(&more),
            (Some(Piece::Call(call)), Piece::Arguments(more)) => call.arguments.push_str(&more),
            (_, piece) => merged.push(piece),
        }
    }
    merged
}

/// Text without calls.
#[derive(Debug)]
struct ContentOnly;

impl ToolCallParser for ContentOnly {
    fn push(&mut self, character: char, pieces: &mut Vec<Piece>) {
        push_content_char(character, pieces);
    }
}

/// Text that consists of one call's arguments.
#[derive(Debug)]
struct SingleCall {
    /// `None` once the call was emitted.
    name: Option<String>,
}

impl ToolCallParser for SingleCall {
    fn push(&mut self, character: char, pieces: &mut Vec<Piece>) {
        if let Some(name) = self.name.take() {
            pieces.push(Piece::Call(ToolCall { name, arguments: String::new() }));
        }
        match pieces.last_mut() {
            Some(Piece::Arguments(text)) => text.push(character),
            _ => pieces.push(Piece::Arguments(character.to_string())),
        }
    }
}

fn push_content_char(character: char, pieces: &mut Vec<Piece>) {
    match pieces.last_mut() {
        Some(Piece::Content(text)) => text.push(character),
        _ => pieces.push(Piece::Content(character.to_string())),
    }
}

fn push_content(text: &str, pieces: &mut Vec<Piece>) {
    text.chars().for_each(|character| push_content_char(character, pieces));
}

#[cfg(test)]
mod tests;
