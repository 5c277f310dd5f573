// All-reduce of tensor-parallel ranks whose devices access each other's memory, in one launch a rank. Adds in
// the order of sum_ranks (ranks.cu), with equal bits.

#ifndef EMULATED
// Accesses that order memory between devices, and with the host.
__device__ __forceinline__ u32 load_acquire_system(const u32* from) {
  u32 x;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ void store_release_system(u32* to, u32 x) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

__device__ __forceinline__ u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
// When the wait of this launch began. In the emulator, which runs a block again from its beginning, that was
// earlier than now.
__device__ __forceinline__ u64 wait_began() { return nanoseconds(); }
// Whether this block ends now and runs again later, so that the launch that it waits for can run.
__device__ __forceinline__ bool runs_again() { return false; }
#endif

// Memory of a rank, in words; the same numbers are in ops/all_reduce.rs. Block b of a rank works with the
// blocks b of the other ranks only, and has of each of these:
//   arrivals [64][8]: the last sum for which rank r has put its part in place; rank r writes it
//   turns [64]: see below
//   regions [64][2][region] f32: the rank's parts of two successive sums
constexpr u32 NUM_BLOCKS = 64, NUM_RANKS = 8, ARRIVALS = 0, TURNS = NUM_BLOCKS * NUM_RANKS;
constexpr u32 REGIONS = TURNS + 2 * NUM_BLOCKS;

// Number of the last sum that a block has completed, modulo 2^32, and whether it gave up waiting since. It is
// in memory, not a parameter: graphs replay a launch with the parameters that it was captured with.
struct Turn {
  u32 sum;
  u32 gave_up;
};

// Polls before a wait looks at the clock and at the host's memory, which takes a microsecond.
constexpr u32 POLLS_PER_LOOK = 256;

enum Outcome { ARRIVED = 0, RUNS_AGAIN = 1, GAVE_UP = 2 };

// Waits until `arrival` has reached the number `sum`. The other rank may be one sum ahead, never more, and
// numbers wrap around: the difference is compared. Gives up when the host has set *stop, or after `patience`
// nanoseconds; it then sets *stop to `reason`.
__device__ __forceinline__ u32 wait_for(const u32* arrival, u32 sum, u32* stop, u64 patience, u32 reason) {
  u64 began = 0;
  for (u32 polls = 1;; ++polls) {
    if ((i32)(load_acquire_system(arrival) - sum) >= 0) return ARRIVED;
    if (polls % POLLS_PER_LOOK != 0) continue;
    if (load_acquire_system(stop) != 0) return GAVE_UP;
    if (began == 0) began = wait_began();
    if (nanoseconds() - began > patience) {
      store_release_system(stop, reason);
      return GAVE_UP;
    }
    if (runs_again()) return RUNS_AGAIN;
  }
}

__device__ __forceinline__ uint4 add_four(uint4 a, uint4 b) {
  return make_uint4(__float_as_uint(__uint_as_float(a.x) + __uint_as_float(b.x)),
                    __float_as_uint(__uint_as_float(a.y) + __uint_as_float(b.y)),
                    __float_as_uint(__uint_as_float(a.z) + __uint_as_float(b.z)),
                    __float_as_uint(__uint_as_float(a.w) + __uint_as_float(b.w)));
}

// One of eight pointers, without an array, which would be in local memory.
#define RANK_OF(r)                                                              \
  ((r) < 4 ? ((r) < 2 ? ((r) == 0 ? m0 : m1) : ((r) == 2 ? m2 : m3))            \
           : ((r) < 6 ? ((r) == 4 ? m4 : m5) : ((r) == 6 ? m6 : m7)))

// sum[i] = the tree of docs/contract.md C2 over the ranks' parts; ranks 1, 2, 4 or 8. m0 .. m7: memory of
// each rank, null past the last one. part, sum: [len] f32 of this rank; len a multiple of 4. Block b adds
// `chunk` numbers from b * chunk on: a multiple of 4, at most `region`. *stop: in the host's memory, 0 until
// a rank is given up. All ranks launch the same sums with the same grids, in the same order. Grid (blocks),
// at most 64, 256 threads: with at most 80 registers, 22 multiprocessors hold all blocks, so none waits for
// one that cannot begin.
//
// Parts of two successive sums are in different regions, and this is enough: no second barrier is needed. A
// block writes its region of sum s again for sum s + 2. By then it has seen arrival s + 1 of every rank,
// which a rank's same block writes in its launch of sum s + 1, so after its launch of sum s, and with it all
// reads of sum s, has ended. Regions and counters belong to a block, so sums may have different grids.
//
// A block that gave up never writes again: no other rank may take a later part for the one that it awaits.
// Its sums are then wrong, and so is whatever other ranks compute from them. *stop is one word for all ranks:
// the host, which finds it set, uses no result of any rank.
extern "C" __global__ void __launch_bounds__(256)
    all_reduce(u32* m0, u32* m1, u32* m2, u32* m3, u32* m4, u32* m5, u32* m6, u32* m7, const float* part, float* sum,
               u32* stop, u64 patience, u32 len, u32 chunk, u32 region, u32 rank, u32 ranks) {
  __shared__ u32 outcomes[NUM_RANKS];
  const u32 block = blockIdx.x, t = threadIdx.x;
  u32* own = RANK_OF(rank);
  Turn* turn = (Turn*)(own + TURNS) + block;
  const Turn last = *turn;
  if (last.gave_up) return;
  const u32 number = last.sum + 1, first = block * chunk, end = min(first + chunk, len);
  const u64 place = REGIONS + ((u64)block * 2 + number % 2) * region;

  for (u32 i = first + 4 * t; i < end; i += 4 * blockDim.x) *(uint4*)(own + place + (i - first)) = load_16(part + i);
  // The release below covers what other threads of the block have written before this barrier.
  __syncthreads();
  if (t < ranks) {
    store_release_system(RANK_OF(t) + ARRIVALS + block * NUM_RANKS + rank, number);
    outcomes[t] = wait_for(own + ARRIVALS + block * NUM_RANKS + t, number, stop, patience, 1 + t);
  }
  __syncthreads();
  u32 outcome = ARRIVED;
  for (u32 r = 0; r < ranks; ++r) outcome = max(outcome, outcomes[r]);
  if (outcome != ARRIVED) {
    if (outcome == GAVE_UP && t == 0) turn->gave_up = 1;
    return;
  }

#define PART(m) load_16(m + at)
  for (u32 i = first + 4 * t; i < end; i += 4 * blockDim.x) {
    const u64 at = place + (i - first);
    uint4 total = PART(m0);
    if (ranks >= 2) total = add_four(total, PART(m1));
    if (ranks >= 4) total = add_four(total, add_four(PART(m2), PART(m3)));
    if (ranks == 8) total = add_four(total, add_four(add_four(PART(m4), PART(m5)), add_four(PART(m6), PART(m7))));
    *(uint4*)(sum + i) = total;
  }
#undef PART
#undef RANK_OF
  if (t == 0) turn->sum = number;
}
