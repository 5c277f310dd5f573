//! What a driver tells the scheduler, and what the scheduler has it do. Plain data.

use std::sync::Arc;
use std::time::Duration;

use speculation::lookup::PredictedText;
use speculation::sequence::{Commit, Ignored, TargetFault};
use speculation::step::PromptLogprobs;
use speculation::{FinishReason, Reply, Role, SequenceId, SequenceSpec, Step, TokenId};

use super::lanes::{LaneId, LaneKey};
use super::policy::SpeculationRequest;
use crate::cost::StepTimePoint;
use crate::lookup_rates::LookupSource;
use crate::rollout::{RolloutOrder, Stage};

/// Names one connection to one worker. A worker that reconnects has a new key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerKey(pub u64);

/// What happened. The driver passes in everything that has arrived, then [`Event::Dispatch`].
#[derive(Debug, Clone)]
pub enum Event {
    /// A new sequence. It waits for a target of its model for [`super::SchedulerConfig::target_wait`].
    Submit(Box<NewSequence>),
    /// The client left, or has all it wants.
    Cancel(SequenceId),
    /// A worker connected.
    WorkerUp(WorkerKey, Box<WorkerInfo>),
    /// A worker is gone, with everything it held.
    WorkerDown(WorkerKey),
    /// A worker answered.
    Frame(WorkerKey, Frame),
    /// An operator drains the workers at an address, or undoes that.
    Drain(Drain),
    /// Whether an operator lists the worker still: one that is listed no more drains, and then its connection ends.
    Listed(WorkerKey, bool),
    /// An operator rolls a draft out, or takes it back.
    Rollout(RolloutOrder),
    /// The time that [`super::Scheduler::next_wakeup`] named has come.
    Timer,
    /// Everything that arrived was passed in: assign workers and begin rounds.
    Dispatch,
}

/// An operator's word on the workers at one address, those that connect later included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drain {
    /// As in reports.
    pub address: String,
    /// They get nothing new; false: they do again.
    pub is_draining: bool,
    /// Sequences at a target move to another one of the same numerics class, if there is one, instead of finishing there.
    pub moves_sequences: bool,
}

/// A sequence to schedule.
#[derive(Debug, Clone)]
pub struct NewSequence {
    /// Chosen by the driver, never used before.
    pub id: SequenceId,
    /// The lane it asks for.
    pub lane: LaneKey,
    /// Sampling, seed and limits; `spec.lane` is set by the scheduler.
    pub spec: SequenceSpec,
    /// Size of the model's vocabulary: a target that returns other ids is not believed.
    pub vocab_size: u32,
    /// The prompt, not empty.
    pub prompt_ids: Arc<[TokenId]>,
    /// What the client asked of speculation.
    pub speculation: SpeculationRequest,
    /// What the client predicts of the output.
    pub prediction: Option<Arc<PredictedText>>,
    /// Whose it is: API keys take turns. Not the isolation key, of which a client may have many by `cache_salt`.
    pub api_key: u64,
    /// Whether it fails where it waits too long for its first target, instead of waiting on: its client has got nothing yet.
    pub may_expire: bool,
}

/// What a worker says of itself when it connects.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerInfo {
    /// Its pool.
    pub role: Role,
    /// Where it is; for logs and reports.
    pub address: String,
    /// The model that it serves or drafts with.
    pub model_id: String,
    /// Names the class of targets whose results are equal bit for bit.
    pub numerics_id: String,
    /// Hash of the token list; empty for a draft worker that needs no tokenizer.
    pub tokenizer_fingerprint: String,
    /// How the worker draws.
    pub sampling_scheme: String,
    /// Task types that the worker is meant for; empty: all.
    pub task_types: Vec<String>,
    /// Ids at and above this do not exist.
    pub vocab_size: u32,
    /// Prompt and output together; 0: not limited.
    pub max_model_len: u32,
    /// KV blocks in all; 0: the worker keeps no KV.
    pub kv_blocks: u64,
    /// Tokens in one block.
    pub kv_block_size: u32,
    /// KV blocks that this router may reserve, if the worker said so.
    pub credit_blocks: Option<u64>,
    /// Profiled step times; empty: not profiled.
    pub step_times: Vec<StepTimePoint>,
    /// Ids of a token tree that a target verifies; 0: chains only.
    pub max_tree_tokens: u32,
    /// Whether a draft worker is on trial: it is scored, and no target sees what it proposes.
    pub is_shadow: bool,
}

impl WorkerInfo {
    /// A worker of one role that says nothing else of itself.
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
            max_tree_tokens: 0,
            is_shadow: false,
        }
    }
}

/// One frame of a worker.
#[derive(Debug, Clone, Default)]
pub struct Frame {
    /// The forward pass that the replies come from.
    pub timing: StepTiming,
    /// A new limit on the KV blocks that this router may reserve.
    pub credit_blocks: Option<u64>,
    /// Answers to steps.
    pub replies: Vec<Reply>,
    /// Sequences that the worker dropped to free KV, with the assignment that this ends.
    pub preempted: Vec<(SequenceId, u32)>,
    /// The worker is about to stop: it gets no new sequences.
    pub is_draining: bool,
}

/// One forward pass of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepTiming {
    /// Rows in it.
    pub rows: u32,
    /// Of these, rows of prompts.
    pub prefill_rows: u32,
    /// Sequences in it.
    pub sequences: u32,
    /// KV tokens read.
    pub kv_tokens: u64,
    /// Mean time from a step's arrival to its first forward pass.
    pub queue: Duration,
    /// Duration of the forward pass.
    pub compute: Duration,
}

/// What the driver is to do, in order.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// Send a step to a worker.
    Send(WorkerKey, Step),
    /// Tell a worker to forget an assignment of a sequence.
    Close(WorkerKey, SequenceId, u32),
    /// The sequence has its first target.
    Assigned(SequenceId),
    /// Nothing runs at a worker that is listed no more: its connection is to end.
    Disconnect(WorkerKey),
    /// A round of a traced sequence begins with this many tokens to draft.
    RoundBegun(SequenceId, u32),
    /// Tokens for the client.
    Commit(CommittedRound),
    /// Scored prompt ids for the client, in order and each once.
    PromptLogprobs(SequenceId, PromptLogprobs),
    /// The sequence is complete. The scheduler has forgotten it.
    Finish(SequenceId, FinishReason, SpeculationUsage),
    /// The sequence failed. The scheduler has forgotten it.
    Fail(SequenceId, Failure),
    /// For metrics and logs.
    Report(Report),
}

/// One verified span of one sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct CommittedRound {
    /// Which sequence.
    pub id: SequenceId,
    /// Its lane.
    pub lane: LaneId,
    /// The tokens.
    pub commit: Commit,
    /// Where the draft was looked up, if it was.
    pub source: Option<LookupSource>,
    /// Totals up to and with this span.
    pub usage: SpeculationUsage,
}

/// Why a sequence failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// Every target refused it.
    Refused(String),
    /// No target serves its model.
    Unavailable(String),
    /// Target after target failed while it ran there.
    Quarantined(String),
    /// Targets were full for so long.
    Expired(Duration),
}

/// Running totals of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpeculationUsage {
    /// Verify steps that committed something, decode steps among them.
    pub rounds: u64,
    /// Drafted tokens that were verified.
    pub draft_tokens: u64,
    /// Drafted tokens that were committed.
    pub accepted_tokens: u64,
    /// Prompt tokens whose KV the target had from other sequences.
    pub cached_tokens: u64,
    /// Tokens of the client's prediction that appeared in the output, and those that did not so far: whoever drafted them.
    pub accepted_prediction_tokens: u32,
    /// See `accepted_prediction_tokens`.
    pub rejected_prediction_tokens: u32,
    /// Why nothing was drafted at some time, in one snake_case word; the last reason wins.
    pub disabled_reason: Option<&'static str>,
}

impl SpeculationUsage {
    /// Tokens per verify step: one, and the accepted ones. `None` before the first step.
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
    Ignored(Ignored),
    /// A draft worker does not answer: rounds go on without it.
    DraftWorkerSilent {
        /// Which worker.
        worker: WorkerKey,
        /// How long the oldest unanswered request waits.
        waited: Duration,
    },
    /// A silent draft worker answers again.
    DraftWorkerAnswers(WorkerKey),
    /// A target owes answers and says nothing: its sequences move where another target serves them.
    TargetSilent {
        /// Which worker.
        worker: WorkerKey,
        /// How long nothing came.
        waited: Duration,
        /// How many sequences moved at once.
        moved: usize,
    },
    /// Sequences move away from a target that is silent, or that an operator drains.
    Moved {
        /// Which worker.
        from: WorkerKey,
        /// How many sequences.
        sequences: usize,
    },
    /// A worker gets nothing new, for it is about to stop or an operator says so, with so many sequences there.
    WorkerDraining {
        /// Which worker.
        worker: WorkerKey,
        /// Sequences assigned to it.
        sequences: u32,
    },
    /// A worker that an operator drained gets new sequences again.
    WorkerUndrained(WorkerKey),
    /// A silent target answers again.
    TargetAnswers(WorkerKey),
    /// A sequence failed at a target.
    TargetFailed {
        /// Which worker.
        worker: WorkerKey,
        /// What happened.
        fault: TargetFault,
        /// Whether its circuit breaker opened: it gets one sequence now and then until one succeeds.
        is_opened: bool,
    },
    /// A lost worker's sequences are replayed at other workers.
    Replayed {
        /// What the lost worker was.
        role: Role,
        /// Where it was.
        address: String,
        /// How many sequences.
        sequences: usize,
    },
    /// A sequence moved to a target of another numerics class: its text may differ from here on.
    NumericsChanged(SequenceId),
    /// A sequence was assigned a target.
    TargetAssigned {
        /// Its priority; lower is more urgent.
        priority: u8,
        /// How long it waited.
        waited: Duration,
    },
    /// How many sequences wait for a target with capacity.
    WaitingForTarget(usize),
    /// A worker's KV blocks.
    Blocks {
        /// Which worker.
        worker: WorkerKey,
        /// How many this router may reserve.
        credit: u64,
        /// How many it has reserved.
        reserved: u64,
    },
    /// A proposal of a shadow draft was compared with what was committed.
    ShadowScored(ShadowScored),
    /// A shadow draft was given up for one sequence, by a reason in one snake_case word.
    ShadowDropped {
        /// Its draft.
        draft: Arc<str>,
        /// Why.
        reason: &'static str,
    },
    /// A candidate took over, or was taken back.
    RolloutEnded {
        /// Its draft.
        draft: String,
        /// What it is now.
        stage: Stage,
        /// Sequences that moved to other draft workers.
        moved: usize,
    },
    /// What a target could commit beyond what it does.
    Headroom {
        /// Which worker.
        worker: WorkerKey,
        /// Rounded down.
        tokens_per_second: u64,
    },
}

/// One proposal of a shadow draft, with the draft that served at the same place.
#[derive(Debug, Clone, PartialEq)]
pub struct ShadowScored {
    /// The shadow's draft.
    pub draft: Arc<str>,
    /// The sequence's lane.
    pub lane: Arc<LaneKey>,
    /// The shadow's positions that were judged, and accepted.
    pub shadow: (u32, u32),
    /// Those of the draft that served, cut to the same length; absent where none guessed at the same place.
    pub serving: Option<(u32, u32)>,
}
