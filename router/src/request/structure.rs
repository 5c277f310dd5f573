//! [`RawGrammar`]: the grammar that a request's output must match, and the fields it cannot be combined
//! with.

use grammar::{Grammar, GrammarError};

use super::raw::RawRequest;
use crate::error::RouterError;

/// A grammar, with the field that requested it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawGrammar {
    /// Name of the client's field, such as `response_format`.
    pub field: &'static str,
    /// The grammar.
    pub grammar: Grammar,
}

impl RawGrammar {
    /// Checks that the grammar is compatible with the request's other fields. Only the grammar decides where
    /// the text may end.
    pub(super) fn check_compatible(&self, request: &RawRequest) -> Result<(), RouterError> {
        let field = self.field;
        self.grammar
            .check_size()
            .map_err(|error| RouterError::invalid(field, format!("{field}: {error}")))?;
        for (other, is_set) in
            [("ignore_eos", request.ignore_eos), ("min_tokens", request.min_tokens.unwrap_or(0) > 0)]
        {
            if is_set {
                let message = format!(
                    "{other} cannot be combined with {field}, which determines where the text may end"
                );
                return Err(RouterError::invalid(other, message));
            }
        }
        // A grammar may require an excluded token.
        if let Some(other) = request.sampling.exclusion_field() {
            let message =
                format!("{other} cannot be combined with {field}, which determines the allowed tokens");
            return Err(RouterError::invalid(other, message));
        }
        Ok(())
    }

    /// Compiles the grammar as a worker would, to refuse grammars no worker can use. Blocks for up to
    /// [`grammar::COMPILE_MAX`]: run it on a thread that does not serve other requests.
    pub fn check(&self) -> Result<(), RouterError> {
        let field = self.field;
        grammar::check(&self.grammar).map_err(|error| match error {
            GrammarError::Busy => RouterError::Overloaded { what: "the compiler of grammars" },
            GrammarError::Panicked => RouterError::Internal(error.to_string()),
            error => RouterError::invalid(field, format!("{field} cannot be used: {error}")),
        })
    }
}
