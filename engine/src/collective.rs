//! What ranks tell each other during a forward: sums of their parts, and the logits. Every rank calls the same
//! operations in the same order; whoever is missing is noticed by the others (`meeting`), and nobody waits for ever.

mod meeting;
mod shared_memory;

pub(crate) use meeting::Meeting;
pub(crate) use shared_memory::shared_memory;

use crate::EngineError;

/// One rank's end, over rows of type `R`.
pub(crate) trait Collective<R>: Send + Sync {
    /// Replaces every rank's rows by their sum over ranks, equally long on all. The order is the tree of
    /// docs/contract.md C2 over ranks: pairs of neighbours, then pairs of pairs.
    fn all_reduce(&self, rows: &mut R) -> Result<(), EngineError>;

    /// Puts the columns of all ranks side by side: `[rows, widths[rank]]` of each becomes `[rows, sum of widths]`
    /// on the first. What the others have then is of no matter.
    fn gather(&self, rows: &mut R, widths: &[usize]) -> Result<(), EngineError>;
}

/// A rank without others.
#[derive(Debug)]
pub(crate) struct Alone;

impl<R> Collective<R> for Alone {
    fn all_reduce(&self, _rows: &mut R) -> Result<(), EngineError> {
        Ok(())
    }

    fn gather(&self, _rows: &mut R, _widths: &[usize]) -> Result<(), EngineError> {
        Ok(())
    }
}
