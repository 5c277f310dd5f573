//! [`Usage`]: what a request cost, whichever API reports it.

use speculation::step::MAX_DRAFT_TOKENS;

use crate::generation::SpeculationUsage;

/// What a request cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Of each prompt once, however many choices it has.
    pub prompt_tokens: u64,
    /// Those of them whose KV a target had from other sequences.
    pub cached_tokens: u64,
    /// Of all choices.
    pub completion_tokens: u64,
    /// Sums over all choices.
    pub speculation: SpeculationUsage,
    /// How much of each draft was accepted, over all choices.
    pub accepted: AcceptanceCounts,
}

/// How often how many tokens of a draft were accepted.
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
    /// One verified draft of `num_draft_tokens`, of which the first `num_accepted` were accepted.
    pub fn observe(&mut self, num_draft_tokens: u64, num_accepted: u64) {
        let most = MAX_DRAFT_TOKENS as u64;
        self.longest_draft = self.longest_draft.max(num_draft_tokens.min(most) as u32);
        self.counts[num_accepted.min(num_draft_tokens).min(most) as usize] += 1;
    }

    /// Counts what another one counted.
    pub fn add(&mut self, other: &Self) {
        self.longest_draft = self.longest_draft.max(other.longest_draft);
        self.counts.iter_mut().zip(&other.counts).for_each(|(sum, count)| *sum += count);
    }

    /// At `j` the drafts of which `j` tokens were accepted, as far as the longest draft reaches.
    pub fn histogram(&self) -> &[u32] {
        &self.counts[..=self.longest_draft as usize]
    }

    /// Drafts.
    pub fn num_steps(&self) -> u64 {
        self.counts.iter().map(|&count| u64::from(count)).sum()
    }

    /// Tokens of the longest draft.
    pub fn longest_draft(&self) -> u32 {
        self.longest_draft
    }
}
