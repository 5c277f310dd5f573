//! Steps of the searches in schemas whose time is not linear in the text: which subschemas a reference may
//! mean, and which parts of the value merged subschemas have in common.

use crate::GrammarError;

/// Maximum steps of all searches of a grammar: about a second (debug build).
const STEPS_MAX: u64 = 1 << 24;

/// Sum over all schemas of a grammar.
#[derive(Debug, Default)]
pub(super) struct SearchSteps(u64);

impl SearchSteps {
    /// Adds steps, before they are taken. `what` says what there is too much of.
    pub(super) fn add(&mut self, steps: usize, what: &str) -> Result<(), GrammarError> {
        self.0 = self.0.saturating_add(steps as u64);
        if self.0 <= STEPS_MAX { Ok(()) } else { Err(too_large(what)) }
    }
}

/// Refuses a schema for its size.
pub(super) fn too_large(what: &str) -> GrammarError {
    GrammarError::Compile(format!("the schema is too large: {what}"))
}
