//! How a text of numbers, names and brackets is bitten.

use proptest::prelude::*;

/// One bite. Places are parts of the text's length, so that they fit what other bites left.
#[derive(Debug, Clone)]
pub(crate) enum Mutation {
    /// Another byte.
    Byte(u16, u8),
    /// Something between.
    Insert(u16, String),
    /// Something less, so many bytes.
    Remove(u16, u8),
    /// Another number for the one that follows a place.
    Number(u16, &'static str),
    /// The end is missing.
    Cut(u16),
}

/// Numbers at which arithmetic on sizes goes wrong.
const NUMBERS: [&str; 20] = [
    "0", "1", "-1", "2", "3", "16", "255", "65536", "1048576", "16777216", "2147483648", "4294967295", "4294967296",
    "9223372036854775807", "9223372036854775808", "18446744073709551615", "18446744073709551616", "1e308", "1.5", "1e999",
];

/// Pieces of which such files consist, and some of which they do not.
const PIECES: [&str; 14] =
    ["{", "}", "[", "]", ",", ":", "\"", "null", "true", "\"F64\"", "\"I4\"", "\\u0000", "{\"a\":{\"a\":", "[[[[[[[["];

pub(crate) fn any() -> impl Strategy<Value = Mutation> {
    let place = proptest::num::u16::ANY;
    prop_oneof![
        1 => (place, proptest::num::u8::ANY).prop_map(|(at, byte)| Mutation::Byte(at, byte)),
        1 => (place, prop::sample::select(&PIECES[..])).prop_map(|(at, piece)| Mutation::Insert(at, piece.to_owned())),
        1 => (place, 1..80u8).prop_map(|(at, len)| Mutation::Remove(at, len)),
        6 => (place, prop::sample::select(&NUMBERS[..])).prop_map(|(at, number)| Mutation::Number(at, number)),
        1 => place.prop_map(Mutation::Cut),
    ]
}

pub(crate) fn mutate(mut text: Vec<u8>, mutations: &[Mutation]) -> Vec<u8> {
    for mutation in mutations {
        let at = |part: u16| part as usize * text.len() / (usize::from(u16::MAX) + 1);
        match mutation {
            Mutation::Byte(place, byte) => {
                let at = at(*place);
                if let Some(old) = text.get_mut(at) {
                    *old = *byte;
                }
            }
            Mutation::Insert(place, piece) => {
                let at = at(*place);
                text.splice(at..at, piece.bytes());
            }
            Mutation::Remove(place, len) => {
                let at = at(*place);
                text.drain(at..text.len().min(at + usize::from(*len)));
            }
            Mutation::Number(place, number) => replace_number(&mut text, at(*place), number),
            Mutation::Cut(place) => text.truncate(at(*place)),
        }
    }
    text
}

/// Replaces the run of digits at or behind `at`.
fn replace_number(text: &mut Vec<u8>, at: usize, number: &str) {
    let Some(start) = (at..text.len()).find(|&i| text[i].is_ascii_digit()) else { return };
    let len = text[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    text.splice(start..start + len, number.bytes());
}
