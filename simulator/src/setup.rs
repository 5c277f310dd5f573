//! Setup of a run and its rules. Plain data.

use std::time::Duration;

use scheduling::batch::GroupRules;
use scheduling::cost::StepTimePoint;
use scheduling::draft_length::Rules;
use scheduling::profile::Profile;
use speculation::Role;
use speculation::tree::MAX_TREE_TOKENS;

/// Setup of one run.
#[derive(Debug, Clone)]
pub struct Setup<'a> {
    /// The simulated pools.
    pub profile: &'a Profile,
    /// The simulated requests.
    pub traffic: Traffic,
    /// Policy for the draft length.
    pub policy: Policy,
    /// Seed of all pseudorandom numbers.
    pub seed: u64,
    /// Virtual time at which the run ends.
    pub duration: Duration,
    /// Initial time that is not measured; controllers learn from it.
    pub warm_up: Duration,
}

impl Setup<'_> {
    pub(crate) fn kinds(&self) -> &[RequestKind] {
        match &self.traffic {
            Traffic::Closed { kinds, .. } | Traffic::Open { kinds, .. } => kinds,
        }
    }
}

/// One kind of request.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestKind {
    /// Task type: determines the lane, and the profile's acceptance.
    pub task_type: String,
    /// Share of the traffic.
    pub share: f64,
    /// Number of prompt tokens.
    pub prompt_tokens: u32,
    /// Mean number of output tokens, evenly distributed from half to one and a half of it; [`ENDLESS`]: the
    /// output never ends.
    pub output_tokens: u32,
}

/// Output tokens of a sequence that never ends.
pub const ENDLESS: u32 = 1 << 30;

/// Arrival process of requests.
#[derive(Debug, Clone, PartialEq)]
pub enum Traffic {
    /// A fixed number of clients, each of which sends its next request as soon as the last one is complete.
    /// The KV of prompts is in the prefix caches, unless [`Experiment::computes_prompts`]. The run's time
    /// begins when every client has its first token.
    Closed {
        /// Number of clients.
        sequences: u32,
        /// Kinds of their requests.
        kinds: Vec<RequestKind>,
    },
    /// Random arrivals with a fixed mean rate (Poisson).
    Open {
        /// Mean requests per second.
        per_second: f64,
        /// Kinds of the requests.
        kinds: Vec<RequestKind>,
        /// Maximum number of active requests; further ones are rejected.
        sequences_max: u32,
    },
}

/// Policy for the draft length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Always this length.
    Fixed(u32),
    /// Each lane chooses.
    Lanes {
        /// Maximum k.
        max_k: u32,
    },
}

/// Variations of the rules, to measure the effect of each.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experiment {
    /// Rules of lanes.
    pub rules: Rules,
    /// Rules of groups at targets.
    pub groups: GroupRules,
    /// Whether draft workers report agreement with fed tokens.
    pub reports_agreement: bool,
    /// Whether targets verify token trees.
    pub supports_trees: bool,
    /// Whether prompts of closed traffic are computed.
    pub computes_prompts: bool,
    /// Ratio of reported to true step times, for targets and drafts.
    pub reported_over_true: (f64, f64),
}

impl Experiment {
    /// Maximum tokens of a tree that workers of a role verify.
    pub(crate) fn max_tree_tokens(&self, role: Role) -> u32 {
        if self.supports_trees && role == Role::Target { MAX_TREE_TOKENS as u32 } else { 0 }
    }

    /// Step times that a worker of this role reports.
    pub(crate) fn reported_step_times(&self, profile: &Profile, role: Role) -> Vec<StepTimePoint> {
        let (target, draft) = self.reported_over_true;
        let factor = if role == Role::Target { target } else { draft };
        let reported =
            |point: StepTimePoint| StepTimePoint { micros: (point.micros as f64 * factor) as u64, ..point };
        profile.pool(role).curve.profiled().into_iter().map(reported).collect()
    }
}

impl Default for Experiment {
    fn default() -> Self {
        Self {
            rules: Rules::default(),
            groups: GroupRules::default(),
            reports_agreement: true,
            supports_trees: false,
            computes_prompts: false,
            reported_over_true: (1.0, 1.0),
        }
    }
}
