//! Parses counts on the command line. clap's own text for a count of zero, "number would be zero for non-zero
//! type", speaks of Rust.

use std::num::NonZeroUsize;

/// Parses a count of at least one.
pub(crate) fn count(text: &str) -> Result<NonZeroUsize, String> {
    text.parse().map_err(|_| "expected a whole number, 1 or more".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_and_what_is_no_whole_number_are_refused() {
        assert_eq!(count("3").map(NonZeroUsize::get), Ok(3));
        for text in ["0", "-1", "1.5", "", "many"] {
            assert_eq!(count(text), Err("expected a whole number, 1 or more".to_owned()), "{text}");
        }
    }
}
