//! Mutations of JSON text.

use proptest::prelude::*;

/// One mutation. Positions are fractions of the text's length, so that they stay valid after other mutations.
#[derive(Debug, Clone)]
pub(crate) enum Mutation {
    /// Replaces a byte.
    Byte(u16, u8),
    /// Inserts a text.
    Insert(u16, String),
    /// Removes this many bytes.
    Remove(u16, u8),
    /// Replaces the first number at or after a position.
    Number(u16, &'static str),
    /// Cuts off the end.
    Cut(u16),
}

/// Numbers that break arithmetic on sizes.
const NUMBERS: [&str; 20] = [
    "0",
    "1",
    "-1",
    "2",
    "3",
    "16",
    "255",
    "65536",
    "1048576",
    "16777216",
    "2147483648",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "1.5",
    "1e999",
];

/// Fragments that occur in such files, and some that do not.
const PIECES: [&str; 14] = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "null",
    "true",
    "\"F64\"",
    "\"I4\"",
    "\\u0000",
    "{\"a\":{\"a\":",
    "[[[[[[[[",
];

pub(crate) fn any() -> impl Strategy<Value = Mutation> {
    let position = proptest::num::u16::ANY;
    prop_oneof![
        1 => (position, proptest::num::u8::ANY).prop_map(|(at, byte)| Mutation::Byte(at, byte)),
        1 => (position, prop::sample::select(&PIECES[..])).prop_map(|(at, piece)| Mutation::Insert(at, piece.to_owned())),
        1 => (position, 1..80u8).prop_map(|(at, len)| Mutation::Remove(at, len)),
        6 => (position, prop::sample::select(&NUMBERS[..])).prop_map(|(at, number)| Mutation::Number(at, number)),
        1 => position.prop_map(Mutation::Cut),
    ]
}

pub(crate) fn mutate(mut text: Vec<u8>, mutations: &[Mutation]) -> Vec<u8> {
    for mutation in mutations {
        let len = text.len();
        let at = |part: u16| usize::from(part) * len / (usize::from(u16::MAX) + 1);
        match mutation {
            Mutation::Byte(position, byte) => {
                let at = at(*position);
                if let Some(old) = text.get_mut(at) {
                    *old = *byte;
                }
            }
            Mutation::Insert(position, piece) => {
                let at = at(*position);
                text.splice(at..at, piece.bytes());
            }
            Mutation::Remove(position, len) => {
                let at = at(*position);
                text.drain(at..text.len().min(at + usize::from(*len)));
            }
            Mutation::Number(position, number) => replace_number(&mut text, at(*position), number),
            Mutation::Cut(position) => text.truncate(at(*position)),
        }
    }
    text
}

/// Replaces the first run of digits at or after `at`.
fn replace_number(text: &mut Vec<u8>, at: usize, number: &str) {
    let Some(start) = (at..text.len()).find(|&i| text[i].is_ascii_digit()) else { return };
    let len = text[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    text.splice(start..start + len, number.bytes());
}
