//! Grammars that an output must match (contract B8): the document that encodes one on the wire, and the set
//! of tokens that it allows at a position.
//!
//! The router parses a client's grammar into a [`Grammar`] and checks it ([`check`]). Draft and target
//! workers compile it for their tokenizer ([`Compiler`]) and get masks from a [`Matcher`]. Each compile has a
//! limited time ([`TimedCompiler`]). The parser is the crate `llguidance`, which is used only here.
//! Everything here is CPU-bound: call it on a thread that may block. The parser is recursive: what uses it
//! needs a thread with a stack of [`STACK_BYTES`].

#![forbid(unsafe_code)]

mod compiler;
mod document;
mod expressions;
mod limits;
mod matcher;
mod timed_compiler;
mod vocabulary;

pub use compiler::{Compiler, STACK_BYTES, check, check_on_this_thread};
pub use document::{Grammar, GrammarKind, TEXT_BYTES_MAX};
pub use matcher::Matcher;
pub use timed_compiler::{COMPILE_MAX, TimedCompiler};
pub use vocabulary::Vocabulary;

/// Why a grammar cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The wire document is invalid.
    #[error("the grammar is not a document of kind and text: {0}")]
    Document(String),
    /// The text is too long.
    #[error("the grammar has {bytes} bytes, at most {TEXT_BYTES_MAX} are allowed")]
    TooLong {
        /// Size of its text.
        bytes: usize,
    },
    /// The text does not compile, or exceeds the limits of a grammar.
    #[error("{0}")]
    Compile(String),
    /// Compiling it takes too long.
    #[error("the grammar takes more than {} s to compile: simplify it", COMPILE_MAX.as_secs())]
    TakesTooLong,
    /// Too many threads are at work on grammars that take too long; any other grammar may come later.
    #[error("all threads that compile grammars are at ones that take too long: retry later")]
    Busy,
    /// The parser has a bug.
    #[error("the parser panicked on this grammar")]
    Panicked,
    /// The bytes of the tokenizer's tokens are not known.
    #[error("grammars require the bytes of all tokens: {0}")]
    Tokenizer(String),
    /// The output so far does not match, or matching exceeds the limits.
    #[error("the grammar cannot continue after {position} output tokens: {reason}")]
    Match {
        /// Number of output tokens before the error.
        position: usize,
        /// The parser's message.
        reason: String,
    },
}
