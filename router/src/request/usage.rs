//! [`Usage`]: the tokens and rounds of a request, reported by all APIs.

use speculation::step::MAX_DRAFT_TOKENS;

use crate::generation::SpeculationUsage;

/// Token counts of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Each prompt counts once, whatever its number of choices.
    pub prompt_tokens: u64,
    /// Prompt tokens whose KV was found in the cache.
    pub cached_tokens: u64,
    /// Output tokens of all choices.
    pub completion_tokens: u64,
    /// Sums over all choices.
    pub speculation: SpeculationUsage,
    /// Histogram of accepted draft lengths, over all choices.
    pub accepted: AcceptanceCounts,
}

/// Histogram of the number of accepted tokens per draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AcceptanceCounts {
    counts: [u32; MAX_DRAFT_TOKENS + 1],
    longest_draft: u32,
}

impl Default for AcceptanceCounts {
    fn default() -> Self {
        Self { counts: [0; MAX_DRAFT_TOKENS + 1], longest_draft: 0 }
    }
}

impl AcceptanceCounts {
    /// Records one verified draft of `num_draft_tokens`, of which the first `num_accepted` were accepted.
    pub fn observe(&mut self, num_draft_tokens: u64, num_accepted: u64) {
        let max = MAX_DRAFT_TOKENS as u64;
        self.longest_draft = self.longest_draft.max(num_draft_tokens.min(max) as u32);
        self.counts[num_accepted.min(num_draft_tokens).min(max) as usize] += 1;
    }

    /// Adds the counts of `other`.
    pub fn add(&mut self, other: &Self) {
        self.longest_draft = self.longest_draft.max(other.longest_draft);
        self.counts.iter_mut().zip(&other.counts).for_each(|(sum, count)| *sum += count);
    }

    /// Entry `j` counts the drafts with `j` accepted tokens; the length follows from the longest draft.
    pub fn histogram(&self) -> &[u32] {
        &self.counts[..=self.longest_draft as usize]
    }

    /// Number of verified drafts.
    pub fn num_steps(&self) -> u64 {
        self.counts.iter().map(|&count| u64::from(count)).sum()
    }

    /// Number of tokens in the longest draft.
    pub fn longest_draft(&self) -> u32 {
        self.longest_draft
    }
}
