//! Attention over paged KV: decode, verify and prefill rows in one pass, block tables in arbitrary order,
//! unwritten memory filled with NaN.

mod exact;

use cpu_kernels::{BLOCK_SIZE, HeadLayout, Segment, TreeSegment};
use half::bf16;

use super::kv_layout::{key_index, value_index};
use super::panels::packed;
use super::tensor_cores::{Bounded, compare_bounded};
use super::{Numbers, Parity, Scale, compare_equal, widened};
use crate::cuda::CudaError;
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::{
    Attention, InputLayout, LAST_BLOCK_PARTS, Limits, OwnBlockViews, OwnBlocks, PANEL_COLUMNS, PartSize,
    Tiling, TilingKey, TilingViews,
};

/// A sequence's keys and values, `[kv head][position][head_dim]`.
pub(super) struct Sequence {
    pub(super) keys: Vec<Vec<Vec<bf16>>>,
    pub(super) values: Vec<Vec<Vec<bf16>>>,
    pub(super) table: Vec<u32>,
    /// Position of its first row in the pass, and its rows.
    pub(super) rows: (u32, usize),
    /// Parents of its rows if they are a token tree; keys and values are then in storage order.
    pub(super) parents: Vec<u32>,
}

/// A pass over several sequences.
pub(super) struct Pass {
    pub(super) layout: HeadLayout,
    pub(super) window: Option<u32>,
    pub(super) sequences: Vec<Sequence>,
    /// `[rows, row width]`.
    pub(super) qkv: Vec<f32>,
    pub(super) kv: Vec<bf16>,
}

/// One chunk, and one split per block.
pub(super) const NO_LIMITS: Limits = Limits {
    max_parts: usize::MAX,
    max_own_blocks: usize::MAX,
    min_runs: usize::MAX,
    running: [usize::MAX; 4],
    last_block_parts: LAST_BLOCK_PARTS,
    parts: Some(PartSize::Split),
    has_panels: false,
    is_padded: false,
};
/// Tiles of warpgroups wherever a sequence has more queries than those of warps hold.
const IN_PANELS: Limits = Limits { running: [1; 4], has_panels: true, ..NO_LIMITS };
/// Heads as `layout_of` takes them, the window, and each sequence's first position and rows.
type PassShape = ([usize; 3], Option<u32>, &'static [(u32, usize)]);
/// Index of this layer, and the number of layers.
const LAYER: (usize, usize) = (1, 2);

/// The layout of this many heads, KV heads and numbers per head.
pub(super) fn layout_of([num_heads, num_kv_heads, head_dim]: [usize; 3]) -> HeadLayout {
    HeadLayout { num_heads, num_kv_heads, head_dim }
}

pub(super) fn cases<E: Executor>(e: &mut E, scale: Scale) -> Result<Vec<Parity>, CudaError> {
    let small: &[(u32, usize)] = &[(0, 1), (15, 3), (140, 5), (0, 20)];
    let large: &[(u32, usize)] = &[(0, 1), (4095, 1), (1000, 8), (0, 300), (700, 129)];
    let lens = scale.pick(small, large);
    let mut parities = Vec::new();
    for (heads, window) in
        [([4, 2, 16], None), ([4, 4, 32], Some(7)), ([6, 1, 64], Some(130)), ([2, 1, 96], None)]
    {
        parities.extend(attention(e, layout_of(heads), window, lens)?);
    }
    let (heads, lens) = scale.pick(([8, 1, 128], &[(130, 2), (260, 1)][..]), ([32, 8, 128], large));
    parities.extend(attention(e, layout_of(heads), None, lens)?);
    // Two groups in a tile of 64 queries.
    parities.extend(attention(e, layout_of([4, 1, 16]), None, &[(1010, 24)])?);
    // More than eight splits, whose partial results a last block reads in several turns.
    parities.extend(attention(e, layout_of([4, 1, 32]), Some(1200), &[(1300, 5), (0, 1)])?);
    parities.extend(in_panels(e, scale)?);
    Ok(parities)
}

/// Tiles of warpgroups, where there are kernels for them: equal bits to tiles of warps. Steps that begin or
/// end inside a block of keys, queries that do not fill a tile, several groups.
fn in_panels<E: Executor>(e: &mut E, scale: Scale) -> Result<Vec<Parity>, CudaError> {
    if !e.attends_in_panels() {
        return Ok(Vec::new());
    }
    let small: &[PassShape] = &[
        ([4, 1, 64], None, &[(0, 70), (200, 33), (5, 1)]),
        ([4, 1, 128], Some(75), &[(130, 41), (0, 20)]),
        ([1, 1, 128], None, &[(1000, 100)]),
    ];
    let large: &[PassShape] = &[
        ([32, 8, 128], None, &[(0, 300), (700, 129), (2100, 300)]),
        ([8, 2, 128], None, &[(8200, 300)]),
        ([32, 8, 128], Some(1000), &[(3000, 200)]),
        ([24, 8, 64], None, &[(2050, 301), (15, 64)]),
        ([16, 2, 64], Some(4096), &[(5000, 100)]),
    ];
    let mut parities = Vec::new();
    for &(heads, window, lens) in scale.pick(small, large) {
        parities.extend(panels(e, layout_of(heads), window, lens)?);
    }
    Ok(parities)
}

/// Rows of these sequences in tiles of warpgroups, with partial results of groups and with none.
pub(super) fn panels<E: Executor>(
    e: &mut E,
    layout: HeadLayout,
    window: Option<u32>,
    lens: &[(u32, usize)],
) -> Result<[Parity; 3], CudaError> {
    let HeadLayout { num_heads, num_kv_heads, head_dim } = layout;
    let pass = Pass::new(layout, window, lens);
    let whole: Vec<Part> = lens.iter().enumerate().map(|(i, &(_, rows))| (i, 0..rows)).collect();
    let bits = |found: &[f32]| found.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let of_warps = bits(&pass.run(e, &whole, NO_LIMITS)?);
    let case = format!(
        "attention of {num_heads}/{num_kv_heads} heads of {head_dim} in panels, window {}",
        window.unwrap_or(0)
    );
    let in_groups = pass.run(e, &whole, Limits { parts: Some(PartSize::Group), ..IN_PANELS })?;
    let undivided = pass.run(e, &whole, Limits { parts: Some(PartSize::All), ..IN_PANELS })?;
    let (found, exact) = pass.sampled_outputs(&undivided);
    Ok([
        compare_bounded(case.clone(), &found, &exact),
        compare_equal(format!("{case}: undivided"), &bits(&undivided), &of_warps),
        compare_equal(format!("{case}: in groups"), &bits(&in_groups), &of_warps),
    ])
}

pub(super) fn attention<E: Executor>(
    e: &mut E,
    layout: HeadLayout,
    window: Option<u32>,
    lens: &[(u32, usize)],
) -> Result<Vec<Parity>, CudaError> {
    let HeadLayout { num_heads, num_kv_heads, head_dim } = layout;
    let pass = Pass::new(layout, window, lens);
    let whole: Vec<Part> = lens.iter().enumerate().map(|(i, &(_, rows))| (i, 0..rows)).collect();
    let together = pass.run(e, &whole, NO_LIMITS)?;
    let case = format!(
        "attention of {num_heads}/{num_kv_heads} heads of {head_dim}, window {}",
        window.unwrap_or(0)
    );
    let (found, exact) = pass.sampled_outputs(&together);
    // In parts of up to three rows they get other tiles, splits and neighbours.
    let mut in_parts = Vec::new();
    // Turns too small for a wide tile, and larger ones.
    let in_chunks = pass.run(e, &whole, Limits { max_parts: 40, ..NO_LIMITS })?;
    let in_wide_chunks = pass.run(e, &whole, Limits { max_parts: 400, ..NO_LIMITS })?;
    let in_runs = pass.run(e, &whole, Limits { min_runs: 1, ..NO_LIMITS })?;
    let merged_apart = pass.run(e, &whole, Limits { last_block_parts: 0, ..NO_LIMITS })?;
    let in_groups = pass.run(e, &whole, Limits { parts: Some(PartSize::Group), ..NO_LIMITS })?;
    let groups_apart = Limits { parts: Some(PartSize::Group), last_block_parts: 0, ..NO_LIMITS };
    let groups_apart = pass.run(e, &whole, groups_apart)?;
    let undivided = pass.run(e, &whole, Limits { parts: Some(PartSize::All), ..NO_LIMITS })?;
    for (sequence, rows) in whole {
        for first in rows.clone().step_by(3) {
            let rows = first..rows.end.min(first + 3);
            in_parts.extend(pass.run(e, &[(sequence, rows)], NO_LIMITS)?);
        }
    }
    let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    Ok(vec![
        compare_bounded(case.clone(), &found, &exact),
        compare_equal(format!("{case}: in parts"), &bits(&in_parts), &bits(&together)),
        compare_equal(format!("{case}: in chunks"), &bits(&in_chunks), &bits(&together)),
        compare_equal(format!("{case}: in wide chunks"), &bits(&in_wide_chunks), &bits(&together)),
        compare_equal(format!("{case}: in runs"), &bits(&in_runs), &bits(&together)),
        compare_equal(format!("{case}: merged by a launch"), &bits(&merged_apart), &bits(&together)),
        compare_equal(format!("{case}: in groups"), &bits(&in_groups), &bits(&together)),
        compare_equal(format!("{case}: groups merged by a launch"), &bits(&groups_apart), &bits(&together)),
        compare_equal(format!("{case}: undivided"), &bits(&undivided), &bits(&together)),
    ])
}

/// Some rows of a sequence.
pub(super) type Part = (usize, std::ops::Range<usize>);

impl Sequence {
    /// Its token tree, for rows from `first` on.
    fn tree(&self, first: usize) -> Option<TreeSegment<'_>> {
        let tree = TreeSegment { start: self.rows.0, first, parents: &self.parents };
        (!self.parents.is_empty()).then_some(tree)
    }

    /// The position of one of its rows.
    fn position(&self, row: usize) -> u32 {
        let depth = self.tree(0).map_or(row, |tree| tree.stored_at(row).count() - 1);
        self.rows.0 + depth as u32
    }
}

impl Pass {
    pub(super) fn new(layout: HeadLayout, window: Option<u32>, lens: &[(u32, usize)]) -> Self {
        let mut numbers = Numbers(9);
        let mut sequences: Vec<Sequence> = Vec::new();
        let mut next_block = 0;
        for &(start, rows) in lens {
            let len = start as usize + rows;
            let mut heads = || -> Vec<Vec<Vec<bf16>>> {
                let head =
                    |numbers: &mut Numbers| (0..len).map(|_| numbers.bf16s(layout.head_dim, 1.0)).collect();
                (0..layout.num_kv_heads).map(|_| head(&mut numbers)).collect()
            };
            let (keys, values) = (heads(), heads());
            let blocks = len.div_ceil(BLOCK_SIZE) as u32;
            // In reverse, so that no block is at the index of its position.
            let table = (next_block..next_block + blocks).rev().collect();
            next_block += blocks;
            sequences.push(Sequence { keys, values, table, rows: (start, rows), parents: Vec::new() });
        }
        let rows: usize = lens.iter().map(|&(_, rows)| rows).sum();
        let qkv = numbers.vec(rows * layout.row_width(), 3.0);
        let kv = kv_memory(layout, &sequences, next_block as usize);
        Self { layout, window, sequences, qkv, kv }
    }

    /// Rows of some sequences, in one call.
    pub(super) fn run<E: Executor>(
        &self,
        e: &mut E,
        parts: &[Part],
        limits: Limits,
    ) -> Result<Vec<f32>, CudaError> {
        let (layout, width) = (self.layout, self.layout.row_width());
        let (mut segments, mut starts, mut tables, mut positions) = (vec![], vec![], vec![], vec![]);
        let mut qkv = Vec::new();
        for (which, range) in parts {
            let sequence = &self.sequences[*which];
            let before: usize = self.sequences[..*which].iter().map(|sequence| sequence.rows.1).sum();
            let first = positions.len();
            let tree = sequence.tree(range.start);
            positions.extend(range.clone().map(|row| sequence.position(row)));
            qkv.extend_from_slice(&self.qkv[(before + range.start) * width..(before + range.end) * width]);
            segments.push(Segment {
                rows: first..positions.len(),
                start: tree.map_or(sequence.position(range.start), |tree| tree.start),
                block_table: &sequence.table,
                tree,
            });
            starts.push(tables.len() as u32);
            tables.extend_from_slice(&sequence.table);
        }
        let rows = positions.len();
        let group = layout.num_heads / layout.num_kv_heads;
        let own = OwnBlocks::new(&segments, &mut tables);
        let tiling = Tiling::new(&segments, &starts, &own, TilingKey { group, window: self.window, limits });
        let tiles = Tensor::of(e, &tiling.tiles, "tiles")?;
        let work = Tensor::of(e, &tiling.work, "splits of tiles")?;
        let tile_of = Tensor::of(e, &tiling.tile_of, "tiles of queries")?;
        let (tiles, work, tile_of) = (tiles.view(), work.view(), tile_of.view());
        let views = TilingViews { tiles, work, tile_of, chunks: &tiling.chunks };
        let sources = Tensor::of(e, &own.sources, "sources of own blocks")?;
        let mut own = Tensor::of(e, &vec![bf16::NAN; views.own_len(layout)], "own blocks")?;
        let positions = Tensor::of(e, &positions, "positions")?;
        let tables = Tensor::of(e, &tables, "tables")?;
        let mut out = Tensor::zeros(e, rows * layout.q_width(), "out")?;
        let mut arrived = Tensor::zeros(e, views.arrived_len(layout), "counters")?;
        let size = (rows, layout.q_width());
        let rounding = input_layout(size.1);
        let mut rounded = Tensor::zeros(e, rounding.len(rows, size.1), "rounded")?;
        let attention = Attention {
            qkv: &Tensor::of(e, &qkv, "qkv")?,
            positions: positions.view(),
            kv: &Tensor::of(e, &self.kv, "kv")?,
            own: Some(OwnBlockViews { sources: sources.view(), blocks: &mut own }),
            tables: tables.view(),
            tiling: views,
            rounded: Some((&mut rounded, rounding)),
            // NaN, because splits that no tile writes must not be read.
            partial: &mut Tensor::of(e, &vec![f32::NAN; views.partial_len(layout)], "partial sums")?,
            arrived: &mut arrived,
            layout,
            layer: LAYER,
            window: self.window,
            out: &mut out,
        };
        attention.launch(e, rows)?;
        // The next launch counts from zero again.
        let counts = arrived.read(e, 0..arrived.len())?;
        assert!(counts.iter().all(|&count| count == 0), "counters return to zero");
        let out = out.read(e, 0..rows * layout.q_width())?;
        let rounded = rounded.read(e, 0..rounded.len())?;
        let expected = as_input(&out, size);
        let bits = |numbers: &[bf16]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&rounded) == bits(&expected), "outputs as the input of a product");
        Ok(out)
    }

    /// Outputs of the kernel and exact ones, for up to 16 rows of each sequence and all their heads.
    fn sampled_outputs(&self, all: &[f32]) -> (Vec<f32>, Vec<Bounded>) {
        let layout = self.layout;
        let group = layout.num_heads / layout.num_kv_heads;
        let (mut found, mut outputs, mut first_row) = (Vec::new(), Vec::new(), 0);
        for sequence in &self.sequences {
            let (start, rows) = sequence.rows;
            let widen = |heads: &[Vec<Vec<bf16>>]| -> Vec<Vec<Vec<f32>>> {
                heads.iter().map(|head| head.iter().map(|x| widened(x)).collect()).collect()
            };
            let (keys, values) = (widen(&sequence.keys), widen(&sequence.values));
            for i in (0..rows).step_by((rows / 16).max(1)) {
                let (row, position) = (first_row + i, start as usize + i);
                let first = self.window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
                for head in 0..layout.num_heads {
                    let query =
                        &self.qkv[row * layout.row_width() + head * layout.head_dim..][..layout.head_dim];
                    let (keys, values) = (&keys[head / group], &values[head / group]);
                    outputs.extend(exact::attention(query, keys, values, first..position + 1));
                    found.extend(&all[row * layout.q_width() + head * layout.head_dim..][..layout.head_dim]);
                }
            }
            first_row += rows;
        }
        (found, outputs)
    }
}

/// Layout of rows of this width as the input of a product.
fn input_layout(width: usize) -> InputLayout {
    if width.is_multiple_of(PANEL_COLUMNS) { InputLayout::Panels } else { InputLayout::Rows }
}

/// Numbers of this many rows and columns as the input of a product.
fn as_input(numbers: &[f32], size: (usize, usize)) -> Vec<bf16> {
    let numbers: Vec<bf16> = numbers.iter().map(|&x| bf16::from_f32(x)).collect();
    if input_layout(size.1) == InputLayout::Panels { packed(&numbers, size) } else { numbers }
}

/// `[blocks][layers][kv heads][K | V of 16 keys]`, NaN in unused slots.
pub(super) fn kv_memory(layout: HeadLayout, sequences: &[Sequence], blocks: usize) -> Vec<bf16> {
    let (head_dim, head_len) = (layout.head_dim, BLOCK_SIZE * layout.head_dim);
    let mut kv = vec![bf16::NAN; blocks * LAYER.1 * layout.num_kv_heads * 2 * head_len];
    for sequence in sequences {
        for head in 0..layout.num_kv_heads {
            for (position, (key, value)) in sequence.keys[head].iter().zip(&sequence.values[head]).enumerate()
            {
                let (block, offset) = (sequence.table[position / BLOCK_SIZE] as usize, position % BLOCK_SIZE);
                let start = ((block * LAYER.1 + LAYER.0) * layout.num_kv_heads + head) * 2 * head_len;
                for d in 0..head_dim {
                    kv[start + key_index(offset, d, head_dim)] = key[d];
                    kv[start + value_index(offset, d, head_dim)] = value[d];
                }
            }
        }
    }
    kv
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::cuda::emulator::Emulator;
    use crate::cuda::ops::count_attention;

    /// FNV-1a over the bits of all outputs.
    fn digest(numbers: &[f32]) -> u64 {
        let bytes = numbers.iter().flat_map(|x| x.to_bits().to_le_bytes());
        bytes
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    }

    /// Tiles, warps, runs of splits and what partial results hold do not affect numerics; the digests show
    /// when steps, splits or groups do.
    #[test]
    fn attention_keeps_the_bits_of_small_tiles() {
        let cases = [
            ([4, 2, 16], None, 0xc36d_4a5c_fe6e_c083_u64),
            ([6, 1, 64], Some(130), 0xa92f_4069_651d_78d9),
            ([8, 2, 128], None, 0x123c_77e4_ebd8_c28e),
        ];
        // More than one group for one, two and four warps, and nine groups, which eight warps merge in two
        // turns.
        let lens = [(0, 1), (15, 3), (300, 20), (0, 70), (500, 5), (1100, 1), (1010, 24), (8300, 1)];
        for (heads, window, expected) in cases {
            let layout = layout_of(heads);
            let pass = Pass::new(layout, window, &lens);
            let whole: Vec<Part> = lens.iter().enumerate().map(|(i, &(_, rows))| (i, 0..rows)).collect();
            let small_tiles = Limits { max_parts: 0, ..NO_LIMITS };
            let in_runs = Limits { min_runs: 1, ..NO_LIMITS };
            let merged_apart = Limits { last_block_parts: 0, ..NO_LIMITS };
            let in_groups = Limits { parts: Some(PartSize::Group), ..NO_LIMITS };
            let groups_apart = Limits { last_block_parts: 0, ..in_groups };
            let undivided = Limits { parts: Some(PartSize::All), ..NO_LIMITS };
            let few_groups = Limits { max_parts: 0, ..in_groups };
            let limits_of_serving = Limits::of(layout, true);
            let in_panels = Limits { parts: Some(PartSize::Group), ..IN_PANELS };
            let undivided_panels = Limits { parts: Some(PartSize::All), ..IN_PANELS };
            for limits in [
                NO_LIMITS,
                small_tiles,
                in_runs,
                merged_apart,
                in_groups,
                groups_apart,
                undivided,
                few_groups,
                limits_of_serving,
                Limits { has_panels: limits_of_serving.has_panels, ..in_panels },
                Limits { has_panels: limits_of_serving.has_panels, ..undivided_panels },
            ] {
                let found = digest(&pass.run(&mut Emulator::build(), &whole, limits).unwrap());
                assert_eq!(found, expected, "{layout:?}, {limits:?}: {found:#x}");
            }
        }
    }

    /// The last block of a tile merges up to 16 partial results, whichever block it is. More take a launch of
    /// their own, and so do those of token trees.
    #[test]
    fn few_splits_are_merged_by_the_last_block() {
        let mut e = Emulator::build();
        let launches = e.launches();
        for (lens, parents, parts, expected) in [
            (&[(2047, 1), (0, 3)][..], &[][..], PartSize::Split, 1),
            (&[(2048, 1), (0, 3)], &[], PartSize::Split, 2),
            (&[(2048, 1), (0, 3)], &[], PartSize::Group, 1),
            (&[(2048, 1), (1020, 33)], &[], PartSize::All, 2),
            // Blocks of rows of trees are gathered by another launch.
            (&[(20, 2), (0, 3)], &[0, 0], PartSize::Split, 3),
            (&[(20, 2), (1500, 1)], &[0, 0], PartSize::All, 3),
        ] {
            let limits = Limits { parts: Some(parts), ..NO_LIMITS };
            let mut pass = Pass::new(layout_of([2, 1, 16]), None, lens);
            pass.sequences[0].parents = parents.to_vec();
            let whole: Vec<Part> = lens.iter().enumerate().map(|(i, &(_, rows))| (i, 0..rows)).collect();
            let mut outputs = std::collections::BTreeSet::new();
            for order in 0..4 {
                e.order(order);
                let before = launches.load(Ordering::Relaxed);
                outputs.insert(digest(&pass.run(&mut e, &whole, limits).unwrap()));
                assert_eq!(launches.load(Ordering::Relaxed) - before, expected, "{lens:?}, {parts:?}");
            }
            assert_eq!(outputs.len(), 1, "{lens:?}: bits depend on the order of blocks");
        }
    }

    /// A key that is not a number makes the rows that see it NaN, whatever folds them, and changes no bit of
    /// others.
    #[test]
    fn a_key_that_is_not_a_number_reaches_the_rows_that_see_it() {
        let [of_splits, in_groups, undivided] = [PartSize::Split, PartSize::Group, PartSize::All].map(Some);
        let of_warps = [of_splits, in_groups, undivided].map(|parts| Limits { parts, ..NO_LIMITS });
        let in_panels = [in_groups, undivided].map(|parts| Limits { parts, ..IN_PANELS });
        for (heads, rows, all_limits) in [([4, 2, 16], 24, &of_warps[..]), ([8, 2, 64], 24, &in_panels)] {
            let (layout, start, bad_row) = (layout_of(heads), 1020, 8);
            let mut pass = Pass::new(layout, None, &[(start, rows)]);
            let mut e = Emulator::build();
            let mut run = |pass: &Pass, limits| pass.run(&mut e, &[(0, 0..rows)], limits).unwrap();
            let clean = run(&pass, NO_LIMITS);
            pass.sequences[0].keys[0][start as usize + bad_row][3] = bf16::NAN;
            pass.kv = kv_memory(layout, &pass.sequences, pass.sequences[0].table.len());
            for &limits in all_limits {
                let found = run(&pass, limits);
                for (i, (found, clean)) in found.iter().zip(&clean).enumerate() {
                    let (row, head) = (i / layout.q_width(), i % layout.q_width() / layout.head_dim);
                    let is_bad = row >= bad_row && head < layout.num_heads / layout.num_kv_heads;
                    let is_right = if is_bad { found.is_nan() } else { found.to_bits() == clean.to_bits() };
                    assert!(is_right, "{limits:?}, row {row}, head {head}: {found}, without it {clean}");
                }
            }
        }
    }

    /// Blocks read as many bytes as the model predicts: keys and values once per 64 queries, queries once per
    /// run of splits, and partial results once if the last block of a tile merges them.
    #[test]
    fn blocks_read_keys_once_for_64_queries() {
        let layout = HeadLayout { num_heads: 8, num_kv_heads: 2, head_dim: 64 };
        let mut e = Emulator::build();
        let mut read = |lens: &[(u32, usize)], limits: Limits| {
            let pass = Pass::new(layout, None, lens);
            let whole: Vec<Part> = lens.iter().enumerate().map(|(i, &(_, rows))| (i, 0..rows)).collect();
            let segment = |row: usize, &(start, rows): &(u32, usize)| Segment {
                rows: row..row + rows,
                start,
                block_table: &[],
                tree: None,
            };
            let firsts = lens.iter().scan(0, |row, len| Some(std::mem::replace(row, *row + len.1)));
            let segments: Vec<Segment<'_>> = firsts.zip(lens).map(|(row, len)| segment(row, len)).collect();
            let own = OwnBlocks::default();
            let key = TilingKey { limits, ..TilingKey::of(layout, None, true) };
            let tiling = Tiling::new(&segments, &vec![0; lens.len()], &own, key);
            let before = e.global_bytes();
            pass.run(&mut e, &whole, limits).unwrap();
            let found = (e.global_bytes() - before) as usize;
            let counted = count_attention(&tiling, layout);
            assert_eq!(found, counted.bytes_read + counted.merged_by_blocks, "{lens:?}, {limits:?}");
            counted
        };
        let small = Limits { max_parts: 0, ..NO_LIMITS };
        let in_runs = Limits { min_runs: 1, ..NO_LIMITS };
        // 48 rows are 192 queries: three wide tiles, or twelve small ones.
        let [of_16, of_64, in_runs] = [small, NO_LIMITS, in_runs].map(|limits| read(&[(976, 48)], limits));
        println!("{of_16:?}\n{of_64:?}\n{in_runs:?}");
        assert_eq!((of_16.blocks, of_64.blocks), ([12 * 8 * 2, 0, 0, 0], [0, 0, 3 * 8 * 2, 0]));
        assert!(of_64.bytes_read * 5 < of_16.bytes_read * 2 && in_runs.bytes_read * 7 < of_16.bytes_read * 2);
        assert_eq!(of_16.warp_blocks, of_64.warp_blocks);
        // A tile of warpgroups, and the 64 queries that are left.
        for parts in [PartSize::Group, PartSize::All] {
            let in_panels = read(&[(976, 48)], Limits { parts: Some(parts), ..IN_PANELS });
            assert_eq!(in_panels.blocks, [0, 0, 2, 2]);
            assert!(in_panels.bytes_read * 10 < of_64.bytes_read * 7, "{in_panels:?}");
        }
        // Five verify rows of four heads each: one tile of two warps. A single row takes one warp.
        assert_eq!(read(&[(100, 5), (20, 1)], NO_LIMITS).blocks, [2, 2, 0, 0]);
    }
}
