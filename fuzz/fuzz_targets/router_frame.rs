//! Fuzzes `tests::untrusted::router_frame`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    tests::untrusted::router_frame(bytes);
});
