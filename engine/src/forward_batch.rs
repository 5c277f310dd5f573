//! One pass of the model over rows of many sequences, with every index worked out: what `llama` and the
//! kernels read. Built from sequences whose KV is already reserved; nothing is checked again below this
//! point.

use std::ops::Range;

use crate::TokenId;
use crate::block_manager::BLOCK_SIZE;
use crate::kv_cache::KvSlot;

/// Most rows in one pass; more are run as several, which changes no bit (docs/contract.md C1) and bounds the
/// workspace.
pub(crate) const MAX_ROWS_PER_PASS: usize = 512;

/// Rows of one sequence, standing one behind the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Segment<'a> {
    /// The rows of the pass.
    pub(crate) rows: Range<usize>,
    /// The position of the first of them.
    pub(crate) start: u32,
    /// The sequence's KV blocks in position order.
    pub(crate) block_table: &'a [u32],
}

/// One sequence's part of a call, its KV reserved.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReservedRows<'a> {
    /// Ids to append.
    pub(crate) token_ids: &'a [TokenId],
    /// The position of the first.
    pub(crate) start: u32,
    /// The sequence's KV blocks, those for these rows included.
    pub(crate) block_table: &'a [u32],
    /// Logits are wanted for the last so many rows.
    pub(crate) num_logits: usize,
}

/// One pass. Per row: `token_ids`, `positions`, `slot_mapping`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ForwardBatch<'a> {
    pub(crate) token_ids: Vec<TokenId>,
    pub(crate) positions: Vec<u32>,
    pub(crate) slot_mapping: Vec<KvSlot>,
    pub(crate) segments: Vec<Segment<'a>>,
    /// Rows that want logits, ascending.
    pub(crate) logit_rows: Vec<usize>,
}

impl<'a> ForwardBatch<'a> {
    /// Cuts a call into passes of at most `max_rows` rows, in batch order.
    pub(crate) fn passes(sequences: &[ReservedRows<'a>], max_rows: usize) -> Vec<ForwardBatch<'a>> {
        let mut passes = Vec::new();
        let mut pass = ForwardBatch::default();
        for sequence in sequences {
            let mut done = 0;
            while done < sequence.token_ids.len() {
                if pass.num_rows() == max_rows {
                    passes.push(std::mem::take(&mut pass));
                }
                let end = sequence.token_ids.len().min(done + max_rows - pass.num_rows());
                pass.push(sequence, done..end);
                done = end;
            }
        }
        passes.push(pass);
        passes
    }

    pub(crate) fn num_rows(&self) -> usize {
        self.token_ids.len()
    }

    fn push(&mut self, sequence: &ReservedRows<'a>, part: Range<usize>) {
        let first_row = self.num_rows();
        let first_logits = sequence.token_ids.len() - sequence.num_logits;
        for i in part.clone() {
            let position = sequence.start as usize + i;
            if i >= first_logits {
                self.logit_rows.push(self.num_rows());
            }
            self.token_ids.push(sequence.token_ids[i]);
            self.positions.push(position as u32);
            self.slot_mapping.push(KvSlot {
                block: sequence.block_table[position / BLOCK_SIZE],
                offset: (position % BLOCK_SIZE) as u32,
            });
        }
        self.segments.push(Segment {
            rows: first_row..self.num_rows(),
            start: sequence.start + part.start as u32,
            block_table: sequence.block_table,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_cut_into_passes_in_order() {
        let sequences = [
            ReservedRows { token_ids: &[10, 11, 12], start: 15, block_table: &[7, 3], num_logits: 1 },
            ReservedRows { token_ids: &[20, 21], start: 0, block_table: &[5], num_logits: 2 },
        ];
        let passes = ForwardBatch::passes(&sequences, 4);
        assert_eq!(passes.len(), 2);
        assert_eq!(passes[0].token_ids, [10, 11, 12, 20]);
        assert_eq!(passes[0].positions, [15, 16, 17, 0]);
        let slots: Vec<(u32, u32)> = passes[0].slot_mapping.iter().map(|s| (s.block, s.offset)).collect();
        assert_eq!(slots, [(7, 15), (3, 0), (3, 1), (5, 0)]);
        assert_eq!(passes[0].logit_rows, [2, 3]);
        assert_eq!(passes[0].segments[1], Segment { rows: 3..4, start: 0, block_table: &[5] });
        assert_eq!(passes[1].segments, [Segment { rows: 0..1, start: 1, block_table: &[5] }]);
        assert_eq!(passes[1].logit_rows, [0]);
    }
}
