//! Repetitions in the patterns of a schema. The parser looks for a match of each before it counts their size
//! ([`crate::expressions`]); for a run of optional parts this takes time quadratic in its length.

use crate::GrammarError;

/// Maximum repetitions of one regular expression. `a?` 2,000 times compiles in a quarter of a second (debug
/// build), 4,000 times in a second.
const REPETITIONS_MAX: u64 = 2_000;

/// Sum of the squares over a grammar's regular expressions.
#[derive(Debug, Default)]
pub(super) struct Repetitions(u64);

impl Repetitions {
    /// Adds a regular expression.
    pub(super) fn add(&mut self, regex: &str) -> Result<(), GrammarError> {
        let count = count(regex);
        self.0 = self.0.saturating_add(count.saturating_mul(count));
        if self.0 <= REPETITIONS_MAX * REPETITIONS_MAX {
            return Ok(());
        }
        Err(GrammarError::Compile(format!(
            "a regular expression has {count} repetitions or empty alternatives, at most {REPETITIONS_MAX} \
             are allowed, or fewer in each of several: shorten it"
        )))
    }
}

/// Number of operators that let a part be empty or repeated. Those in character classes count as well.
fn count(regex: &str) -> u64 {
    let mut count = 0;
    let (mut before, mut was_escaped) = ('|', false);
    let mut characters = regex.chars();
    while let Some(character) = characters.next() {
        if character == '\\' {
            (before, was_escaped) = (characters.next().unwrap_or('\\'), true);
            continue;
        }
        match character {
            // `\p{..}` and the like.
            '{' if matches!(before, 'p' | 'P' | 'x' | 'u' | 'U') && was_escaped => {}
            '?' if before == '(' && !was_escaped => {}
            '?' | '*' | '+' | '{' => count += 1,
            '|' | ')' if matches!(before, '|' | '(') && !was_escaped => count += 1,
            _ => {}
        }
        (before, was_escaped) = (character, false);
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_operators_and_group_flags_are_no_repetitions() {
        for (regex, expected) in [
            ("abc", 0),
            (r"a\?\*b\\+", 1),
            (r"\p{L}\x{61}{2}", 1),
            ("(?:a|b)*c{2,3}", 2),
            ("(a|)(|b)||", 3),
            ("()()", 2),
            ("x?y+z*", 3),
        ] {
            assert_eq!(count(regex), expected, "{regex}");
        }
        let mut repetitions = Repetitions::default();
        assert_eq!(repetitions.add(&"a?".repeat(1_500)), Ok(()));
        assert!(repetitions.add(&"b?".repeat(1_500)).is_err());
    }
}
