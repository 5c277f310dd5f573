//! Grammars that an output must match (contract B8): the document that carries one on the wire, and the set of tokens that it
//! allows at a position.
//!
//! The router reads a client's grammar into a [`Grammar`] and checks it ([`check`]); both workers compile it against their
//! tokenizer ([`Compiler`]) and ask a [`Matcher`] for masks. The parser is the crate `llguidance`; nothing outside this
//! crate knows that. Everything here is computing: callers put it on a thread that may block.

#![forbid(unsafe_code)]

mod compiler;
mod document;
mod matcher;
mod vocabulary;

pub use compiler::{Compiler, check};
pub use document::{Grammar, GrammarKind, TEXT_BYTES_MAX};
pub use matcher::Matcher;
pub use vocabulary::Vocabulary;

/// Why a grammar cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The wire's document is not one.
    #[error("the grammar is not a document of kind and text: {0}")]
    Document(String),
    /// The text is too long.
    #[error("the grammar has {bytes} bytes, at most {TEXT_BYTES_MAX} are allowed")]
    TooLong {
        /// Of its text.
        bytes: usize,
    },
    /// The text does not compile, or takes more than a grammar may.
    #[error("{0}")]
    Compile(String),
    /// A tokenizer whose tokens' bytes are not known.
    #[error("tokenizer.json: {0}: grammars need a byte-level or byte-fallback tokenizer")]
    Tokenizer(String),
    /// The text so far does not match, or matching it takes more than it may.
    #[error("the grammar cannot go on behind {position} output tokens: {reason}")]
    Match {
        /// Output tokens before the fault.
        position: usize,
        /// In the parser's words.
        reason: String,
    },
}
