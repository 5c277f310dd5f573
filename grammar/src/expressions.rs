//! Size of the expressions that a lexer's first step builds, which the parser's fuel counts only afterwards.
//!
//! The parser derives expressions by a byte. The derivative of a sequence whose leading parts may be empty
//! has one alternative for each of them, and so has that of each of its tails: a run of optional parts takes
//! time quadratic in its length.

use llguidance::derivre::{ExprRef, RegexBuilder};
use llguidance::earley::lexerspec::LexerSpec;

use crate::GrammarError;

/// Maximum alternatives of all derivatives: about half a second (debug build).
const ALTERNATIVES_MAX: u64 = 4_000_000;

/// Checks the expressions of all terminals, and those that they were built from.
pub(crate) fn check(lexer: &LexerSpec) -> Result<(), GrammarError> {
    let expressions = lexer.regex_builder.exprset();
    // The types of expressions have no public name.
    let mut examples = RegexBuilder::new();
    let mut tag_of = |regex: &str| {
        let example = examples.mk_regex(regex).map_err(|error| GrammarError::Compile(error.to_string()))?;
        Ok(examples.exprset().get_tag(example))
    };
    let (sequence, literal) = (tag_of("[ab]*[cd]*")?, tag_of("abc[de]")?);
    let mut alternatives = vec![0_u64; expressions.len()];
    let mut total = 0_u64;
    // An expression comes after its parts.
    for at in 1..expressions.len() {
        let expression = ExprRef::new(at as u32);
        let args = expressions.get_args(expression);
        let tag = expressions.get_tag(expression);
        let num_first = match args {
            _ if tag == literal => 0,
            [first, ..] if tag == sequence && !expressions.is_nullable(*first) => 1,
            args => args.len(),
        };
        let sum = args[..num_first]
            .iter()
            .fold(0, |sum: u64, arg| sum.saturating_add(alternatives[arg.as_usize()]));
        alternatives[at] = sum.max(1);
        total = total.saturating_add(alternatives[at]);
    }
    if total <= ALTERNATIVES_MAX {
        return Ok(());
    }
    let message = "the grammar's terminals have too many optional parts in a row: shorten or split them";
    Err(GrammarError::Compile(message.to_owned()))
}
