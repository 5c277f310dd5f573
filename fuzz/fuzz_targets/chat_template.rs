//! Fuzzes `tests::untrusted::chat_template`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    tests::untrusted::chat_template(bytes);
});
