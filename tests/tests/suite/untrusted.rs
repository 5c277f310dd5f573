//! Untrusted bytes, on stable Rust: the functions that the fuzzer (`fuzz/`) calls, on their seeds and on
//! mutated seeds. Each test is a separate process with a limited address space: code that allocates what a
//! length field claims is killed.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tests::untrusted::{INPUT_PARSERS, InputParser};

/// Allowed memory in addition to the process's initial size.
const MORE_BYTES: u64 = 1 << 30;

/// Mutated seeds per parser; slow places, which load a model or a tokenizer, get fewer.
const ROUNDS: usize = 400;
const SLOW_ROUNDS: usize = 60;
const SLOW_BYTES: usize = 64 << 10;

/// Byte strings that often break parsers.
const PIECES: [&[u8]; 12] = [
    b"18446744073709551615",
    b"-1",
    b"1e999",
    b"\xff\xff\xff\xff\x0f",
    b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"{\"a\":{\"a\":{\"a\":",
    b"[[[[[[[[[[[[[[[[",
    b"\"",
    b"\0",
    b"\xc3\x28",
    b"{% for i in range(100000000) %}{% endfor %}",
    b"null",
];

fn mutate(seed: &[u8], rng: &mut StdRng) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for _ in 0..rng.random_range(1..5) {
        let at = rng.random_range(0..=bytes.len());
        match rng.random_range(0..5) {
            0 => bytes.truncate(at),
            1 => {
                let piece = PIECES[rng.random_range(0..PIECES.len())];
                bytes.splice(at..at, piece.iter().copied());
            }
            2 => drop(bytes.drain(at..(at + rng.random_range(1..64)).min(bytes.len()))),
            3 => {
                // Numbers are the most likely to cause errors.
                let digits = |byte: &u8| byte.is_ascii_digit();
                if let Some(start) = bytes[at..].iter().position(digits).map(|offset| at + offset) {
                    let len = bytes[start..].iter().take_while(|byte| digits(byte)).count();
                    bytes.splice(start..start + len, PIECES[rng.random_range(0..3)].iter().copied());
                }
            }
            _ => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = rng.random();
                }
            }
        }
    }
    bytes
}

fn limit_memory() {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux reports the size of a process");
    let pages: u64 = statm
        .split_whitespace()
        .next()
        .and_then(|pages| pages.parse().ok())
        .expect("the first number is its pages");
    let (_, hard) = getrlimit(Resource::RLIMIT_AS).expect("limits can be read");
    setrlimit(Resource::RLIMIT_AS, (pages * 4_096 + MORE_BYTES).min(hard), hard)
        .expect("a limit can be lowered");
}

fn check(name: &str) {
    let parser = INPUT_PARSERS.iter().find(|parser| parser.name == name).expect("the name is in the list");
    let InputParser { read, seeds, .. } = parser;
    limit_memory();
    let mut rng = StdRng::seed_from_u64(1);
    for seed in seeds() {
        assert!(!seed.is_empty(), "{name}: a seed is missing");
        assert!(read(&seed), "{name}: a seed is invalid, so that its mutations test little");
        read(&[]);
        let rounds = if seed.len() > SLOW_BYTES { SLOW_ROUNDS } else { ROUNDS };
        for _ in 0..rounds {
            read(&mutate(&seed, &mut rng));
        }
    }
}

macro_rules! places {
    ($($name:ident),*) => {
        $(#[test]
        fn $name() {
            check(stringify!($name));
        })*

        #[test]
        fn every_input_parser_has_a_test() {
            let tested = [$(stringify!($name)),*];
            assert_eq!(INPUT_PARSERS.map(|parser| parser.name), tested);
        }
    };
}

places!(
    router_frame,
    worker_frame,
    http_body,
    keys_file,
    toml,
    tokenizer,
    chat_template,
    safetensors,
    model_config
);
