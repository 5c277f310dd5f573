//! Acceptance probabilities by position in the draft, by task type, and by time, so that a change of the text
//! can be simulated.

use super::raw::RawAcceptance;
use super::{ProfileError, fraction, non_negative};
use speculation::spec::lane_number;

/// Acceptance schedule of a profile.
#[derive(Debug, Clone, PartialEq)]
pub struct Acceptance {
    /// By time, ascending within a task type.
    entries: Vec<Entry>,
}

#[derive(Debug, Clone, PartialEq)]
struct Entry {
    task_type: String,
    /// [`lane_number`] of the task type, as workers know it.
    lane: u32,
    from_s: f64,
    /// Never empty; the last rate applies to all later positions.
    by_position: Vec<f64>,
}

impl Acceptance {
    /// Creates a schedule with one rate for all drafted tokens.
    pub fn constant(rate: f64) -> Self {
        Self { entries: vec![Entry::new(String::new(), 0.0, vec![rate])] }
    }

    /// Creates a schedule with one rate from each of these seconds on: `[(0.0, 0.8), (10.0, 0.3)]`; the first
    /// begins at 0.
    pub fn steps(steps: &[(f64, f64)]) -> Self {
        let entry = |&(from_s, rate): &(f64, f64)| Entry::new(String::new(), from_s, vec![rate]);
        Self { entries: steps.iter().map(entry).collect() }
    }

    /// Creates a schedule with one rate per task type.
    pub fn by_task(rates: &[(&str, f64)]) -> Self {
        let entry = |&(task, rate): &(&str, f64)| Entry::new(task.to_owned(), 0.0, vec![rate]);
        Self { entries: rates.iter().map(entry).collect() }
    }

    /// Probability that a drafted token is accepted if all earlier tokens of the draft were. `lane` is the
    /// task type's [`lane_number`]; `seconds` count from the start.
    pub fn rate(&self, lane: u32, position: usize, seconds: f64) -> f64 {
        let of =
            |lane: u32| self.entries.iter().rev().find(|entry| entry.lane == lane && entry.from_s <= seconds);
        let Some(entry) = of(lane).or_else(|| of(lane_number(""))) else { return 0.0 };
        entry.by_position[position.min(entry.by_position.len() - 1)]
    }

    /// Task types with separate rates.
    pub fn task_types(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|entry| entry.task_type.as_str()).filter(|task| !task.is_empty())
    }

    pub(super) fn check(raw: Vec<RawAcceptance>) -> Result<Self, ProfileError> {
        if !raw.iter().any(|entry| entry.task_type.is_empty() && entry.from_s == 0.0) {
            let fault = "lacks the default: an entry without task_type and with from_s = 0";
            return Err(ProfileError::value("acceptance", fault));
        }
        let mut entries: Vec<Entry> = Vec::with_capacity(raw.len());
        for (i, entry) in raw.into_iter().enumerate() {
            let field = |name: &str| format!("acceptance[{i}].{name}");
            non_negative(&field("from_s"), entry.from_s)?;
            if entry.by_position.is_empty() {
                return Err(ProfileError::value(
                    field("by_position"),
                    "is empty, expected at least one rate",
                ));
            }
            for (position, rate) in entry.by_position.iter().enumerate() {
                fraction(&field(&format!("by_position[{position}]")), *rate)?;
            }
            let before = entries.iter().rev().find(|before| before.task_type == entry.task_type);
            if before.is_some_and(|before| before.from_s >= entry.from_s) {
                let fault = "must be later than in the previous entry of the same task_type";
                return Err(ProfileError::value(field("from_s"), fault));
            }
            entries.push(Entry::new(entry.task_type, entry.from_s, entry.by_position));
        }
        Ok(Self { entries })
    }
}

impl Entry {
    fn new(task_type: String, from_s: f64, by_position: Vec<f64>) -> Self {
        let lane = lane_number(&task_type);
        Self { task_type, lane, from_s, by_position }
    }
}
