//! Fuzzes `tests::untrusted::keys_file`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    tests::untrusted::keys_file(bytes);
});
