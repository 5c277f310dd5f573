//! What a check found, as plain data: the JSON of `outrider check-pair`, from which the text is written (`table`).

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use speculation::AcceptanceMode;

use super::advice::{Advice, Placement, Situation, advise};
use super::cost::Costs;
use super::measure::{Counts, Measured};
use super::texts::TextCheck;

/// Draft sizes, as parts of the target's, at which published pairs work best.
pub const GOOD_RATIO: (f64, f64) = (8.0, 12.0);
/// A task type that is accepted less than this is one to switch off.
pub const SWITCH_OFF_BELOW: f64 = 0.5;
/// Loads that advice is given for.
const LOADS: [u32; 2] = [1, 8];

/// Everything that was found of one draft.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// As it was given.
    pub target: String,
    /// As it was given.
    pub draft: String,
    /// Whether a router would pair them, and what else differs.
    pub text: TextCheck,
    /// Sizes; nothing where the token lists differ: then no model was loaded.
    pub size: Option<SizeCheck>,
    /// What was measured; nothing where the token lists differ.
    pub measured: Option<MeasuredReport>,
}

/// Sizes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct SizeCheck {
    /// Weights of the target.
    pub target_parameters: u64,
    /// Of the draft.
    pub draft_parameters: u64,
    /// Target over draft.
    pub ratio: f64,
    /// Whether the ratio lies within [`GOOD_RATIO`].
    pub within_8_to_12: bool,
}

impl SizeCheck {
    /// Of two models.
    pub fn new(target_parameters: u64, draft_parameters: u64) -> Self {
        let ratio = target_parameters as f64 / draft_parameters as f64;
        let within_8_to_12 = (GOOD_RATIO.0..=GOOD_RATIO.1).contains(&ratio);
        Self { target_parameters, draft_parameters, ratio, within_8_to_12 }
    }
}

/// What was measured on this machine.
#[derive(Debug, Clone, Serialize)]
pub struct MeasuredReport {
    /// k of every round.
    pub num_draft_tokens: u32,
    /// Acceptance by temperature, mode and task type.
    pub acceptance: Vec<AcceptanceLine>,
    /// A draft's step against a target's.
    pub cost: CostReport,
    /// By task type, coupled, all temperatures.
    pub tasks: Vec<TaskReport>,
}

/// Acceptance in one setting.
#[derive(Debug, Clone, Serialize)]
pub struct AcceptanceLine {
    /// Of the draw.
    pub temperature: f32,
    /// How drafts were judged.
    pub mode: &'static str,
    /// Task type; `all` for the sum.
    pub task: String,
    /// Accepted of drafted.
    pub acceptance_rate: Option<f64>,
    /// Tokens per verification.
    pub acceptance_length: f64,
    /// By position, given that all before were accepted.
    pub acceptance_by_position: Vec<f64>,
    /// What these rest on.
    #[serde(flatten)]
    pub counts: Counts,
}

/// Step times.
#[derive(Debug, Clone, Serialize)]
pub struct CostReport {
    /// A draft step over a target step, one row each.
    pub ratio_at_1_row: Option<f64>,
    /// The same at 8 rows.
    pub ratio_at_8_rows: Option<f64>,
    /// The target's.
    pub target: Vec<scheduling::cost::StepTimePoint>,
    /// The draft's.
    pub draft: Vec<scheduling::cost::StepTimePoint>,
}

/// One task type, and what to do about it.
#[derive(Debug, Clone, Serialize)]
pub struct TaskReport {
    /// Which; `all` for the sum.
    pub task: String,
    /// Accepted of drafted.
    pub acceptance_rate: Option<f64>,
    /// Tokens per verification.
    pub acceptance_length: f64,
    /// Accepted less than [`SWITCH_OFF_BELOW`].
    pub switch_off: bool,
    /// The k that pays, by placement and load.
    pub advice: Vec<Advice>,
}

/// The name of all task types together.
pub const ALL: &str = "all";

impl MeasuredReport {
    /// Sums up. `wire` is what a draft worker apart costs, there and back; `context` what a sequence holds on average.
    pub fn new(
        measured: &Measured,
        costs: Costs,
        num_draft_tokens: u32,
        (wire, context): (Duration, f64),
    ) -> Self {
        let mut acceptance = Vec::new();
        for (setting, by_task) in &measured.by_setting {
            for (task, counts) in with_sum(by_task.clone()) {
                acceptance.push(AcceptanceLine {
                    temperature: setting.temperature,
                    mode: setting.mode.as_str(),
                    task,
                    acceptance_rate: counts.acceptance_rate(),
                    acceptance_length: counts.acceptance_length(),
                    acceptance_by_position: counts.rates(),
                    counts,
                });
            }
        }
        let tasks = with_sum(measured.by_task(AcceptanceMode::Coupled)).into_iter().map(|(task, counts)| {
            let at = |placement| LOADS.map(|load| (placement, load));
            let loads = [at(Placement::Colocated), at(Placement::Apart)].concat();
            let advice = loads.into_iter().filter_map(|(placement, sequences)| {
                advise(&counts.verdicts, &costs, Situation { placement, sequences, context, wire })
            });
            TaskReport {
                task,
                acceptance_rate: counts.acceptance_rate(),
                acceptance_length: counts.acceptance_length(),
                switch_off: counts.acceptance_rate().is_some_and(|rate| rate < SWITCH_OFF_BELOW),
                advice: advice.collect(),
            }
        });
        let tasks = tasks.collect();
        let cost = CostReport {
            ratio_at_1_row: costs.ratio(1),
            ratio_at_8_rows: costs.ratio(8),
            target: costs.target,
            draft: costs.draft,
        };
        Self { num_draft_tokens, acceptance, cost, tasks }
    }

    /// The task types to switch off.
    pub fn to_switch_off(&self) -> Vec<&str> {
        let off = self.tasks.iter().filter(|task| task.switch_off && task.task != ALL);
        off.map(|task| task.task.as_str()).collect()
    }
}

/// The task types, then all of them together.
fn with_sum(by_task: BTreeMap<String, Counts>) -> Vec<(String, Counts)> {
    let sum = Counts::sum(by_task.values());
    by_task.into_iter().chain([(ALL.to_owned(), sum)]).collect()
}
