// Common definitions for all kernels: number formats, the engine's own exp, warp sums, the two tensor-core
// instructions, copies. `sources.rs` puts this text before each file, because NVRTC has no include path.
//
// Compiled with --fmad=false: a product and a sum are rounded separately unless the code calls fmaf, as in
// the CPU twins. No fast-math. EMULATED is defined when a C++ compiler builds the same files for the host;
// emulator.hpp then defines the device functions.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

// A bfloat16 in memory; arithmetic is done in f32.
struct bf16 {
  u16 bits;
};

#ifndef EMULATED
#define WARP 32
#define NEG_INF __int_as_float(0xff800000)
#define POS_INF __int_as_float(0x7f800000)

// d[16 x 8] += a[16 x 16] b[16 x 8], bf16 inputs, f32 sums. Fragments of lane l = 4 g + t:
//   a[0]: row g, columns 2 t and 2 t + 1; a[1]: row g + 8, same columns; a[2], a[3]: same rows, columns + 8
//   b[0]: rows 2 t and 2 t + 1 of column g; b[1]: those rows + 8
//   d[0], d[1]: columns 2 t and 2 t + 1 of row g; d[2], d[3]: of row g + 8
__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same with d = a b.
__device__ __forceinline__ void mma_bf16_first(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}

// d[16 x 8] += a[16 x 32] b[32 x 8], exact in i32. Fragments as in mma_bf16, with four int8 per register
// instead of two bf16: columns 4 t .. 4 t + 3, and those + 16.
__device__ __forceinline__ void mma_int8(i32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Loads 16 bytes from global memory; the functions below load 8 and 4. The emulator counts the bytes.
__device__ __forceinline__ uint4 load_16(const void* from) { return *(const uint4*)from; }

__device__ __forceinline__ u64 load_8(const u64* from) { return *from; }
__device__ __forceinline__ float load_4(const float* from) { return *from; }

// Starts an asynchronous copy of 16 bytes from global to shared memory. If `inside` is false it reads nothing
// and writes 16 zero bytes. The copies that a thread has started since its last cp_async_commit form a group.
__device__ __forceinline__ void cp_async_16(void* to, const void* from, bool inside) {
  const u32 shared = (u32)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most LEFT of the thread's groups are in flight. Other threads see the bytes only after a
// barrier.
template <int LEFT>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Loads four matrices of 8 rows x 16 bytes from shared memory. Lanes 8 m .. 8 m + 7 pass the rows of matrix m.
// Lane 4 g + t receives bytes 4 t .. 4 t + 3 of row g of each.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], const uint4* row) {
  const u32 at = (u32)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
}

// Rounds two floats to bf16, nearest even; the first goes to the lower half.
__device__ __forceinline__ u32 narrow_two(float x0, float x1) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(x1), "f"(x0));
  return both;
}

// The greater of two numbers, or NaN if either is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}

// Multiplies two bf16 by 2^120. The result is exact, for denormal numbers too, unless it overflows. Not every
// device has a bf16 multiply instruction, so this is an fma that adds -0, which changes no number.
__device__ __forceinline__ u32 times_2_120(u32 both) {
  u32 result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(both), "r"(0x7b807b80u), "r"(0x80008000u));
  return result;
}

// Shared memory whose size is a parameter of the kernel launch.
#define DYNAMIC_SHARED(name) extern __shared__ uint4 name[]
#endif

// Returns x, hidden from the optimizer: the compiler does not hoist expressions of it out of loops.
__device__ __forceinline__ u32 opaque(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

// Rounds to nearest even, like half::bf16::from_f32; a NaN stays a NaN.
__device__ __forceinline__ bf16 narrow(float x) {
  u32 bits = __float_as_uint(x);
  bf16 result;
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    result.bits = (u16)((bits >> 16) | 0x0040u);
  } else {
    result.bits = (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
  return result;
}

#ifdef EMULATED
__device__ __forceinline__ u32 times_2_120(u32 both) {
  const float factor = __uint_as_float(247u << 23);
  const float low = __uint_as_float(both << 16) * factor, high = __uint_as_float(both & 0xffff0000u) * factor;
  return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000u);
}

__device__ __forceinline__ void mma_bf16_first(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  for (int i = 0; i < 4; ++i) d[i] = 0.0f;
  mma_bf16(d, a, b);
}

__device__ __forceinline__ float max_or_nan(float a, float b) { return a > b || a != a ? a : b; }

// A NaN stays a NaN, but with other bits than on the device.
__device__ __forceinline__ u32 narrow_two(float x0, float x1) { return (u32)narrow(x0).bits | (u32)narrow(x1).bits << 16; }
#endif

// Packs two bf16 as the tensor cores read them: the lower index in the lower half.
__device__ __forceinline__ u32 pack(bf16 low, bf16 high) { return (u32)low.bits | (u32)high.bits << 16; }

// e^x for x <= 0, equal to exp_f32 as mantissa * 2^(shifted - rounder).
__device__ __forceinline__ void exp_parts(float x, float& mantissa, float& shifted) {
  const float rounder = 12582912.0f;  // 1.5 * 2^23
  shifted = fmaf(x, 1.44269504088896340736f, rounder);
  float n = shifted - rounder;
  float r = fmaf(n, -1.4286068e-6f, fmaf(n, -0.69314575f, x));
  float series = 1.0f / 5040.0f;
  series = fmaf(series, r, 1.0f / 720.0f);
  series = fmaf(series, r, 1.0f / 120.0f);
  series = fmaf(series, r, 1.0f / 24.0f);
  series = fmaf(series, r, 1.0f / 6.0f);
  series = fmaf(series, r, 0.5f);
  mantissa = fmaf(r * r, series, r) + 1.0f;
}

__device__ __forceinline__ float exp_f32_below_zero(float x) {
  float mantissa, shifted;
  exp_parts(x, mantissa, shifted);
  // The rounder's lower nine bits are zero.
  const float power = __uint_as_float((__float_as_uint(shifted) + 127u) << 23);
  return x < -87.0f ? 0.0f : mantissa * power;
}

// The same, but any number if x is not a number. The product is normal, so it is a sum of exponents.
__device__ __forceinline__ float exp_f32_of_number(float x) {
  float mantissa, shifted;
  exp_parts(x, mantissa, shifted);
  // Opaque, so that it is computed in any case, and not in a branch.
  const u32 result = opaque((__float_as_uint(shifted) << 23) + __float_as_uint(mantissa));
  return x < -87.0f ? 0.0f : __uint_as_float(result);
}

// e^x: the engine's own version, equal to the CPU kernels' exp bit for bit.
__device__ __forceinline__ float exp_f32(float x) {
  const float value = exp_f32_below_zero(x);
  return x > 88.0f ? POS_INF : value;
}

// Sums a warp's 32 numbers as a butterfly (offsets 16, 8, 4, 2, 1); every lane gets the sum.
__device__ __forceinline__ float warp_sum(float x) {
  for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// Adds the sums of eight K-slices in the tree order of docs/contract.md C2.
__device__ __forceinline__ float tree(const float (&s)[8]) {
  return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

// Functions for rows of logits.

// Result of drawing a token from a row.
struct Drawn {
  u32 token_id;
  u32 status;  // 0: drawn; 1: token_id's logit is NaN or +infinity; 2: every logit is -infinity
};

// speculation::math::ln of a normal positive number.
__device__ __forceinline__ double ln(double x) {
  const u64 sqrt_half = 0x3fe6a09e667f3bcdull;
  const i64 shifted = (i64)((u64)__double_as_longlong(x) - sqrt_half);
  const double e = (double)(shifted >> 52) + 0.0;
  const double m = __longlong_as_double((i64)(((u64)shifted & 0x000fffffffffffffull) + sqrt_half));
  const double f = m - 1.0;
  const double s = f / (2.0 + f);
  const double s2 = s * s;
  double series = 2.0 / 21.0;
  series = series * s2 + 2.0 / 19.0;
  series = series * s2 + 2.0 / 17.0;
  series = series * s2 + 2.0 / 15.0;
  series = series * s2 + 2.0 / 13.0;
  series = series * s2 + 2.0 / 11.0;
  series = series * s2 + 2.0 / 9.0;
  series = series * s2 + 2.0 / 7.0;
  series = series * s2 + 2.0 / 5.0;
  series = series * s2 + 2.0 / 3.0;
  const double r = series * s2;
  const double half = 0.5 * f * f;
  const double ln_2_high = __longlong_as_double(0x3fe62e42fe000000ll);
  const double ln_2_low = __longlong_as_double(0x3e1f473de6af278fll);
  return e * ln_2_high - ((half - (s * (half + r) + e * ln_2_low)) - f);
}

// speculation::math::exp for x <= 0.
__device__ __forceinline__ double exp_below_zero(double x) {
  if (x < -745.1332191019412) return 0.0;
  const double rounder = 6755399441055744.0;
  const double k = (x * 1.44269504088896340736 + rounder) - rounder;
  const double ln_2_high = __longlong_as_double(0x3fe62e42fe000000ll);
  const double ln_2_low = __longlong_as_double(0x3e1f473de6af278fll);
  const double r = (x - k * ln_2_high) - k * ln_2_low;
  double series = 1.0 / 6227020800.0;
  series = series * r + 1.0 / 479001600.0;
  series = series * r + 1.0 / 39916800.0;
  series = series * r + 1.0 / 3628800.0;
  series = series * r + 1.0 / 362880.0;
  series = series * r + 1.0 / 40320.0;
  series = series * r + 1.0 / 5040.0;
  series = series * r + 1.0 / 720.0;
  series = series * r + 1.0 / 120.0;
  series = series * r + 1.0 / 24.0;
  series = series * r + 1.0 / 6.0;
  series = series * r + 1.0 / 2.0;
  const double mantissa = 1.0 + (r + (r * r) * series);
  const i64 whole = (i64)k;
  const i64 half = whole >> 1;
  const double first = __longlong_as_double((half + 1023) << 52);
  const double second = __longlong_as_double((whole - half + 1023) << 52);
  return (mantissa * first) * second;
}

// Maps a float to an integer key in the same order; -0 counts as 0.
__device__ __forceinline__ u32 key_of(float z) {
  const u32 bits = __float_as_uint(z + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Sort rank of a token: higher logits first, then lower ids. A greater rank comes first.
__device__ __forceinline__ u64 rank_of(u32 key, u32 token_id) { return (u64)key << 32 | (u32)~token_id; }

// Sums one number per thread of a block of 256; every thread gets the sum. Each warp adds as a butterfly,
// then the warps' sums are added in order.
template <typename T>
__device__ __forceinline__ T block_sum(T x, T (&shared)[8]) {
  for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  __syncthreads();
  if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = x;
  __syncthreads();
  T sum = 0;
  for (u32 w = 0; w < 8; ++w) sum += shared[w];
  return sum;
}

// Exclusive prefix sum over the threads of a block of 256.
__device__ __forceinline__ u32 sum_before(u32 x, u32 (&shared)[8]) {
  u32 sum = x;
  for (u32 step = 1; step < WARP; step *= 2) {
    const u32 other = __shfl_up_sync(0xffffffffu, sum, step);
    if (threadIdx.x % WARP >= step) sum += other;
  }
  __syncthreads();
  if (threadIdx.x % WARP == WARP - 1) shared[threadIdx.x / WARP] = sum;
  __syncthreads();
  for (u32 w = 0; w < threadIdx.x / WARP; ++w) sum += shared[w];
  return sum - x;
}

// Rows of bf16 that products read are in memory row after row, or packed in panels for gemm_panels.cu. A panel
// is 8 rows x 64 columns: four sets of 16 columns, each of 2 x 8 rows x 8 columns, where a set is what the
// tensor cores multiply at once. A set takes every other four columns of 32, and the first two of each four
// precede the last two: this is how gemm_bf16.cu and fp8.cu distribute columns to lanes. Two columns from an
// even one on stay together.

// Index in panels [columns / 64][panels]; `panels` is ceil(rows / 8).
__device__ __forceinline__ u64 panel_index(u32 row, u32 column, u32 panels) {
  const u32 four = column % 32 / 4;
  const u32 set = column % 64 / 32 * 2 + four % 2;
  const u32 inside = set * 128 + column % 4 / 2 * 64 + row % 8 * 8 + four / 2 * 2 + column % 2;
  return ((u64)(column / 64) * panels + row / 8) * 512 + inside;
}

// Index of an input of a product. `panels` is 0 if rows follow one another.
__device__ __forceinline__ u64 input_index(u32 row, u32 column, u32 width, u32 panels) {
  return panels == 0 ? (u64)row * width + column : panel_index(row, column, panels);
}

// Writes two columns from an even one on, rounded.
__device__ __forceinline__ void write_input_pair(bf16* to, u32 row, u32 column, u32 width, u32 panels, float a, float b) {
  *(u32*)(to + input_index(row, column, width, panels)) = pack(narrow(a), narrow(b));
}

// Writes four columns from a multiple of 4 on, rounded.
__device__ __forceinline__ void write_input(bf16* to, u32 row, u32 column, u32 width, u32 panels, float a, float b, float c,
                                            float d) {
  u32* words = (u32*)(to + input_index(row, column, width, panels));
  words[0] = pack(narrow(a), narrow(b));
  words[panels == 0 ? 1 : 32] = pack(narrow(c), narrow(d));
}
