//! One pass of the model over rows of many sequences, with every index computed: the input of `llama` and the
//! kernels. Built from sequences whose KV is already reserved. Code below this point does not check it again.

use std::ops::Range;

use cpu_kernels::{BLOCK_SIZE, KvSlot, PassRows, Segment, TreeSegment};

use crate::TokenId;

/// Maximum rows of one pass. A larger batch runs as several passes, which changes no bit (docs/contract.md
/// C1) and bounds the workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PassLimits {
    pub(crate) rows: usize,
    /// Maximum rows with logits; a row of logits is as wide as the vocabulary.
    pub(crate) logit_rows: usize,
}

impl PassLimits {
    pub(crate) const DEFAULT: Self = Self { rows: 512, logit_rows: 512 };
}

/// One sequence's part of a call, with its KV reserved.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReservedRows<'a> {
    /// Ids to append.
    pub(crate) token_ids: &'a [TokenId],
    /// Position of the first id.
    pub(crate) start: u32,
    /// The sequence's KV blocks, including those for these rows.
    pub(crate) block_table: &'a [u32],
    /// Number of trailing rows to return logits for.
    pub(crate) num_logits: usize,
    /// The token tree formed by the last ids, if there is one.
    pub(crate) tree: TreePart<'a>,
}

/// The part of a token tree that a call adds: the rows after those that earlier calls stored, which lie
/// before `start`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TreePart<'a> {
    /// Number of rows that earlier calls stored.
    pub(crate) num_stored: usize,
    /// Parents of all rows, stored rows first ([`TreeSegment::parents`]); empty without a tree.
    pub(crate) parents: &'a [u32],
}

impl TreePart<'_> {
    /// Number of rows that the call adds.
    pub(crate) fn num_new(&self) -> usize {
        self.parents.len() - self.num_stored
    }
}

impl ReservedRows<'_> {
    /// Number of ids before the tree.
    fn num_linear(&self) -> usize {
        self.token_ids.len() - self.tree.num_new()
    }
}

/// Owned copy of [`ReservedRows`]: it outlives the call, or came from another node.
#[derive(Debug, PartialEq)]
pub(crate) struct OwnedRows {
    pub(crate) token_ids: Vec<TokenId>,
    pub(crate) start: u32,
    pub(crate) block_table: Vec<u32>,
    pub(crate) num_logits: usize,
    pub(crate) num_stored: usize,
    pub(crate) parents: Vec<u32>,
}

impl OwnedRows {
    pub(crate) fn of(rows: &ReservedRows<'_>) -> Self {
        let ReservedRows { token_ids, start, block_table, num_logits, tree } = *rows;
        let (token_ids, block_table) = (token_ids.to_vec(), block_table.to_vec());
        let TreePart { num_stored, parents } = tree;
        Self { token_ids, start, block_table, num_logits, num_stored, parents: parents.to_vec() }
    }

    pub(crate) fn borrowed(&self) -> ReservedRows<'_> {
        let Self { token_ids, start, block_table, num_logits, num_stored, parents } = self;
        let tree = TreePart { num_stored: *num_stored, parents };
        ReservedRows { token_ids, start: *start, block_table, num_logits: *num_logits, tree }
    }
}

/// One pass. Per row: `token_ids`, `positions`, `slot_mapping`. Rows behind those of `segments` are padding:
/// they have no slots, and nothing reads their results.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ForwardBatch<'a> {
    pub(crate) token_ids: Vec<TokenId>,
    pub(crate) positions: Vec<u32>,
    pub(crate) slot_mapping: Vec<KvSlot>,
    pub(crate) segments: Vec<Segment<'a>>,
    /// Indices of rows that need logits, ascending.
    pub(crate) logit_rows: Vec<usize>,
    /// Whether [`ForwardBatch::pad`] has given it one of few sizes.
    pub(crate) is_padded: bool,
}

impl<'a> ForwardBatch<'a> {
    /// Splits a call into passes within `limits`, in batch order.
    pub(crate) fn passes(sequences: &[ReservedRows<'a>], limits: PassLimits) -> Vec<ForwardBatch<'a>> {
        let mut passes = Vec::new();
        let mut pass = ForwardBatch::default();
        for sequence in sequences {
            let mut done = 0;
            while done < sequence.token_ids.len() {
                let until = match done < sequence.num_linear() {
                    true => sequence.num_linear(),
                    false => sequence.token_ids.len(),
                };
                let first_logits = done.max(sequence.token_ids.len() - sequence.num_logits);
                let end = until
                    .min(done + limits.rows - pass.num_rows())
                    .min(first_logits + limits.logit_rows - pass.logit_rows.len());
                if end == done {
                    passes.push(std::mem::take(&mut pass));
                    continue;
                }
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

    /// Positions, slots and segments of the rows, in the form that the kernels take.
    pub(crate) fn rows(&self) -> PassRows<'_> {
        let Self { positions, slot_mapping, segments, .. } = self;
        PassRows { positions, slot_mapping, segments }
    }

    /// Adds rows, so that there are as many as `padded` returns for their number: token 0 at position 0, without
    /// a sequence. Does nothing if it returns `None`, or if some rows have no logits: these are rows of prompts,
    /// and such passes are seldom alike.
    pub(crate) fn pad(&mut self, padded: impl Fn(usize) -> Option<usize>) {
        let rows = self.num_rows();
        if self.logit_rows.len() < rows {
            return;
        }
        let Some(all) = padded(rows) else { return };
        self.token_ids.resize(all, 0);
        self.positions.resize(all, 0);
        self.logit_rows.extend(rows..all);
        self.is_padded = true;
    }

    /// The rows with logits only. Assumes that the keys and values of all rows are stored.
    pub(crate) fn logit_part(&self) -> ForwardBatch<'a> {
        let rows = self.logit_rows.iter();
        ForwardBatch {
            token_ids: rows.clone().map(|&row| self.token_ids[row]).collect(),
            positions: rows.clone().map(|&row| self.positions[row]).collect(),
            slot_mapping: rows.map(|&row| self.slot_mapping[row]).collect(),
            segments: self.segments.iter().filter_map(|segment| self.logit_segment(segment)).collect(),
            logit_rows: (0..self.logit_rows.len()).collect(),
            is_padded: false,
        }
    }

    /// The part of a segment with logits, which is its end; row numbers count rows with logits only.
    fn logit_segment(&self, segment: &Segment<'a>) -> Option<Segment<'a>> {
        let before = |row| self.logit_rows.partition_point(|&logit_row| logit_row < row);
        let rows = before(segment.rows.start)..before(segment.rows.end);
        let skipped = segment.rows.len() - rows.len();
        let tree = segment.tree.map(|tree| TreeSegment { first: tree.first + skipped, ..tree });
        let start = tree.map_or(segment.start + skipped as u32, |tree| tree.start);
        (!rows.is_empty()).then_some(Segment { rows, start, block_table: segment.block_table, tree })
    }

    fn push(&mut self, sequence: &ReservedRows<'a>, part: Range<usize>) {
        let first_row = self.num_rows();
        let first_logits = sequence.token_ids.len() - sequence.num_logits;
        let num_linear = sequence.num_linear();
        let num_stored = sequence.tree.num_stored;
        let tree_start = sequence.start + num_linear as u32 - num_stored as u32;
        let tree = part.start.checked_sub(num_linear).map(|first| TreeSegment {
            start: tree_start,
            first: first + num_stored,
            parents: sequence.tree.parents,
        });
        for i in part.clone() {
            let stored_at = sequence.start as usize + i;
            let depth = tree.map(|tree| tree.stored_at(i - num_linear + num_stored).count() - 1);
            let position = depth.map_or(stored_at, |depth| tree_start as usize + depth);
            if i >= first_logits {
                self.logit_rows.push(self.num_rows());
            }
            self.token_ids.push(sequence.token_ids[i]);
            self.positions.push(position as u32);
            self.slot_mapping.push(KvSlot {
                block: sequence.block_table[stored_at / BLOCK_SIZE],
                offset: (stored_at % BLOCK_SIZE) as u32,
            });
        }
        self.segments.push(Segment {
            rows: first_row..self.num_rows(),
            start: tree.map_or(sequence.start + part.start as u32, |tree| tree.start),
            block_table: sequence.block_table,
            tree,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Limits of `rows` rows, with and without logits.
    fn rows(rows: usize) -> PassLimits {
        PassLimits { rows, logit_rows: rows }
    }

    #[test]
    fn passes_respect_both_row_limits() {
        let sequence = |token_ids, num_logits| ReservedRows {
            token_ids,
            start: 0,
            block_table: &[0],
            num_logits,
            tree: TreePart::default(),
        };
        let sequences =
            [sequence(&[0, 1, 2, 3, 4, 5], 1), sequence(&[6, 7, 8, 9], 3), sequence(&[10, 11], 0)];
        let passes = ForwardBatch::passes(&sequences, PassLimits { rows: 9, logit_rows: 2 });
        let ids: Vec<&[u32]> = passes.iter().map(|pass| pass.token_ids.as_slice()).collect();
        assert_eq!(ids, [&[0, 1, 2, 3, 4, 5, 6, 7][..], &[8, 9, 10, 11]]);
        assert_eq!((&passes[0].logit_rows[..], &passes[1].logit_rows[..]), (&[5, 7][..], &[0, 1][..]));
        // A pass that has the maximum of rows with logits still accepts rows without.
        let passes =
            ForwardBatch::passes(&[sequences[0], sequences[2]], PassLimits { rows: 9, logit_rows: 1 });
        assert_eq!(passes.len(), 1);
    }

    #[test]
    fn a_call_is_split_into_passes_in_order() {
        let sequences = [
            ReservedRows {
                token_ids: &[10, 11, 12],
                start: 15,
                block_table: &[7, 3],
                num_logits: 1,
                tree: TreePart::default(),
            },
            ReservedRows {
                token_ids: &[20, 21],
                start: 0,
                block_table: &[5],
                num_logits: 2,
                tree: TreePart::default(),
            },
        ];
        let passes = ForwardBatch::passes(&sequences, rows(4));
        assert_eq!(passes.len(), 2);
        assert_eq!(passes[0].token_ids, [10, 11, 12, 20]);
        assert_eq!(passes[0].positions, [15, 16, 17, 0]);
        let slots: Vec<(u32, u32)> = passes[0].slot_mapping.iter().map(|s| (s.block, s.offset)).collect();
        assert_eq!(slots, [(7, 15), (3, 0), (3, 1), (5, 0)]);
        assert_eq!(passes[0].logit_rows, [2, 3]);
        assert_eq!(passes[0].segments[1], Segment { rows: 3..4, start: 0, block_table: &[5], tree: None });
        assert_eq!(passes[1].segments, [Segment { rows: 0..1, start: 1, block_table: &[5], tree: None }]);
        assert_eq!(passes[1].logit_rows, [0]);
    }

    /// Rows of a sequence without a tree.
    fn sequence(token_ids: &[TokenId], start: u32, num_logits: usize) -> ReservedRows<'_> {
        ReservedRows { token_ids, start, block_table: &[7, 3], num_logits, tree: TreePart::default() }
    }

    #[test]
    fn rows_with_logits_keep_their_positions() {
        let parents = [0, 1, 1];
        let tree = ReservedRows {
            tree: TreePart { num_stored: 0, parents: &parents },
            ..sequence(&[30, 31, 32, 33], 4, 2)
        };
        let sequences = [sequence(&[10, 11, 12], 15, 1), sequence(&[20, 21], 0, 0), tree];
        let pass = &ForwardBatch::passes(&sequences, rows(16))[0];
        assert_eq!(pass.logit_rows, [2, 7, 8]);
        let part = pass.logit_part();
        assert_eq!((&part.token_ids[..], &part.positions[..]), (&[12, 32, 33][..], &[17, 6, 6][..]));
        assert_eq!(part.slot_mapping, [2, 7, 8].map(|row: usize| pass.slot_mapping[row]));
        assert_eq!(part.logit_rows, [0, 1, 2]);
        let block_table = &[7, 3];
        let later = TreeSegment { start: 5, first: 1, parents: &parents };
        assert_eq!(
            part.segments,
            [
                Segment { rows: 0..1, start: 17, block_table, tree: None },
                Segment { rows: 1..3, start: 5, block_table, tree: Some(later) },
            ]
        );
        assert_eq!(part.logit_part(), part, "all rows have logits");
    }

    #[test]
    fn padding_follows_the_rows_of_sequences() {
        let pass = |num_logits| {
            let sequences = [sequence(&[10, 11, 12], 15, num_logits), sequence(&[20, 21], 3, 2)];
            ForwardBatch::passes(&sequences, rows(16)).remove(0)
        };
        let mut padded = pass(3);
        padded.pad(|rows| Some(rows.next_multiple_of(4)));
        assert_eq!(padded.token_ids, [10, 11, 12, 20, 21, 0, 0, 0]);
        assert_eq!(padded.positions, [15, 16, 17, 3, 4, 0, 0, 0]);
        assert_eq!((&padded.slot_mapping, &padded.segments), (&pass(3).slot_mapping, &pass(3).segments));
        assert!(padded.logit_rows.iter().copied().eq(0..8) && padded.is_padded);
        let mut same = [pass(3), pass(1)];
        same[0].pad(|_| None);
        same[1].pad(|_| Some(8));
        assert_eq!(same, [pass(3), pass(1)]);
    }

    #[test]
    fn tree_rows_have_positions_by_depth_and_slots_in_order() {
        let parents = [0, 0, 1, 2, 2];
        let sequence = ReservedRows {
            token_ids: &[10, 11, 20, 21, 22, 23, 24],
            start: 12,
            block_table: &[7, 3],
            num_logits: 6,
            tree: TreePart { num_stored: 0, parents: &parents },
        };
        let passes = ForwardBatch::passes(&[sequence], rows(4));
        assert_eq!(passes[0].positions, [12, 13, 14, 14]);
        assert_eq!(passes[1].positions, [15, 15, 15]);
        let slots: Vec<(u32, u32)> =
            passes.iter().flat_map(|pass| &pass.slot_mapping).map(|s| (s.block, s.offset)).collect();
        assert_eq!(slots, [(7, 12), (7, 13), (7, 14), (7, 15), (3, 0), (3, 1), (3, 2)]);
        assert_eq!((&passes[0].logit_rows[..], &passes[1].logit_rows[..]), (&[1, 2, 3][..], &[0, 1, 2][..]));
        let ranges: Vec<Range<usize>> =
            passes.iter().flat_map(|p| &p.segments).map(|s| s.rows.clone()).collect();
        assert_eq!(ranges, [0..2, 2..4, 0..3]);
        let tree = passes[1].segments[0].tree.unwrap();
        assert_eq!((tree.start, tree.first), (14, 2));
        assert_eq!(tree.stored_at(2).collect::<Vec<_>>(), [16, 14]);
        assert_eq!(tree.stored_at(4).collect::<Vec<_>>(), [18, 15]);
        // The same rows, with the second pass as a second call.
        let later = ReservedRows {
            token_ids: &[22, 23, 24],
            start: 16,
            num_logits: 3,
            tree: TreePart { num_stored: 2, parents: &parents },
            ..sequence
        };
        assert_eq!(ForwardBatch::passes(&[later], rows(4)), passes[1..]);
    }
}
