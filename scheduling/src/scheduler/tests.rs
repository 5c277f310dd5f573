//! Scenario tests: events in, commands out. The files in `testdata/scheduler/` explain each verb at its first
//! use.

use std::collections::BTreeMap;

use speculation::step::Work;
use speculation::{
    Draft, Proposal, ProposalAhead, Refusal, RefusalCause, Reply, ReplyBody, SamplingParams, SequenceSpec,
    Step, TokenSpan,
};

use super::demand::PoolDemand;
use super::events::{ClientEvent, Drain, Prompt, StepTiming, WorkerInfo};
use super::lanes::{LaneExplanation, LaneKey, TemperatureBand};
use super::policy::{DraftTokens, SpeculationRequest};
use super::shadows::ShadowReport;
use super::*;
use crate::cost::StepTimePoint;
use crate::draft_score::PairedReport;
use crate::rollout::{RolloutOrder, RolloutRules, RolloutSettings};
use crate::testdata::{Line, run_folder};

mod work;

/// Vocabulary size of every model.
const VOCAB_SIZE: u32 = 1_000;

/// A scheduler, and the steps that its workers received.
struct World {
    scheduler: Scheduler,
    now: Duration,
    workers: BTreeMap<String, WorkerKey>,
    sequences: BTreeMap<String, SequenceId>,
    /// The latest step for each sequence at each worker.
    steps: BTreeMap<(SequenceId, WorkerKey), Step>,
    /// The step before the latest.
    steps_before: BTreeMap<(SequenceId, WorkerKey), Step>,
}

#[test]
fn scenarios() {
    run_folder("scheduler", || World::new(DraftTokens::Auto), World::line);
}

impl World {
    fn new(draft_tokens: DraftTokens) -> Self {
        Self::with_policy(PolicyConfig::new(draft_tokens, 8))
    }

    fn with_policy(policy: PolicyConfig) -> Self {
        let config = SchedulerConfig {
            policy,
            target_deadline: Duration::from_secs(10),
            target_wait: Duration::from_secs(30),
            queue_wait: Duration::from_secs(20),
            replay_ids_per_second: 1_000,
            tpot_objective: None,
            shadow_share: 1.0,
            rules: Rules::default(),
        };
        Self {
            scheduler: Scheduler::new(config),
            now: Duration::ZERO,
            workers: BTreeMap::new(),
            sequences: BTreeMap::new(),
            steps: BTreeMap::new(),
            steps_before: BTreeMap::new(),
        }
    }

    fn line(&mut self, line: &Line) -> String {
        if let Some(at) = line.duration("at") {
            assert!(at >= self.now, "time must not go back");
            self.now = at;
        }
        match line.verb.as_str() {
            "target" | "draft" => self.connect(line),
            "disconnect" => self.event(Event::WorkerDown(self.worker(&line.words[0]))),
            "submit" => self.submit(line),
            "cancel" => self.event(Event::Cancel(self.sequence(&line.words[0]))),
            "stop" => self.event(Event::Stop(self.sequence(&line.words[0]))),
            "credit" => {
                let frame = Frame { credit_blocks: Some(line.need("blocks")), ..Frame::default() };
                self.event(Event::Frame(self.worker(&line.words[0]), frame))
            }
            "drain" if line.words.len() > 1 => self.drain(line),
            "unlist" | "list" => self.event(Event::Listed(self.worker(&line.words[0]), line.verb == "list")),
            "drain" => {
                let frame = Frame { is_draining: true, ..Frame::default() };
                self.event(Event::Frame(self.worker(&line.words[0]), frame))
            }
            "reply" => self.reply(line),
            "ahead" => self.ahead(line),
            "preempt" => self.preempt(line),
            "rollout" => self.rollout(line),
            "score" => self.score(),
            "timer" => self.event(Event::Timer),
            "pools" => self.pools(),
            "lanes" => self.lanes(),
            "prices" => self.prices(),
            "network" => self.network(line),
            "dispatch" => self.event(Event::Dispatch),
            "wakeup" => match self.scheduler.next_wakeup() {
                Some(at) => format!("at {} us", at.as_micros()),
                None => "never".to_owned(),
            },
            _ => line.unknown(),
        }
    }

    /// `target NAME blocks=N us=(1,1000,64,2000) ..` connects a worker; `us` lists rows and step times.
    /// `draft NAME shadow` connects a draft worker on trial.
    fn connect(&mut self, line: &Line) -> String {
        let role = if line.verb == "target" { Role::Target } else { Role::Draft };
        let key = WorkerKey(self.workers.len() as u64 + 1);
        let name = line.words[0].clone();
        let times: Vec<u64> = line.list("us");
        let point = |at: &[u64]| StepTimePoint { rows: at[0] as u32, context: 0, micros: at[1] };
        let info = WorkerInfo {
            address: name.clone(),
            vocab_size: VOCAB_SIZE,
            kv_blocks: line.get("blocks").unwrap_or(1_000),
            kv_block_size: 16,
            max_model_len: line.get("window").unwrap_or(0),
            numerics_id: line.get("numerics").unwrap_or_default(),
            task_types: line.list("tasks"),
            is_shadow: line.has("shadow"),
            step_times: times.chunks(2).map(point).collect(),
            ..WorkerInfo::of(role, &line.get::<String>("model").unwrap_or_else(|| "m".to_owned()))
        };
        self.workers.insert(name, key);
        self.event(Event::WorkerUp(key, Box::new(info)))
    }

    /// `rollout MODEL share=X drafts=N sequences=N slowdown=X` begins a rollout; see also `rollout promote`
    /// and `rollout end`.
    fn rollout(&mut self, line: &Line) -> String {
        let order = match line.words[0].as_str() {
            "promote" => RolloutOrder::Promote,
            "end" => RolloutOrder::End,
            draft => RolloutOrder::Begin(RolloutSettings {
                draft: draft.to_owned(),
                share: line.get("share").unwrap_or(0.0),
                decides: true,
                rules: RolloutRules {
                    min_drafts: line.get("drafts").unwrap_or(1_000),
                    min_sequences: line.get("sequences").unwrap_or(50),
                    max_slowdown: line.get("slowdown").unwrap_or(1.25),
                    ..RolloutRules::default()
                },
            }),
        };
        self.event(Event::Rollout(order))
    }

    /// `score` prints the scores of drafts on trial and the state of the rollout.
    fn score(&self) -> String {
        let report = self.scheduler.report();
        let line = |draft: &ShadowReport| {
            let PairedReport { drafts, sequences, shadow_accepted, serving_accepted, .. } = draft.paired;
            format!(
                "{}: {shadow_accepted} against {serving_accepted} in {drafts} drafts of {sequences} sequences",
                draft.draft
            )
        };
        let dropped = report.shadows.dropped.iter().map(|(why, count)| format!("{count} dropped: {why}"));
        let rollout =
            report.rollout.iter().map(|rollout| format!("rollout {:?} {:?}", rollout.stage, rollout.verdict));
        report.shadows.drafts.iter().map(line).chain(dropped).chain(rollout).collect::<Vec<_>>().join("\n")
    }

    /// `pools` prints the number of workers that each model wants.
    fn pools(&self) -> String {
        let line = |pool: PoolDemand| {
            let PoolDemand { model, sequences, wanted_target_workers: targets, wanted_draft_workers, .. } =
                pool;
            format!("{model}: {sequences} sequences want {targets:.2} targets, {wanted_draft_workers} drafts")
        };
        self.scheduler.report().pools.into_iter().map(line).collect::<Vec<_>>().join("\n")
    }

    /// `lanes` prints the sequences of each lane and how many of them run.
    fn lanes(&self) -> String {
        let line = |lane: LaneExplanation| {
            format!("{}: {} of {} sequences run", lane.task_type, lane.running, lane.sequences)
        };
        self.scheduler.report().lanes.into_iter().map(line).collect::<Vec<_>>().join("\n")
    }

    /// Measured times of plain rounds, as a part of their price.
    fn prices(&self) -> String {
        let line = |lane: LaneExplanation| {
            let plain = &lane.choice.outlook[0];
            format!(
                "{}: plain rounds take {:.2} of their price",
                lane.task_type,
                plain.verify_us / plain.table_verify_us
            )
        };
        self.scheduler.report().lanes.into_iter().map(line).collect::<Vec<_>>().join("\n")
    }

    /// `network NAME` prints the measured network time of a worker.
    fn network(&self, line: &Line) -> String {
        let name = &line.words[0];
        let worker = self.scheduler.state.workers.get(self.worker(name)).expect("the worker is connected");
        format!("{name}: {:.0} us", worker.cost.wire_us())
    }

    /// `drain NAME by operator` and `drain NAME undone` are orders of an operator; with `moving`, sequences
    /// move away.
    fn drain(&mut self, line: &Line) -> String {
        self.event(Event::Drain(Drain {
            address: line.words[0].clone(),
            is_draining: !line.has("undone"),
            moves_sequences: line.has("moving"),
        }))
    }

    /// `submit NAME prompt=N max=N k=N task=T priority=N key=N` submits a sequence of N prompt ids; `k` pins
    /// the draft length. With `grammar` its output must match a grammar.
    fn submit(&mut self, line: &Line) -> String {
        let id = SequenceId(self.sequences.len() as u64 / 2 + 1);
        self.sequences.insert(line.words[0].clone(), id);
        // Its shadow: the name with an apostrophe.
        self.sequences.insert(format!("{}'", line.words[0]), SequenceId(id.0 | 1 << 63));
        let prompt_len: u32 = line.get("prompt").unwrap_or(4);
        let spec = SequenceSpec {
            prompt_len,
            max_len: prompt_len + line.get("max").unwrap_or(100),
            priority: line.get("priority").unwrap_or(0),
            sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
            grammar: line.has("grammar").then(|| "{}".to_owned()),
            ..SequenceSpec::default()
        };
        let lane = LaneKey {
            model: line.get("model").unwrap_or_else(|| "m".to_owned()),
            task_type: line.get("task").unwrap_or_default(),
            temperature: TemperatureBand::Greedy,
        };
        let speculation = SpeculationRequest { num_draft_tokens: line.get("k"), ..Default::default() };
        let prompt_ids: Vec<u32> = (0..prompt_len).map(|i| i + 10).collect();
        let prompt = Arc::new(Prompt::new(&prompt_ids, spec.isolation_key));
        let may_expire = line.get("choice").unwrap_or(0) == 0;
        let api_key = line.get("key").unwrap_or(0);
        let vocab_size = VOCAB_SIZE;
        let prediction = None;
        let new =
            NewSequence { id, lane, spec, vocab_size, prompt, speculation, prediction, api_key, may_expire };
        self.event(Event::Submit(Box::new(new)))
    }

    /// `reply SEQUENCE WORKER what` answers the latest step of the sequence at the worker (with `late`: the
    /// step before). `what` is `propose=N` (N correct ids, or `right=N` of them), `accept=N` (N drafted ids
    /// and one more), `fed`, `need=N` (N ids are cached), `proposal` (which no target may send),
    /// `no_mask`, `too_large` or `refused` (a refusal by its cause). `took` is the duration of the forward
    /// pass, `queued` the time before it, `prefill` its number of prompt rows beside the others (with
    /// `prompt_only` there are no others), `cached` the part of the context that was cached.
    fn reply(&mut self, line: &Line) -> String {
        let (id, worker) = (self.sequence(&line.words[0]), self.worker(&line.words[1]));
        let sent = if line.has("late") { &self.steps_before } else { &self.steps };
        let step = sent[&(id, worker)].clone();
        let start = step.start();
        // Token ids equal their positions, so that every draft can be correct.
        let ids = |count: u32| (start..start + count).collect::<Vec<u32>>();
        let body = if let Some(count) = line.get("propose") {
            let right = line.get("right").unwrap_or(count) as usize;
            let mut token_ids = ids(count);
            token_ids.iter_mut().skip(right).for_each(|id| *id = 0);
            ReplyBody::Proposal(Proposal { start, draft: Draft::chain(token_ids) })
        } else if let Some(num_accepted) = line.get("accept") {
            let token_ids = ids(num_accepted + 1);
            ReplyBody::Span(TokenSpan { start, num_accepted, token_ids, ..TokenSpan::default() })
        } else if let Some(cached_len) = line.get("need") {
            ReplyBody::NeedContext { cached_len, has_spec: true }
        } else if line.has("proposal") {
            ReplyBody::Proposal(Proposal { start, draft: Draft::default() })
        } else if line.has("fed") {
            ReplyBody::Fed { cached_len: start, prompt_logprobs: None }
        } else {
            let (cause, reason) = match () {
                () if line.has("no_mask") => (RefusalCause::Grammar, "no mask"),
                () if line.has("too_large") => (RefusalCause::Capacity, "too large"),
                () => (RefusalCause::Failure, "no"),
            };
            ReplyBody::Refused(Refusal { cause, reason: reason.to_owned() })
        };
        let rows = match &step.work {
            _ if line.has("prompt_only") => 0,
            Work::Verify { draft } => 1 + draft.token_ids.len() as u32,
            Work::Propose { .. } | Work::Feed => 1,
        };
        let compute = line.duration("took").unwrap_or_default();
        let prefill_rows = line.get("prefill").unwrap_or(0);
        let timing = StepTiming {
            rows: rows + prefill_rows,
            prefill_rows,
            sequences: 1,
            queue: line.duration("queued").unwrap_or_default(),
            compute,
            ..StepTiming::default()
        };
        let num_cached = line.get("cached").unwrap_or(0);
        let replies = vec![Reply { num_cached, ..Reply::to(&step, body) }];
        let frame = Frame { timing, replies, ..Frame::default() };
        self.event(Event::Frame(worker, frame))
    }

    /// `ahead SEQUENCE WORKER after=N propose=M`: M ids that the worker drafted ahead of an outcome, N committed
    /// ids since the start of its latest proposal.
    fn ahead(&mut self, line: &Line) -> String {
        let (sequence_id, worker) = (self.sequence(&line.words[0]), self.worker(&line.words[1]));
        let step = &self.steps[&(sequence_id, worker)];
        let (epoch, step_seq) = (step.epoch, step.step_seq);
        let (start, end) = (step.start(), step.start() + line.need::<u32>("after"));
        let committed_ids = (start..end).collect();
        let draft = Draft::chain((end..end + line.need::<u32>("propose")).collect());
        let ahead = vec![ProposalAhead { sequence_id, epoch, step_seq, committed_ids, draft }];
        self.event(Event::Frame(worker, Frame { ahead, ..Frame::default() }))
    }

    fn preempt(&mut self, line: &Line) -> String {
        let (id, worker) = (self.sequence(&line.words[0]), self.worker(&line.words[1]));
        let assignment = self.steps[&(id, worker)].epoch;
        let frame = Frame { preempted: vec![(id, assignment)], ..Frame::default() };
        self.event(Event::Frame(worker, frame))
    }

    fn event(&mut self, event: Event) -> String {
        let commands: Vec<Command> = self.scheduler.on_event(self.now, event).collect();
        commands.into_iter().map(|command| self.print(command)).collect::<Vec<_>>().join("\n")
    }

    fn print(&mut self, command: Command) -> String {
        match command {
            Command::Send(worker, step) => {
                let work = match &step.work {
                    Work::Feed => "feed".to_owned(),
                    Work::Propose { num_draft_tokens, .. } => format!("propose k={num_draft_tokens}"),
                    Work::Verify { draft } => format!("verify {:?}", draft.token_ids),
                };
                let (name, sequence) = (self.name_of(worker), self.name_of_sequence(step.sequence_id));
                let line = format!(
                    "send {name}: {sequence} keep={} append={} {work}",
                    step.base_len,
                    step.append_ids.len()
                );
                let key = (step.sequence_id, worker);
                if let Some(before) = self.steps.insert(key, step) {
                    self.steps_before.insert(key, before);
                }
                line
            }
            Command::Close(worker, id, assignment) => {
                let (name, sequence) = (self.name_of(worker), self.name_of_sequence(id));
                format!("close {name}: {sequence} assignment {assignment}")
            }
            // Always followed by the first step.
            Command::Assigned(_) => String::new(),
            Command::Disconnect(worker) => format!("disconnect {}", self.name_of(worker)),
            Command::RoundBegun(id, k) => format!("round {} k={k}", self.name_of_sequence(id)),
            Command::Client(event) => self.print_client_event(event),
            Command::Report(report) => self.print_report(&report),
        }
    }

    fn print_client_event(&self, event: ClientEvent) -> String {
        match event {
            ClientEvent::Commit(round) => {
                let (name, commit) = (self.name_of_sequence(round.id), &round.commit);
                let (accepted, drafted) = (commit.num_accepted, commit.num_draft_tokens);
                let cached = match round.usage.cached_tokens {
                    0 => String::new(),
                    tokens => format!(", {tokens} cached"),
                };
                format!("commit {name} {:?} accepted {accepted} of {drafted}{cached}", commit.token_ids)
            }
            ClientEvent::PromptLogprobs(id, _) => format!("prompt logprobs {}", self.name_of_sequence(id)),
            ClientEvent::Finish(id, reason, usage) => {
                let why = usage.disabled_reason.map(|why| format!(" ({why})")).unwrap_or_default();
                format!("finish {} {reason:?}, {} rounds{why}", self.name_of_sequence(id), usage.rounds)
            }
            ClientEvent::Fail(id, failure) => format!("fail {} {failure:?}", self.name_of_sequence(id)),
        }
    }

    /// Omits gauges, which would be in every case.
    fn print_report(&self, report: &Report) -> String {
        match report {
            Report::LaneOpened(..)
            | Report::DraftLength(..)
            | Report::WorkerChanged { .. }
            | Report::Headroom { .. } => String::new(),
            Report::WaitingForTarget(0) => String::new(),
            Report::WaitingForTarget(count) => format!("{count} wait for a target"),
            Report::TargetAssigned { waited, .. } if waited.is_zero() => String::new(),
            Report::TargetAssigned { waited, .. } => format!("assigned after {} us", waited.as_micros()),
            Report::Anomaly(why) => format!("ignored {why:?}"),
            Report::UsedProposalAhead => "proposal was drafted ahead".to_owned(),
            Report::DraftWorkerSilent { worker, .. } => format!("{} is silent", self.name_of(*worker)),
            Report::DraftWorkerRecovered(worker) => format!("{} answers again", self.name_of(*worker)),
            Report::TargetSilent { worker, waited, moved } => {
                format!("{} is silent for {} us: {moved} move", self.name_of(*worker), waited.as_micros())
            }
            Report::WorkerDraining { worker, sequences } => {
                format!("{} drains with {sequences} sequences", self.name_of(*worker))
            }
            Report::SequencesMoved { from, sequences } => {
                format!("{sequences} move from {}", self.name_of(*from))
            }
            Report::WorkerUndrained(worker) => format!("{} gets new sequences again", self.name_of(*worker)),
            Report::TargetRecovered(worker) => format!("{} answers again", self.name_of(*worker)),
            Report::TargetFailed { worker, fault, is_opened } => {
                let opened = if *is_opened { "; its breaker opens" } else { "" };
                format!("{}: {fault}{opened}", self.name_of(*worker))
            }
            Report::SequencesReplayed { address, sequences, .. } => {
                format!("lost {address}: {sequences} replayed")
            }
            Report::ShadowScored(scored) => {
                format!("scored {}: {:?} serving {:?}", scored.draft, scored.shadow, scored.serving)
            }
            Report::ShadowDropped { draft, reason } => {
                format!("shadow {draft} dropped: {}", reason.as_str())
            }
            Report::RolloutEnded { draft, stage, moved } => format!("{draft} is {stage:?}: {moved} move"),
            Report::NumericsChanged { id, .. } => format!("{} changes numerics", self.name_of_sequence(*id)),
        }
    }

    fn worker(&self, name: &str) -> WorkerKey {
        self.workers[name]
    }

    fn sequence(&self, name: &str) -> SequenceId {
        self.sequences[name]
    }

    fn name_of(&self, worker: WorkerKey) -> &str {
        self.workers.iter().find(|(_, key)| **key == worker).map_or("?", |(name, _)| name)
    }

    fn name_of_sequence(&self, id: SequenceId) -> &str {
        self.sequences.iter().find(|(_, at)| **at == id).map_or("?", |(name, _)| name)
    }
}
