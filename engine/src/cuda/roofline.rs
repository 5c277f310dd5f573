//! Model of step times on an H100, for docs/design/gpu.md. `cargo nextest run -p outrider-engine --lib
//! cuda::roofline --no-capture` prints its table. Blocks, bytes and launches are those of the code. Rates,
//! latencies and the time per unit of work are assumptions, named below. **Nothing here was measured on a
//! GPU**: expect an error of 30 % in either direction, and more for kernels that overlap.
//!
//! A kernel takes the longest of: its bytes divided by memory bandwidth, its bytes divided by cache
//! bandwidth, its operations divided by the rate of the instructions it uses, and the chain of dependent
//! loads of one warp times the number of waves.

mod counted;
mod fp8;

use cpu_kernels::{HeadLayout, KSlices, Segment};

use super::gpu_check::step_work::{H100, StepWork};
use super::kv_budget::PASS_LIMITS;
use super::ops::{Limits, OwnBlocks, Tiling, Variant, count_attention, product_launch};
use super::ranks::SumPhases;
use crate::forward_batch::PassLimits;

pub(super) use counted::two_layers;

/// Rates per second (assumptions): achieved memory bandwidth in bytes, cache bandwidth in bytes, operations
/// of `mma.sync` with operands in shared memory.
const MEMORY_BANDWIDTH: f64 = 3.0e12;
const CACHE_BANDWIDTH: f64 = 5.5e12;
const MMA_RATE: f64 = 3.6e14;
/// Latencies in seconds (assumptions): a load from memory while others are in flight, a load from the cache,
/// the gap between two launches, a collective of eight ranks before its first byte. `LINK_BANDWIDTH`: bytes
/// per second between two GPUs.
const MEMORY_LATENCY: f64 = 0.6e-6;
const CACHE_LATENCY: f64 = 0.2e-6;
const LAUNCH_GAP: f64 = 0.8e-6;
const COLLECTIVE_LATENCY: f64 = 12e-6;
const LINK_BANDWIDTH: f64 = 3.0e11;
/// Double-precision operations per second, and operations per token of a draw (assumptions).
const FP64_RATE: f64 = 1.4e13;
const FP64_PER_TOKEN: f64 = 40.0;
const MULTIPROCESSORS: f64 = 132.0;
/// Instructions per second of each of a multiprocessor's four schedulers, at most (an assumption: the clock
/// rate).
const CLOCK: f64 = 1.755e9;
/// Attention with heads of 128, from the machine code for sm_90 (`make kernels-check`): instructions of a
/// warp per 16 keys, and resident blocks per multiprocessor, for blocks of one warp and of four warps.
const INSTRUCTIONS_PER_16_KEYS: f64 = 801.0;
const RESIDENT_BLOCKS: f64 = 9.0;
const RESIDENT_WIDE_BLOCKS: f64 = 2.0;

/// The earlier version of the kernels, or the current one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Code {
    Before,
    Now,
}

struct Model {
    name: &'static str,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    intermediate: usize,
    layers: usize,
}

const MODELS: [Model; 2] = [
    Model { name: "8B", hidden: 4096, heads: 32, kv_heads: 8, intermediate: 14_336, layers: 32 },
    Model { name: "70B", hidden: 8192, heads: 64, kv_heads: 8, intermediate: 28_672, layers: 80 },
];
const VOCAB: usize = 128_256;
const HEAD_DIM: usize = 128;

/// Shape of a step: `sequences` with `rows_of_each` rows after `context` tokens, on `ranks` ranks. All rows
/// of short sequences are drawn, and the last row of each prompt.
#[derive(Debug, Clone, Copy)]
struct Step {
    ranks: usize,
    sequences: usize,
    rows_of_each: usize,
    context: usize,
}

impl Step {
    fn rows(self) -> usize {
        self.sequences * self.rows_of_each
    }

    fn drawn(self) -> usize {
        if self.rows_of_each > 8 { self.sequences } else { self.rows() }
    }
}

/// Weight matrices of a rank: n and K-slices.
fn matrices(model: &Model, ranks: usize) -> [(usize, KSlices); 4] {
    let owned = |k: usize, unit: usize| KSlices::eighths(k, unit).owned(0..8 / ranks).rebased();
    [
        ((model.heads + 2 * model.kv_heads) * HEAD_DIM / ranks, KSlices::whole(model.hidden)),
        (model.hidden, owned(model.heads * HEAD_DIM, HEAD_DIM)),
        (2 * model.intermediate / ranks, KSlices::whole(model.hidden)),
        (model.hidden, owned(model.intermediate, 32)),
    ]
}

/// Seconds of a bf16 GEMM.
fn product(code: Code, rows: usize, (n, slices): &(usize, KSlices)) -> f64 {
    let k = slices.end();
    let weights = (2 * n * k) as f64;
    let forced = Variant::Few { rows: if rows > 8 { 32 } else { 8 }, channels: 16 };
    let blocks = product_launch((rows, *n), slices, (code == Code::Before).then_some(forced));
    let count = (blocks.grid[0] * blocks.grid[1]) as f64;
    let passes = blocks.grid[0] as f64;
    let inputs = (2 * rows * k) as f64;
    // Earlier, large weights left the cache before the next row block read them, and were read again. Now row
    // blocks of the same weights are neighbours in the grid.
    let again = if code == Code::Before && weights > 25e6 { passes } else { 1.0 };
    let memory = (weights * again + inputs) / MEMORY_BANDWIDTH;
    let out = (4 * rows * n) as f64 / CACHE_BANDWIDTH;
    if let Variant::Tiled { rows: height } = blocks.variant {
        let waves = (count / MULTIPROCESSORS).ceil() * MULTIPROCESSORS;
        let operations = waves * 2.0 * (128 * height * k) as f64 / MMA_RATE;
        let cache = count * (2 * (128 + height) * k) as f64 / CACHE_BANDWIDTH;
        // One level of the contract's summation tree is kept in the outputs: written and read once more.
        let out = if height == 128 { 3.0 * out } else { out };
        return memory.max(operations).max(cache) + out + MEMORY_LATENCY;
    }
    let Variant::Few { rows: height, channels } = blocks.variant else {
        unreachable!("the other one was above")
    };
    // Steps of 32 numbers of K that a warp takes in an iteration, and the time of an iteration, from the
    // machine code.
    let (steps, trips) = match (code, height) {
        (Code::Before, 8) => (4, 4.0 * MEMORY_LATENCY),
        (Code::Before, _) => (4, 4.0 * MEMORY_LATENCY + 16.0 * CACHE_LATENCY),
        (Code::Now, 8) if channels < 16 => (8, MEMORY_LATENCY + 0.1e-6),
        (Code::Now, _) => (4, MEMORY_LATENCY + 0.1e-6),
    };
    // Earlier, one warp per slice of eight; a rank owns only some of the slices.
    let slices_used = slices.ranges().iter().filter(|slice| !slice.is_empty()).count().max(1);
    let (active, of_warp) = if slices_used == 1 && slices.ranges().len() == 1 {
        (8, k / 8)
    } else {
        (slices_used, k / slices_used)
    };
    let (active, count) = match code {
        Code::Before => (active as f64, passes * (*n as f64 / 16.0).ceil()),
        Code::Now => (8.0, count),
    };
    let resident: f64 = match (code, height) {
        (Code::Before, 8) => 5.0,
        (Code::Before, _) | (Code::Now, 8) => 3.0,
        (Code::Now, _) => 2.0,
    };
    let waves = (count / (MULTIPROCESSORS * resident)).ceil();
    let chain = waves * (of_warp as f64 / (32 * steps) as f64).ceil() * trips;
    let cache = count * active * (2 * (channels + height) * of_warp) as f64 / CACHE_BANDWIDTH;
    memory.max(cache).max(chain) + out + MEMORY_LATENCY
}

/// The blocks of one attention launch.
struct AttentionBlocks {
    /// Number of blocks, number of 16-key units that all of them process, and resident blocks per
    /// multiprocessor.
    blocks: f64,
    key_blocks: f64,
    resident: f64,
    /// Seconds before a block's first keys, and seconds per 16 keys.
    prologue: f64,
    of_block: f64,
}

impl AttentionBlocks {
    /// Seconds of a block's dependent chain, times the number of waves.
    fn chain(&self) -> f64 {
        if self.blocks == 0.0 {
            return 0.0;
        }
        let waves = (self.blocks / (MULTIPROCESSORS * self.resident)).ceil();
        waves * (self.prologue + self.key_blocks / self.blocks * self.of_block)
    }
}

/// Seconds of attention and of merging its splits.
fn attention(code: Code, model: &Model, step: Step) -> f64 {
    let (kv_heads, group) = ((model.kv_heads / step.ranks).max(1), model.heads / model.kv_heads);
    let len = step.context + step.rows_of_each;
    let splits = len.div_ceil(128);
    let rows_of_splits = step.rows() as f64 * (model.heads / step.ranks) as f64;
    let kv = (step.sequences * len * kv_heads * 4 * HEAD_DIM) as f64;
    let (sums, partial) = match code {
        Code::Before => {
            let queries = step.rows_of_each * group;
            // A row of a prompt attends to half of the prompt on average.
            let seen = (step.context + step.rows_of_each.div_ceil(2)) as f64;
            let blocks = (step.sequences * queries.div_ceil(16) * kv_heads) as f64 * (seen / 128.0).ceil();
            let key_blocks = blocks * (seen / 16.0).min(8.0).ceil();
            let prologue = if queries.min(16) > 4 { 19e-6 } else { 8e-6 };
            let work = AttentionBlocks { blocks, key_blocks, resident: 15.0, prologue, of_block: 2.9e-6 };
            (
                work.chain().max(key_blocks * 16.0 * (4 * HEAD_DIM) as f64 / CACHE_BANDWIDTH),
                rows_of_splits * splits as f64 * 130.0 * 4.0,
            )
        }
        Code::Now => attention_now((group * kv_heads, kv_heads), step),
    };
    // The merge uses one warp per row for few splits and eight for many. Second value: resident blocks per
    // multiprocessor.
    let (of_splits, resident) = match code {
        Code::Before => (0.55e-6 * splits as f64, 32.0),
        Code::Now if splits <= 8 => (2.0 * MEMORY_LATENCY, 18.0),
        Code::Now => (MEMORY_LATENCY + 0.7e-6 * splits.div_ceil(32) as f64, 6.0),
    };
    let merge = 2e-6 + of_splits * (rows_of_splits / (MULTIPROCESSORS * resident)).ceil();
    sums.max((kv + partial) / MEMORY_BANDWIDTH) + merge.max(partial / MEMORY_BANDWIDTH)
}

/// Seconds of the attention kernels without memory traffic, and bytes of partial results, both counted on the
/// launched blocks.
fn attention_now((num_heads, num_kv_heads): (usize, usize), step: Step) -> (f64, f64) {
    let layout = HeadLayout { num_heads, num_kv_heads, head_dim: HEAD_DIM };
    let segment = |i: usize| Segment {
        rows: i * step.rows_of_each..(i + 1) * step.rows_of_each,
        start: step.context as u32,
        block_table: &[],
        tree: None,
    };
    let segments: Vec<Segment<'_>> = (0..step.sequences).map(segment).collect();
    let group = num_heads / num_kv_heads;
    let tiling = Tiling::new(
        &segments,
        (&vec![0; segments.len()], &OwnBlocks::default()),
        (group, None),
        Limits::of(layout),
    );
    let counted = count_attention(&tiling, layout);
    let chain: f64 = [RESIDENT_BLOCKS, RESIDENT_WIDE_BLOCKS]
        .into_iter()
        .zip(counted.blocks.into_iter().zip(counted.key_blocks))
        .map(|(resident, (blocks, key_blocks))| {
            let (blocks, key_blocks) = (blocks as f64, key_blocks as f64);
            AttentionBlocks { blocks, key_blocks, resident, prologue: 1.5e-6, of_block: 0.6e-6 }.chain()
        })
        .sum();
    let warp_blocks = counted.warp_blocks as f64;
    let issue = warp_blocks * INSTRUCTIONS_PER_16_KEYS / (MULTIPROCESSORS * 4.0 * CLOCK);
    // Scores and values, with queries and probabilities in two halves each.
    let operations = warp_blocks * (2 * 2 * 2 * 16 * 16 * HEAD_DIM) as f64 / MMA_RATE;
    let cache = counted.bytes_read as f64 / CACHE_BANDWIDTH;
    let launches = (2 * (tiling.chunks.len() - 1)) as f64 * LAUNCH_GAP;
    (chain.max(issue).max(operations).max(cache) + launches, counted.partial_bytes as f64)
}

/// Seconds of the other kernels of a layer, and the number of a layer's launches.
fn rest(code: Code, model: &Model, step: Step) -> (f64, f64) {
    let (rows, hidden) = (step.rows() as f64, model.hidden as f64);
    let (q, inner) = ((model.heads * HEAD_DIM / step.ranks) as f64, (model.intermediate / step.ranks) as f64);
    // Bytes through the cache: sums, norms, rounding, rotary embedding, SwiGLU.
    let (bytes, floor, launches) = match code {
        Code::Before => (
            rows * (24.0 * hidden
                + 24.0 * hidden
                + 12.0 * hidden
                + 6.0 * (q + inner)
                + 12.0 * q
                + 12.0 * inner),
            2.0 * 9.0 + 12.0 * 2.0,
            17.0,
        ),
        Code::Now => (rows * (2.0 * 22.0 * hidden + 10.0 * q + 14.0 * inner), 2.0 * 4.0 + 2.0 * 2.0, 10.0),
    };
    let floor: f64 = floor * 1e-6 * if model.hidden > 4096 { 1.4 } else { 1.0 };
    (floor.max(bytes / CACHE_BANDWIDTH), launches)
}

/// Seconds of a step in passes of `rows` rows. The last pass of a prompt has the drawn row.
fn time_in_passes(code: Code, model: &Model, step: Step, rows: usize) -> f64 {
    let of_pass = rows / step.sequences;
    let firsts = (0..step.rows_of_each).step_by(of_pass);
    let pass = |first: usize| Step {
        rows_of_each: of_pass.min(step.rows_of_each - first),
        context: step.context + first,
        ..step
    };
    let passes: f64 = firsts.map(|first| pass_time(code, model, pass(first))).sum();
    let vocabulary = (VOCAB / step.ranks, KSlices::whole(model.hidden));
    passes + product(code, step.drawn(), &vocabulary) + drawing(code, step)
}

/// Seconds of a step with the pass limits of the server.
fn time(code: Code, model: &Model, step: Step) -> f64 {
    let limits = if code == Code::Before { PassLimits::DEFAULT } else { PASS_LIMITS };
    time_in_passes(code, model, step, limits.rows)
}

/// Seconds of one pass without its logits.
fn pass_time(code: Code, model: &Model, step: Step) -> f64 {
    let layer: f64 =
        matrices(model, step.ranks).iter().map(|matrix| product(code, step.rows(), matrix)).sum();
    let (rest, launches) = rest(code, model, step);
    let layer = layer
        + attention(code, model, step)
        + rest
        + launches * LAUNCH_GAP
        + 2.0 * sum_over_ranks(code, model, step);
    // Uploads and reading back are as they were.
    let copies = 0.05e-3;
    model.layers as f64 * layer + copies
}

/// Seconds of one sum over ranks, of which a layer has two.
fn sum_over_ranks(code: Code, model: &Model, step: Step) -> f64 {
    let (len, ranks) = (step.rows() * model.hidden, step.ranks as f64);
    let part = (len * size_of::<f32>()) as f64;
    if step.ranks == 1 {
        0.0
    } else if code == Code::Now && SumPhases::BY_SIZE.adds_shares(len, step.ranks) {
        // The launch between the collectives; the second one puts the shares side by side.
        2.0 * COLLECTIVE_LATENCY + 2.0 * (ranks - 1.0) / ranks * part / LINK_BANDWIDTH + LAUNCH_GAP
    } else {
        COLLECTIVE_LATENCY + (ranks - 1.0) * part / LINK_BANDWIDTH
    }
}

/// Seconds of drawing from whole rows: before, a block took a row; now parts of rows are read once and
/// joined.
fn drawing(code: Code, step: Step) -> f64 {
    let tokens = (step.drawn() * VOCAB) as f64;
    match code {
        Code::Before => 0.3e-3,
        Code::Now => {
            2.0 * (LAUNCH_GAP + MEMORY_LATENCY)
                + 2e-6
                + (4.0 * tokens / MEMORY_BANDWIDTH).max(FP64_PER_TOKEN * tokens / FP64_RATE)
        }
    }
}

/// Seconds at the rates of the data sheet: weights and KV cache read once, or all operations, whichever is
/// longer.
fn ideal(model: &Model, step: Step) -> f64 {
    let of_layer: f64 = matrices(model, step.ranks).iter().map(|(n, slices)| (n * slices.end()) as f64).sum();
    let numbers = of_layer * model.layers as f64;
    let vocabulary = (VOCAB / step.ranks * model.hidden) as f64;
    let kv = (step.sequences * (step.context + step.rows_of_each)) as f64
        * ((model.kv_heads / step.ranks).max(1) * HEAD_DIM * 4 * model.layers) as f64;
    let seen = (step.context + step.rows_of_each.div_ceil(2)) as f64;
    let scores =
        4.0 * step.rows() as f64 * seen * (model.heads / step.ranks * HEAD_DIM * model.layers) as f64;
    let work = StepWork {
        layer_weights: numbers,
        vocabulary_weights: vocabulary,
        rows: step.rows(),
        drawn: step.drawn(),
        kv_bytes: kv,
        attention_operations: scores,
    };
    work.ideal(H100)
}

#[test]
fn the_table_of_the_document() {
    println!(
        "| model | ranks | step | context | ideal | before | now | now / ideal |\n|---|---|---|---|---|---|---|---|"
    );
    for (model, ranks) in [(&MODELS[0], 1), (&MODELS[0], 8), (&MODELS[1], 1), (&MODELS[1], 8)] {
        for (name, sequences, rows_of_each) in
            [("1 row", 1, 1), ("32 x 5 rows", 32, 5), ("2,048 rows", 1, 2048)]
        {
            for context in [128, 8192, 32_768] {
                let step = Step { ranks, sequences, rows_of_each, context };
                let [ideal, before, now] =
                    [ideal(model, step), time(Code::Before, model, step), time(Code::Now, model, step)]
                        .map(|seconds| seconds * 1e3);
                let part = now / ideal;
                println!(
                    "| {} | {ranks} | {name} | {context} | {ideal:.1} | {before:.1} | {now:.1} | {part:.1} |",
                    model.name
                );
                assert!(now < before && ideal < now, "{} {step:?}", model.name);
            }
        }
    }
}

/// Effect of larger passes, for the document.
#[test]
fn passes_of_more_rows_give_little() {
    for (model, ranks) in [(&MODELS[0], 1), (&MODELS[0], 8), (&MODELS[1], 1), (&MODELS[1], 8)] {
        for context in [128, 8192, 32_768] {
            let step = Step { ranks, sequences: 1, rows_of_each: 2048, context };
            let [small, large] = [PassLimits::DEFAULT, PASS_LIMITS]
                .map(|limits| 1e3 * time_in_passes(Code::Now, model, step, limits.rows));
            println!(
                "{} on {ranks} behind {context}: passes of 512 rows {small:.1} ms, of 2,048 {large:.1} ms",
                model.name
            );
            assert!(large < small && small < 1.25 * large, "{small} and {large}");
        }
    }
}

/// Modelled time of a step of 32 x 5 rows and of one row, for the document: seconds of all layers by kind of
/// work, the logits and the draw.
#[test]
fn where_the_time_of_a_step_goes() {
    for (sequences, rows_of_each, context) in [(1, 1, 128), (32, 5, 128), (32, 5, 8192)] {
        for model in &MODELS {
            let step = Step { ranks: 1, sequences, rows_of_each, context };
            let layers = 1e3 * model.layers as f64;
            let products = matrices(model, 1).map(|matrix| layers * product(Code::Now, step.rows(), &matrix));
            let (rest, launches) = rest(Code::Now, model, step);
            let [attention, rest, gaps] = [attention(Code::Now, model, step), rest, launches * LAUNCH_GAP]
                .map(|seconds| layers * seconds);
            let logits = 1e3 * product(Code::Now, step.drawn(), &(VOCAB, KSlices::whole(model.hidden)));
            let draw = 1e3 * drawing(Code::Now, step);
            let (all, ideal) = (1e3 * time(Code::Now, model, step), 1e3 * ideal(model, step));
            println!(
                "{} {sequences} x {rows_of_each} behind {context}: {all:.2} ms, {:.3} of ideal {ideal:.2}: products {products:.2?}, \
                 attention {attention:.2}, rest {rest:.2}, launches {gaps:.2}, logits {logits:.2}, draw {draw:.2}",
                model.name,
                all / ideal
            );
            let sum = products.iter().sum::<f64>() + attention + rest + gaps + logits + draw + 0.05;
            assert!((sum - all).abs() < 1e-6 * all, "{sum} of {all}");
        }
    }
}

/// Keys and values read for the table's prompt at 32k, compared with the earlier kernel, in which every 16
/// queries read all of them.
#[test]
fn a_long_prompt_reads_its_keys_a_quarter_as_often() {
    let layout = HeadLayout { num_heads: 32, num_kv_heads: 8, head_dim: HEAD_DIM };
    let segment = Segment { rows: 0..2048, start: 32_768, block_table: &[], tree: None };
    let limits = Limits::of(layout);
    let [now, before] = [limits, Limits { max_parts: 0, ..limits }].map(|limits| {
        let own = OwnBlocks::default();
        count_attention(&Tiling::new(std::slice::from_ref(&segment), (&[0], &own), (4, None), limits), layout)
    });
    println!("now {now:?}\nbefore {before:?}");
    assert_eq!(now.warp_blocks, before.warp_blocks);
    assert!(now.bytes_read * 7 < before.bytes_read * 2, "{now:?}, {before:?}");
}
