//! The token sequences of words that an output must not contain.

use speculation::TokenId;
use text::{Framing, ModelText};

use super::check_vocabulary;
use crate::error::RouterError;

/// Tokenizes each word as it is at the beginning of a text and, as far as that differs, behind a space. As in
/// vLLM, the word's own leading whitespace is removed before.
pub fn bad_word_ids(
    model: &ModelText,
    words: &[String],
    vocab_size: u32,
) -> Result<Vec<Vec<TokenId>>, RouterError> {
    let field = "bad_words";
    let mut sequences: Vec<Vec<TokenId>> = Vec::new();
    for (idx, word) in words.iter().enumerate() {
        for text in [word.trim_start().to_owned(), format!(" {}", word.trim_start())] {
            let ids = model.encode(&text, Framing::AsIs)?;
            if ids.is_empty() {
                return Err(RouterError::invalid(field, format!("{field}[{idx}] has no tokens")));
            }
            check_vocabulary(model, field, &ids, vocab_size)?;
            if !sequences.contains(&ids) {
                sequences.push(ids);
            }
        }
    }
    Ok(sequences)
}

#[cfg(test)]
mod tests {
    use super::super::tests::demo;
    use super::*;

    #[test]
    fn words_are_tokenized_with_and_without_a_space() {
        let model = demo();
        let words = ["the", "  the", "garden fence"].map(str::to_owned);
        let found = bad_word_ids(&model, &words, 4_096).unwrap();
        let encode = |text: &str| model.encode(text, Framing::AsIs).unwrap();
        let expected = ["the", " the", "garden fence", " garden fence"].map(encode);
        assert_eq!(found, expected);
        let error = bad_word_ids(&model, &words, 1).unwrap_err();
        let expected = "bad_words has the token";
        assert!(matches!(error, RouterError::InvalidRequest { message, .. } if message.contains(expected)));
    }
}
