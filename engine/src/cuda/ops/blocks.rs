//! Divides a product into blocks: which kernel, which grid, and the work of each warp of a block. Pure
//! arithmetic on shapes. No choice made here changes a bit of the result, because every kernel sums an
//! element in one order (`kernels/products.cuh`).

use cpu_kernels::NUM_SLICES;

/// Warps per block.
const WARPS: usize = 8;
/// Streaming multiprocessors of an H100 SXM; fewer blocks leave some of them idle.
pub(super) const MULTIPROCESSORS: usize = 132;
/// Channels per group of warps. Fewer than 16 leave a part of the tensor cores' operand empty, which costs
/// nothing if few rows wait for weights, and gives more blocks.
pub(super) const CHANNELS: [usize; 4] = [16, 8, 4, 2];
/// Rows per block of the kernels whose warps load their own operands.
const FEW_ROWS: [usize; 2] = [8, 32];
/// Rows and channels per block of the kernels whose warps share operands.
pub(super) const TILE_ROWS: [usize; 3] = [64, 80, 128];
pub(super) const TILE_CHANNELS: usize = 128;
/// Arithmetic intensity at which the tensor cores and the L2 cache are balanced, in operations per byte
/// (modelled: 360 TFLOP/s, 5.5 TB/s).
const OPERATIONS_OF_BYTE: usize = 65;
/// Minimum number of shared tiles. Fewer take longer than small blocks, which reach a fifth of the rate but
/// use all multiprocessors (modelled).
const MIN_TILES: usize = 32;

/// The kernel of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Variant {
    /// Each warp loads its own operands: blocks of 8 or 32 rows, groups of 16, 8, 4 or 2 channels.
    Few { rows: usize, channels: usize },
    /// The warps of a block share a tile of 128 channels and 64, 80 or 128 rows.
    Tiled { rows: usize },
}

/// Launch shape of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LaunchShape {
    /// Blocks along rows, then along channels: neighbouring blocks share weights.
    pub(super) grid: [usize; 2],
    /// For [`Variant::Few`]: the first slice that holds numbers, the number of such slices (as a logarithm),
    /// channels per group of warps.
    pub(super) cut: [usize; 3],
}

impl Variant {
    /// Chooses the kernel for `rows` x `n` outputs over slices with these borders. `heights` are the rows of the
    /// tiles that have a kernel.
    pub(super) fn choose((rows, n): (usize, usize), borders: &[u32], heights: &[usize]) -> Self {
        // Cost per number of K: the maximum of the operations of whole waves and the bytes that blocks read.
        let cost = |height: &usize| {
            let blocks = rows.div_ceil(*height) * n.div_ceil(TILE_CHANNELS);
            let waves = blocks.div_ceil(MULTIPROCESSORS) * MULTIPROCESSORS;
            (waves * TILE_CHANNELS * height).max(blocks * (TILE_CHANNELS + height) * OPERATIONS_OF_BYTE)
        };
        if let Some(&height) = heights.iter().min_by_key(|height| cost(height)) {
            let is_worth_it = rows.div_ceil(height) * n.div_ceil(TILE_CHANNELS) >= MIN_TILES;
            if rows > FEW_ROWS[1] && is_worth_it {
                return Self::Tiled { rows: height };
            }
        }
        let of_block = if rows > FEW_ROWS[0] { FEW_ROWS[1] } else { FEW_ROWS[0] };
        let few = |channels| Self::Few { rows: of_block, channels };
        let fill = |channels: usize, least: usize| {
            let [along_rows, along_n] = LaunchShape::new(few(channels), (rows, n), borders).grid;
            along_rows * along_n >= least
        };
        let narrowest = CHANNELS[CHANNELS.len() - 1];
        let filling = CHANNELS.into_iter().find(|&channels| fill(channels, MULTIPROCESSORS));
        // A matrix that does not fill half of them takes very little time in any variant.
        few(filling.unwrap_or(if fill(narrowest, MULTIPROCESSORS / 2) { narrowest } else { CHANNELS[0] }))
    }
}

impl LaunchShape {
    pub(super) fn new(variant: Variant, (rows, n): (usize, usize), borders: &[u32]) -> Self {
        match variant {
            Variant::Tiled { rows: height } => {
                Self { grid: [rows.div_ceil(height), n.div_ceil(TILE_CHANNELS)], cut: [0; 3] }
            }
            Variant::Few { rows: height, channels } => {
                let (first, log_slices) = nonempty_slices(borders);
                let grid = [rows.div_ceil(height), n.div_ceil(channels * (WARPS >> log_slices))];
                Self { grid, cut: [first, log_slices, channels] }
            }
        }
    }
}

/// Returns the smallest aligned run of 1, 2, 4 or 8 slices that contains all nonempty slices: its first
/// slice, and the logarithm of its length.
pub(super) fn nonempty_slices(borders: &[u32]) -> (usize, usize) {
    let is_used = |s: &usize| borders.get(*s) < borders.get(*s + 1);
    let first = (0..NUM_SLICES).find(is_used).unwrap_or(0);
    let last = (0..NUM_SLICES).rfind(is_used).unwrap_or(NUM_SLICES - 1);
    let log = (0..3).find(|log| first >> log == last >> log).unwrap_or(3);
    (first >> log << log, log)
}

#[cfg(test)]
mod tests {
    use cpu_kernels::KSlices;

    use super::super::gemm::borders;
    use super::*;

    /// Llama 3: hidden size, heads, KV heads, intermediate size.
    const MODELS: [(&str, [usize; 4]); 2] = [("8B", [4096, 32, 8, 14_336]), ("70B", [8192, 64, 8, 28_672])];
    const VOCAB: usize = 128_256;

    /// A rank's matrices: name, n, slices of K.
    fn matrices(
        [hidden, heads, kv_heads, intermediate]: [usize; 4],
        ranks: usize,
    ) -> Vec<(&'static str, usize, KSlices)> {
        let owned = |k: usize, unit: usize| KSlices::eighths(k, unit).owned(0..8 / ranks).rebased();
        vec![
            ("qkv", (heads + 2 * kv_heads) * 128 / ranks, KSlices::whole(hidden)),
            ("o", hidden, owned(heads * 128, 128)),
            ("gate_up", 2 * intermediate / ranks, KSlices::whole(hidden)),
            ("down", hidden, owned(intermediate, 32)),
            ("vocabulary", VOCAB / ranks, KSlices::whole(hidden)),
        ]
    }

    /// Counts a block's warps that have a slice with numbers and a channel.
    fn active_warps(blocks: &LaunchShape, borders: &[u32]) -> usize {
        let [first, log_slices, _] = blocks.cut;
        let slices = first..first + (1 << log_slices);
        let used = slices.filter(|&s| borders[s] < borders[s + 1]).count();
        used * (WARPS >> log_slices)
    }

    #[test]
    fn all_warps_and_all_multiprocessors_work_at_every_degree_of_tensor_parallelism() {
        for (model, sizes) in MODELS {
            for ranks in [1, 2, 4, 8] {
                for (name, n, slices) in matrices(sizes, ranks) {
                    let borders = borders(&slices, 8);
                    for rows in [1, 5, 8, 9, 32, 33, 64, 160] {
                        let variant = Variant::choose((rows, n), &borders, &TILE_ROWS);
                        let blocks = LaunchShape::new(variant, (rows, n), &borders);
                        let said =
                            format!("{model} {name} of {ranks} ranks, {rows} rows: {variant:?} {blocks:?}");
                        let Variant::Few { .. } = variant else { continue };
                        assert_eq!(active_warps(&blocks, &borders), WARPS, "{said}");
                        assert!(blocks.grid[0] * blocks.grid[1] >= MULTIPROCESSORS, "{said}");
                    }
                }
            }
        }
        // Formerly a block had a warp for each of the eight slices, including those of other ranks.
        let down = borders(&KSlices::eighths(28_672, 32).owned(0..1).rebased(), 8);
        assert_eq!((0..8).filter(|&s| down[s] < down[s + 1]).count(), 1);
    }

    #[test]
    fn the_run_of_used_slices_is_aligned() {
        let check = |ends: [u32; 8], expected| {
            let borders: Vec<u32> = std::iter::once(0).chain(ends).collect();
            assert_eq!(nonempty_slices(&borders), expected, "{ends:?}");
        };
        check([8, 16, 24, 32, 40, 48, 56, 64], (0, 3));
        check([8, 16, 24, 32, 32, 32, 32, 32], (0, 2));
        check([0, 0, 0, 0, 8, 16, 24, 32], (4, 2));
        check([0, 0, 8, 16, 16, 16, 16, 16], (2, 1));
        check([0, 0, 0, 0, 0, 0, 0, 8], (7, 0));
        // Two neighbouring slices that are not an aligned pair; alternating empty slices.
        check([0, 8, 16, 16, 16, 16, 16, 16], (0, 2));
        check([0, 16, 16, 32, 32, 48, 48, 64], (0, 3));
        check([0; 8], (0, 3));
    }

    #[test]
    fn blocks_cover_all_rows_and_channels() {
        let whole = borders(&KSlices::whole(4096), 8);
        let half = borders(&KSlices::eighths(4096, 32).owned(4..8).rebased(), 8);
        for rows in 1..400 {
            for n in [1, 15, 16, 17, 2048, 4096, 57_344] {
                for borders in [&whole, &half] {
                    let variant = Variant::choose((rows, n), borders, &TILE_ROWS);
                    let blocks = LaunchShape::new(variant, (rows, n), borders);
                    let of_block = match variant {
                        Variant::Few { rows, channels } => [rows, channels * (WARPS >> blocks.cut[1])],
                        Variant::Tiled { rows } => [rows, TILE_CHANNELS],
                    };
                    for (blocks, of_block, all) in
                        [(blocks.grid[0], of_block[0], rows), (blocks.grid[1], of_block[1], n)]
                    {
                        assert!(blocks * of_block >= all && (blocks - 1) * of_block < all, "{rows} x {n}");
                    }
                }
            }
        }
    }

    /// A prompt's products of an 8B model: tiles of 128 x 80 read 5 bytes for 4 of tiles of 128 x 128.
    #[test]
    fn prompts_take_square_tiles() {
        for (name, n, slices) in matrices(MODELS[0].1, 1).into_iter().take(4) {
            let borders = borders(&slices, 8);
            for rows in [512, 2048] {
                let variant = Variant::choose((rows, n), &borders, &TILE_ROWS);
                assert_eq!(variant, Variant::Tiled { rows: 128 }, "{name}, {rows} rows");
            }
        }
    }

    /// Bytes that blocks in this order load from memory, given an LRU cache of `cached` bytes (each block
    /// reads the rows of its weights and of its inputs), and bytes that they load in total.
    fn bytes_moved(order: &[[usize; 2]], row_bytes: usize, cached: usize) -> [usize; 2] {
        let (mut memory, mut all, mut kept) = (0, 0, Vec::<((usize, usize), usize)>::new());
        for &[weights, inputs] in order {
            // A tile is named by its first row and its kind.
            for (name, rows) in [((0, weights), weights % 1000), ((1, inputs), inputs % 1000)] {
                all += rows * row_bytes;
                let found = kept.iter().position(|(tile, _)| *tile == name);
                match found {
                    Some(at) => drop(kept.remove(at)),
                    None => memory += rows * row_bytes,
                }
                kept.push((name, rows * row_bytes));
                while kept.iter().map(|(_, bytes)| bytes).sum::<usize>() > cached {
                    kept.remove(0);
                }
            }
        }
        [memory, all]
    }

    /// 32 sequences of 5 rows through the widest matrix of an 8B model. The cache is half of an H100's.
    #[test]
    fn weights_are_read_once_for_160_rows() {
        let (rows, n, k) = (160, 28_672, 4096);
        let (row_bytes, cached) = (2 * k, 25 << 20);
        let needed = (n + rows) * row_bytes;
        let name = |tile: usize, height: usize| tile * 1000 + height;
        let borders = borders(&KSlices::whole(k), 8);
        let variant = Variant::choose((rows, n), &borders, &TILE_ROWS);
        let blocks = LaunchShape::new(variant, (rows, n), &borders);
        let Variant::Tiled { rows: height } = variant else { panic!("{variant:?}") };
        let by_rows = (0..blocks.grid[1])
            .flat_map(|c| (0..blocks.grid[0]).map(move |r| [name(c, TILE_CHANNELS), name(r, height)]));
        let after = bytes_moved(&by_rows.collect::<Vec<_>>(), row_bytes, cached);
        // Formerly: blocks of 16 channels and 32 rows, channels first.
        let by_channels = (0..rows / 32).flat_map(|r| (0..n / 16).map(move |c| [name(c, 16), name(r, 32)]));
        let before = bytes_moved(&by_channels.collect::<Vec<_>>(), row_bytes, cached);
        let part = |bytes: usize| bytes as f64 / needed as f64;
        println!(
            "bytes from memory (modelled), of weights and inputs: {:.2}, before {:.2}",
            part(after[0]),
            part(before[0])
        );
        println!("bytes that blocks read (counted): {:.2}, before {:.2}", part(after[1]), part(before[1]));
        assert!(part(after[0]) <= 1.3 && part(before[0]) > 4.5);
        assert!(part(after[1]) <= 3.3 && part(before[1]) > 14.0);
    }
}
