//! The results of a check as plain data: the JSON of `outrider check-pair`, and the input of `table`.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use speculation::AcceptanceMode;

use super::advice::{Advice, Deployment, Placement, advise};
use super::cost::Costs;
use super::measure::{AcceptanceCounts, Counts};
use super::texts::TextCheck;

/// Range of target / draft size in which published pairs work best.
pub const GOOD_RATIO: (f64, f64) = (8.0, 12.0);
/// Concurrent sequences that advice is computed for.
const LOADS: [u32; 2] = [1, 8];

/// Results for one draft.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// The target, as given on the command line.
    pub target: String,
    /// The draft, as given on the command line.
    pub draft: String,
    /// Whether a router would pair them, and other differences.
    pub text: TextCheck,
    /// Model sizes; `None` if the token lists differ, because then no model is loaded.
    pub size: Option<SizeCheck>,
    /// Measurements; `None` if the token lists differ.
    pub measured: Option<MeasuredReport>,
}

/// Sizes of both models.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct SizeCheck {
    /// Parameters of the target.
    pub target_parameters: u64,
    /// Parameters of the draft.
    pub draft_parameters: u64,
    /// Target / draft.
    pub ratio: f64,
    /// Whether the ratio lies within [`GOOD_RATIO`].
    pub within_8_to_12: bool,
}

impl SizeCheck {
    /// Compares two models.
    pub fn new(target_parameters: u64, draft_parameters: u64) -> Self {
        let ratio = target_parameters as f64 / draft_parameters as f64;
        let within_8_to_12 = (GOOD_RATIO.0..=GOOD_RATIO.1).contains(&ratio);
        Self { target_parameters, draft_parameters, ratio, within_8_to_12 }
    }
}

/// Measurements on this machine.
#[derive(Debug, Clone, Serialize)]
pub struct MeasuredReport {
    /// k in every round.
    pub num_draft_tokens: u32,
    /// Acceptance by temperature, mode and task type.
    pub acceptance: Vec<AcceptanceLine>,
    /// Draft step times relative to target step times.
    pub cost: CostReport,
    /// By task type, in coupled mode, over all temperatures.
    pub tasks: Vec<TaskReport>,
    /// Task types that were not measured because none of their prompts fits, with their number of prompts.
    pub left_out: BTreeMap<String, usize>,
}

/// Acceptance in one setting.
#[derive(Debug, Clone, Serialize)]
pub struct AcceptanceLine {
    /// Sampling temperature.
    pub temperature: f32,
    /// Acceptance mode.
    pub mode: &'static str,
    /// Task type; `all` for the sum.
    pub task: String,
    /// Accepted / drafted.
    pub acceptance_rate: Option<f64>,
    /// Tokens per verification.
    pub acceptance_length: f64,
    /// By position, given that all earlier positions were accepted.
    pub acceptance_by_position: Vec<f64>,
    /// The underlying counters.
    #[serde(flatten)]
    pub counts: Counts,
}

/// Step times.
#[derive(Debug, Clone, Serialize)]
pub struct CostReport {
    /// Draft step time / target step time, one row each.
    pub ratio_at_1_row: Option<f64>,
    /// Draft step time / target step time, 8 rows each.
    pub ratio_at_8_rows: Option<f64>,
    /// Step times of the target.
    pub target: Vec<scheduling::cost::StepTimePoint>,
    /// Step times of the draft.
    pub draft: Vec<scheduling::cost::StepTimePoint>,
}

/// Results and advice for one task type.
#[derive(Debug, Clone, Serialize)]
pub struct TaskReport {
    /// The task type; `all` for the sum.
    pub task: String,
    /// Accepted / drafted.
    pub acceptance_rate: Option<f64>,
    /// Tokens per verification.
    pub acceptance_length: f64,
    /// Whether no k pays, at any placement and load that advice is given for.
    pub switch_off: bool,
    /// The best k, by placement and load.
    pub advice: Vec<Advice>,
}

/// The name of all task types together.
pub const ALL: &str = "all";

impl MeasuredReport {
    /// Summarizes the measurements, without what was left out. `wire` is the round-trip time to a separate
    /// draft worker, `context` the mean length of a sequence in tokens.
    pub fn new(
        measured: &AcceptanceCounts,
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
                advise(&counts.verified_rounds, &costs, Deployment { placement, sequences, context, wire })
            });
            let advice: Vec<Advice> = advice.collect();
            TaskReport {
                task,
                acceptance_rate: counts.acceptance_rate(),
                acceptance_length: counts.acceptance_length(),
                switch_off: no_k_pays(&advice),
                advice,
            }
        });
        let tasks = tasks.collect();
        let cost = CostReport {
            ratio_at_1_row: costs.ratio(1),
            ratio_at_8_rows: costs.ratio(8),
            target: costs.target,
            draft: costs.draft,
        };
        Self { num_draft_tokens, acceptance, cost, tasks, left_out: BTreeMap::new() }
    }

    /// Returns the task types to switch off.
    pub fn to_switch_off(&self) -> Vec<&str> {
        let off = self.tasks.iter().filter(|task| task.switch_off && task.task != ALL);
        off.map(|task| task.task.as_str()).collect()
    }
}

/// Whether there is advice, and all of it says not to draft.
fn no_k_pays(advice: &[Advice]) -> bool {
    !advice.is_empty() && advice.iter().all(|advice| advice.k == 0)
}

/// The task types, followed by their sum.
fn with_sum(by_task: BTreeMap<String, Counts>) -> Vec<(String, Counts)> {
    let sum = Counts::sum(by_task.values());
    by_task.into_iter().chain([(ALL.to_owned(), sum)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_type_is_switched_off_only_if_no_k_pays_anywhere() {
        let advice = |k, placement| {
            let speedup = if k == 0 { 1.0 } else { 1.5 };
            Advice { placement, sequences: 1, k, speedup, expected_tokens: 1.0 }
        };
        let off = [advice(0, Placement::Colocated), advice(0, Placement::Apart)];
        let pays_apart = [advice(0, Placement::Colocated), advice(4, Placement::Apart)];
        assert!(no_k_pays(&off) && !no_k_pays(&pays_apart));
        assert!(!no_k_pays(&[]), "nothing was measured");
    }
}
