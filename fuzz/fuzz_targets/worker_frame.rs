//! Fuzzes `tests::untrusted::worker_frame`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    tests::untrusted::worker_frame(bytes);
});
