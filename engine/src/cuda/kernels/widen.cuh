// Converts FP8 (E4M3) weights to the bf16 numbers that equal them. Four weights form a word, whose bits are
// arranged so that few instructions convert them (`ops/fp8.rs` packs them). Half h of a word:
//   bit 15: sign of number h; bits 4 to 10: its exponent and fraction
//   bit 11: sign of number 2 + h; bits 12 to 14: upper three bits of its exponent and fraction
//   bits 0 to 3: lower four bits of the exponent and fraction of number 2 + h

// Extract numbers 0 and 1 of a word, and numbers 2 and 3. With the exponent bits in place the values lack a
// factor of 2^120. The bf16 multiplication by it is exact, also for the smallest numbers, which are denormal
// before it.
__device__ __forceinline__ u32 first_two(u32 word) { return times_2_120(word & 0x87f087f0u); }
__device__ __forceinline__ u32 last_two(u32 word) {
  return times_2_120((word << 4 & 0x80f080f0u) | (word >> 4 & 0x07000700u));
}
