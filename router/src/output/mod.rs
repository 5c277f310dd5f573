//! What an assistant's text is made of: reasoning, content and tool calls, in the formats that models are trained to write.
//!
//! [`OutputFormat`] says which format a request's output has, [`OutputReader`] reads one choice in it. What is read depends on
//! the text alone and not on how it was cut into pieces: every reader looks at one character after the other, and its tests cut
//! recorded outputs everywhere. Must never know tokens, requests or protocols.

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

/// A part of an assistant's message. Parts of one kind in a row are one text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// What the model says.
    Content(String),
    /// What the model thinks before it says something.
    Reasoning(String),
    /// A call begins, with what of its arguments is known.
    Call(ToolCall),
    /// More of the last call's arguments.
    Arguments(String),
}

/// How tool calls are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolSyntax {
    /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`: Hermes, Qwen.
    Hermes,
    /// `{"name": .., "parameters": {..}}` as the whole output, several parted by `;`: Llama 3.
    Llama,
    /// `[TOOL_CALLS]` and a list of calls, or calls as `name{..}`: Mistral.
    Mistral,
}

impl ToolSyntax {
    /// The syntax that a chat template tells its model of, if it is one that can be read.
    pub fn of_template(source: &str) -> Option<Self> {
        let mentions = |words: &str| source.contains(words);
        if !mentions("tools") {
            return None;
        }
        if mentions("[TOOL_CALLS]") {
            return Some(Self::Mistral);
        }
        if mentions("<tool_call>") {
            return Some(Self::Hermes);
        }
        let is_llama = mentions("<|python_tag|>") || (mentions("\"parameters\"") && mentions("ipython"));
        is_llama.then_some(Self::Llama)
    }

    /// Special tokens that are part of the syntax, and have to be shown where calls are read.
    pub fn special_tokens(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &["<tool_call>", "</tool_call>"],
            Self::Llama => &["<|python_tag|>"],
            Self::Mistral => &["[TOOL_CALLS]", "[ARGS]"],
        }
    }
}

/// What of an output is tool calls.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum CallFormat {
    /// Nothing.
    #[default]
    None,
    /// Whatever is written in the syntax and calls one of these tools.
    Auto {
        /// As the model was told.
        syntax: ToolSyntax,
        /// Names that can be called.
        tools: Vec<String>,
    },
    /// All of it: a JSON list of calls, which a grammar has made sure of.
    Required,
    /// All of it: the arguments of this one tool, which a grammar has made sure of.
    Named(String),
}

/// What an output is made of.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OutputFormat {
    /// What of it is tool calls.
    pub calls: CallFormat,
    /// Whether the model thinks first.
    pub reasoning: ReasoningFormat,
    /// Calls behind the first one are left out.
    pub single_call: bool,
}

/// Whether a model thinks first, between `<think>` and `</think>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReasoningFormat {
    /// It does not.
    #[default]
    None,
    /// Where it writes `<think>` first.
    Marked,
    /// The prompt has written `<think>` already.
    Begun,
}

impl OutputFormat {
    /// What the prompt says: a template may have begun the model's thought.
    pub fn prompted(&mut self, prompt: &str) {
        if self.reasoning == ReasoningFormat::Marked && prompt.trim_end().ends_with("<think>") {
            self.reasoning = ReasoningFormat::Begun;
        }
    }

    /// Whether an output is content and nothing else.
    pub fn is_plain(&self) -> bool {
        self.calls == CallFormat::None && self.reasoning == ReasoningFormat::None
    }

    /// Special tokens that the format is written with: their text counts.
    pub fn special_tokens(&self) -> Vec<&'static str> {
        let mut tokens = match &self.calls {
            CallFormat::Auto { syntax, .. } => syntax.special_tokens().to_vec(),
            _ => Vec::new(),
        };
        if self.reasoning != ReasoningFormat::None {
            tokens.extend(["<think>", "</think>"]);
        }
        tokens
    }
}

/// Reads tool calls out of text, which may come in any pieces.
trait CallReader: Send + std::fmt::Debug {
    /// One character more.
    fn push(&mut self, character: char, pieces: &mut Vec<Piece>);

    /// The text is complete: what was held back.
    fn finish(&mut self, pieces: &mut Vec<Piece>);
}

/// Reads one choice.
#[derive(Debug)]
pub struct OutputReader {
    reasoning: Reasoning,
    calls: Box<dyn CallReader>,
    /// How many more calls are wanted.
    calls_left: usize,
}

impl OutputReader {
    /// A reader of one choice's text.
    pub fn new(format: &OutputFormat) -> Self {
        let calls: Box<dyn CallReader> = match &format.calls {
            CallFormat::None => Box::new(AllContent),
            CallFormat::Auto { syntax: ToolSyntax::Hermes, tools } => Box::new(Hermes::new(tools.clone())),
            CallFormat::Auto { syntax: ToolSyntax::Llama, tools } => Box::new(Llama::new(tools.clone())),
            CallFormat::Auto { syntax: ToolSyntax::Mistral, tools } => Box::new(Mistral::new(tools.clone())),
            CallFormat::Required => Box::new(CallArray::default()),
            CallFormat::Named(name) => Box::new(OneCall { name: Some(name.clone()) }),
        };
        let calls_left = if format.single_call { 1 } else { usize::MAX };
        Self { reasoning: Reasoning::new(format.reasoning), calls, calls_left }
    }

    /// Reads on; what is known now. Parts of one kind are joined.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for character in text.chars() {
            self.reasoning.push(character, &mut *self.calls, &mut pieces);
        }
        self.wanted(pieces)
    }

    /// The text is complete: what was held back.
    pub fn finish(&mut self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        self.reasoning.finish(&mut *self.calls, &mut pieces);
        self.calls.finish(&mut pieces);
        self.wanted(pieces)
    }

    fn wanted(&mut self, mut pieces: Vec<Piece>) -> Vec<Piece> {
        pieces.retain(|piece| {
            let is_wanted = !matches!(piece, Piece::Call(_)) || self.calls_left > 0;
            self.calls_left = self.calls_left.saturating_sub(usize::from(matches!(piece, Piece::Call(_))));
            is_wanted
        });
        joined(pieces)
    }
}

/// Joins neighbours of one kind.
pub fn joined(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut joined: Vec<Piece> = Vec::with_capacity(pieces.len());
    for piece in pieces {
        match (joined.last_mut(), piece) {
            (Some(Piece::Content(text)), Piece::Content(more))
            | (Some(Piece::Reasoning(text)), Piece::Reasoning(more))
            | (Some(Piece::Arguments(text)), Piece::Arguments(more)) => text.push_str(&more),
            (Some(Piece::Call(call)), Piece::Arguments(more)) => call.arguments.push_str(&more),
            (_, piece) => joined.push(piece),
        }
    }
    joined
}

/// Text without calls.
#[derive(Debug)]
struct AllContent;

impl CallReader for AllContent {
    fn push(&mut self, character: char, pieces: &mut Vec<Piece>) {
        push_content(character, pieces);
    }

    fn finish(&mut self, _pieces: &mut Vec<Piece>) {}
}

/// Text that is one call's arguments.
#[derive(Debug)]
struct OneCall {
    /// Until the call has begun.
    name: Option<String>,
}

impl CallReader for OneCall {
    fn push(&mut self, character: char, pieces: &mut Vec<Piece>) {
        if let Some(name) = self.name.take() {
            pieces.push(Piece::Call(ToolCall { name, arguments: String::new() }));
        }
        match pieces.last_mut() {
            Some(Piece::Arguments(text)) => text.push(character),
            _ => pieces.push(Piece::Arguments(character.to_string())),
        }
    }

    fn finish(&mut self, _pieces: &mut Vec<Piece>) {}
}

fn push_content(character: char, pieces: &mut Vec<Piece>) {
    match pieces.last_mut() {
        Some(Piece::Content(text)) => text.push(character),
        _ => pieces.push(Piece::Content(character.to_string())),
    }
}

fn push_contents(text: &str, pieces: &mut Vec<Piece>) {
    text.chars().for_each(|character| push_content(character, pieces));
}

#[cfg(test)]
mod tests;
