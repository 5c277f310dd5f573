//! Fuzzes `tests::untrusted::model_config`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    tests::untrusted::model_config(bytes);
});
