// What a kernel of cooperating warpgroups needs on compute capability 9.0 (PTX ISA: wgmma, mbarrier,
// cp.async.bulk, setmaxnreg). The emulator has its own version (emulator/warpgroup.hpp).

#ifndef EMULATED
// An address in shared memory.
typedef u32 SharedAddress;

__device__ __forceinline__ SharedAddress shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// Makes the barrier at `at` complete a phase after `arrivals` arrivals and all bytes that were announced.
__device__ __forceinline__ void barrier_init(SharedAddress at, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine. A __syncthreads follows.
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive(SharedAddress at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

// Arrives at the barrier that has this place in the shared memory of block `block` of the cluster.
__device__ __forceinline__ void barrier_arrive_in(u32 block, SharedAddress at) {
  asm volatile(
      "{\n"
      ".reg .u32 place;\n"
      "mapa.shared::cluster.u32 place, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [place];\n"
      "}" ::"r"(at), "r"(block) : "memory");
}

// This block's number in its cluster.
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Waits until all threads of the cluster have called it. What they wrote before is visible after.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::: "memory");
}

// Arrives, and announces `bytes` of copies.
__device__ __forceinline__ void barrier_expect(SharedAddress at, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

// Waits until the phase of this parity is complete. The first phase has parity 0; that before it is complete.
__device__ __forceinline__ void barrier_wait(SharedAddress at, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred is_complete;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 is_complete, [%0], %1;\n"
      "@is_complete bra complete;\n"
      "bra again;\n"
      "complete:\n"
      "}" ::"r"(at), "r"(parity) : "memory");
}

// Starts a copy of `bytes`, a multiple of 16, from global to shared memory. The barrier counts them as they
// arrive.
__device__ __forceinline__ void copy_bulk(SharedAddress to, const void* from, u32 bytes, SharedAddress barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}

// The same to all blocks of the cluster whose bit is set in `blocks`: the bytes arrive at this place of each, and
// are counted by its barrier.
__device__ __forceinline__ void copy_bulk_to(u32 blocks, SharedAddress to, const void* from, u32 bytes, SharedAddress barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"((unsigned short)blocks)
      : "memory");
}

// Sets the number of registers of each thread of this warpgroup; all its threads take part.
template <int COUNT>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// A number that is the same in all lanes of the warp, which need one register for it together.
__device__ __forceinline__ u32 uniform(u32 x) { return __shfl_sync(0xffffffffu, x, 0); }

// Orders what this thread wrote to shared memory before copies and products that others start after a barrier.
__device__ __forceinline__ void writes_ready() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Matrices of 8 rows x 16 bytes, each contiguous in shared memory, as the operand of an instruction, from a set of
// 16 on: ALONG_K bytes to the next 8 numbers of K, ACROSS bytes to the next 8 rows, no swizzle.
typedef u64 Operand;
template <u32 ALONG_K, u32 ACROSS>
__device__ __forceinline__ Operand operand_at(SharedAddress at) {
  static_assert(ALONG_K % 16 == 0 && ACROSS % 16 == 0 && ALONG_K < 1 << 18 && ACROSS < 1 << 18, "fits its field");
  return (u64)((at & 0x3ffffu) >> 4) | (u64)(ALONG_K >> 4) << 16 | (u64)(ACROSS >> 4) << 32;
}
// The same operand from `bytes` further on, a multiple of 16, still in shared memory.
__device__ __forceinline__ Operand operand_after(Operand operand, u32 bytes) {
  return (operand & 0xffffffff00000000ull) | (u32)((u32)operand + (bytes >> 4));
}
// Panels of 8 rows x 64 numbers.
__device__ __forceinline__ Operand panels_at(SharedAddress at) { return operand_at<128, 1024>(at); }

// Orders the registers of `acc` before the instructions that add to them, or after those that have.
template <int LEN>
__device__ __forceinline__ void order_registers(float (&acc)[LEN]) {
#pragma unroll
  for (int i = 0; i < LEN; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}
template <int LEN>
__device__ __forceinline__ void order_registers(i32 (&acc)[LEN]) {
#pragma unroll
  for (int i = 0; i < LEN; ++i) asm volatile("" : "+r"(acc[i])::"memory");
}
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most LEFT committed groups of products are in flight.
template <int LEFT>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// acc += weights rows^T over a set of 16 of K: 64 channels x ROWS rows, f32 sums. The warpgroup's thread
// 32 w + 4 g + t holds channels 16 w + g and 16 w + g + 8 of rows 2 t and 2 t + 1 of each group of 8 rows:
// acc[4 j + i] is channel + 8 (i / 2), row 8 j + 2 t + i % 2. Asynchronous.
template <int ROWS>
__device__ __forceinline__ void multiply_panels(float (&acc)[ROWS / 2], Operand weights, Operand rows);

// The same over a set of 32 int8 of K, exact in i32. A set takes as many bytes as one of 16 bf16.
template <int ROWS>
__device__ __forceinline__ void multiply_panels(i32 (&acc)[ROWS / 2], Operand weights, Operand rows);

// As the first with the weights in registers: of channels 16 w + g and 16 w + g + 8, numbers 2 t and 2 t + 1 of the
// set (weights[0], weights[1]) and numbers 2 t + 8 and 2 t + 9. They stay until the products are complete.
template <int ROWS>
__device__ __forceinline__ void multiply_lanes(float (&acc)[ROWS / 2], const u32 (&weights)[4], Operand rows);

#define REGISTERS_10(t)                                                                                             \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9"
#define REGISTERS_FIRST_10 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9"
#define SUMS_4(i) "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3])
#define SUMS_20(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12), SUMS_4(i + 16)
// REGISTERS names the registers of `acc`, NEXT the five after them.
#define MULTIPLY_PANELS(ROWS, REGISTERS, NEXT_0, NEXT_1, NEXT_2, NEXT_3, NEXT_4, ...)                               \
  template <>                                                                                                       \
  __device__ __forceinline__ void multiply_panels<ROWS>(float (&acc)[ROWS / 2], Operand weights, Operand rows) {    \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #ROWS "k16.f32.bf16.bf16 {" REGISTERS "}, " NEXT_0 ", " NEXT_1  \
                 ", 1, 1, 1, 0, 0;"                                                                                 \
                 : __VA_ARGS__                                                                                      \
                 : "l"(weights), "l"(rows));                                                                        \
  }                                                                                                                 \
  template <>                                                                                                       \
  __device__ __forceinline__ void multiply_lanes<ROWS>(float (&acc)[ROWS / 2], const u32 (&weights)[4],             \
                                                       Operand rows) {                                              \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #ROWS "k16.f32.bf16.bf16 {" REGISTERS "}, {" NEXT_0 ", " NEXT_1 \
                 ", " NEXT_2 ", " NEXT_3 "}, " NEXT_4 ", 1, 1, 1, 0;"                                               \
                 : __VA_ARGS__                                                                                      \
                 : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(rows));                  \
  }
MULTIPLY_PANELS(8, "%0, %1, %2, %3", "%4", "%5", "%6", "%7", "%8", SUMS_4(0))
MULTIPLY_PANELS(16, "%0, %1, %2, %3, %4, %5, %6, %7", "%8", "%9", "%10", "%11", "%12", SUMS_4(0), SUMS_4(4))
MULTIPLY_PANELS(40, REGISTERS_FIRST_10 ", " REGISTERS_10(1), "%20", "%21", "%22", "%23", "%24", SUMS_20(0))
MULTIPLY_PANELS(64, REGISTERS_FIRST_10 ", " REGISTERS_10(1) ", " REGISTERS_10(2) ", %30, %31", "%32", "%33", "%34", "%35", "%36",
                SUMS_20(0), SUMS_4(20), SUMS_4(24), SUMS_4(28))
MULTIPLY_PANELS(80, REGISTERS_FIRST_10 ", " REGISTERS_10(1) ", " REGISTERS_10(2) ", " REGISTERS_10(3), "%40", "%41",
                "%42", "%43", "%44", SUMS_20(0), SUMS_20(20))
MULTIPLY_PANELS(128,
                REGISTERS_FIRST_10 ", " REGISTERS_10(1) ", " REGISTERS_10(2) ", " REGISTERS_10(3) ", " REGISTERS_10(4) ", "
                REGISTERS_10(5) ", %60, %61, %62, %63",
                "%64", "%65", "%66", "%67", "%68", SUMS_20(0), SUMS_20(20), SUMS_20(40), SUMS_4(60))

#define EXACT_4(i) "+r"(acc[i]), "+r"(acc[i + 1]), "+r"(acc[i + 2]), "+r"(acc[i + 3])
#define EXACT_20(i) EXACT_4(i), EXACT_4(i + 4), EXACT_4(i + 8), EXACT_4(i + 12), EXACT_4(i + 16)
#define MULTIPLY_INT8(ROWS, REGISTERS, NEXT_0, NEXT_1, ...)                                                         \
  template <>                                                                                                       \
  __device__ __forceinline__ void multiply_panels<ROWS>(i32 (&acc)[ROWS / 2], Operand weights, Operand rows) {      \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #ROWS "k32.s32.s8.s8 {" REGISTERS "}, " NEXT_0 ", " NEXT_1      \
                 ", 1;"                                                                                             \
                 : __VA_ARGS__                                                                                      \
                 : "l"(weights), "l"(rows));                                                                        \
  }
// The instruction has no form of 40 rows.
MULTIPLY_INT8(8, "%0, %1, %2, %3", "%4", "%5", EXACT_4(0))
MULTIPLY_INT8(16, "%0, %1, %2, %3, %4, %5, %6, %7", "%8", "%9", EXACT_4(0), EXACT_4(4))
MULTIPLY_INT8(48, REGISTERS_FIRST_10 ", " REGISTERS_10(1) ", %20, %21, %22, %23", "%24", "%25", EXACT_20(0), EXACT_4(20))
MULTIPLY_INT8(80, REGISTERS_FIRST_10 ", " REGISTERS_10(1) ", " REGISTERS_10(2) ", " REGISTERS_10(3), "%40", "%41",
              EXACT_20(0), EXACT_20(20))
MULTIPLY_INT8(128,
              REGISTERS_FIRST_10 ", " REGISTERS_10(1) ", " REGISTERS_10(2) ", " REGISTERS_10(3) ", " REGISTERS_10(4) ", "
              REGISTERS_10(5) ", %60, %61, %62, %63",
              "%64", "%65", EXACT_20(0), EXACT_20(20), EXACT_20(40), EXACT_4(60))
#endif
