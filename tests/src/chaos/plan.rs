//! The plan of a run: which streams are requested, and which faults occur when. A pure function of the seed
//! and of a few sizes, so that a run can be repeated. Timing on the machine (where each stream is when a
//! fault occurs) is not part of it.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{Rng, RngExt as _, SeedableRng as _};

use super::fault::FaultKind;
use crate::case::Case;
use crate::pair::{PairText, TASK_TYPES};

/// Temperatures of the texts.
const TEMPERATURES: [f32; 4] = [0.0, 0.5, 0.7, 1.0];

/// Drafted tokens per round, unless the lane chooses.
const DRAFT_TOKENS: [u32; 5] = [1, 2, 4, 4, 8];

/// Range of the number of tokens that reach clients between two faults.
const CALM_TOKENS: std::ops::Range<u64> = 60..400;

/// Sizes of a run.
#[derive(Debug, Clone)]
pub struct PlanSize {
    /// Number of distinct texts; streams use them in turn.
    pub texts: usize,
    /// Minimum and maximum output tokens per text.
    pub tokens: (u32, u32),
    /// Number of faults.
    pub faults: usize,
    /// Kinds of faults; each occurs once before one occurs again.
    pub kinds: Vec<FaultKind>,
    /// Minimum and maximum duration of a fault.
    pub hold: (Duration, Duration),
}

/// The plan of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The requested texts.
    pub texts: Vec<PlannedText>,
    /// The faults, in order.
    pub faults: Vec<PlannedFault>,
}

/// A requested text.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedText {
    /// One of [`TASK_TYPES`].
    pub task_type: &'static str,
    /// Index of the bundled prompt, modulo their number.
    pub prompt: u32,
    /// Sampling temperature.
    pub temperature: f32,
    /// Output tokens.
    pub max_tokens: u32,
    /// k of every round; `None` if the lane chooses.
    pub num_draft_tokens: Option<u32>,
    /// Whether filters and penalties apply.
    pub is_filtered: bool,
    /// Priority; lower is more urgent.
    pub priority: u32,
    /// Sampling seed.
    pub seed: u64,
}

/// A planned fault.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedFault {
    /// The kind of fault.
    pub kind: FaultKind,
    /// Index of the affected process, modulo the number of candidates.
    pub victim: usize,
    /// Index of the variant of the fault, modulo the number of variants.
    pub variant: usize,
    /// Number of tokens that reach clients between the end of the previous fault and this one.
    pub after_tokens: u64,
    /// Duration.
    pub hold: Duration,
}

impl Plan {
    /// Draws the plan for a seed.
    pub fn draw(seed: u64, size: &PlanSize) -> Self {
        // Separate random generators, so that the texts do not depend on the number of faults.
        let (mut texts, mut faults) = (StdRng::seed_from_u64(seed), StdRng::seed_from_u64(!seed));
        let (mut kinds, mut variants) = (Vec::new(), BTreeMap::new());
        let mut next_kind = |faults: &mut StdRng| {
            if kinds.is_empty() {
                kinds.clone_from(&size.kinds);
                kinds.shuffle(faults);
            }
            kinds.pop()
        };
        let mut planned = Vec::new();
        for _ in 0..size.faults {
            let Some(kind) = next_kind(&mut faults) else { break };
            let fault = PlannedFault::draw(&mut faults, kind, size.hold);
            // A kind that occurs again uses its next variant.
            let variant = *variants.entry(kind).and_modify(|variant| *variant += 1).or_insert(fault.variant);
            planned.push(PlannedFault { variant, ..fault });
        }
        Self {
            texts: (0..size.texts).map(|_| PlannedText::draw(&mut texts, size.tokens)).collect(),
            faults: planned,
        }
    }
}

impl PlannedText {
    fn draw(chance: &mut impl Rng, (shortest, longest): (u32, u32)) -> Self {
        // Most are short, a few are long.
        let share = chance.random_range(0.0f64..1.0).powi(2);
        Self {
            task_type: TASK_TYPES[chance.random_range(0..TASK_TYPES.len())],
            prompt: chance.random(),
            temperature: TEMPERATURES[chance.random_range(0..TEMPERATURES.len())],
            max_tokens: shortest + (f64::from(longest - shortest) * share) as u32,
            num_draft_tokens: chance
                .random_bool(0.8)
                .then(|| DRAFT_TOKENS[chance.random_range(0..DRAFT_TOKENS.len())]),
            is_filtered: chance.random_bool(0.25),
            priority: chance.random_range(0..3),
            seed: chance.random(),
        }
    }

    /// The request for this text.
    pub fn case(&self, number: usize, text: &PairText) -> anyhow::Result<Case> {
        let mut prompts = text.bundled(self.task_type)?;
        let idx = (self.prompt as usize).checked_rem(prompts.len()).context("no prompts are bundled")?;
        let name = format!(
            "text {number} ({}[{idx}] at T = {}, {} tokens, seed {})",
            self.task_type, self.temperature, self.max_tokens, self.seed as i64
        );
        let mut case = Case::new(name, prompts.swap_remove(idx), self.temperature);
        case.task_type = self.task_type.to_owned();
        case.seed = self.seed;
        case.max_tokens = self.max_tokens;
        case.ignore_eos = true;
        case.priority = self.priority;
        case.num_draft_tokens = self.num_draft_tokens.unwrap_or_default();
        case.is_k_left_to_lane = self.num_draft_tokens.is_none();
        if self.is_filtered {
            case.sampling.top_p = 0.9;
            case.sampling.top_k = 40;
            case.sampling.repetition_penalty = 1.2;
        }
        Ok(case)
    }
}

impl PlannedFault {
    fn draw(chance: &mut impl Rng, kind: FaultKind, (shortest, longest): (Duration, Duration)) -> Self {
        // Uniform in the logarithm: as likely below the geometric mean as above it.
        let times = longest.as_secs_f64() / shortest.as_secs_f64();
        Self {
            kind,
            victim: chance.random_range(0..1_000),
            variant: chance.random_range(0..1_000),
            after_tokens: chance.random_range(CALM_TOKENS),
            hold: shortest.mul_f64(times.powf(chance.random_range(0.0..1.0))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn size() -> PlanSize {
        PlanSize {
            texts: 200,
            tokens: (16, 400),
            faults: 60,
            kinds: FaultKind::all().to_vec(),
            hold: (Duration::from_millis(300), Duration::from_secs(12)),
        }
    }

    #[test]
    fn a_seed_determines_the_plan() {
        let plan = Plan::draw(7, &size());
        assert_eq!(plan, Plan::draw(7, &size()));
        let other = Plan::draw(8, &size());
        assert_ne!(plan.texts, other.texts);
        assert_ne!(plan.faults, other.faults);
        let fewer = Plan::draw(7, &PlanSize { faults: 3, texts: 10, ..size() });
        assert_eq!(fewer.texts, plan.texts[..10]);
        assert_eq!(fewer.faults, plan.faults[..3]);
    }

    #[test]
    fn every_kind_occurs_once_before_any_repeats() {
        for seed in 0..20 {
            let plan = Plan::draw(seed, &size());
            for round in plan.faults.chunks(FaultKind::all().len()) {
                let kinds: BTreeSet<FaultKind> = round.iter().map(|fault| fault.kind).collect();
                assert_eq!(kinds.len(), round.len(), "seed {seed}");
            }
        }
    }

    #[test]
    fn a_kind_occurs_in_all_its_variants() {
        let plan = Plan::draw(3, &PlanSize { kinds: vec![FaultKind::HostileTarget], faults: 17, ..size() });
        let variants: BTreeSet<usize> = plan.faults.iter().map(|fault| fault.variant % 17).collect();
        assert_eq!(variants.len(), 17);
    }

    #[test]
    fn sizes_are_kept_and_used() {
        let plan = Plan::draw(1, &size());
        let lengths = plan.texts.iter().map(|text| text.max_tokens);
        assert!(lengths.clone().all(|tokens| (16..=400).contains(&tokens)));
        assert!(lengths.clone().min() < Some(24) && lengths.max() > Some(350));
        let (shortest, longest) = size().hold;
        assert!(plan.faults.iter().all(|fault| (shortest..=longest).contains(&fault.hold)));
        let types: BTreeSet<&str> = plan.texts.iter().map(|text| text.task_type).collect();
        assert_eq!(types.len(), TASK_TYPES.len());
        assert!(plan.texts.iter().any(|text| text.num_draft_tokens.is_none()));
        let only = Plan::draw(1, &PlanSize { kinds: vec![FaultKind::CutDraft], ..size() });
        assert!(only.faults.len() == 60 && only.faults.iter().all(|fault| fault.kind == FaultKind::CutDraft));
        assert!(Plan::draw(1, &PlanSize { kinds: Vec::new(), ..size() }).faults.is_empty());
    }
}
