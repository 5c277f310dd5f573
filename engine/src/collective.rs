//! Communication between ranks during a forward: all-reduce of partial sums, gather of logits. Every rank
//! calls the same operations in the same order. The others detect a missing rank (`rank_barrier`), so every
//! wait ends.

mod across_nodes;
mod rank_barrier;
mod shared_memory;

pub(crate) use across_nodes::across_nodes;
pub(crate) use rank_barrier::RankBarrier;
pub(crate) use shared_memory::shared_memory;

use crate::EngineError;
use crate::host::HostRows;

/// One rank's end of the collective, over rows of type `R`.
pub(crate) trait Collective<R>: Send + Sync {
    /// Replaces every rank's rows by their sum over all ranks; all have the same length. Sums in the order of
    /// the tree of docs/contract.md C2: pairs of neighbouring ranks, then pairs of pairs.
    fn all_reduce(&self, rows: &mut R) -> Result<(), EngineError>;

    /// Concatenates the columns of all ranks: `[rows, widths[rank]]` from each becomes `[rows, sum of
    /// widths]` on the first rank. The content on the other ranks is unspecified.
    fn gather(&self, rows: &mut R, widths: &[usize]) -> Result<(), EngineError>;
}

/// The collective of a single rank: both operations do nothing.
#[derive(Debug)]
pub(crate) struct SingleRank;

impl<R> Collective<R> for SingleRank {
    fn all_reduce(&self, _rows: &mut R) -> Result<(), EngineError> {
        Ok(())
    }

    fn gather(&self, _rows: &mut R, _widths: &[usize]) -> Result<(), EngineError> {
        Ok(())
    }
}

/// Joins the columns of all parts, `[rows, widths[i]]` each, to `[rows, sum of widths]`.
fn join_columns(parts: &[&[f32]], widths: &[usize], out: &mut HostRows) {
    let num_rows = parts[0].len() / widths[0];
    out.resize(num_rows * widths.iter().sum::<usize>());
    let mut rest = &mut out[..];
    for row in 0..num_rows {
        for (part, width) in parts.iter().zip(widths) {
            let columns = rest.split_off_mut(..*width).expect("`out` was resized to hold all parts");
            columns.copy_from_slice(&part[row * width..(row + 1) * width]);
        }
    }
}
