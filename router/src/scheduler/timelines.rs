//! Timelines of recent sequences for the console: when each step was sent and answered. Only a few sequences
//! are recorded at a time, so a busy router takes a sample, and the other sequences cost nothing. Timelines
//! contain durations and counts, never text or token ids.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use scheduling::scheduler::WorkerKey;
use scheduling::scheduler::events::StepTiming;
use serde::Serialize;
use speculation::step::{Reply, ReplyBody, Step, Work};
use speculation::{Role, SequenceId};

/// Maximum number of sequences recorded at once; others are not recorded.
const RECORDED_MAX: usize = 4;

/// Maximum number of finished timelines kept.
const KEPT_MAX: usize = 32;

/// Maximum number of steps in a timeline; later ones are only counted.
const STEPS_MAX: usize = 512;

/// Finished timelines of a router. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Timelines(Arc<Mutex<VecDeque<Timeline>>>);

impl Timelines {
    /// Timelines, latest first.
    pub fn latest(&self) -> Vec<Timeline> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().rev().cloned().collect()
    }

    fn push(&self, timeline: Timeline) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == KEPT_MAX {
            kept.pop_front();
        }
        kept.push_back(timeline);
    }
}

/// One sequence from submission to end. Times are microseconds since the submission.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Timeline {
    /// Identifier of the sequence's request.
    pub request_id: String,
    /// Index of the choice within the request.
    pub choice: u32,
    /// Task type of the sequence's lane.
    pub task_type: String,
    /// Length of the prompt in tokens.
    pub prompt_len: u32,
    /// Number of committed tokens.
    pub num_tokens: u64,
    /// Time of the end.
    pub ended_us: u64,
    /// How it ended: `finished`, `failed` or `cancelled`.
    pub end: &'static str,
    /// Number of steps beyond the recorded ones.
    pub steps_left_out: u64,
    /// Steps in the order they were sent.
    pub steps: Vec<TimelineStep>,
}

/// One step sent to a worker.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TimelineStep {
    /// Role of the worker.
    pub role: Role,
    /// Sequence number of the step.
    pub step_seq: u64,
    /// Number of ids appended to the context.
    pub num_appended: u32,
    /// Number of tokens to propose, or of drafted tokens to verify.
    pub k: u32,
    /// Time when the step was sent.
    pub sent_us: u64,
    /// Time of the reply; absent if none came.
    pub answered_us: Option<u64>,
    /// Part of that time spent in the worker's queue.
    pub queue_us: u64,
    /// Part of that time spent in the forward that produced the reply; a proposal takes one forward per
    /// token. The rest is network time.
    pub compute_us: u64,
    /// Kind of reply: `fed`, `proposal`, `span`, `need_context` or `refused`.
    pub reply: Option<&'static str>,
    /// Number of tokens proposed, or of drafted tokens accepted.
    pub num_tokens: u32,
}

/// Sequences being recorded.
#[derive(Debug)]
pub(super) struct TimelineRecorder {
    timelines: Timelines,
    roles: BTreeMap<WorkerKey, Role>,
    recorded: Vec<RecordedSequence>,
}

/// A submitted sequence.
pub(super) struct SubmittedSequence<'a> {
    pub(super) id: SequenceId,
    pub(super) request_id: &'a str,
    pub(super) choice: u32,
    pub(super) task_type: &'a str,
    pub(super) prompt_len: u32,
}

#[derive(Debug)]
struct RecordedSequence {
    id: SequenceId,
    submitted: Duration,
    timeline: Timeline,
}

impl TimelineRecorder {
    pub(super) fn new(timelines: Timelines) -> Self {
        Self { timelines, roles: BTreeMap::new(), recorded: Vec::new() }
    }

    pub(super) fn worker_joined(&mut self, key: WorkerKey, role: Role) {
        self.roles.insert(key, role);
    }

    pub(super) fn worker_left(&mut self, key: WorkerKey) {
        self.roles.remove(&key);
    }

    /// Starts recording a submitted sequence, if there is capacity.
    pub(super) fn start(&mut self, now: Duration, sequence: &SubmittedSequence<'_>) {
        if self.recorded.len() == RECORDED_MAX {
            return;
        }
        let timeline = Timeline {
            request_id: sequence.request_id.to_owned(),
            choice: sequence.choice,
            task_type: sequence.task_type.to_owned(),
            prompt_len: sequence.prompt_len,
            num_tokens: 0,
            ended_us: 0,
            end: "cancelled",
            steps_left_out: 0,
            steps: Vec::new(),
        };
        self.recorded.push(RecordedSequence { id: sequence.id, submitted: now, timeline });
    }

    /// Records a step sent to a worker.
    pub(super) fn record_step(&mut self, now: Duration, worker: WorkerKey, step: &Step) {
        if self.recorded.is_empty() {
            return;
        }
        let Some(&role) = self.roles.get(&worker) else { return };
        let Some(recorded) = self.find(step.sequence_id) else { return };
        if recorded.timeline.steps.len() == STEPS_MAX {
            recorded.timeline.steps_left_out += 1;
            return;
        }
        let k = match &step.work {
            Work::Propose { num_draft_tokens, .. } => *num_draft_tokens,
            Work::Verify { draft } => draft.token_ids.len() as u32,
            Work::Feed => 0,
        };
        let sent_us = micros(now - recorded.submitted);
        recorded.timeline.steps.push(TimelineStep {
            role,
            step_seq: step.step_seq,
            num_appended: step.append_ids.len() as u32,
            k,
            sent_us,
            answered_us: None,
            queue_us: 0,
            compute_us: 0,
            reply: None,
            num_tokens: 0,
        });
    }

    /// Records a worker's replies and the timing of their forward.
    pub(super) fn record_replies(&mut self, now: Duration, timing: &StepTiming, replies: &[Reply]) {
        if self.recorded.is_empty() {
            return;
        }
        for reply in replies {
            let Some(recorded) = self.find(reply.sequence_id) else { continue };
            let answered_us = micros(now - recorded.submitted);
            let mut steps = recorded.timeline.steps.iter_mut().rev();
            let Some(step) = steps.find(|step| step.step_seq == reply.step_seq) else { continue };
            step.answered_us = Some(answered_us);
            (step.queue_us, step.compute_us) = (micros(timing.queue), micros(timing.compute));
            (step.reply, step.num_tokens) = match &reply.body {
                ReplyBody::Fed { .. } => (Some("fed"), 0),
                ReplyBody::Proposal(proposal) => (Some("proposal"), proposal.draft.token_ids.len() as u32),
                ReplyBody::Span(span) => (Some("span"), span.num_accepted),
                ReplyBody::NeedContext { .. } => (Some("need_context"), 0),
                ReplyBody::Refused(_) => (Some("refused"), 0),
            };
        }
    }

    /// Counts committed tokens of the sequence.
    pub(super) fn record_commit(&mut self, id: SequenceId, num_tokens: usize) {
        if let Some(recorded) = self.find(id) {
            recorded.timeline.num_tokens += num_tokens as u64;
        }
    }

    /// Ends the timeline of a sequence. A sequence that already ended is ignored.
    pub(super) fn finish(&mut self, now: Duration, id: SequenceId, end: &'static str) {
        let Some(at) = self.recorded.iter().position(|recorded| recorded.id == id) else { return };
        let RecordedSequence { submitted, timeline, .. } = self.recorded.swap_remove(at);
        self.timelines.push(Timeline { ended_us: micros(now - submitted), end, ..timeline });
    }

    fn find(&mut self, id: SequenceId) -> Option<&mut RecordedSequence> {
        self.recorded.iter_mut().find(|recorded| recorded.id == id)
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use speculation::step::{Draft, Proposal, Refusal, TokenSpan};

    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const TARGET: WorkerKey = WorkerKey(1);
    const DRAFT: WorkerKey = WorkerKey(2);

    fn recorder() -> (Timelines, TimelineRecorder) {
        let timelines = Timelines::default();
        let mut recorder = TimelineRecorder::new(timelines.clone());
        recorder.worker_joined(TARGET, Role::Target);
        recorder.worker_joined(DRAFT, Role::Draft);
        (timelines, recorder)
    }

    fn step(id: u64, step_seq: u64, work: Work) -> Step {
        Step {
            sequence_id: SequenceId(id),
            epoch: 1,
            step_seq,
            spec: None,
            base_len: 0,
            prefix_hash: 0,
            append_ids: vec![1, 2, 3],
            work,
        }
    }

    fn reply(id: u64, step_seq: u64, body: ReplyBody) -> Reply {
        Reply {
            sequence_id: SequenceId(id),
            epoch: 1,
            step_seq,
            body,
            agreed: Vec::new(),
            num_cached: 0,
            num_ahead: 0,
        }
    }

    fn submit(recorder: &mut TimelineRecorder, id: u64) {
        let request_id = format!("request-{id}");
        let id = SequenceId(id);
        recorder.start(
            MS,
            &SubmittedSequence { id, request_id: &request_id, choice: 0, task_type: "code", prompt_len: 3 },
        );
    }

    #[test]
    fn a_round_is_recorded_with_the_time_of_each_worker() {
        let (timelines, mut recorder) = recorder();
        submit(&mut recorder, 7);
        recorder.record_step(
            3 * MS,
            DRAFT,
            &step(7, 1, Work::Propose { num_draft_tokens: 4, num_tree_tokens: 0 }),
        );
        let timing = StepTiming { queue: MS, compute: 2 * MS, ..StepTiming::default() };
        let draft = Draft::chain(vec![5, 6]);
        let proposal = Proposal { start: 3, draft: draft.clone() };
        recorder.record_replies(7 * MS, &timing, &[reply(7, 1, ReplyBody::Proposal(proposal))]);
        recorder.record_step(8 * MS, TARGET, &step(7, 2, Work::Verify { draft }));
        let span = TokenSpan { num_accepted: 1, token_ids: vec![5, 9], ..TokenSpan::default() };
        recorder.record_replies(20 * MS, &timing, &[reply(7, 2, ReplyBody::Span(span))]);
        recorder.record_commit(SequenceId(7), 2);
        assert!(timelines.latest().is_empty(), "the sequence is still running");
        recorder.finish(21 * MS, SequenceId(7), "finished");

        let timeline = timelines.latest().remove(0);
        assert_eq!(
            (timeline.request_id.as_str(), timeline.end, timeline.ended_us),
            ("request-7", "finished", 20_000)
        );
        assert_eq!((timeline.num_tokens, timeline.steps_left_out), (2, 0));
        let [draft, verify] = &timeline.steps[..] else { panic!("two steps: {timeline:?}") };
        assert_eq!(
            (draft.role, draft.k, draft.reply, draft.num_tokens),
            (Role::Draft, 4, Some("proposal"), 2)
        );
        assert_eq!((draft.sent_us, draft.answered_us), (2_000, Some(6_000)));
        assert_eq!((draft.queue_us, draft.compute_us), (1_000, 2_000));
        assert_eq!(
            (verify.role, verify.k, verify.reply, verify.num_tokens),
            (Role::Target, 2, Some("span"), 1)
        );
        assert_eq!(verify.answered_us, Some(19_000));
    }

    #[test]
    fn recorded_and_kept_timelines_are_limited() {
        let (timelines, mut recorder) = recorder();
        for id in 0..10 {
            submit(&mut recorder, id);
        }
        for id in 0..10 {
            recorder.finish(2 * MS, SequenceId(id), "finished");
            recorder.finish(2 * MS, SequenceId(id), "cancelled");
        }
        assert_eq!(timelines.latest().len(), RECORDED_MAX);
        for id in 10..100 {
            submit(&mut recorder, id);
            recorder.finish(2 * MS, SequenceId(id), "cancelled");
        }
        let kept = timelines.latest();
        assert_eq!((kept.len(), kept[0].request_id.as_str()), (KEPT_MAX, "request-99"));
    }

    #[test]
    fn a_long_timeline_keeps_its_first_steps_and_counts_the_others() {
        let (timelines, mut recorder) = recorder();
        submit(&mut recorder, 1);
        for step_seq in 0..STEPS_MAX as u64 + 5 {
            recorder.record_step(2 * MS, TARGET, &step(1, step_seq, Work::Feed));
        }
        // Replies to a step that was left out and to a sequence that is not recorded.
        let replies = [STEPS_MAX as u64 + 1, 3]
            .map(|seq| reply(1, seq, ReplyBody::Fed { cached_len: 3, prompt_logprobs: None }));
        recorder.record_replies(3 * MS, &StepTiming::default(), &replies);
        let unrecorded = reply(9, 1, ReplyBody::Refused(Refusal::failure("no")));
        recorder.record_replies(3 * MS, &StepTiming::default(), &[unrecorded]);
        recorder.finish(4 * MS, SequenceId(1), "failed");
        let timeline = timelines.latest().remove(0);
        assert_eq!((timeline.steps.len(), timeline.steps_left_out), (STEPS_MAX, 5));
        let answered = timeline.steps.iter().filter(|step| step.answered_us.is_some());
        assert_eq!(answered.map(|step| step.step_seq).collect::<Vec<_>>(), [3]);
    }
}
