//! Products by warpgroup instructions (`kernels/panels.cuh`), of inputs that are packed in panels of 8 rows by
//! 64 columns, and weights in bf16 or FP8 that are packed in tiles of 128 channels by 64 columns; of int8,
//! panels and tiles have 128 columns. Equal bits to [`GemmBf16`](super::GemmBf16),
//! [`GemmFp8`](super::GemmFp8), [`GemmFp8Blocks`](super::GemmFp8Blocks) and [`GemmInt8`](super::GemmInt8).

mod launched;
mod operands;
mod tile;

pub(crate) use launched::LaunchedProduct;
pub(crate) use operands::{INT8_PANEL_COLUMNS, PanelOperands};
use tile::usable;
pub(crate) use tile::{BLOCK_TILES, INT8_TILES, NUM_ALONE, TILES, Tile};

use cpu_kernels::NUM_SLICES;
use half::bf16;

use super::blocks::nonempty_slices;
use super::gemm::check_borders;
use super::{MAX_GRID_YZ, ensure_capacity};
use crate::cuda::CudaError;
use crate::cuda::blas::ProductShape;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, check, check_len};
use crate::cuda::sources::{FP8_PANELS, GEMM_PANELS, INT8_PANELS, Kernel};

/// Rows of a panel.
const PANEL_ROWS: usize = 8;
/// Columns of a panel of bf16: rows in panels and slices of K are whole multiples.
pub(crate) const PANEL_COLUMNS: usize = 64;
/// Channels of a unit of work; weights are padded to a multiple.
pub(crate) const CHANNELS: usize = 128;
/// Upper bound of the memory for sums of groups of slices.
pub(crate) const MAX_SUMS_BYTES: usize = 32 << 20;

/// How rows of bf16 that a product reads are in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InputLayout {
    /// Row after row.
    Rows,
    /// Panels of 8 rows by 64 columns (`panel_index` of prelude.cuh).
    Panels,
}

impl InputLayout {
    /// Number of elements of `rows` rows.
    pub(crate) fn len(self, rows: usize, width: usize) -> usize {
        if self == Self::Panels { rows.next_multiple_of(PANEL_ROWS) * width } else { rows * width }
    }

    /// The kernels' parameter `panels` for this number of rows.
    pub(super) fn panels(self, rows: usize) -> usize {
        if self == Self::Panels { rows.div_ceil(PANEL_ROWS) } else { 0 }
    }
}

/// The output of an operation, rounded as the input of a product.
pub(crate) type ProductInput<'a, M> = (&'a mut Tensor<M, bf16>, InputLayout);

/// Whether a product over slices of K with these borders can take operands in panels of this many columns.
pub(crate) fn fits_panels(borders: &[u32], columns: usize) -> bool {
    borders.iter().all(|border| border.is_multiple_of(columns as u32))
}

/// Number of elements of packed weights `[n, k]`.
pub(crate) fn packed_len(n: usize, k: usize) -> usize {
    n.next_multiple_of(CHANNELS) * k
}

/// Channels to pack. Both numbers of channels are multiples of 128; the last ones may be padding.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PackedChannels {
    pub(crate) first: usize,
    pub(crate) count: usize,
    pub(crate) k: usize,
}

/// Packs bf16 weights of `channels`, which are the first of `rows`, into tiles of `to`.
pub(crate) fn pack_panels<E: Executor>(
    executor: &mut E,
    rows: &Tensor<E::Memory, bf16>,
    to: &mut Tensor<E::Memory, bf16>,
    channels: PackedChannels,
) -> Result<(), CudaError> {
    pack(executor, GEMM_PANELS.kernel(TILES.len() + 1), rows, to, channels)
}

/// The same for rows of FP8 weights that [`Fp8Layout::pack`](super::Fp8Layout::pack) has packed, without
/// padding between slices.
pub(crate) fn pack_fp8<E: Executor>(
    executor: &mut E,
    rows: &Tensor<E::Memory, u8>,
    to: &mut Tensor<E::Memory, u8>,
    channels: PackedChannels,
) -> Result<(), CudaError> {
    pack(executor, FP8_PANELS.kernel(TILES.len()), rows, to, channels)
}

fn pack<E: Executor, T: bytemuck::Pod>(
    executor: &mut E,
    kernel: &'static Kernel,
    rows: &Tensor<E::Memory, T>,
    to: &mut Tensor<E::Memory, T>,
    PackedChannels { first, count, k }: PackedChannels,
) -> Result<(), CudaError> {
    let tiles = count / CHANNELS;
    let is_whole = count.is_multiple_of(CHANNELS) && first.is_multiple_of(CHANNELS);
    check(kernel.name, ("rows", count), is_whole && (1..=MAX_GRID_YZ).contains(&tiles), "whole tiles")?;
    check(kernel.name, ("k", k), k > 0 && k.is_multiple_of(PANEL_COLUMNS), "a multiple of 64")?;
    check_len(kernel.name, "rows", rows.len(), count * k)?;
    check_len(kernel.name, "packed weights", to.len(), (first + count) * k)?;
    let params = Params::default().read(rows).write_from(to, first * k).u32(k);
    let grid = [(k / PANEL_COLUMNS) as u32, tiles as u32, 1];
    // SAFETY: these are the kernel's parameters; the checks ensure that every tile is in bounds.
    unsafe { executor.launch(kernel, grid, &mut { params }) }
}

/// Inputs times weights.
#[derive(Debug)]
pub(crate) struct GemmPanels<'a, M> {
    pub(crate) operands: PanelOperands<'a, M>,
    /// `[n]`.
    pub(crate) bias: Option<&'a Tensor<M, f32>>,
    /// Borders on the device, and the same borders on the host.
    pub(crate) borders: (&'a Tensor<M, u32>, &'a [u32]),
    /// Memory for sums of groups of slices.
    pub(crate) sums: &'a mut Option<Tensor<M, f32>>,
    /// `[rows, n]`.
    pub(crate) out: &'a mut Tensor<M, f32>,
}

/// Sums of groups of slices, at addresses of memory that outlives their use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GroupSums {
    /// `[groups][rows, n]`.
    sums: u64,
    /// Scales `[rows]` of exact sums of int8, which are integers; 0 if the sums are floats.
    exact_scales: u64,
    /// Scales and bias `[n]`, or 0.
    scales: u64,
    bias: u64,
    /// `[rows, n]`.
    out: u64,
    rows: usize,
    n: usize,
    groups: usize,
    slices: usize,
}

impl GroupSums {
    /// One group: `len` numbers at `x`.
    pub(crate) fn of_one(x: u64, len: usize) -> Self {
        let (exact_scales, scales, bias) = (0, 0, 0);
        Self { sums: x, exact_scales, scales, bias, out: x, rows: 1, n: len, groups: 1, slices: NUM_SLICES }
    }

    /// Whether these are the sums in f32 of a product without scales and bias whose `len` outputs are at
    /// `out`.
    pub(crate) fn are_of(&self, out: u64, len: usize) -> bool {
        let is_plain = [self.exact_scales, self.scales, self.bias] == [0; 3];
        is_plain && (self.out, self.rows * self.n) == (out, len)
    }

    /// Address of the outputs.
    pub(crate) fn out(&self) -> u64 {
        self.out
    }

    /// Number of outputs.
    pub(crate) fn len(&self) -> usize {
        self.rows * self.n
    }

    /// Parameters of a kernel that adds the groups itself: their address, and after others of its own the
    /// numbers of groups and of slices.
    pub(super) fn params(&self) -> (u64, [usize; 2]) {
        (self.sums, [self.groups, self.slices])
    }

    /// Adds the groups. One group is the output already.
    ///
    /// # Safety
    /// The addresses are those of the product, and the memory is still allocated.
    pub(crate) unsafe fn add<E: Executor>(self, executor: &mut E) -> Result<(), CudaError> {
        if self.groups == 1 {
            return Ok(());
        }
        let (is_exact, len) = (self.exact_scales != 0, self.len());
        let kernel = if is_exact { &INT8_PANELS } else { &GEMM_PANELS }.kernel(TILES.len());
        let params = Params::default().u64(self.sums);
        let params = if is_exact { params.u64(self.exact_scales) } else { params };
        let params = params.u64(self.scales).u64(self.bias).u64(self.out);
        let params = params.u64(len as u64).u32(self.n).u32(self.groups);
        let params = if is_exact { params } else { params.u32(self.slices) };
        let grid = [len.div_ceil(kernel.threads as usize) as u32, 1, 1];
        // SAFETY: these are the kernel's parameters, by this function's contract.
        unsafe { executor.launch(kernel, grid, &mut { params }) }
    }
}

impl<M: DeviceMemory> GemmPanels<'_, M> {
    /// Launches the fastest kernel. If it sums groups of slices, `out` is only written when the caller adds
    /// them.
    pub(crate) fn launch<E>(
        self,
        executor: &mut E,
        shape: ProductShape,
    ) -> Result<Option<GroupSums>, CudaError>
    where
        E: Executor<Memory = M>,
    {
        let ProductShape { rows, n, k } = shape;
        let (_, log_slices) = nonempty_slices(self.borders.1);
        let steps = k / self.operands.columns();
        let tiles = usable(self.operands.tiles(), executor.multiplies_in_clusters());
        let chosen = PanelLaunch::choose((rows.max(1), n.max(1), steps), tiles, 1 << log_slices);
        self.launch_as(executor, shape, chosen)
    }

    /// Launches a given kernel, or the fastest, and adds the groups.
    pub(crate) fn launch_whole<E>(
        self,
        executor: &mut E,
        shape: ProductShape,
        given: Option<PanelLaunch>,
    ) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let groups = match given {
            Some(launch) => self.launch_as(executor, shape, launch),
            None => self.launch(executor, shape),
        }?;
        // SAFETY: `self` borrowed the product's memory, which outlives this call.
        groups.map_or(Ok(()), |groups| unsafe { groups.add(executor) })
    }

    /// Launches a given kernel.
    pub(crate) fn launch_as<E>(
        self,
        executor: &mut E,
        shape: ProductShape,
        launch: PanelLaunch,
    ) -> Result<Option<GroupSums>, CudaError>
    where
        E: Executor<Memory = M>,
    {
        let ProductShape { rows, n, k } = shape;
        let Self { operands, bias, borders: (on_device, borders), sums, out } = self;
        let (first, log_slices) = nonempty_slices(borders);
        let (slices, groups) = (1 << log_slices, launch.groups);
        let kernel = operands.kernel(launch.tile)?;
        check(kernel.name, ("rows", rows), (1..1 << 21).contains(&rows), "1 to 2^21")?;
        check(kernel.name, ("n", n), (1..1 << 21).contains(&n), "1 to 2^21")?;
        check_borders(kernel.name, borders, (k, operands.columns()))?;
        check(
            kernel.name,
            ("groups", groups),
            groups > 0 && slices >= groups,
            format_args!("1 to {slices}"),
        )?;
        check_len(kernel.name, "borders", on_device.len(), NUM_SLICES + 1)?;
        check_len(kernel.name, "bias", bias.map_or(n, Tensor::len), n)?;
        check_len(kernel.name, "out", out.len(), rows * n)?;
        operands.check(kernel.name, shape)?;
        let grid = [launch.blocks(rows, n) as u32, 1, 1];
        let is_whole = groups == 1;
        let params = operands.params(is_whole).read_if(bias.filter(|_| is_whole)).read(on_device);
        let product = |params: Params| {
            let params = params.u32(rows).u32(n).u32(k).u32(first).u32(slices).u32(groups);
            operands.last_params(params)
        };
        if is_whole {
            // SAFETY: these are the kernel's parameters; the checks ensure that every element is in bounds.
            unsafe { executor.launch(kernel, grid, &mut product(params.write(out))) }?;
            return Ok(None);
        }
        let sums = ensure_capacity(sums, executor, groups * rows * n, "sums of groups of slices")?;
        // SAFETY: as above, with the sums of every group.
        unsafe { executor.launch(kernel, grid, &mut product(params.write(sums))) }?;
        let address = |numbers: Option<&Tensor<M, f32>>| numbers.map_or(0, Tensor::address);
        Ok(Some(GroupSums {
            sums: sums.address(),
            exact_scales: address(operands.scales_of_exact_sums()),
            scales: address(operands.channel_scales()),
            bias: address(bias),
            out: out.address(),
            rows,
            n,
            groups,
            slices,
        }))
    }
}

/// A kernel for a product, and in how many groups its units divide the slices. No choice changes a bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PanelLaunch {
    tile: Tile,
    groups: usize,
}

impl PanelLaunch {
    /// Every kernel of these tiles with every number of groups of `slices` slices.
    pub(crate) fn all(tiles: &[Tile], slices: usize) -> Vec<Self> {
        let groups = |&tile: &Tile| {
            std::iter::successors(Some(1), |groups| Some(2 * groups))
                .take_while(move |groups| *groups <= slices)
                .map(move |groups| Self { tile, groups })
        };
        tiles.iter().flat_map(groups).collect()
    }

    /// The launch with the shortest modelled time, of `rows` by `n` outputs over `steps` steps of K.
    fn choose((rows, n, steps): (usize, usize, usize), tiles: &[Tile], slices: usize) -> Self {
        let fits = |launch: &Self| launch.groups == 1 || launch.groups * rows * n * 4 <= MAX_SUMS_BYTES;
        let all = Self::all(tiles, slices).into_iter().filter(fits);
        // Of launches that wait for weights, that with the fewest units.
        all.min_by_key(|launch| (launch.nanoseconds((rows, n, steps)), launch.units(rows, n)))
            .unwrap_or(Self { tile: TILES[0], groups: 1 })
    }

    /// Time of a product: the steps of the units of a multiprocessor, or reading the weights from memory, whichever
    /// takes longer, and adding the groups.
    fn nanoseconds(self, (rows, n, steps): (usize, usize, usize)) -> usize {
        let of_unit = steps.div_ceil(self.groups) * self.tile.nanoseconds_of_step();
        let multiplying = self.units(rows, n).div_ceil(self.tile.multiprocessors()) * of_unit;
        let reading = n * steps * (PANEL_COLUMNS * size_of::<bf16>()) / 4300;
        let adding = if self.groups > 1 { 2000 + rows * n * 4 * (2 * self.groups + 1) / 4000 } else { 0 };
        multiplying.max(reading) + adding
    }

    /// Units of work: row tiles, tiles of channels, groups of slices.
    fn units(self, rows: usize, n: usize) -> usize {
        let Tile { rows: height, cluster: (row_tiles, channel_tiles), .. } = self.tile;
        let clusters = rows.div_ceil(height * row_tiles) * n.div_ceil(CHANNELS * channel_tiles);
        clusters * self.tile.cluster_size() * self.groups
    }

    /// Blocks of a launch.
    fn blocks(self, rows: usize, n: usize) -> usize {
        self.units(rows, n).min(self.tile.multiprocessors() * self.tile.blocks)
    }
}

const _: () = assert!(NUM_SLICES == 8, "gemm_panels.cu adds eight slices");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_panels_are_padded() {
        assert_eq!([1, 8, 9, 160].map(|rows| InputLayout::Panels.len(rows, 128)), [1024, 1024, 2048, 20_480]);
        assert_eq!(InputLayout::Rows.len(9, 128), 9 * 128);
        assert_eq!([1, 9].map(|rows| InputLayout::Panels.panels(rows)), [1, 2]);
        assert_eq!([packed_len(128, 64), packed_len(129, 64)], [128 * 64, 256 * 64]);
    }

    /// Shapes of an 8B model; the choices that were fastest on an H200 or within a tenth of it.
    #[test]
    fn the_choice_fits_the_rows_and_fills_the_device() {
        let choose = |(rows, n, k), in_clusters| {
            let tiles = usable(&TILES, in_clusters);
            let PanelLaunch { tile, groups } =
                PanelLaunch::choose((rows, n, k / PANEL_COLUMNS), tiles, NUM_SLICES);
            (tile.rows, tile.cluster, groups)
        };
        let chosen = |rows, n, k| {
            let (height, _, groups) = choose((rows, n, k), false);
            (height, groups)
        };
        assert_eq!([1, 16].map(|rows| chosen(rows, 28_672, 4096)), [(8, 1), (16, 1)]);
        assert_eq!(chosen(40, 4096, 4096), (40, 4));
        assert_eq!([28_672, 4096].map(|n| chosen(160, n, 4096)), [(80, 1), (80, 2)]);
        assert_eq!(chosen(160, 4096, 14_336), (80, 2));
        assert_eq!([28_672, 6144, 4096].map(|n| chosen(2048, n, 4096)), [(128, 1); 3]);
        // In clusters: as alone while one row tile holds all rows, then pairs, then squares.
        assert_eq!([1, 40].map(|rows| choose((rows, 28_672, 4096), true).1), [(1, 1); 2]);
        assert_eq!(choose((160, 28_672, 4096), true), (80, (2, 1), 1));
        assert_eq!([28_672, 6144].map(|n| choose((2048, n, 4096), true)), [(128, (2, 2), 1); 2]);
        for rows in [1, 5, 40, 160, 700, 2048] {
            for (n, k) in [(28_672, 4096), (4096, 14_336), (57_344, 8192), (1280, 8192), (8192, 3584)] {
                let launch = PanelLaunch::choose((rows, n, k / PANEL_COLUMNS), &TILES, NUM_SLICES);
                assert!(launch.groups == 1 || launch.groups * rows * n * 4 <= MAX_SUMS_BYTES, "{launch:?}");
            }
        }
    }

    #[test]
    fn slices_that_a_step_would_cross_do_not_fit() {
        let borders = [0, 64, 128, 128, 192, 192, 192, 192, 192];
        assert!(fits_panels(&borders, PANEL_COLUMNS) && !fits_panels(&borders, INT8_PANEL_COLUMNS));
        assert!(!fits_panels(&[0, 32, 64, 96, 128, 160, 192, 224, 256], PANEL_COLUMNS));
    }
}
