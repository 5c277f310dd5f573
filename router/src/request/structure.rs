//! [`SentGrammar`]: the grammar that a request's output must match, and what it cannot be combined with.

use grammar::{Grammar, GrammarError};

use super::sent::SentRequest;
use crate::error::RouterError;

/// A grammar, and the field that asked for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SentGrammar {
    /// As the client wrote it, such as `response_format`.
    pub field: &'static str,
    /// What it asks for.
    pub grammar: Grammar,
}

impl SentGrammar {
    /// Whether it fits beside the request's other fields. A grammar decides where a text may end: nothing else can.
    pub(super) fn check_beside(&self, request: &SentRequest) -> Result<(), RouterError> {
        let field = self.field;
        self.grammar
            .check_size()
            .map_err(|error| RouterError::invalid(field, format!("{field}: {error}")))?;
        for (other, is_set) in
            [("ignore_eos", request.ignore_eos), ("min_tokens", request.min_tokens.unwrap_or(0) > 0)]
        {
            if is_set {
                let message =
                    format!("{other} cannot be combined with {field}, which says where the text may end");
                return Err(RouterError::invalid(other, message));
            }
        }
        Ok(())
    }

    /// Compiles it as a worker would, to refuse what no worker could use. Takes milliseconds: not for a thread that serves others.
    pub fn check(&self) -> Result<(), RouterError> {
        grammar::check(&self.grammar).map_err(|error: GrammarError| {
            let field = self.field;
            RouterError::invalid(field, format!("{field} cannot be used: {error}"))
        })
    }
}
