//! Lanes and rounds: where a tokenized request becomes sequences, and sequences become rounds of drafting and verifying.
//!
//! One task ([`owner`]) owns every sequence, for the router holds their truth; [`Rounds`] is the handle to it. What a
//! sequence does next is `speculation::sequence`'s rule; how far a round drafts is the lane's ([`controllers`], within [`policy`]); who works for
//! it is decided in [`placement`]. This folder moves messages and decides nothing else.

pub mod controllers;
pub mod owner;
pub mod placement;
pub mod policy;
mod pool;
mod running;

use async_trait::async_trait;
use serde::Serialize;
use speculation::Role;
use speculation::draft_health::HealthReport;
use tokio::sync::{mpsc, oneshot};

use crate::error::RouterError;
use crate::generation::{Generation, GenerationStream, Lanes};
use crate::lane::controllers::LaneExplanation;
use crate::waits::WaitReport;
use crate::workers::WorkerEvent;

/// Requests that wait for the owner task; past it clients are told to come back.
pub const SUBMISSIONS: usize = 1_024;

/// Worker events that wait for the owner task; past it the streams are held up.
pub const WORKER_EVENTS: usize = 4_096;

/// Questions about the lanes that wait for the owner task.
pub const QUESTIONS: usize = 16;

/// What separates lanes: requests in one lane look alike to a draft.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LaneKey {
    /// Which model.
    pub model: String,
    /// What kind of text; empty for those of too many kinds to tell apart.
    pub task_type: String,
    /// How much chance there is in the draw.
    pub temperature: TemperatureBand,
}

/// Acceptance falls with temperature, in steps that matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TemperatureBand {
    /// Argmax.
    Greedy,
    /// Below 0.5.
    Low,
    /// Below 0.9.
    Medium,
    /// All above.
    High,
}

impl TemperatureBand {
    /// The word used in metrics and explanations.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Greedy => "greedy",
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
        }
    }
}

impl LaneKey {
    /// The lane of a request.
    pub fn of(generation: &Generation) -> Self {
        let sampling = &generation.spec.sampling;
        let temperature = match sampling.temperature {
            _ if sampling.is_greedy() => TemperatureBand::Greedy,
            t if t < 0.5 => TemperatureBand::Low,
            t if t < 0.9 => TemperatureBand::Medium,
            _ => TemperatureBand::High,
        };
        Self { model: generation.model.clone(), task_type: generation.task_type.clone(), temperature }
    }
}

/// Why lanes and workers are as they are: what `/debug/lanes` shows.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct LanesReport {
    /// What the choice of k rests on, lane by lane.
    pub lanes: Vec<LaneExplanation>,
    /// The workers that this router is connected to.
    pub workers: Vec<WorkerReport>,
    /// Sequences that wait for a target with room.
    pub waiting_for_target: usize,
    /// How long requests waited to be admitted, by priority.
    pub admission_waits: Vec<WaitReport>,
    /// How long sequences waited for a target with room, by priority; those that lost theirs, too.
    pub target_waits: Vec<WaitReport>,
}

/// One worker, as `/debug/lanes` shows it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WorkerReport {
    /// Its pool.
    pub role: Role,
    /// Where it is.
    pub address: String,
    /// What it serves.
    pub model: String,
    /// What it is meant for; empty: for everything.
    pub task_types: Vec<String>,
    /// Sequences of this router there.
    pub sequences: u32,
    /// KV blocks that this router may reserve there, and those that it has reserved.
    pub credit_blocks: u64,
    /// See `credit_blocks`.
    pub reserved_blocks: u64,
    /// There and back, beyond queue and step, microseconds.
    pub wire_us: f64,
    /// Whether it answers, if it is a draft worker.
    pub health: Option<HealthReport>,
}

/// A request on its way to the owner.
#[derive(Debug)]
pub struct Submission {
    generation: Generation,
    answer: oneshot::Sender<Result<GenerationStream, RouterError>>,
}

/// The handle to the owner task.
#[derive(Debug, Clone)]
pub struct Rounds {
    submissions: mpsc::Sender<Submission>,
    questions: mpsc::Sender<oneshot::Sender<LanesReport>>,
}

/// The owner's ends of its queues.
#[derive(Debug)]
pub struct Inbox {
    submissions: mpsc::Receiver<Submission>,
    workers: mpsc::Receiver<WorkerEvent>,
    questions: mpsc::Receiver<oneshot::Sender<LanesReport>>,
}

/// Connects the doors, the workers' connections and the owner.
pub fn queues() -> (Rounds, mpsc::Sender<WorkerEvent>, Inbox) {
    let (submit, submissions) = mpsc::channel(SUBMISSIONS);
    let (events, workers) = mpsc::channel(WORKER_EVENTS);
    let (ask, questions) = mpsc::channel(QUESTIONS);
    (Rounds { submissions: submit, questions: ask }, events, Inbox { submissions, workers, questions })
}

#[async_trait]
impl Lanes for Rounds {
    async fn submit(&self, generation: Generation) -> Result<GenerationStream, RouterError> {
        let (answer, answered) = oneshot::channel();
        self.submissions.try_send(Submission { generation, answer }).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => RouterError::Overloaded { what: "the lanes' queue" },
            mpsc::error::TrySendError::Closed(_) => RouterError::Draining,
        })?;
        answered.await.unwrap_or(Err(RouterError::Draining))
    }

    async fn explain(&self) -> Result<LanesReport, RouterError> {
        let (answer, answered) = oneshot::channel();
        self.questions.try_send(answer).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => {
                RouterError::Overloaded { what: "the queue of questions to the lanes" }
            }
            mpsc::error::TrySendError::Closed(_) => RouterError::Draining,
        })?;
        answered.await.map_err(|_| RouterError::Draining)
    }
}
