//! Plans which requests are sent when: pairs of blocks with equal questions and alternating arms. Pure.
//!
//! The speed of a shared machine varies, so only adjacent blocks are compared, and the arm that goes first
//! alternates. Within a block the task types are shuffled, each with the same number of requests.

use std::collections::BTreeMap;
use std::mem::discriminant;

use rand::rngs::Xoshiro256PlusPlus;
use rand::{SeedableRng as _, seq::SliceRandom as _};
use serde::Serialize;

use crate::load::{Prompt, Schedule};

/// Default length of an open loop's block, seconds.
const BLOCK_SECONDS: f64 = 10.0;
/// Default number of requests per user in a closed loop's block.
const BLOCK_REQUESTS_PER_USER: usize = 2;

/// Load on a server.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LoadLevel {
    /// Requests in flight: a closed loop.
    Concurrency(usize),
    /// Requests a second: an open loop.
    Rate(f64),
}

impl LoadLevel {
    /// Name for people.
    pub fn name(&self) -> String {
        match self {
            Self::Concurrency(count) => format!("{count} at a time"),
            Self::Rate(rate) => format!("{rate}/s"),
        }
    }

    /// Position on an axis of loads of one kind.
    pub fn size(&self) -> f64 {
        match self {
            Self::Concurrency(count) => *count as f64,
            Self::Rate(rate) => *rate,
        }
    }

    /// Label of that axis.
    pub fn axis(&self) -> &'static str {
        match self {
            Self::Concurrency(_) => "requests in flight",
            Self::Rate(_) => "requests a second",
        }
    }
}

/// Conditions of a block.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Condition {
    /// The load.
    pub level: LoadLevel,
    /// The temperature.
    pub temperature: f64,
}

impl Condition {
    /// Whether only the size of the load differs.
    pub(super) fn is_on_curve_of(&self, other: &Self) -> bool {
        self.temperature == other.temperature && discriminant(&self.level) == discriminant(&other.level)
    }
}

/// Requests of one arm that are sent together; all are finished before the next block begins.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Block {
    /// Index into the plan's conditions.
    pub(super) condition: usize,
    /// Blocks of the same pair have equal questions.
    pub(super) pair: usize,
    pub(super) arm: usize,
    /// Indices of prompts, in the order of sending.
    pub(super) prompts: Vec<usize>,
    /// Sent but not counted.
    pub(super) is_warmup: bool,
}

/// All blocks of a run, in order.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) conditions: Vec<Condition>,
    pub(super) blocks: Vec<Block>,
    seed: u64,
}

/// Inputs of a plan.
#[derive(Debug, Clone)]
pub(super) struct PlanInputs<'a> {
    pub(super) prompts: &'a [Prompt],
    pub(super) levels: Vec<LoadLevel>,
    pub(super) temperatures: Vec<f64>,
    pub(super) arms: usize,
    /// Number per arm and condition.
    pub(super) blocks: usize,
    pub(super) block_requests: Option<usize>,
    pub(super) warmup: usize,
    pub(super) seed: u64,
}

impl Plan {
    pub(super) fn new(inputs: &PlanInputs<'_>) -> Self {
        let mut conditions = Vec::new();
        for &temperature in &inputs.temperatures {
            conditions.extend(inputs.levels.iter().map(|&level| Condition { level, temperature }));
        }
        let prompts_by_task = PromptsByTask::new(inputs.prompts);
        let mut blocks = Vec::new();
        for (condition, Condition { level, .. }) in conditions.iter().enumerate() {
            let each = prompts_by_task.requests_per_task(level, inputs.block_requests);
            let warmup = prompts_by_task.take_shuffled(
                0,
                inputs.warmup.div_ceil(prompts_by_task.tasks()),
                inputs.seed,
            );
            let warmup: Vec<usize> = warmup.into_iter().take(inputs.warmup).collect();
            for arm in 0..inputs.arms {
                let prompts = warmup.clone();
                blocks.push(Block { condition, pair: 0, arm, prompts, is_warmup: true });
            }
            for pair in 0..inputs.blocks {
                let prompts = prompts_by_task.take_shuffled(pair, each, inputs.seed);
                let turns = (0..inputs.arms).map(|turn| (turn + pair) % inputs.arms);
                blocks.extend(turns.map(|arm| Block {
                    condition,
                    pair,
                    arm,
                    prompts: prompts.clone(),
                    is_warmup: false,
                }));
            }
        }
        Self { conditions, blocks, seed: inputs.seed }
    }

    /// Send times of a block's requests: the same for both blocks of a pair.
    pub(super) fn schedule(&self, block: &Block) -> Schedule {
        match self.conditions[block.condition].level {
            LoadLevel::Concurrency(concurrency) => Schedule::Closed { concurrency },
            LoadLevel::Rate(rate) => {
                let seed = self.seed ^ ((block.pair as u64) << 32) ^ ((block.condition as u64) << 48);
                Schedule::poisson(rate, block.prompts.len(), seed)
            }
        }
    }

    /// Number of requests in all blocks.
    pub(super) fn num_requests(&self) -> usize {
        self.blocks.iter().map(|block| block.prompts.len()).sum()
    }
}

/// Indices of prompts, by task type.
struct PromptsByTask(Vec<Vec<usize>>);

impl PromptsByTask {
    fn new(prompts: &[Prompt]) -> Self {
        let mut by_task = BTreeMap::<&str, Vec<usize>>::new();
        for (i, prompt) in prompts.iter().enumerate() {
            by_task.entry(&prompt.task).or_default().push(i);
        }
        Self(by_task.into_values().collect())
    }

    fn tasks(&self) -> usize {
        self.0.len().max(1)
    }

    fn requests_per_task(&self, level: &LoadLevel, requests: Option<usize>) -> usize {
        let wanted = requests.unwrap_or_else(|| match level {
            LoadLevel::Concurrency(concurrency) => BLOCK_REQUESTS_PER_USER * concurrency,
            LoadLevel::Rate(rate) => (rate * BLOCK_SECONDS) as usize,
        });
        wanted.div_ceil(self.tasks()).max(1)
    }

    /// The next `each` prompts of every task type, starting over at the end, in shuffled order.
    fn take_shuffled(&self, turn: usize, each: usize, seed: u64) -> Vec<usize> {
        let next = |task: &Vec<usize>| -> Vec<usize> {
            (0..each).map(|i| task[(turn * each + i) % task.len()]).collect()
        };
        let mut taken: Vec<usize> = self.0.iter().flat_map(next).collect();
        taken.shuffle(&mut Xoshiro256PlusPlus::seed_from_u64(seed ^ ((turn as u64) << 32)));
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::prompts::Content;

    fn prompts() -> Vec<Prompt> {
        let prompt =
            |task: &str, i| Prompt { task: task.to_owned(), content: Content::Prompt(format!("{task} {i}")) };
        (0..3).map(|i| prompt("a", i)).chain((0..5).map(|i| prompt("b", i))).collect()
    }

    fn inputs(prompts: &[Prompt]) -> PlanInputs<'_> {
        PlanInputs {
            prompts,
            levels: vec![LoadLevel::Concurrency(1), LoadLevel::Rate(4.0)],
            temperatures: vec![0.0, 1.0],
            arms: 2,
            blocks: 4,
            block_requests: None,
            warmup: 3,
            seed: 9,
        }
    }

    #[test]
    fn arms_take_turns_with_equal_questions() {
        let prompts = prompts();
        let plan = Plan::new(&inputs(&prompts));
        assert_eq!(plan.conditions.len(), 4);
        for condition in 0..4 {
            let of: Vec<&Block> = plan.blocks.iter().filter(|block| block.condition == condition).collect();
            let (warm, measured): (Vec<&Block>, Vec<&Block>) =
                of.into_iter().partition(|block| block.is_warmup);
            assert!(warm.iter().all(|block| block.prompts.len() == 3));
            let order: Vec<usize> = measured.iter().map(|block| block.arm).collect();
            assert_eq!(order, [0, 1, 1, 0, 0, 1, 1, 0]);
            for pair in measured.chunks(2) {
                assert_eq!(pair[0].prompts, pair[1].prompts);
                assert_eq!(plan.schedule(pair[0]), plan.schedule(pair[1]));
                let of_a = pair[0].prompts.iter().filter(|i| prompts[**i].task == "a").count();
                assert_eq!(of_a * 2, pair[0].prompts.len(), "each task type as often as the other");
            }
            assert_ne!(plan.schedule(measured[0]), plan.schedule(measured[2]).clone_if_open());
        }
        let sizes = plan.blocks.iter().filter(|block| !block.is_warmup).map(|block| block.prompts.len());
        assert_eq!(sizes.max(), Some(40), "ten seconds of the rate");
    }

    impl Schedule {
        /// Closed loops have no send times that could differ.
        fn clone_if_open(self) -> Self {
            match self {
                Self::Closed { .. } => Self::Open { send_after: Vec::new() },
                open => open,
            }
        }
    }
}
