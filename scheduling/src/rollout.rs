//! The rollout of a draft: which draft may propose for which sequence while a candidate is tested, and when
//! the evidence suffices to promote the candidate or roll it back. Pure. A rollout affects speed and no
//! tokens.
//!
//! Evidence is evaluated when enough has accumulated, and again at each doubling. Evaluations are few because
//! each may err by chance: a bound of [`NUM_ERRORS`] standard errors errs once in 740 evaluations on one
//! side.

use serde::Serialize;
use speculation::SequenceId;

use crate::cluster_mean::ClusterMean;
use crate::draft_score::{PairedReport, PairedScore};

/// Number of standard errors that a difference must exceed.
const NUM_ERRORS: f64 = 3.0;

/// Settings of a rollout.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RolloutSettings {
    /// Model id of the candidate's draft workers.
    pub draft: String,
    /// Share of new sequences that the candidate drafts for, 0 to 1; 0: it is only scored as a shadow draft.
    pub share: f64,
    /// Whether evidence promotes it and rolls it back; otherwise an operator does.
    pub decides: bool,
    /// Required evidence.
    #[serde(flatten)]
    pub rules: RolloutRules,
}

/// Thresholds for sufficient evidence.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RolloutRules {
    /// Minimum drafts of both at the same positions before any decision.
    pub min_drafts: u64,
    /// Minimum number of sequences that these come from.
    pub min_sequences: u64,
    /// Relative gain in accepted tokens that the candidate must show with certainty.
    pub margin: f64,
    /// Maximum ratio of the candidate's step time to that of the other draft.
    pub max_slowdown: f64,
}

impl Default for RolloutRules {
    fn default() -> Self {
        Self { min_drafts: 1_000, min_sequences: 50, margin: 0.03, max_slowdown: 1.25 }
    }
}

impl RolloutSettings {
    /// Returns the fault of the settings, if there is one.
    pub fn fault(&self) -> Option<String> {
        let RolloutRules { margin, max_slowdown, .. } = self.rules;
        match () {
            () if self.draft.is_empty() => Some("draft must be the model id of the candidate".to_owned()),
            () if !(0.0..=1.0).contains(&self.share) => {
                Some(format!("share must be between 0 and 1, not {}", self.share))
            }
            () if !(0.0..=10.0).contains(&margin) => {
                Some(format!("margin must be between 0 and 10, not {margin}"))
            }
            () if !(max_slowdown.is_finite() && max_slowdown > 0.0) => {
                Some(format!("max_slowdown must be above 0, not {max_slowdown}"))
            }
            () => None,
        }
    }
}

/// An operator's order.
#[derive(Debug, Clone, PartialEq)]
pub enum RolloutOrder {
    /// Begins a rollout, and replaces another one.
    Begin(RolloutSettings),
    /// The candidate drafts for every sequence from now on.
    Promote,
    /// Ends the rollout: every draft worker returns to the role with which it was started.
    End,
}

/// Stage of a rollout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RolloutStage {
    /// The candidate drafts for its share.
    Canary,
    /// It drafts for every sequence that it has capacity for.
    Promoted,
    /// It drafts for none.
    RolledBack,
}

/// Result of an evaluation of the evidence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RolloutVerdict {
    /// The evidence is insufficient or shows no certain difference.
    Undecided,
    /// The candidate is better by the margin.
    Better,
    /// It is better, but its steps take too long to be certain that it pays.
    BetterAndSlower,
    /// It is worse.
    Worse,
}

/// Rank of a draft worker for a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Preference {
    /// The sequence is meant for its draft.
    Primary,
    /// The sequence is meant for another draft, and this one substitutes.
    Fallback,
}

/// An active rollout, or one that has ended and still applies.
#[derive(Debug, Clone, PartialEq)]
pub struct Rollout {
    settings: RolloutSettings,
    stage: RolloutStage,
    verdict: RolloutVerdict,
    /// Numbers of drafts at which each kind of evidence is evaluated next.
    next_evaluations: [u64; 2],
    /// Judged and accepted positions of the sequences that each draft served.
    arms: Arms,
    /// Pairs at the time it ended; later pairs compare with another serving draft.
    final_pairs: Option<PairedReport>,
}

/// Acceptance in the two arms of a canary: accepted of judged positions, by sequence.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Arms {
    candidate: ClusterMean,
    others: ClusterMean,
}

/// Report on a rollout.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RolloutReport {
    /// Its settings.
    #[serde(flatten)]
    pub settings: RolloutSettings,
    /// Its stage.
    pub stage: RolloutStage,
    /// Result of the latest evaluation.
    pub verdict: RolloutVerdict,
    /// Both drafts at the same positions; if evidence ended the rollout, the pairs at that time.
    pub paired: PairedReport,
    /// Acceptance of the candidate's drafts for its share; absent before the first.
    pub candidate_acceptance: Option<f64>,
    /// Acceptance of the other drafts in the same period.
    pub other_acceptance: Option<f64>,
    /// Ratio of the candidate's step time to that of the other draft, if both are known.
    pub slowdown: Option<f64>,
}

impl Rollout {
    /// Begins a rollout.
    pub fn new(settings: RolloutSettings) -> Self {
        let next_evaluations = [settings.rules.min_drafts.max(1); 2];
        let (stage, verdict) = (RolloutStage::Canary, RolloutVerdict::Undecided);
        Self { settings, stage, verdict, next_evaluations, arms: Arms::default(), final_pairs: None }
    }

    /// The candidate's model id.
    pub fn draft(&self) -> &str {
        &self.settings.draft
    }

    /// Its stage.
    pub fn stage(&self) -> RolloutStage {
        self.stage
    }

    /// Ends it, by order of an operator or by the evidence.
    pub fn end(&mut self, stage: RolloutStage) {
        self.stage = stage;
    }

    /// Records the judged and accepted positions of a sequence that this draft served.
    pub fn on_served(&mut self, draft: &str, judged: u64, accepted: u64) {
        if self.stage == RolloutStage::Canary {
            let arm = if draft == self.draft() { &mut self.arms.candidate } else { &mut self.arms.others };
            arm.observe(judged as f64, accepted as f64);
        }
    }

    /// Evaluates the evidence if that is due. Returns the new stage if it changes.
    pub fn evaluate(&mut self, paired: &PairedScore, slowdown: Option<f64>) -> Option<RolloutStage> {
        if self.stage != RolloutStage::Canary {
            return None;
        }
        let mut verdict = None;
        if is_due(&mut self.next_evaluations[0], paired.difference().observations()) {
            verdict = Some(self.verdict_of_pairs(paired, slowdown));
        }
        if is_due(&mut self.next_evaluations[1], self.arms.min_observations()) && self.is_worse_in_canary() {
            verdict = Some(RolloutVerdict::Worse);
        }
        self.verdict = verdict?;
        let ends = match self.verdict {
            RolloutVerdict::Better => RolloutStage::Promoted,
            RolloutVerdict::Worse => RolloutStage::RolledBack,
            RolloutVerdict::Undecided | RolloutVerdict::BetterAndSlower => return None,
        };
        // Without a share it is only scored.
        (self.settings.decides && self.settings.share > 0.0).then(|| {
            self.stage = ends;
            self.final_pairs = Some(paired.report());
            ends
        })
    }

    fn verdict_of_pairs(&self, paired: &PairedScore, slowdown: Option<f64>) -> RolloutVerdict {
        let rules = &self.settings.rules;
        let bounds = (paired.difference().mean(), paired.difference().error(), paired.serving().mean());
        let (Some(mean), Some(error), Some(serving)) = bounds else { return RolloutVerdict::Undecided };
        let margin = NUM_ERRORS * error;
        match () {
            () if paired.difference().clusters() < rules.min_sequences => RolloutVerdict::Undecided,
            () if mean + margin < 0.0 => RolloutVerdict::Worse,
            () if mean - margin <= rules.margin * serving => RolloutVerdict::Undecided,
            () if slowdown.is_some_and(|slowdown| slowdown > rules.max_slowdown) => {
                RolloutVerdict::BetterAndSlower
            }
            () => RolloutVerdict::Better,
        }
    }

    fn is_worse_in_canary(&self) -> bool {
        let Arms { candidate, others } = &self.arms;
        let enough = candidate.clusters().min(others.clusters()) >= self.settings.rules.min_sequences;
        let Some(difference) = candidate.mean().zip(others.mean()).map(|(a, b)| a - b) else { return false };
        let Some(error) = candidate.error().zip(others.error()).map(|(a, b)| a.hypot(b)) else {
            return false;
        };
        enough && difference + NUM_ERRORS * error < 0.0
    }

    /// Creates the report.
    pub fn report(&self, paired: PairedReport, slowdown: Option<f64>) -> RolloutReport {
        RolloutReport {
            settings: self.settings.clone(),
            stage: self.stage,
            verdict: self.verdict,
            paired: self.final_pairs.unwrap_or(paired),
            candidate_acceptance: self.arms.candidate.mean(),
            other_acceptance: self.arms.others.mean(),
            slowdown,
        }
    }
}

impl Arms {
    fn min_observations(&self) -> u64 {
        self.candidate.observations().min(self.others.observations())
    }
}

/// Whether an evaluation is due; the next one follows at twice the number.
fn is_due(next: &mut u64, drafts: u64) -> bool {
    let is_due = drafts >= *next;
    if is_due {
        *next = drafts.saturating_mul(2);
    }
    is_due
}

/// Preference of a draft worker with model `draft` for a sequence; `None`: it may not serve it. `is_shadow`:
/// the worker was started as a shadow draft.
pub fn preference(
    rollout: Option<&Rollout>,
    (draft, is_shadow): (&str, bool),
    sequence: SequenceId,
) -> Option<Preference> {
    let Some(rollout) = rollout else { return (!is_shadow).then_some(Preference::Primary) };
    let is_meant_for_candidate = match rollout.stage {
        RolloutStage::Canary => is_sampled(sequence, rollout.settings.share, "canary"),
        RolloutStage::Promoted => true,
        RolloutStage::RolledBack => false,
    };
    match (draft == rollout.draft(), is_meant_for_candidate) {
        (true, true) => Some(Preference::Primary),
        (true, false) => None,
        (false, _) if is_shadow => None,
        (false, true) => Some(Preference::Fallback),
        (false, false) => Some(Preference::Primary),
    }
}

/// Whether a draft worker is scored as a shadow draft for sequences that it does not serve.
pub fn is_scored(rollout: Option<&Rollout>, draft: &str, is_shadow: bool) -> bool {
    match rollout.filter(|rollout| rollout.draft() == draft) {
        Some(rollout) => rollout.stage != RolloutStage::Promoted,
        None => is_shadow,
    }
}

/// Whether a sequence belongs to a share of all sequences. A larger share contains the smaller one of the
/// same purpose; shares of different purposes are independent.
pub fn is_sampled(sequence: SequenceId, share: f64, purpose: &str) -> bool {
    let salt = purpose.bytes().fold(0, |salt: u64, byte| salt.wrapping_mul(31).wrapping_add(byte.into()));
    // Finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): spreads consecutive ids evenly.
    let mut bits = sequence.0.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ salt.wrapping_mul(0xD1B5_4A32_D192_ED03);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^= bits >> 31;
    ((bits >> 11) as f64) < share * (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests;
