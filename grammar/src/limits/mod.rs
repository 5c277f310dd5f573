//! Limits on a grammar's text, checked before it is compiled by the router and by every worker.
//!
//! The parser compiles nested parts by recursion, follows references while doing so, and copies what `allOf`
//! merges. Its own limits count less than that. Whatever passes here compiles far within
//! [`crate::STACK_BYTES`], and its parts that are not covered by the parser's fuel take at most about a
//! second each. The checks themselves use no recursion and time linear in the text, apart from references:
//! their searches have limits of their own (`search.rs`).

mod graph;
mod integers;
mod lark;
mod multiple_of;
mod patterns;
mod schema;
mod search;

use serde_json::Value;

use self::patterns::Repetitions;
use self::search::SearchSteps;
use crate::GrammarError;
use crate::document::{Grammar, GrammarKind};

/// Maximum nesting of a grammar: subschemas within subschemas, rules within rules, through references. A
/// cycle is followed once. The parser needs about 5 kB of stack per level.
const NESTING_MAX: u64 = 400;

/// Checks everything but the syntax, which the parser checks.
pub(crate) fn check(grammar: &Grammar) -> Result<(), GrammarError> {
    match grammar.kind {
        GrammarKind::JsonSchema => match serde_json::from_str::<Value>(&grammar.text) {
            Ok(schema) => schema::check(&schema, &mut Repetitions::default(), &mut SearchSteps::default()),
            Err(error) => Err(GrammarError::Compile(format!("not JSON: {error}"))),
        },
        // The parser limits the nesting of regular expressions.
        GrammarKind::Regex => Ok(()),
        GrammarKind::Lark => lark::check(&grammar.text),
    }
}

/// Refuses a grammar that nests too deeply. `what` names what nests.
fn check_nesting(levels: u64, what: &str) -> Result<(), GrammarError> {
    if levels <= NESTING_MAX {
        return Ok(());
    }
    let message = format!("{what} nest more than {NESTING_MAX} levels deep: flatten them");
    Err(GrammarError::Compile(message))
}
