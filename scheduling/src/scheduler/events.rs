//! Events that a driver passes to the scheduler, and commands that the scheduler returns. Plain data.

use std::sync::Arc;
use std::time::Duration;

use speculation::lookup::PredictedText;
use speculation::prefix::Prefix;
use speculation::sequence::{Anomaly, Commit, TargetFault};
use speculation::step::PromptLogprobs;
use speculation::{FinishReason, ProposalAhead, Reply, Role, SequenceId, SequenceSpec, Step, TokenId};

use super::lanes::{LaneId, LaneKey};
use super::policy::SpeculationRequest;
use super::shadows::ShadowEnd;
use crate::cost::{BatchTimePoint, MAX_REPORTED, StepTimePoint};
use crate::cpu_share::CpuShare;
use crate::lookup_rates::LookupSource;
use crate::placement::PrefixMarks;
use crate::rollout::{RolloutOrder, RolloutStage};

/// Identifies one connection to one worker. A worker that reconnects has a new key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerKey(pub u64);

/// An input of the scheduler. The driver passes in everything that has arrived, then [`Event::Dispatch`].
#[derive(Debug, Clone)]
pub enum Event {
    /// A new sequence. It waits for a target of its model for [`super::SchedulerConfig::target_wait`].
    Submit(Box<NewSequence>),
    /// The client disconnected.
    Cancel(SequenceId),
    /// The output is complete: it contains a stop string of the client.
    Stop(SequenceId),
    /// A worker connected.
    WorkerUp(WorkerKey, Box<WorkerInfo>),
    /// A worker disconnected, and its state is lost.
    WorkerDown(WorkerKey),
    /// A worker sent a frame.
    Frame(WorkerKey, Frame),
    /// An operator drains the workers at an address, or undoes that.
    Drain(Drain),
    /// Whether the worker is still listed by the operator. One that is not listed drains, and then its
    /// connection ends.
    Listed(WorkerKey, bool),
    /// An operator starts, promotes or ends the rollout of a draft.
    Rollout(RolloutOrder),
    /// The time returned by [`super::Scheduler::next_wakeup`] was reached.
    Timer,
    /// Everything that arrived was passed in: assign workers and begin rounds.
    Dispatch,
}

/// An operator's order to drain the workers at one address, including workers that connect later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drain {
    /// The address, as in reports.
    pub address: String,
    /// Whether they get no new sequences; false undoes that.
    pub is_draining: bool,
    /// Whether sequences at a target move to another target of the same numerics class, if there is one,
    /// instead of finishing there.
    pub moves_sequences: bool,
}

/// A prompt, hashed once for all choices of a request.
#[derive(Debug, Clone)]
pub struct Prompt {
    pub(super) prefix: Prefix,
    pub(super) marks: Arc<PrefixMarks>,
}

impl Prompt {
    /// Hashes a prompt. Prefixes are shared only under the same isolation key, that of the sequences' specs.
    pub fn new(ids: &[TokenId], isolation_key: u64) -> Self {
        let prefix = Prefix::new(ids);
        let marks = Arc::new(PrefixMarks::of(&prefix, isolation_key));
        Self { prefix, marks }
    }

    /// The ids.
    pub fn ids(&self) -> &[TokenId] {
        self.prefix.ids()
    }
}

/// A sequence to schedule.
#[derive(Debug, Clone)]
pub struct NewSequence {
    /// Chosen by the driver, unique.
    pub id: SequenceId,
    /// Requested lane.
    pub lane: LaneKey,
    /// Sampling, seed and limits; `spec.lane` is set by the scheduler.
    pub spec: SequenceSpec,
    /// Size of the model's vocabulary; a target's ids at or above it are rejected.
    pub vocab_size: u32,
    /// The prompt, not empty; shared by the choices of a request.
    pub prompt: Arc<Prompt>,
    /// The client's settings for speculation.
    pub speculation: SpeculationRequest,
    /// The output that the client predicts.
    pub prediction: Option<Arc<PredictedText>>,
    /// Key for fair queueing: the API key, or one derived from a gateway's fairness id. Differs from the
    /// isolation key, of which a client may have many by `cache_salt`.
    pub api_key: u64,
    /// Whether it fails after waiting too long for its first target instead of waiting on. Possible because
    /// its client has received nothing yet.
    pub may_expire: bool,
}

/// What a worker reports about itself when it connects.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerInfo {
    /// The worker's role.
    pub role: Role,
    /// Address, for logs and reports.
    pub address: String,
    /// Model that it serves or drafts with.
    pub model_id: String,
    /// Numerics class: targets of one class compute results that are equal bit for bit.
    pub numerics_id: String,
    /// Hash of the token list; empty for a draft worker that needs no tokenizer.
    pub tokenizer_fingerprint: String,
    /// Sampling scheme of the worker.
    pub sampling_scheme: String,
    /// Task types that the worker is intended for; empty: all.
    pub task_types: Vec<String>,
    /// Size of the vocabulary: all ids are below it.
    pub vocab_size: u32,
    /// Maximum length of prompt and output together; 0: not limited.
    pub max_model_len: u32,
    /// Total KV blocks; 0: the worker keeps no KV.
    pub kv_blocks: u64,
    /// Tokens in one block.
    pub kv_block_size: u32,
    /// KV blocks that this router may reserve, if the worker reported a limit.
    pub credit_blocks: Option<u64>,
    /// Profiled step times; empty: not profiled.
    pub step_times: Vec<StepTimePoint>,
    /// Profiled step times of batches; empty: not profiled.
    pub batch_times: Vec<BatchTimePoint>,
    /// Maximum tokens of a tree that the target verifies; 0: chains only.
    pub max_tree_tokens: u32,
    /// Whether the draft worker is on trial: its proposals are scored and are sent to no target.
    pub is_shadow: bool,
    /// The CPU cores that it computes on, if any.
    pub cpu: Option<CpuShare>,
}

impl WorkerInfo {
    /// Whether its context window holds `len` ids.
    pub(super) fn has_window(&self, len: u32) -> bool {
        self.max_model_len == 0 || len <= self.max_model_len
    }

    /// Whether it is meant for requests of this task type.
    pub(super) fn accepts_task(&self, task_type: &str) -> bool {
        self.task_types.is_empty() || self.task_types.iter().any(|meant| meant == task_type)
    }

    /// Whether the two workers take turns on the same CPU cores.
    pub(super) fn shares_cores_with(&self, other: &Self) -> bool {
        self.cpu.as_ref().zip(other.cpu.as_ref()).is_some_and(|(own, other)| own.contends_with(other))
    }

    /// Creates the info of a worker that reports only its role and model.
    pub fn of(role: Role, model_id: &str) -> Self {
        Self {
            role,
            address: String::new(),
            model_id: model_id.to_owned(),
            numerics_id: String::new(),
            tokenizer_fingerprint: String::new(),
            sampling_scheme: String::new(),
            task_types: Vec::new(),
            vocab_size: 0,
            max_model_len: 0,
            kv_blocks: 0,
            kv_block_size: 0,
            credit_blocks: None,
            step_times: Vec::new(),
            batch_times: Vec::new(),
            max_tree_tokens: 0,
            is_shadow: false,
            cpu: None,
        }
    }
}

/// One frame from a worker.
#[derive(Debug, Clone, Default)]
pub struct Frame {
    /// Forward pass that produced the replies.
    pub timing: StepTiming,
    /// New limit on the KV blocks that this router may reserve.
    pub credit_blocks: Option<u64>,
    /// Answers to steps.
    pub replies: Vec<Reply>,
    /// Proposals that a draft worker drafted ahead.
    pub ahead: Vec<ProposalAhead>,
    /// Sequences that the worker dropped to free KV, each with the epoch of the assignment that this ends.
    pub preempted: Vec<(SequenceId, u32)>,
    /// Whether the worker is about to stop; it gets no new sequences.
    pub is_draining: bool,
}

/// Timing of one forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepTiming {
    /// Number of rows.
    pub rows: u32,
    /// Rows of these that belong to prompts.
    pub prefill_rows: u32,
    /// Number of sequences.
    pub sequences: u32,
    /// Number of KV tokens read.
    pub kv_tokens: u64,
    /// Mean time from a step's arrival to its first forward pass.
    pub queue: Duration,
    /// Duration of the forward pass.
    pub compute: Duration,
}

impl StepTiming {
    /// The timing with every number that a worker may set freely at most [`MAX_REPORTED`].
    pub(super) fn clamped(self) -> Self {
        let longest = Duration::from_micros(MAX_REPORTED);
        Self {
            kv_tokens: self.kv_tokens.min(MAX_REPORTED),
            queue: self.queue.min(longest),
            compute: self.compute.min(longest),
            ..self
        }
    }
}

/// An output of the scheduler; the driver executes commands in order.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// Send a step to a worker.
    Send(WorkerKey, Step),
    /// Tell a worker to drop one assignment (epoch) of a sequence.
    Close(WorkerKey, SequenceId, u32),
    /// The sequence got its first target.
    Assigned(SequenceId),
    /// Close the connection of a worker that is no longer listed and has no sequences.
    Disconnect(WorkerKey),
    /// A round of a traced sequence begins; the number is its draft length.
    RoundBegun(SequenceId, u32),
    /// Tell a client.
    Client(ClientEvent),
    /// For metrics and logs.
    Report(Report),
}

/// Something for the client of one sequence.
#[derive(Debug, Clone, PartialEq)]
pub enum ClientEvent {
    /// Tokens.
    Commit(CommittedRound),
    /// Scored prompt ids, in order and without repeats.
    PromptLogprobs(SequenceId, PromptLogprobs),
    /// The sequence is complete, and the scheduler dropped it.
    Finish(SequenceId, FinishReason, SpeculationUsage),
    /// The sequence failed, and the scheduler dropped it.
    Fail(SequenceId, SequenceFailure),
}

/// One verified span of one sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct CommittedRound {
    /// The sequence.
    pub id: SequenceId,
    /// Its lane.
    pub lane: LaneId,
    /// The committed tokens.
    pub commit: Commit,
    /// Source of the lookup draft, if there was one.
    pub source: Option<LookupSource>,
    /// Totals including this span.
    pub usage: SpeculationUsage,
}

/// Why a sequence failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SequenceFailure {
    /// Every target refused it.
    Refused(String),
    /// The last target refused it because its engine cannot do what the request asks for.
    Unsupported(String),
    /// No target serves its model.
    Unavailable(String),
    /// Too many targets in a row failed while it ran there.
    Quarantined(String),
    /// All targets were full; the duration is the time it waited.
    Expired(Duration),
}

/// Running totals of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpeculationUsage {
    /// Verify steps that committed something, including decode steps.
    pub rounds: u64,
    /// Drafted tokens that were verified.
    pub draft_tokens: u64,
    /// Drafted tokens that were committed.
    pub accepted_tokens: u64,
    /// Prompt tokens whose KV the target had from other sequences.
    pub cached_tokens: u64,
    /// Tokens of the client's prediction that have appeared in the output, regardless of which source drafted
    /// them.
    pub accepted_prediction_tokens: u32,
    /// Tokens of the client's prediction that have not appeared in the output so far.
    pub rejected_prediction_tokens: u32,
    /// Why the latest round had no draft, in snake_case; `None` if it had one.
    pub disabled_reason: Option<&'static str>,
}

impl SpeculationUsage {
    /// Tokens per verify step: 1 + accepted. `None` before the first step.
    pub fn acceptance_length(&self) -> Option<f64> {
        (self.rounds > 0).then(|| 1.0 + self.accepted_tokens as f64 / self.rounds as f64)
    }
}

/// Something for metrics and logs.
#[derive(Debug, Clone, PartialEq)]
pub enum Report {
    /// A lane was opened.
    LaneOpened(LaneId, Arc<LaneKey>),
    /// A lane's draft length.
    DraftLength(LaneId, u32),
    /// A reply or draft was ignored.
    Anomaly(Anomaly),
    /// A draft worker does not answer; rounds continue without it.
    DraftWorkerSilent {
        /// The worker.
        worker: WorkerKey,
        /// Age of the oldest unanswered request.
        waited: Duration,
    },
    /// An unresponsive draft worker answers again.
    DraftWorkerRecovered(WorkerKey),
    /// A target does not answer; its sequences move to other targets that can serve them.
    TargetSilent {
        /// The worker.
        worker: WorkerKey,
        /// Time since its last frame, or since the first unanswered request if that is later.
        waited: Duration,
        /// Number of sequences that moved at once.
        moved: usize,
    },
    /// Sequences move away from a target that does not answer or that an operator drains.
    SequencesMoved {
        /// The worker.
        from: WorkerKey,
        /// Number of sequences.
        sequences: usize,
    },
    /// A worker gets no new sequences: it is about to stop, or an operator drains it.
    WorkerDraining {
        /// The worker.
        worker: WorkerKey,
        /// Sequences assigned to it.
        sequences: u32,
    },
    /// A worker that an operator drained gets new sequences again.
    WorkerUndrained(WorkerKey),
    /// An unresponsive target answers again.
    TargetRecovered(WorkerKey),
    /// A sequence failed at a target.
    TargetFailed {
        /// The worker.
        worker: WorkerKey,
        /// The fault.
        fault: TargetFault,
        /// Whether its circuit breaker opened: it gets one sequence now and then until one succeeds.
        is_opened: bool,
    },
    /// A lost worker's sequences are replayed at other workers.
    SequencesReplayed {
        /// Role of the lost worker.
        role: Role,
        /// Its address.
        address: String,
        /// Number of sequences.
        sequences: usize,
    },
    /// A sequence moved to a target of another numerics class; its further text may differ.
    NumericsChanged {
        /// The sequence.
        id: SequenceId,
        /// Class of its earlier target.
        earlier: String,
        /// Its new target.
        worker: WorkerKey,
        /// Class of that.
        numerics_id: String,
    },
    /// A sequence was assigned a target.
    TargetAssigned {
        /// Its priority; lower is more urgent.
        priority: u8,
        /// How long it waited.
        waited: Duration,
    },
    /// A round used a proposal that had been drafted ahead and waited here.
    UsedProposalAhead,
    /// Number of sequences that wait for a target with capacity.
    WaitingForTarget(usize),
    /// A worker's KV blocks or usability changed.
    WorkerChanged {
        /// The worker.
        worker: WorkerKey,
        /// KV blocks that this router may reserve.
        credit: u64,
        /// KV blocks that this router has reserved.
        reserved: u64,
        /// Whether it is used like others of its role. A target is not while it is avoided, nor is a draft
        /// worker that is silent, or that can be paired with none of the connected targets.
        is_usable: bool,
    },
    /// A shadow draft's proposal was compared with the committed tokens.
    ShadowScored(ShadowScored),
    /// A shadow draft was dropped for one sequence.
    ShadowDropped {
        /// Its draft.
        draft: Arc<str>,
        /// The reason.
        reason: ShadowEnd,
    },
    /// A rollout ended: its candidate was promoted or rolled back.
    RolloutEnded {
        /// Its draft.
        draft: String,
        /// Its new stage.
        stage: RolloutStage,
        /// Sequences that moved to other draft workers.
        moved: usize,
    },
    /// Throughput that a target could add to its present one.
    Headroom {
        /// The worker.
        worker: WorkerKey,
        /// Tokens per second, rounded down.
        tokens_per_second: u64,
    },
}

/// Score of one proposal of a shadow draft, with that of the serving draft at the same position.
#[derive(Debug, Clone, PartialEq)]
pub struct ShadowScored {
    /// The shadow's draft.
    pub draft: Arc<str>,
    /// The sequence's lane.
    pub lane: Arc<LaneKey>,
    /// Positions of the shadow that were judged, and how many of them were accepted.
    pub shadow: (u32, u32),
    /// The same for the serving draft, cut to the same length; absent if it proposed nothing at this
    /// position.
    pub serving: Option<(u32, u32)>,
}
