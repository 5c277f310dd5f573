//! Fuzzes `tests::untrusted::http_body`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    tests::untrusted::http_body(bytes);
});
