//! What a run plays, and by which rules. Plain data.

use std::time::Duration;

use scheduling::batch::GroupRules;
use scheduling::cost::StepTimePoint;
use scheduling::draft_length::Rules;
use scheduling::profile::{Pool, Profile};
use speculation::Role;
use speculation::tree::MAX_TREE_TOKENS;

/// What one run plays.
#[derive(Debug, Clone)]
pub struct Setup<'a> {
    /// The pools.
    pub profile: &'a Profile,
    /// The requests.
    pub traffic: Traffic,
    /// How far rounds draft.
    pub policy: Policy,
    /// Keys every chance.
    pub seed: u64,
    /// When the run ends, in virtual time.
    pub duration: Duration,
    /// What happens before counts for nothing but what the controllers learn from it.
    pub warm_up: Duration,
}

impl Setup<'_> {
    pub(crate) fn kinds(&self) -> &[Kind] {
        match &self.traffic {
            Traffic::Closed { kinds, .. } | Traffic::Open { kinds, .. } => kinds,
        }
    }
}

/// One kind of request.
#[derive(Debug, Clone, PartialEq)]
pub struct Kind {
    /// Its task type: the lane, and the profile's acceptance.
    pub task_type: String,
    /// Its share of the traffic.
    pub share: f64,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Output tokens on average, spread evenly from half to one and a half of it; [`ENDLESS`]: the output
    /// never ends.
    pub output_tokens: u32,
}

/// Output tokens of a sequence that never ends.
pub const ENDLESS: u32 = 1 << 30;

/// Who asks, and when.
#[derive(Debug, Clone, PartialEq)]
pub enum Traffic {
    /// As many clients, each of which sends its next request as soon as the last one is complete. The
    /// prompts' KV is in the prefix caches. The run's time begins when every client has its first token.
    Closed {
        /// How many at once.
        sequences: u32,
        /// What they are.
        kinds: Vec<Kind>,
    },
    /// Requests that come at random, as many a second on average (Poisson).
    Open {
        /// Requests a second.
        per_second: f64,
        /// What they are.
        kinds: Vec<Kind>,
        /// Past so many under way, a request is turned away.
        sequences_max: u32,
    },
}

/// How far rounds draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Always so far.
    Fixed(u32),
    /// Each lane chooses, up to so far.
    Lanes {
        /// k at most.
        max_k: u32,
    },
}

/// What is asked of the rules themselves: how much hangs on each of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experiment {
    /// What lanes go by.
    pub rules: Rules,
    /// What targets go by.
    pub groups: GroupRules,
    /// Whether draft workers say of the tokens that they are fed whether they would have drawn them.
    pub tells_agreement: bool,
    /// Whether targets verify token trees.
    pub takes_trees: bool,
    /// The step times that targets and drafts tell of themselves, over those that they have.
    pub told_over_true: (f64, f64),
}

impl Experiment {
    /// Ids of a token tree that workers of a role verify.
    pub(crate) fn max_tree_tokens(&self, role: Role) -> u32 {
        if self.takes_trees && role == Role::Target { MAX_TREE_TOKENS as u32 } else { 0 }
    }

    /// What a worker of this pool tells of its step times.
    pub(crate) fn told_step_times(&self, pool: &Pool, role: Role) -> Vec<StepTimePoint> {
        let (target, draft) = self.told_over_true;
        let factor = if role == Role::Target { target } else { draft };
        let told =
            |point: StepTimePoint| StepTimePoint { micros: (point.micros as f64 * factor) as u64, ..point };
        pool.curve.profiled().into_iter().map(told).collect()
    }
}

impl Default for Experiment {
    fn default() -> Self {
        Self {
            rules: Rules::default(),
            groups: GroupRules::default(),
            tells_agreement: true,
            takes_trees: false,
            told_over_true: (1.0, 1.0),
        }
    }
}
