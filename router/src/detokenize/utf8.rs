//! [`Utf8Assembler`]: converts the bytes of tokens to text incrementally. A token may end in the middle of a
//! character; the incomplete bytes wait for the next token.

use std::str;

/// Replaces invalid bytes.
const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// Converts a stream of bytes to the text that `String::from_utf8_lossy` returns for all of them together.
#[derive(Debug, Default)]
pub(crate) struct Utf8Assembler {
    /// Bytes of an incomplete character: at most three between calls.
    begun: Vec<u8>,
}

impl Utf8Assembler {
    /// Appends the text that `bytes` completes.
    pub(crate) fn push(&mut self, bytes: &[u8], text: &mut String) {
        // Fast path: most tokens are whole characters.
        if self.begun.is_empty()
            && let Ok(whole) = str::from_utf8(bytes)
        {
            return text.push_str(whole);
        }
        self.begun.extend_from_slice(bytes);
        let mut rest = self.begun.as_slice();
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
        self.begun = rest.to_vec();
    }

    /// Returns the rest at the end: a replacement character if a character is incomplete, else nothing.
    pub(crate) fn finish(&mut self) -> String {
        if std::mem::take(&mut self.begun).is_empty() { String::new() } else { REPLACEMENT.into() }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_character_over_three_tokens_comes_out_whole() {
        let mut assembler = Utf8Assembler::default();
        for (bytes, shown) in [(&b"a\xe2"[..], "a"), (b"\x82", ""), (b"\xacb", "\u{20ac}b")] {
            let mut text = String::new();
            assembler.push(bytes, &mut text);
            assert_eq!(text, shown);
        }
        assert_eq!(assembler.finish(), "");
    }

    proptest! {
        #[test]
        fn the_sum_is_the_whole_text_however_it_is_cut(
            bytes in prop::collection::vec(
                prop_oneof![any::<u8>(), Just(0xe2), Just(0x82), Just(0xac), Just(0xf0), Just(0x9f), Just(b'a')],
                0..64,
            ),
            cuts in prop::collection::vec(0usize..8, 0..64),
        ) {
            let mut assembler = Utf8Assembler::default();
            let mut text = String::new();
            let mut rest = bytes.as_slice();
            for cut in cuts {
                let (piece, later) = rest.split_at(cut.min(rest.len()));
                assembler.push(piece, &mut text);
                rest = later;
            }
            assembler.push(rest, &mut text);
            text.push_str(&assembler.finish());
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }
}
