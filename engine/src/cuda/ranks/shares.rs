//! Decides how a sum over ranks is formed. In one phase every rank gets all parts and adds them up, which
//! sends R - 1 parts to each of R ranks. In two phases a rank gets its share of every part (reduce-scatter),
//! adds these up, and the ranks gather each other's sums (all-gather), which sends 2 (R - 1) / R parts to
//! each but waits for a second collective. An element is added in the same order either way, so the bits are
//! equal.

/// Bytes that one GPU receives from others in the time that a collective takes before its first byte: 12 us
/// at 300 GB/s over NVLink, an assumption (docs/design/gpu.md).
const LATENCY_BYTES: f64 = 3.6e6;

/// When sums over ranks are formed in two phases.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct SumPhases {
    /// See [`LATENCY_BYTES`].
    latency_bytes: f64,
}

impl SumPhases {
    /// Where the second phase is predicted to save time.
    pub(crate) const BY_SIZE: Self = Self { latency_bytes: LATENCY_BYTES };

    /// Wherever the numbers can be divided, for checks.
    pub(crate) const ALWAYS_TWO: Self = Self { latency_bytes: 0.0 };

    /// Whether a sum of `len` numbers of f32 over `ranks` ranks takes two phases. Two ranks send as many
    /// bytes either way.
    pub(crate) fn adds_shares(self, len: usize, ranks: usize) -> bool {
        len.is_multiple_of(ranks) && ranks > 2 && len as f64 > self.max_one_phase_len(ranks)
    }

    /// The longest sum over `ranks` ranks, two or more, that one kernel forms over peer pointers, up to the
    /// rounding of its blocks to whole vectors. A rank then receives in one phase what takes as long as the
    /// latency of a collective, which that kernel avoids. For longer sums the bytes count most, so that two
    /// phases may be faster, and the memory for parts would grow.
    pub(crate) fn max_len_over_peers(ranks: usize) -> usize {
        LATENCY_BYTES as usize / ((ranks - 1) * size_of::<f32>())
    }

    /// Number of f32 that sums of up to `rows` rows of `width` need besides the parts: the sums, the parts of
    /// other ranks, and the sums of a share.
    pub(crate) fn workspace_len(self, (rows, width): (usize, usize), ranks: usize) -> usize {
        let len = rows * width;
        if !width.is_multiple_of(ranks) || !self.adds_shares(len, ranks) {
            return (ranks + 1) * len;
        }
        let one_phase = self.max_one_phase_len(ranks).ceil() as usize;
        len + len.max(ranks * one_phase) + len / ranks
    }

    fn max_one_phase_len(self, ranks: usize) -> f64 {
        let saved_parts = (ranks as f64 - 1.0) * (1.0 - 2.0 / ranks as f64);
        self.latency_bytes / (saved_parts * size_of::<f32>() as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_sums_of_many_ranks_take_two_phases() {
        let by_size = SumPhases::BY_SIZE;
        // A hidden size of 8,192: one verify step of five rows, and 32 of them.
        assert!(!by_size.adds_shares(5 * 8192, 8));
        assert!(by_size.adds_shares(160 * 8192, 8));
        // 4 ranks save 1.5 parts, 8 ranks 5.25: 73 and 21 rows outweigh the latency.
        assert!(!by_size.adds_shares(73 * 8192, 4) && by_size.adds_shares(74 * 8192, 4));
        assert!(!by_size.adds_shares(20 * 8192, 8) && by_size.adds_shares(21 * 8192, 8));
        assert!(!by_size.adds_shares(2048 * 8192, 2), "the bytes are the same");
        assert!(!by_size.adds_shares(1, 1));
    }

    #[test]
    fn a_workspace_holds_the_largest_sum_of_either_kind() {
        let by_size = SumPhases::BY_SIZE;
        let lens = (1..=256).map(|rows| rows * 8192);
        let needed = |len: usize| match by_size.adds_shares(len, 8) {
            true => len + len + len / 8,
            false => len + 8 * len,
        };
        assert!(by_size.workspace_len((256, 8192), 8) >= lens.map(needed).max().unwrap());
        assert_eq!(by_size.workspace_len((2048, 8192), 8), (2 * 8 + 1) * 2048 * 8192 / 8);
        assert_eq!(by_size.workspace_len((2048, 8192), 2), 3 * 2048 * 8192);
        assert_eq!(by_size.workspace_len((2048, 8190), 8), 9 * 2048 * 8190);
    }

    /// Rows of 8,192: a verify step of some sequences, and no prompt.
    #[test]
    fn sums_over_peers_are_those_of_few_rows() {
        assert_eq!([2, 4, 8].map(|ranks| SumPhases::max_len_over_peers(ranks) / 8192), [109, 36, 15]);
    }

    #[test]
    fn what_cannot_be_divided_takes_one_phase() {
        assert!(SumPhases::ALWAYS_TWO.adds_shares(16, 4));
        assert!(!SumPhases::ALWAYS_TWO.adds_shares(18, 4));
        assert!(!SumPhases::BY_SIZE.adds_shares(1 + 2048 * 8192, 8));
    }
}
