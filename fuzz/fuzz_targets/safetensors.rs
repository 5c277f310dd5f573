//! Fuzzes `tests::untrusted::safetensors`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    tests::untrusted::safetensors(bytes);
});
