//! The list of kernels: files, entry points, block sizes and register limits. A new kernel is a file in
//! `kernels/` and a line here. `make kernels-check` compiles all of them and checks their limits.

/// Text in front of every file.
const PRELUDE: &str = include_str!("kernels/prelude.cuh");
/// Text between the prelude and files with matrix products.
const PRODUCTS: &str = include_str!("kernels/products.cuh");
const TILED: &str = include_str!("kernels/tiled.cuh");
const WARPGROUP: &str = include_str!("kernels/warpgroup.cuh");
const PANELS: &str = include_str!("kernels/panels.cuh");
const WIDEN: &str = include_str!("kernels/widen.cuh");
const FP8_SHARED: &str = include_str!("kernels/fp8.cuh");
/// Text between the prelude and files that read or write KV.
const KV: &str = include_str!("kernels/kv.cuh");
/// Text between the prelude and files with attention.
const ATTENTION_TILES: &str = include_str!("kernels/attention.cuh");
const MERGE: &str = include_str!("kernels/attention_merge.cuh");
/// Text between the prelude and files that split rows of logits into parts.
const PARTS: &str = include_str!("kernels/parts.cuh");

/// An entry point.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Kernel {
    /// Name in the file.
    pub(crate) name: &'static str,
    /// Threads per block; each kernel is written for one block size.
    pub(crate) threads: u32,
    /// Limit of registers per thread on every architecture; more registers would lower occupancy.
    pub(crate) max_registers: u32,
    /// Dynamic shared memory of a block in bytes, in addition to what the kernel declares.
    pub(crate) shared_bytes: u32,
    /// Number of blocks of a cluster: they run at the same time and copy to each other's shared memory. It
    /// divides the grid's x.
    pub(crate) cluster: u32,
    /// Requirements of the machine code of its main loop, if that is checked.
    pub(crate) main_loop: Option<LoopRequirements>,
    /// Minimum number of 16-byte loads from global memory that are in flight together.
    pub(crate) loads_in_flight: u32,
    /// Numbers of products of warpgroups and, at least, of bulk copies in its machine code, if these are
    /// checked.
    pub(crate) warpgroups: Option<(u32, u32)>,
    /// Whether it must declare no shared memory, because its dynamic shared memory begins at a multiple of
    /// 128 bytes.
    pub(crate) is_shared_aligned: bool,
}

/// Requirements of the machine code of the innermost loop with the most products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LoopRequirements {
    /// Minimum number of 16-byte loads from global memory before the first product, and number of all such
    /// loads.
    pub(crate) loads_before_product: u32,
    pub(crate) loads: u32,
    /// Minimum number of asynchronous copies of 16 bytes.
    pub(crate) copies: u32,
}

/// A file of kernels.
#[derive(Debug)]
pub(crate) struct Source {
    /// Name for messages.
    pub(crate) file: &'static str,
    /// Text between the prelude and the file.
    before: &'static [&'static str],
    text: &'static str,
    /// The only architecture that runs it; `None`: all do.
    only_on: Option<&'static str>,
    /// Its entry points.
    pub(crate) kernels: &'static [Kernel],
}

impl Source {
    /// The text that is compiled.
    pub(crate) fn text(&self) -> String {
        format!("{PRELUDE}\n{}\n#line 1 \"{}\"\n{}", self.before.join("\n"), self.file, self.text)
    }

    /// The target to compile for so that devices of `arch` run this file. `None` if none of them does. Code
    /// for one architecture may use instructions that no other one has.
    pub(crate) fn target(&self, arch: &str) -> Option<String> {
        match self.only_on {
            None => Some(arch.to_owned()),
            Some(only) => (only == arch).then(|| format!("{arch}a")),
        }
    }

    /// Whether the machine code of any of its kernels is checked.
    pub(crate) fn has_code_checks(&self) -> bool {
        self.kernels.iter().any(Kernel::has_code_checks)
    }

    /// File name of its machine code.
    pub(crate) fn machine_code_file(&self) -> String {
        self.file.replace(".cu", ".cubin")
    }

    /// An entry point of this file. Panics if it is not listed; only `ops` calls this.
    pub(crate) const fn kernel(&'static self, index: usize) -> &'static Kernel {
        &self.kernels[index]
    }
}

const fn kernel(name: &'static str, threads: u32, max_registers: u32) -> Kernel {
    Kernel {
        name,
        threads,
        max_registers,
        shared_bytes: 0,
        cluster: 1,
        main_loop: None,
        loads_in_flight: 0,
        warpgroups: None,
        is_shared_aligned: false,
    }
}

impl Kernel {
    /// Whether its machine code is checked.
    fn has_code_checks(&self) -> bool {
        self.main_loop.is_some() || self.loads_in_flight > 0 || self.warpgroups.is_some()
    }

    /// Requires `loads` loads in the main loop, `loads_before_product` of them before the first product.
    const fn with_loads(self, loads_before_product: u32, loads: u32) -> Self {
        Self { main_loop: Some(LoopRequirements { loads_before_product, loads, copies: 0 }), ..self }
    }

    /// Sets the size of a ring of stages for tiles of `rows` rows and weights of `weight_bytes` each.
    const fn with_ring(self, rows_and_stages: (u32, u32), weight_bytes: u32) -> Self {
        Self { shared_bytes: ring_bytes(rows_and_stages, weight_bytes), is_shared_aligned: true, ..self }
    }

    /// Sets the size of shared memory that begins with stages, and requires this many products of warpgroups,
    /// and bulk copies that fill the stages.
    const fn with_stages(self, shared_bytes: u32, products: u32) -> Self {
        Self { shared_bytes, is_shared_aligned: true, warpgroups: Some((products, 1)), ..self }
    }

    /// Sets the size of dynamic shared memory.
    const fn with_shared(self, shared_bytes: u32) -> Self {
        Self { shared_bytes, ..self }
    }

    /// Sets the number of blocks of a cluster.
    const fn in_clusters_of(self, cluster: u32) -> Self {
        Self { cluster, ..self }
    }

    /// Requires `loads_in_flight` loads that are in flight together.
    const fn with_loads_in_flight(self, loads_in_flight: u32) -> Self {
        Self { loads_in_flight, ..self }
    }

    /// Sets the size of the shared-memory stages, which asynchronous copies in the main loop fill.
    const fn with_copies(self, shared_bytes: u32) -> Self {
        Self {
            shared_bytes,
            main_loop: Some(LoopRequirements { loads_before_product: 0, loads: 0, copies: 2 }),
            ..self
        }
    }

    /// As `with_copies`, with the copies in the loop around the main loop.
    const fn with_outer_copies(self, shared_bytes: u32) -> Self {
        let main_loop = Some(LoopRequirements { loads_before_product: 0, loads: 0, copies: 0 });
        Self { shared_bytes, main_loop, ..self }
    }
}

/// Bytes of the stages of a product whose warps share 128 channels and `rows` rows: `STAGES` of tiled.cuh,
/// each of two steps of 64 bytes.
const fn stage_bytes(rows: u32) -> u32 {
    let stages = if rows > 64 { 3 } else { 4 };
    stages * 2 * 64 * (128 + rows)
}

/// Bytes of the stages of `WidenedOperands` in fp8.cuh: one step of weights with a byte each, and two steps of
/// rows.
const fn fp8_stage_bytes(rows: u32) -> u32 {
    let stages = if rows > 64 { 3 } else { 4 };
    stages * 64 * (128 + 2 * rows)
}

/// Bytes of a step of 64 keys and values that attention.cu keeps in shared memory and, with four warps, of
/// the results of groups (`SharedSlot`).
const fn attention_bytes(head_dim: u32, warps: u32) -> u32 {
    let results = if warps == 4 { warps * 32 * 2 * (head_dim / 16 + 1) * 16 } else { 0 };
    64 * head_dim * 2 * 2 + results
}

/// Bytes of shared memory of attention_panels.cu: stages of 64 keys and values, 128 queries in two parts of
/// bf16, the results of their rows, barriers.
const fn attention_panel_bytes(head_dim: u32) -> u32 {
    let stages = 384 / head_dim;
    stages * 2 * 64 * head_dim * 2 + 2 * 128 * head_dim * 2 + 128 * head_dim * 4 + stages * 16 + 3 * 8
}

/// Bytes of `stages` stages of panels.cuh for tiles of `rows` rows and weights of `weight_bytes` each, of the
/// sums of level 2, of barriers, and of borders. A step of 128 int8 takes the bytes of one of 64 bf16.
const fn ring_bytes((rows, stages): (u32, u32), weight_bytes: u32) -> u32 {
    stages * 64 * (128 * weight_bytes + rows * 2) + rows * 128 * 4 + stages * 16 + 48
}

macro_rules! source {
    ($constant:ident, $file:literal, [$($kernel:expr),+ $(,)?]) => {
        source!($constant, $file, [], [$($kernel),+]);
    };
    ($constant:ident, $file:literal, [$($before:expr),*], [$($kernel:expr),+ $(,)?]) => {
        source!($constant, $file, None, [$($before),*], [$($kernel),+]);
    };
    ($constant:ident, $file:literal, $only_on:expr, [$($before:expr),*], [$($kernel:expr),+ $(,)?]) => {
        pub(crate) static $constant: Source = Source {
            file: $file,
            before: &[$($before),*],
            text: include_str!(concat!("kernels/", $file)),
            only_on: $only_on,
            kernels: &[$($kernel),+],
        };
    };
}

source!(EMBEDDING, "embedding.cu", [kernel("embedding", 256, 32)]);
source!(
    ROWS,
    "rows.cu",
    [
        kernel("add", 256, 32),
        kernel("to_bf16", 256, 32),
        kernel("to_panels", 256, 32),
        kernel("take_rows", 256, 32),
        kernel("finish_sum", 256, 32)
    ]
);
source!(RMS_NORM, "rms_norm.cu", [kernel("rms_norm", 256, 128)]);
source!(
    HEADS,
    "heads.cu",
    [KV],
    [
        kernel("norm_heads", 32, 48),
        kernel("rotate", 32, 48),
        kernel("write_kv", 32, 48),
        kernel("rotate_and_write_kv", 32, 48)
    ]
);
source!(SWIGLU, "swiglu.cu", [kernel("swiglu", 256, 32)]);
source!(
    GEMM_BF16,
    "gemm_bf16.cu",
    [PRODUCTS],
    [
        kernel("gemm_bf16_8", 256, 80).with_loads(10, 12),
        kernel("gemm_bf16_8_narrow", 256, 80).with_loads(12, 16),
        kernel("gemm_bf16_32", 256, 128).with_loads(16, 24),
        kernel("gemm_bf16_32_narrow", 256, 128).with_loads(16, 20),
    ]
);
source!(
    INT8,
    "int8.cu",
    [PRODUCTS],
    [
        kernel("quantize_rows", 128, 32),
        kernel("gemm_int8_8", 256, 80).with_loads(10, 12),
        kernel("gemm_int8_8_narrow", 256, 80).with_loads(12, 16),
        kernel("gemm_int8_32", 256, 128).with_loads(16, 24),
        kernel("gemm_int8_32_narrow", 256, 128).with_loads(16, 20),
    ]
);
source!(
    FP8,
    "fp8.cu",
    [PRODUCTS, TILED, WIDEN, FP8_SHARED],
    [
        kernel("gemm_fp8_8", 256, 80).with_loads(8, 8),
        kernel("gemm_fp8_8_narrow", 256, 80).with_loads(10, 12),
        kernel("gemm_fp8_32", 256, 128).with_loads(14, 20),
        kernel("gemm_fp8_32_narrow", 256, 128).with_loads(14, 18),
        kernel("gemm_fp8_tiled_64", 256, 200).with_copies(fp8_stage_bytes(64)),
        kernel("gemm_fp8_tiled_80", 256, 240).with_copies(fp8_stage_bytes(80)),
        kernel("gemm_fp8_tiled_128", 256, 255).with_outer_copies(fp8_stage_bytes(128)),
    ]
);
source!(
    FP8_BLOCKS,
    "fp8_blocks.cu",
    [PRODUCTS, TILED, WIDEN, FP8_SHARED],
    [
        kernel("gemm_fp8_blocks_8", 256, 80).with_loads_in_flight(8),
        kernel("gemm_fp8_blocks_8_narrow", 256, 80).with_loads_in_flight(6),
        kernel("gemm_fp8_blocks_32", 256, 128).with_loads_in_flight(10),
        kernel("gemm_fp8_blocks_32_narrow", 256, 128).with_loads_in_flight(9),
        kernel("gemm_fp8_blocks_tiled_64", 256, 240).with_shared(fp8_stage_bytes(64)),
        kernel("gemm_fp8_blocks_tiled_80", 256, 255).with_shared(fp8_stage_bytes(80)),
    ]
);
source!(
    GEMM_TILED,
    "gemm_tiled.cu",
    [PRODUCTS, TILED],
    [
        kernel("gemm_bf16_tiled_64", 256, 200).with_copies(stage_bytes(64)),
        kernel("gemm_bf16_tiled_80", 256, 240).with_copies(stage_bytes(80)),
        kernel("gemm_bf16_tiled_128", 256, 248).with_copies(stage_bytes(128)),
        kernel("gemm_int8_tiled_64", 256, 128).with_copies(stage_bytes(64)),
        kernel("gemm_int8_tiled_80", 256, 128).with_copies(stage_bytes(80)),
        kernel("gemm_int8_tiled_128", 256, 128).with_copies(stage_bytes(128)),
        kernel("gemm_int8_sliced_64", 256, 224).with_copies(stage_bytes(64)),
        kernel("gemm_int8_sliced_80", 256, 240).with_copies(stage_bytes(80)),
        kernel("gemm_int8_sliced_128", 256, 255).with_copies(stage_bytes(128)),
    ]
);
source!(
    GEMM_PANELS,
    "gemm_panels.cu",
    Some("sm_90"),
    [WARPGROUP, PANELS],
    [
        kernel("gemm_panels_8", 384, 80).with_ring((8, 6), 2),
        kernel("gemm_panels_16", 384, 80).with_ring((16, 5), 2),
        kernel("gemm_panels_40", 384, 168).with_ring((40, 8), 2),
        kernel("gemm_panels_80", 384, 168).with_ring((80, 7), 2),
        kernel("gemm_panels_128", 384, 168).with_ring((128, 5), 2),
        kernel("gemm_panels_80_by_2", 384, 168).with_ring((80, 7), 2).in_clusters_of(2),
        kernel("gemm_panels_128_by_2", 384, 168).with_ring((128, 5), 2).in_clusters_of(2),
        kernel("gemm_panels_128_by_4", 384, 168).with_ring((128, 5), 2).in_clusters_of(4),
        kernel("sum_groups", 256, 32),
        kernel("pack_panels", 256, 32),
    ]
);
source!(
    FP8_PANELS,
    "fp8_panels.cu",
    Some("sm_90"),
    [WARPGROUP, PANELS, WIDEN],
    [
        kernel("fp8_panels_8", 384, 80).with_ring((8, 10), 1),
        kernel("fp8_panels_16", 384, 80).with_ring((16, 9), 1),
        kernel("fp8_panels_40", 384, 168).with_ring((40, 12), 1),
        kernel("fp8_panels_80", 384, 168).with_ring((80, 9), 1),
        kernel("fp8_panels_128", 384, 168).with_ring((128, 6), 1),
        kernel("fp8_panels_80_by_2", 384, 168).with_ring((80, 9), 1).in_clusters_of(2),
        kernel("fp8_panels_128_by_2", 384, 168).with_ring((128, 6), 1).in_clusters_of(2),
        kernel("fp8_panels_128_by_4", 384, 168).with_ring((128, 6), 1).in_clusters_of(4),
        kernel("pack_fp8", 256, 32),
        kernel("fp8_block_panels_8", 384, 80).with_ring((8, 10), 1),
        kernel("fp8_block_panels_16", 384, 80).with_ring((16, 9), 1),
        kernel("fp8_block_panels_40", 384, 168).with_ring((40, 12), 1),
        kernel("fp8_block_panels_80", 384, 168).with_ring((80, 9), 1),
        kernel("fp8_block_panels_80_by_2", 384, 168).with_ring((80, 9), 1).in_clusters_of(2),
    ]
);
source!(
    INT8_PANELS,
    "int8_panels.cu",
    Some("sm_90"),
    [WARPGROUP, PANELS],
    [
        kernel("int8_panels_8", 384, 80).with_ring((8, 6), 2),
        kernel("int8_panels_16", 384, 80).with_ring((16, 5), 2),
        kernel("int8_panels_48", 384, 168).with_ring((48, 8), 2),
        kernel("int8_panels_80", 384, 168).with_ring((80, 7), 2),
        kernel("int8_panels_128", 384, 168).with_ring((128, 5), 2),
        kernel("int8_panels_80_by_2", 384, 168).with_ring((80, 7), 2).in_clusters_of(2),
        kernel("int8_panels_128_by_2", 384, 168).with_ring((128, 5), 2).in_clusters_of(2),
        kernel("int8_panels_128_by_4", 384, 168).with_ring((128, 5), 2).in_clusters_of(4),
        kernel("sum_int8_groups", 256, 32),
    ]
);
source!(
    ATTENTION,
    "attention.cu",
    [KV, ATTENTION_TILES, MERGE],
    [
        kernel("attention_16", 32, 128).with_copies(attention_bytes(16, 1)),
        kernel("attention_32", 32, 144).with_copies(attention_bytes(32, 1)),
        kernel("attention_64", 32, 176).with_copies(attention_bytes(64, 1)),
        kernel("attention_96", 32, 224).with_copies(attention_bytes(96, 1)),
        kernel("attention_128", 32, 255).with_copies(attention_bytes(128, 1)),
        kernel("attention_pair_16", 64, 128).with_copies(attention_bytes(16, 2)),
        kernel("attention_pair_32", 64, 144).with_copies(attention_bytes(32, 2)),
        kernel("attention_pair_64", 64, 176).with_copies(attention_bytes(64, 2)),
        kernel("attention_pair_96", 64, 224).with_copies(attention_bytes(96, 2)),
        kernel("attention_pair_128", 64, 255).with_copies(attention_bytes(128, 2)),
        kernel("attention_wide_16", 128, 128).with_copies(attention_bytes(16, 4)),
        kernel("attention_wide_32", 128, 144).with_copies(attention_bytes(32, 4)),
        kernel("attention_wide_64", 128, 176).with_copies(attention_bytes(64, 4)),
        kernel("attention_wide_96", 128, 224).with_copies(attention_bytes(96, 4)),
        kernel("attention_wide_128", 128, 255).with_copies(attention_bytes(128, 4)),
    ]
);
source!(
    ATTENTION_PANELS,
    "attention_panels.cu",
    Some("sm_90"),
    [WARPGROUP, KV, ATTENTION_TILES, MERGE],
    [
        kernel("attention_panels_64", 384, 168).with_stages(attention_panel_bytes(64), 32),
        kernel("attention_panels_128", 384, 168).with_stages(attention_panel_bytes(128), 48),
    ]
);
source!(
    ATTENTION_MERGE,
    "attention_merge.cu",
    [ATTENTION_TILES, MERGE],
    [kernel("attention_merge", 128, 112), kernel("attention_merge_long", 256, 80)]
);
source!(TREES, "trees.cu", [KV], [kernel("gather_blocks", 128, 56), kernel("copy_tokens", 128, 40)]);
source!(LOGITS, "logits.cu", [kernel("edit_logits", 128, 32)]);
source!(
    FILTERS,
    "filters.cu",
    [PARTS],
    [
        kernel("keep_parts", 256, 80).with_loads_in_flight(4),
        kernel("keep_join", 256, 64),
        kernel("keep_mask", 256, 48).with_loads_in_flight(4),
    ]
);
source!(RANKS, "ranks.cu", [kernel("sum_ranks", 256, 40), kernel("concat_ranks", 256, 40)]);
source!(ALL_REDUCE, "all_reduce.cu", [kernel("all_reduce", 256, 80)]);
source!(
    DRAW,
    "draw.cu",
    [PARTS],
    [
        kernel("draw_parts", 256, 80).with_loads_in_flight(4),
        kernel("draw_join", 32, 64),
        kernel("candidate_parts", 256, 80).with_loads_in_flight(4),
        kernel("candidate_join", 32, 64)
    ]
);
source!(SCORE, "score.cu", [kernel("score", 256, 48)]);
source!(RANDOM, "random.cu", [kernel("random_bf16", 256, 32), kernel("random_f32", 256, 32)]);
source!(PROBE, "probe.cu", [kernel("read_words", 256, 48), kernel("multiply_only", 256, 64)]);

/// All source files.
pub(crate) fn all() -> [&'static Source; 25] {
    [
        &EMBEDDING,
        &ROWS,
        &RMS_NORM,
        &HEADS,
        &SWIGLU,
        &GEMM_BF16,
        &INT8,
        &FP8,
        &FP8_BLOCKS,
        &GEMM_TILED,
        &GEMM_PANELS,
        &FP8_PANELS,
        &INT8_PANELS,
        &ATTENTION,
        &ATTENTION_PANELS,
        &ATTENTION_MERGE,
        &TREES,
        &LOGITS,
        &FILTERS,
        &RANKS,
        &ALL_REDUCE,
        &DRAW,
        &SCORE,
        &RANDOM,
        &PROBE,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kernels are written out, or by a macro whose calls name them.
    #[test]
    fn every_entry_point_is_listed_once_and_every_listed_one_is_written() {
        for source in all() {
            let calls = [
                "ATTENTION(",
                "ATTENTION_PANELS(",
                "GEMM_BF16(",
                "GEMM_INT8(",
                "GEMM_BF16_TILED(",
                "GEMM_INT8_TILED(",
                "GEMM_FP8(",
                "GEMM_FP8_TILED(",
                "GEMM_FP8_BLOCKS(",
                "GEMM_FP8_BLOCKS_TILED(",
                "GEMM_PANELS(",
                "FP8_PANELS(",
                "FP8_BLOCK_PANELS(",
                "INT8_PANELS(",
            ];
            let begins = |line: &str| calls.iter().any(|call| line.starts_with(call));
            let calls: Vec<&str> = source.text.lines().filter(|line| begins(line)).collect();
            for kernel in source.kernels {
                let is_called = |call: &&str| call.contains(&format!("({},", kernel.name));
                let written =
                    source.text.contains(&format!("{}(", kernel.name)) || calls.iter().any(is_called);
                assert!(written, "{} is not in {}", kernel.name, source.file);
                assert_eq!(kernel.threads % 32, 0, "{}: whole warps", kernel.name);
                // Limit of an L4, or of an H100; 2048 bytes are for what the kernel declares and the system
                // takes.
                let limit = if source.only_on.is_some() { 228 } else { 100 };
                assert!(
                    kernel.shared_bytes + 2048 <= limit << 10,
                    "{}: {}",
                    kernel.name,
                    kernel.shared_bytes
                );
            }
            // A macro that defines kernels contains one more match.
            let macros =
                source.text.lines().filter(|line| line.strip_prefix("#define ").is_some_and(begins)).count();
            let written = source.text.matches("extern \"C\" __global__").count() - macros + calls.len();
            assert_eq!(written, source.kernels.len(), "{}", source.file);
        }
    }
}
