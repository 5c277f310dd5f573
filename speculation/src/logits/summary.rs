//! The highest logit of a row and whether all are numbers, in one pass with vector registers.

/// Number of logits in a block of a row.
pub(super) const SUMMARY_BLOCK: usize = 256;

/// What one pass over a row finds.
pub(super) struct Summary {
    /// The highest logit; NaN is ignored. Negative infinity for an empty row.
    pub(super) max: f32,
    /// The first block of [`SUMMARY_BLOCK`] logits that contains `max`.
    pub(super) max_block: usize,
    /// Whether no logit is NaN or +inf.
    pub(super) all_numbers: bool,
}

impl Summary {
    pub(super) fn of(logits: &[f32]) -> Self {
        pulp::Arch::new().dispatch(Summarize(logits))
    }
}

/// Compiled for each vector register width; the result does not depend on it, because comparisons do not
/// round.
struct Summarize<'a>(&'a [f32]);

impl pulp::NullaryFnOnce for Summarize<'_> {
    type Output = Summary;

    #[inline(always)]
    fn call(self) -> Summary {
        let mut summary = Summary { max: f32::NEG_INFINITY, max_block: 0, all_numbers: true };
        for (block, logits) in self.0.chunks(SUMMARY_BLOCK).enumerate() {
            let max = highest(logits);
            if max > summary.max {
                (summary.max, summary.max_block) = (max, block);
            }
            // `<` is false for NaN, so a bad logit is found regardless of the others.
            let mut fine = 1;
            for &logit in logits {
                fine &= u32::from(logit < f32::INFINITY);
            }
            summary.all_numbers &= fine == 1;
        }
        summary
    }
}

/// The highest logit; NaN is ignored.
#[inline(always)]
pub(crate) fn highest(logits: &[f32]) -> f32 {
    // Independent lanes fit vector registers; a single running maximum would be a dependency chain.
    const LANES: usize = 16;
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = higher(lanes[lane], chunk[lane]);
        }
    }
    let mut max = f32::NEG_INFINITY;
    for &logit in lanes.iter().chain(rest) {
        max = higher(max, logit);
    }
    max
}

#[inline(always)]
fn higher(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}
