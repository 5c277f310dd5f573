//! Checked kernel calls: each file is one operation and its shapes. A call that could make a kernel access
//! memory out of bounds returns an error before the launch. No other module launches kernels.

mod all_reduce;
mod attention;
mod blocks;
mod candidates;
mod draw;
mod filters;
mod fp8;
mod fp8_blocks;
mod gemm;
mod heads;
mod int8;
mod logits;
mod own_blocks;
mod padding;
mod panels;
mod probe;
mod random;
mod ranks;
mod rows;
mod score;
mod step_arrays;
mod step_buffer;
mod tiling;
mod trees;

use super::CudaError;
use super::executor::check;
pub(crate) use all_reduce::{AllReduce, SumMemory};
pub(crate) use attention::{Attention, OwnBlockViews, TilingViews, check_head_dim};
pub(crate) use blocks::Variant;
pub(crate) use candidates::{
    CandidateBuffers, ListedRow, candidates, copy_edited_rows, find_candidates, score_first_candidates,
};
pub(crate) use draw::{DrawBuffers, DrawRow, Drawn, LogitsShape, draw};
pub(crate) use filters::{FilterRow, apply_filters, candidate_bytes};
pub(crate) use fp8::{Fp8Layout, GemmFp8};
pub(crate) use fp8_blocks::{BlockLayout, GemmFp8Blocks};
pub(crate) use gemm::{GRAIN as BF16_GRAIN, GemmBf16, borders, check_borders};
pub(crate) use heads::{Angles, NormHeads, WriteKv, rotate, rotate_at};
pub(crate) use int8::{GRAIN as INT8_GRAIN, GemmInt8, Int8Rows, QuantizeRows, StepLayout};
pub(crate) use logits::{ContextEdits, EDIT_BYTES, LogitEdit, edit_logits};
pub(crate) use own_blocks::{OwnBlocks, own_bytes};
pub(crate) use padding::padded_rows;
pub(crate) use panels::{
    BLOCK_TILES, CHANNELS as TILE_CHANNELS, GemmPanels, GroupSums, INT8_PANEL_COLUMNS, INT8_TILES,
    InputLayout, LaunchedProduct, MAX_SUMS_BYTES, NUM_ALONE, PANEL_COLUMNS, PackedChannels, PanelLaunch,
    PanelOperands, ProductInput, TILES, fits_panels, pack_fp8, pack_panels, packed_len,
};
pub(crate) use probe::{multiply_only, read_words};
pub(crate) use random::{random_bf16, random_f32};
pub(crate) use ranks::{concat_ranks, sum_ranks};
pub(crate) use rows::{Embedding, FinishSum, RmsNorm, Swiglu, add, add_at, take_rows, to_bf16, to_panels};
pub(crate) use score::{ScoreBuffers, ScoreRow, ScoredToken, copy_raw_rows, score, scores};
pub(crate) use step_arrays::{Place, StepArrays};
pub(crate) use step_buffer::{StepBuffer, capacity, ensure_capacity};
pub(crate) use tiling::{
    AttentionChunk, AttentionCounts, AttentionTile, LAST_BLOCK_PARTS, Limits, PartSize, Tiling, TilingKey,
    WorkItem, count_attention, partial_bytes,
};
pub(crate) use trees::{GatherBlocks, copy_tokens};

/// Largest size of a grid along y and z.
const MAX_GRID_YZ: usize = 65_535;

/// Checks a number that is the size of the grid along y or z.
fn check_grid(kernel: &'static str, what: &'static str, size: usize) -> Result<(), CudaError> {
    check(kernel, (what, size), (1..=MAX_GRID_YZ).contains(&size), format_args!("1 to {MAX_GRID_YZ}"))
}
