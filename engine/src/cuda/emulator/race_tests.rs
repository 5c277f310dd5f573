//! Tests of the emulator with kernels that depend on the order of threads or blocks: it reports planted
//! races, and does not report the corrected kernels.

use super::super::executor::{Executor, Params, Tensor};
use super::super::on_host::{self, Check};
use super::super::sources::Kernel;
use super::Emulator;

/// Kernels of 64 threads over `out` `[blocks * 64]`.
const KERNELS: &str = r#"
#define KERNEL(name) extern "C" __global__ void name(unsigned* out)
#define AT out[blockIdx.x * 64 + t]

KERNEL(no_barrier) {
  __shared__ unsigned numbers[64];
  const unsigned t = threadIdx.x;
  numbers[t] = t;
  AT = numbers[63 - t];
}
KERNEL(shuffle_for_a_barrier) {
  __shared__ unsigned numbers[64];
  const unsigned t = threadIdx.x;
  numbers[t] = t;
  __shfl_xor_sync(0xffffffffu, t, 1);
  AT = numbers[t ^ 1];
}
KERNEL(written_too_soon) {
  __shared__ unsigned numbers[64];
  const unsigned t = threadIdx.x;
  numbers[t] = t;
  __syncthreads();
  const unsigned other = numbers[63 - t];
  numbers[t] = other;
  __syncthreads();
  AT = numbers[t];
}
KERNEL(two_writers) {
  __shared__ unsigned number;
  const unsigned t = threadIdx.x;
  if (t % 32 == 0) number = t;
  __syncthreads();
  AT = number;
}
KERNEL(copied_by_another) {
  __shared__ uint4 chunks[64];
  const unsigned t = threadIdx.x;
  cp_async_16(chunks + t, out, false);
  cp_async_commit();
  cp_async_wait<0>();
  AT = chunks[63 - t].x;
}
KERNEL(blocks_that_meet) {
  const unsigned t = threadIdx.x;
  out[t] = blockIdx.x;
}
KERNEL(with_barriers) {
  __shared__ unsigned numbers[64];
  __shared__ unsigned char bytes[64];
  const unsigned t = threadIdx.x;
  numbers[t] = t;
  bytes[t] = (unsigned char)t;
  __syncthreads();
  const unsigned other = numbers[63 - t];
  __syncthreads();
  numbers[t] = other + bytes[(t + 1) % 64];
  AT = numbers[t];
}
KERNEL(order_of_threads) {
  __shared__ unsigned next;
  const unsigned t = threadIdx.x;
  if (t == 0) next = 0;
  __syncthreads();
  AT = next++;
}
// The last of the two blocks adds what both have written. A counter is zero again after a launch.
static unsigned counter;
#define LAST_BLOCK(BEFORE, FENCE, THEN, IS_LAST)   \
  __shared__ unsigned num_earlier;                 \
  const unsigned t = threadIdx.x;                  \
  AT = t;                                          \
  BEFORE;                                          \
  if (t == 0) {                                    \
    FENCE;                                         \
    num_earlier = atomicInc(&counter, 1);          \
    THEN;                                          \
  }                                                \
  __syncthreads();                                 \
  if (IS_LAST) AT = out[t] + out[64 + t]
KERNEL(last_block) { LAST_BLOCK(__syncthreads(), __threadfence(), __threadfence(), num_earlier == 1); }
KERNEL(any_block) { LAST_BLOCK(__syncthreads(), __threadfence(), __threadfence(), true); }
KERNEL(first_block) { LAST_BLOCK(__syncthreads(), __threadfence(), __threadfence(), num_earlier == 0); }
KERNEL(counted_without_barrier) { LAST_BLOCK((void)0, __threadfence(), __threadfence(), num_earlier == 1); }
KERNEL(counted_without_fence) { LAST_BLOCK(__syncthreads(), (void)0, __threadfence(), num_earlier == 1); }
KERNEL(fenced_too_soon) { LAST_BLOCK(__threadfence(); __syncthreads(), (void)0, __threadfence(), num_earlier == 1); }
KERNEL(read_without_fence) { LAST_BLOCK(__syncthreads(), __threadfence(), (void)0, num_earlier == 1); }
KERNEL(written_after_counting) {
  LAST_BLOCK(__syncthreads(), __threadfence(), __threadfence(), num_earlier == 1);
  else AT = 2 * t;
}
KERNEL(counter_as_number) {
  LAST_BLOCK(__syncthreads(), __threadfence(), __threadfence(), num_earlier == 1);
  if (t == 0) counter = 0;
}
static unsigned next_block;
KERNEL(order_of_blocks) {
  const unsigned t = threadIdx.x;
  if (t == 0) AT = next_block++;
}
"#;

macro_rules! kernels {
    ($($name:ident),+) => {
        $(
            #[expect(non_upper_case_globals, reason = "named as the kernel is")]
            static $name: Kernel = Kernel {
                name: stringify!($name),
                threads: 64,
                max_registers: 32,
                shared_bytes: 0,
                cluster: 1,
                main_loop: None,
                loads_in_flight: 0,
                warpgroups: None,
                is_shared_aligned: false,
            };
        )+

        fn text() -> String {
            let entry = |name| format!("extern \"C\" void run_{name}(void** p) {{ emulator::entry<{name}>(p); }}\n");
            on_host::shim() + KERNELS + &[$(stringify!($name)),+].map(entry).concat()
        }
    };
}

kernels!(
    no_barrier,
    shuffle_for_a_barrier,
    written_too_soon,
    two_writers,
    copied_by_another,
    blocks_that_meet,
    with_barriers,
    order_of_threads,
    order_of_blocks,
    last_block,
    any_block,
    first_block,
    counted_without_barrier,
    counted_without_fence,
    fenced_too_soon,
    read_without_fence,
    written_after_counting,
    counter_as_number
);

/// Runs a kernel of two blocks; returns its output, or the error.
fn run(emulator: &mut Emulator, kernel: &'static Kernel) -> Result<Vec<u32>, String> {
    let mut out = Tensor::<_, u32>::zeros(emulator, 2 * 64, "out").unwrap();
    let params = Params::default().write(&mut out);
    // SAFETY: the kernels write two blocks of 64 numbers.
    let launched = unsafe { emulator.launch(kernel, [2, 1, 1], &mut { params }) };
    launched.map_err(|error| error.to_string())?;
    Ok(out.read(emulator, 0..2 * 64).unwrap())
}

#[test]
fn planted_races_are_found() {
    let mut emulator = Emulator::of(&text(), Check::Races);
    for (kernel, says) in [
        (&no_barrier, "a read beside a write"),
        (&shuffle_for_a_barrier, "a read beside a write"),
        (&written_too_soon, "a write beside a read"),
        (&two_writers, "two writes"),
        (&copied_by_another, "a read beside a write"),
        (&blocks_that_meet, "two writes"),
        (&order_of_threads, "beside a"),
        (&any_block, "a write beside a read"),
        (&first_block, "a write beside a read"),
        (&counted_without_barrier, "a read beside a write"),
        (&counted_without_fence, "a read beside a write"),
        (&fenced_too_soon, "a read beside a write"),
        (&read_without_fence, "a read beside a write"),
        (&written_after_counting, "a read beside a write"),
        (&counter_as_number, "an access beside a count"),
    ] {
        for order in 0..8 {
            emulator.order(order);
            let said = run(&mut emulator, kernel).expect_err(kernel.name);
            // The order decides which of the two accesses comes first.
            let either = said.contains(says) || (said.contains(" beside a ") && says.contains(" beside a "));
            assert!(said.contains(kernel.name) && either, "{}: {said}", kernel.name);
        }
        // A race is reported only once.
        assert!(run(&mut emulator, &with_barriers).is_ok(), "after {}", kernel.name);
    }
}

/// The last block may read what the others wrote, whichever it is, launch after launch.
#[test]
fn a_counter_with_fences_orders_blocks() {
    let mut emulator = Emulator::of(&text(), Check::Races);
    let mut last = std::collections::BTreeSet::new();
    for order in 0..8 {
        emulator.order(order);
        let out = run(&mut emulator, &last_block).unwrap();
        let of_block = |block: usize| (0..64).all(|t| out[block * 64 + t] == 2 * t as u32);
        assert!(of_block(0) != of_block(1), "one block adds: {out:?}");
        last.insert(of_block(0));
    }
    assert_eq!(last.len(), 2, "either block is the last one in some order");
}

#[test]
fn threads_and_blocks_run_in_many_orders() {
    let mut emulator = Emulator::of(&text(), Check::Nothing);
    let mut seen = std::collections::BTreeSet::new();
    let mut first_blocks = std::collections::BTreeSet::new();
    for order in 0..8 {
        emulator.order(order);
        let turns = run(&mut emulator, &order_of_threads).unwrap();
        let mut sorted = turns[..64].to_vec();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..64).collect::<Vec<u32>>(), "every thread has its turn once");
        seen.insert(turns);
        let blocks = run(&mut emulator, &order_of_blocks).unwrap();
        first_blocks.insert(blocks[0] < blocks[64]);
        emulator.order(order);
        let again = run(&mut emulator, &order_of_threads).unwrap();
        assert!(seen.contains(&again), "an order is the same at every run");
    }
    assert_eq!(seen.len(), 8);
    assert_eq!(first_blocks.len(), 2, "either block comes first in some order");
}
