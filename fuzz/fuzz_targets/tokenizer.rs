//! Fuzzes `tests::untrusted::tokenizer`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    tests::untrusted::tokenizer(bytes);
});
