//! A product as it was launched, read back from its kernel and parameters: for counts and models of steps.

use half::bf16;

use super::{CHANNELS, PANEL_COLUMNS, PanelLaunch, TILES};
use crate::cuda::sources::GEMM_PANELS;

/// A launched product of bf16 panels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LaunchedProduct {
    launch: PanelLaunch,
    rows: usize,
    n: usize,
    k: usize,
}

impl LaunchedProduct {
    /// The product that [`GemmPanels::launch_as`](super::GemmPanels::launch_as) launched with these
    /// parameters; `None` for other kernels.
    pub(crate) fn of(kernel: &str, params: &[u64]) -> Option<Self> {
        let mut kernels = GEMM_PANELS.kernels.iter().zip(TILES);
        let (_, tile) = kernels.find(|(listed, _)| listed.name == kernel)?;
        // Five addresses, the shape, the first slice, the number of slices, groups.
        let &[_, _, _, _, _, rows, n, k, _, _, groups] = params else { return None };
        let [rows, n, k, groups] = [rows, n, k, groups].map(|number| number as usize);
        Some(Self { launch: PanelLaunch { tile, groups }, rows, n, k })
    }

    /// Modelled time, adding its groups of slices included.
    pub(crate) fn nanoseconds(&self) -> usize {
        self.launch.nanoseconds((self.rows, self.n, self.k / PANEL_COLUMNS))
    }

    /// Bytes of weights and inputs that its blocks read, if they share none: each unit of work reads 128
    /// channels and its rows, padding included, over its part of K.
    pub(crate) fn bytes_read(&self) -> usize {
        let units_of_group = self.launch.units(self.rows, self.n) / self.launch.groups;
        units_of_group * (CHANNELS + self.launch.tile.rows) * self.k * size_of::<bf16>()
    }
}
