//! [`Utf8Decoder`]: converts the bytes of tokens to text incrementally. A token may end in the middle of a
//! character; the incomplete bytes wait for the next token.

use std::str;

/// Replaces invalid bytes.
const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// Converts a stream of bytes to the text that `String::from_utf8_lossy` returns for all of them together.
#[derive(Debug, Default)]
pub(crate) struct Utf8Decoder {
    /// Bytes of an incomplete character: at most three between calls.
    incomplete: Vec<u8>,
}

impl Utf8Decoder {
    /// Appends the text that `bytes` completes.
    pub(crate) fn push(&mut self, bytes: &[u8], text: &mut String) {
        // Fast path: most tokens are whole characters.
        if self.incomplete.is_empty()
            && let Ok(whole) = str::from_utf8(bytes)
        {
            return text.push_str(whole);
        }
        self.incomplete.extend_from_slice(bytes);
        let mut rest = self.incomplete.as_slice();
        loop {
            let error = match str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => error,
            };
            let (valid, broken) = rest.split_at(error.valid_up_to());
            text.push_str(str::from_utf8(valid).expect("checked up to here"));
            match error.error_len() {
                Some(len) => {
                    text.push(REPLACEMENT);
                    rest = &broken[len..];
                }
                None => {
                    rest = broken;
                    break;
                }
            }
        }
        self.incomplete = rest.to_vec();
    }

    /// Returns the rest at the end: a replacement character if a character is incomplete, else nothing.
    pub(crate) fn finish(&mut self) -> String {
        if std::mem::take(&mut self.incomplete).is_empty() { String::new() } else { REPLACEMENT.into() }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_character_split_over_three_tokens_is_decoded() {
        let mut decoder = Utf8Decoder::default();
        for (bytes, expected) in [(&b"a\xe2"[..], "a"), (b"\x82", ""), (b"\xacb", "\u{20ac}b")] {
            let mut text = String::new();
            decoder.push(bytes, &mut text);
            assert_eq!(text, expected);
        }
        assert_eq!(decoder.finish(), "");
    }

    proptest! {
        #[test]
        fn the_text_does_not_depend_on_how_the_bytes_are_split(
            bytes in prop::collection::vec(
                prop_oneof![any::<u8>(), Just(0xe2), Just(0x82), Just(0xac), Just(0xf0), Just(0x9f), Just(b'a')],
                0..64,
            ),
            cuts in prop::collection::vec(0usize..8, 0..64),
        ) {
            let mut decoder = Utf8Decoder::default();
            let mut text = String::new();
            let mut rest = bytes.as_slice();
            for cut in cuts {
                let (piece, later) = rest.split_at(cut.min(rest.len()));
                decoder.push(piece, &mut text);
                rest = later;
            }
            decoder.push(rest, &mut text);
            text.push_str(&decoder.finish());
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }
}
