//! Fuzzes `tests::untrusted::toml`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    tests::untrusted::toml(bytes);
});
