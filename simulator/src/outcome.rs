//! Results of a run.

use std::time::Duration;

use super::RequestKind;
use scheduling::draft_length::Explanation;
use speculation::Role;

/// Results of a run, after its warm-up.
#[derive(Debug, Clone)]
pub struct RunOutcome {
    /// Measured virtual time.
    pub seconds: f64,
    /// By kind, in the order of the traffic.
    pub kinds: Vec<KindOutcome>,
    /// Controllers of the lanes at the end.
    pub lanes: Vec<LaneOutcome>,
    /// Requests rejected because the system was full.
    pub num_rejected: u64,
    /// Active sequences at the end.
    pub sequences_at_end: u32,
    target_busy: Duration,
    draft_busy: Duration,
    /// Number of forwards of all targets.
    pub target_forwards: u64,
}

/// Results of one kind of request.
#[derive(Debug, Clone)]
pub struct KindOutcome {
    /// The task type.
    pub task_type: String,
    /// Number of committed tokens.
    pub tokens: u64,
    /// Number of verify steps.
    pub rounds: u64,
    /// Milliseconds per output token after the first, for each request that ended.
    pub tpot_ms: Vec<f64>,
    /// Milliseconds to the first token, for each request that ended.
    pub ttft_ms: Vec<f64>,
    /// Longest time between two commits of a sequence.
    pub worst_wait: Duration,
}

/// One lane at the end of a run.
#[derive(Debug, Clone)]
pub struct LaneOutcome {
    /// The task type.
    pub name: String,
    /// Mean drafted tokens per round over the whole run.
    pub mean_k: f64,
    /// Explanation by its controller.
    pub explanation: Explanation,
}

impl RunOutcome {
    pub(super) fn new(kinds: &[RequestKind]) -> Self {
        let kind = |kind: &RequestKind| KindOutcome {
            task_type: kind.task_type.clone(),
            tokens: 0,
            rounds: 0,
            tpot_ms: Vec::new(),
            ttft_ms: Vec::new(),
            worst_wait: Duration::ZERO,
        };
        Self {
            seconds: 0.0,
            kinds: kinds.iter().map(kind).collect(),
            lanes: Vec::new(),
            num_rejected: 0,
            sequences_at_end: 0,
            target_busy: Duration::ZERO,
            draft_busy: Duration::ZERO,
            target_forwards: 0,
        }
    }

    /// Committed tokens per second, of all kinds.
    pub fn tokens_per_second(&self) -> f64 {
        self.kinds.iter().map(|kind| kind.tokens).sum::<u64>() as f64 / self.seconds
    }

    /// Share of the time that workers of a role spent in forwards, summed over workers.
    pub fn busy(&self, role: Role) -> f64 {
        let busy = if role == Role::Target { self.target_busy } else { self.draft_busy };
        busy.as_secs_f64() / self.seconds
    }

    pub(super) fn forward(&mut self, role: Role, took: Duration, since: Duration, now: Duration) {
        let took = took.min(now - since);
        match role {
            Role::Target => {
                self.target_busy += took;
                self.target_forwards += 1;
            }
            Role::Draft => self.draft_busy += took,
        }
    }

    pub(super) fn committed(&mut self, kind: usize, tokens: u32, waited: Duration) {
        let kind = &mut self.kinds[kind];
        kind.tokens += u64::from(tokens);
        kind.rounds += 1;
        kind.worst_wait = kind.worst_wait.max(waited);
    }

    pub(super) fn finished(
        &mut self,
        kind: usize,
        (came, first, last): (Duration, Duration, Duration),
        output: u32,
    ) {
        let kind = &mut self.kinds[kind];
        let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
        kind.ttft_ms.push(ms(first - came));
        if output > 1 {
            kind.tpot_ms.push(ms(last - first) / f64::from(output - 1));
        }
    }
}

/// The `at` quantile of `values` by nearest rank; NaN if there are none, so that no time is taken for 0.
pub fn percentile(values: &[f64], at: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let index = ((sorted.len() as f64 * at).ceil() as usize).clamp(1, sorted.len().max(1)) - 1;
    sorted.get(index).copied().unwrap_or(f64::NAN)
}
