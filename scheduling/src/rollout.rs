//! The rollout of a draft: which draft may propose for which sequence while a candidate is tried, and when evidence is enough to give it
//! everything or to take it back. Pure; a rollout changes speed and no token.
//!
//! Evidence is looked at when there is enough of it, then whenever there is twice as much: each look may err by chance, so looks are few. A bound of
//! [`DEVIATIONS`] standard errors errs once in 740 looks on one side.

use serde::Serialize;
use speculation::SequenceId;

use crate::cluster_mean::ClusterMean;
use crate::draft_score::{PairedReport, PairedScore};

/// Standard errors that a difference has to exceed.
pub const DEVIATIONS: f64 = 3.0;

/// What an operator asks for.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RolloutSettings {
    /// The candidate: the model id of its draft workers.
    pub draft: String,
    /// Share of new sequences that it drafts for, 0 to 1; 0: it is scored as a shadow draft alone.
    pub share: f64,
    /// Whether evidence promotes it and takes it back, or an operator does.
    pub decides: bool,
    /// What evidence has to show.
    #[serde(flatten)]
    pub rules: RolloutRules,
}

/// When evidence is enough.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RolloutRules {
    /// Drafts of both at the same places, before anything is decided.
    pub min_drafts: u64,
    /// Sequences that these have to come from.
    pub min_sequences: u64,
    /// By what part of the serving draft's accepted tokens the candidate has to be better, surely.
    pub margin: f64,
    /// How many times as long the candidate's step may take.
    pub max_slowdown: f64,
}

impl Default for RolloutRules {
    fn default() -> Self {
        Self { min_drafts: 1_000, min_sequences: 50, margin: 0.03, max_slowdown: 1.25 }
    }
}

impl RolloutSettings {
    /// What is wrong with it, if something is.
    pub fn fault(&self) -> Option<String> {
        let RolloutRules { margin, max_slowdown, .. } = self.rules;
        match () {
            () if self.draft.is_empty() => Some("draft must name the candidate's model".to_owned()),
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

/// An operator's word.
#[derive(Debug, Clone, PartialEq)]
pub enum RolloutOrder {
    /// A rollout begins, in place of another one.
    Begin(RolloutSettings),
    /// The candidate of the rollout drafts for every sequence from now on.
    Promote,
    /// The rollout is over and forgotten: every draft worker is again what it was started as.
    End,
}

/// How far a rollout is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// The candidate drafts for its share.
    Canary,
    /// It drafts for every sequence that it has capacity for.
    Promoted,
    /// It drafts for none.
    RolledBack,
}

/// What evidence says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// There is too little of it, or it shows no sure difference.
    Undecided,
    /// The candidate is better by the margin.
    Better,
    /// It is better, and its steps take too long to be sure that this pays.
    BetterAndSlower,
    /// It is worse.
    Worse,
}

/// How a draft worker may serve a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Preference {
    /// It is meant for it.
    First,
    /// Another draft is meant for it, and this one stands in.
    Second,
}

/// A rollout under way, or one that has ended and still holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Rollout {
    settings: RolloutSettings,
    stage: Stage,
    verdict: Verdict,
    /// Drafts at which each kind of evidence is looked at next.
    next_looks: [u64; 2],
    /// Judged and accepted positions of the sequences that each draft served.
    arms: Arms,
    /// The pairs that it was ended on: later ones compare with another serving draft.
    ended_on: Option<PairedReport>,
}

/// Acceptance of the two arms of a canary: accepted of judged positions, by sequence.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Arms {
    candidate: ClusterMean,
    others: ClusterMean,
}

/// A rollout, for people.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RolloutReport {
    /// What was asked for.
    #[serde(flatten)]
    pub settings: RolloutSettings,
    /// How far it is.
    pub stage: Stage,
    /// What the evidence said when it was last looked at.
    pub verdict: Verdict,
    /// Both drafts at the same places; of a rollout that evidence ended, what it was ended on.
    pub paired: PairedReport,
    /// Acceptance of the drafts that the candidate made for its share; absent before the first.
    pub candidate_acceptance: Option<f64>,
    /// That of the other drafts meanwhile.
    pub other_acceptance: Option<f64>,
    /// How many times as long the candidate's step takes, where both are known.
    pub slowdown: Option<f64>,
}

impl Rollout {
    /// A rollout that begins.
    pub fn new(settings: RolloutSettings) -> Self {
        let next_looks = [settings.rules.min_drafts.max(1); 2];
        let (stage, verdict) = (Stage::Canary, Verdict::Undecided);
        Self { settings, stage, verdict, next_looks, arms: Arms::default(), ended_on: None }
    }

    /// The candidate's model id.
    pub fn draft(&self) -> &str {
        &self.settings.draft
    }

    /// How far it is.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// An operator, or evidence, ends it.
    pub fn end(&mut self, stage: Stage) {
        self.stage = stage;
    }

    /// A sequence ended that this draft served: of its drafted positions so many were judged, and accepted.
    pub fn on_served(&mut self, draft: &str, judged: u64, accepted: u64) {
        if self.stage == Stage::Canary {
            let arm = if draft == self.draft() { &mut self.arms.candidate } else { &mut self.arms.others };
            arm.observe(judged as f64, accepted as f64);
        }
    }

    /// Looks at the evidence, if it is time to. Returns what becomes of the rollout, if that changes.
    pub fn look(&mut self, paired: &PairedScore, slowdown: Option<f64>) -> Option<Stage> {
        if self.stage != Stage::Canary {
            return None;
        }
        let mut seen = None;
        if is_due(&mut self.next_looks[0], paired.difference().observations()) {
            seen = Some(self.of_pairs(paired, slowdown));
        }
        if is_due(&mut self.next_looks[1], self.arms.smaller()) && self.is_worse_where_it_serves() {
            seen = Some(Verdict::Worse);
        }
        self.verdict = seen?;
        let ends = match self.verdict {
            Verdict::Better => Stage::Promoted,
            Verdict::Worse => Stage::RolledBack,
            Verdict::Undecided | Verdict::BetterAndSlower => return None,
        };
        // Without a share it is only scored.
        (self.settings.decides && self.settings.share > 0.0).then(|| {
            self.stage = ends;
            self.ended_on = Some(paired.report());
            ends
        })
    }

    fn of_pairs(&self, paired: &PairedScore, slowdown: Option<f64>) -> Verdict {
        let rules = &self.settings.rules;
        let bounds = (paired.difference().mean(), paired.difference().error(), paired.serving().mean());
        let (Some(mean), Some(error), Some(serving)) = bounds else { return Verdict::Undecided };
        let margin = DEVIATIONS * error;
        match () {
            () if paired.difference().clusters() < rules.min_sequences => Verdict::Undecided,
            () if mean + margin < 0.0 => Verdict::Worse,
            () if mean - margin <= rules.margin * serving => Verdict::Undecided,
            () if slowdown.is_some_and(|slowdown| slowdown > rules.max_slowdown) => Verdict::BetterAndSlower,
            () => Verdict::Better,
        }
    }

    fn is_worse_where_it_serves(&self) -> bool {
        let Arms { candidate, others } = &self.arms;
        let enough = candidate.clusters().min(others.clusters()) >= self.settings.rules.min_sequences;
        let Some(difference) = candidate.mean().zip(others.mean()).map(|(a, b)| a - b) else { return false };
        let Some(error) = candidate.error().zip(others.error()).map(|(a, b)| a.hypot(b)) else {
            return false;
        };
        enough && difference + DEVIATIONS * error < 0.0
    }

    /// For people.
    pub fn report(&self, paired: PairedReport, slowdown: Option<f64>) -> RolloutReport {
        RolloutReport {
            settings: self.settings.clone(),
            stage: self.stage,
            verdict: self.verdict,
            paired: self.ended_on.unwrap_or(paired),
            candidate_acceptance: self.arms.candidate.mean(),
            other_acceptance: self.arms.others.mean(),
            slowdown,
        }
    }
}

impl Arms {
    fn smaller(&self) -> u64 {
        self.candidate.observations().min(self.others.observations())
    }
}

/// Whether it is time for a look; the next one is at twice as much.
fn is_due(next: &mut u64, drafts: u64) -> bool {
    let is_due = drafts >= *next;
    if is_due {
        *next = drafts.saturating_mul(2);
    }
    is_due
}

/// How a draft worker that drafts by `draft` may serve a sequence; `None`: not at all. `is_shadow`: the worker was started as a shadow draft.
pub fn preference(
    rollout: Option<&Rollout>,
    (draft, is_shadow): (&str, bool),
    sequence: SequenceId,
) -> Option<Preference> {
    let Some(rollout) = rollout else { return (!is_shadow).then_some(Preference::First) };
    let is_meant_for_candidate = match rollout.stage {
        Stage::Canary => is_chosen(sequence, rollout.settings.share, "canary"),
        Stage::Promoted => true,
        Stage::RolledBack => false,
    };
    match (draft == rollout.draft(), is_meant_for_candidate) {
        (true, true) => Some(Preference::First),
        (true, false) => None,
        (false, _) if is_shadow => None,
        (false, true) => Some(Preference::Second),
        (false, false) => Some(Preference::First),
    }
}

/// Whether a draft worker is scored as a shadow draft for sequences that it does not serve.
pub fn is_scored(rollout: Option<&Rollout>, draft: &str, is_shadow: bool) -> bool {
    match rollout.filter(|rollout| rollout.draft() == draft) {
        Some(rollout) => rollout.stage != Stage::Promoted,
        None => is_shadow,
    }
}

/// Whether a sequence belongs to a share of all. A larger share holds the smaller one of the same purpose; shares of different purposes are independent.
pub fn is_chosen(sequence: SequenceId, share: f64, purpose: &str) -> bool {
    let salt = purpose.bytes().fold(0, |salt: u64, byte| salt.wrapping_mul(31).wrapping_add(byte.into()));
    // The finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): ids that follow each other are spread evenly.
    let mut bits = sequence.0.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ salt.wrapping_mul(0xD1B5_4A32_D192_ED03);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^= bits >> 31;
    ((bits >> 11) as f64) < share * (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests;
