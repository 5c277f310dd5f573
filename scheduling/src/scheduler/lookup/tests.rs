//! Tests of lookup drafts through the whole scheduler. The workers know the target's text and answer every
//! step.

use std::collections::BTreeMap;
use std::time::Duration;

use speculation::step::Work;
use speculation::{
    AcceptanceMode, Draft, FinishReason, Proposal, Reply, ReplyBody, SamplingParams, SequenceId,
    SequenceSpec, Step, TokenSpan,
};

use super::super::events::{
    ClientEvent, Frame, NewSequence, Prompt, SpeculationUsage, StepTiming, WorkerInfo,
};
use super::super::lanes::{LaneKey, TemperatureBand};
use super::super::policy::{DraftTokens, LanePolicy, PolicyConfig, SpeculationRequest};
use super::super::{Command, Event, Scheduler, SchedulerConfig, WorkerKey};
use super::*;
use crate::cost::StepTimePoint;
use crate::draft_length::Rules;

const VOCAB_SIZE: u32 = 5_000;
const STEP: Duration = Duration::from_millis(10);

/// One sequence, and workers that know its text.
struct World {
    scheduler: Scheduler,
    now: Duration,
    /// Prompt and output.
    truth: Vec<TokenId>,
    num_sequences: u64,
    committed: Vec<TokenId>,
    /// Whether the draft worker's proposals are correct.
    draft_is_right: bool,
    roles: BTreeMap<WorkerKey, Role>,
    /// Number of verify steps, and the drafts of those that had one.
    num_verified: u32,
    drafts: Vec<Draft>,
    num_proposals: u32,
    usage: Option<SpeculationUsage>,
    /// Number of committed ids after which the target is lost and another one joins.
    loses_target_at: Option<usize>,
}

struct Asked<'a> {
    prompt: &'a [TokenId],
    output: &'a [TokenId],
    prediction: Option<&'a [TokenId]>,
    suffix_drafts: bool,
    speculation: SpeculationRequest,
    acceptance: AcceptanceMode,
    temperature: f32,
    /// The lane's limit on sequences at a target.
    max_batch: Option<u32>,
}

impl<'a> Asked<'a> {
    fn of(prompt: &'a [TokenId], output: &'a [TokenId]) -> Self {
        let (prediction, suffix_drafts, speculation, acceptance, max_batch) = Default::default();
        let temperature = 0.0;
        Self { prompt, output, prediction, suffix_drafts, speculation, acceptance, temperature, max_batch }
    }
}

impl World {
    fn new(asked: &Asked<'_>, with_draft_worker: bool) -> Self {
        let mut policy = PolicyConfig {
            tree_tokens: DraftTokens::Fixed(0),
            suffix_drafts: asked.suffix_drafts,
            ..PolicyConfig::new(DraftTokens::Auto, 16)
        };
        let lane = LanePolicy { max_batch_for_speculation: asked.max_batch, ..policy.lane("") };
        policy.lanes.insert(String::new(), lane);
        let minute = Duration::from_secs(60);
        let mut world = Self {
            scheduler: Scheduler::new(SchedulerConfig {
                policy,
                target_deadline: minute,
                target_wait: minute,
                queue_wait: minute,
                replay_ids_per_second: 0,
                tpot_objective: None,
                shadow_share: 0.0,
                rules: Rules::default(),
            }),
            now: Duration::ZERO,
            truth: [asked.prompt, asked.output].concat(),
            num_sequences: 0,
            committed: Vec::new(),
            draft_is_right: false,
            roles: BTreeMap::new(),
            num_verified: 0,
            drafts: Vec::new(),
            num_proposals: 0,
            usage: None,
            loses_target_at: None,
        };
        world.connect(1, Role::Target);
        if with_draft_worker {
            world.connect(2, Role::Draft);
        }
        world
    }

    /// Runs a sequence to its end.
    fn run(mut self, asked: &Asked<'_>) -> Self {
        let spec = SequenceSpec {
            prompt_len: asked.prompt.len() as u32,
            max_len: self.truth.len() as u32,
            acceptance: asked.acceptance,
            sampling: SamplingParams { temperature: asked.temperature, ..SamplingParams::default() },
            ..SequenceSpec::default()
        };
        let lane =
            LaneKey { model: "m".to_owned(), task_type: String::new(), temperature: TemperatureBand::Greedy };
        let prediction = asked.prediction.map(|ids| Arc::new(PredictedText::new(ids.to_vec())));
        self.num_sequences += 1;
        self.committed.clear();
        self.event(Event::Submit(Box::new(NewSequence {
            id: SequenceId(self.num_sequences),
            lane,
            spec,
            vocab_size: VOCAB_SIZE,
            prompt: Arc::new(Prompt::new(asked.prompt, 0)),
            speculation: asked.speculation,
            prediction,
            api_key: 0,
            may_expire: false,
        })));
        // All ids that the target draws were committed, independent of the drafts.
        assert_eq!(self.committed, self.truth[asked.prompt.len()..]);
        self
    }

    fn connect(&mut self, key: u64, role: Role) {
        self.roles.insert(WorkerKey(key), role);
        self.event(Event::WorkerUp(WorkerKey(key), Box::new(info(role))));
    }

    /// Passes an event in and answers all steps until none is outstanding.
    fn event(&mut self, event: Event) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            let mut commands: Vec<Command> = self.scheduler.on_event(self.now, event).collect();
            commands.extend(self.scheduler.on_event(self.now, Event::Dispatch));
            for command in commands {
                match command {
                    Command::Send(key, step) => events.insert(0, self.answer(key, &step)),
                    Command::Client(ClientEvent::Commit(round)) => {
                        self.committed.extend(&round.commit.token_ids);
                        self.usage = Some(round.usage);
                        if self.loses_target_at.is_some_and(|at| self.committed.len() >= at) {
                            self.loses_target_at = None;
                            self.roles.insert(WorkerKey(9), Role::Target);
                            events.insert(0, Event::WorkerUp(WorkerKey(9), Box::new(info(Role::Target))));
                            events.insert(0, Event::WorkerDown(WorkerKey(1)));
                        }
                    }
                    Command::Client(ClientEvent::Fail(_, failure)) => panic!("{failure:?}"),
                    _ => {}
                }
            }
        }
    }

    fn answer(&mut self, key: WorkerKey, step: &Step) -> Event {
        let (start, truth) = (step.start(), &self.truth);
        let role = self.roles[&key];
        let (rows, body) = match &step.work {
            Work::Feed => (1, ReplyBody::Fed { cached_len: start, prompt_logprobs: None }),
            Work::Propose { num_draft_tokens, .. } => {
                self.num_proposals += 1;
                let end = truth.len().min((start + num_draft_tokens) as usize);
                let shift = u32::from(!self.draft_is_right);
                let ids = truth[start as usize..end].iter().map(|id| (id + shift) % VOCAB_SIZE).collect();
                (1, ReplyBody::Proposal(Proposal { start, draft: Draft::chain(ids) }))
            }
            Work::Verify { draft } => {
                let rest = &truth[start as usize..];
                let num_accepted = draft.token_ids.iter().zip(rest).take_while(|(a, b)| a == b).count();
                let end = rest.len().min(num_accepted + 1);
                let finish = (end == rest.len()).then_some(FinishReason::Length);
                let token_ids = rest[..end].to_vec();
                let num_accepted = num_accepted as u32;
                self.num_verified += 1;
                if !draft.token_ids.is_empty() {
                    self.drafts.push(draft.clone());
                }
                let span = TokenSpan { start, num_accepted, token_ids, finish, ..TokenSpan::default() };
                (1 + draft.token_ids.len() as u32, ReplyBody::Span(span))
            }
        };
        let compute = if role == Role::Target { STEP } else { STEP / 5 };
        self.now += compute;
        let timing = StepTiming { rows, sequences: 1, compute, ..StepTiming::default() };
        Event::Frame(key, Frame { timing, replies: vec![Reply::to(step, body)], ..Frame::default() })
    }
}

fn info(role: Role) -> WorkerInfo {
    // Each further row costs the target 3% of a one-row step.
    let times = if role == Role::Target { [(1, 10_000), (64, 28_900)] } else { [(1, 2_000), (64, 2_000)] };
    WorkerInfo {
        vocab_size: VOCAB_SIZE,
        kv_blocks: 10_000,
        kv_block_size: 16,
        step_times: times.map(|(rows, micros)| StepTimePoint { rows, context: 0, micros }).to_vec(),
        ..WorkerInfo::of(role, "m")
    }
}

/// `len` ids that do not repeat.
fn text(from: TokenId, len: u32) -> Vec<TokenId> {
    (from..from + len).collect()
}

/// `file` with one id replaced, two ids inserted and three removed.
fn edited(file: &[TokenId]) -> Vec<TokenId> {
    [&file[..40], &[4_001], &file[41..90], &[4_002, 4_003], &file[90..130], &file[133..]].concat()
}

fn run(asked: &Asked<'_>, with_draft_worker: bool) -> World {
    World::new(asked, with_draft_worker).run(asked)
}

#[test]
fn a_predicted_text_is_verified_in_long_drafts_and_no_worker_is_asked() {
    let file = text(100, 200);
    let output = edited(&file);
    let asked = Asked { prediction: Some(&file), ..Asked::of(&[1, 2, 3], &output) };
    for with_draft_worker in [false, true] {
        let world = run(&asked, with_draft_worker);
        assert!(world.num_verified < 40, "{} rounds", world.num_verified);
        assert!(world.num_proposals < 10, "{} proposals", world.num_proposals);
        let usage = world.usage.unwrap();
        // One id was replaced and three were removed: 196 of 200 appear.
        assert_eq!((usage.accepted_prediction_tokens, usage.rejected_prediction_tokens), (196, 4));
        assert_eq!(usage.rounds, u64::from(world.num_verified));
    }
    let plain = run(&Asked::of(&[1, 2, 3], &output), false);
    assert_eq!((plain.num_verified as usize, plain.drafts.len()), (output.len(), 0));
}

#[test]
fn a_text_that_repeats_the_prompt_is_looked_up_there_where_the_operator_says_so() {
    let prompt = text(100, 300);
    let output = edited(&prompt[50..250]);
    for (suffix_drafts, most) in [(true, 45), (false, output.len())] {
        let world = run(&Asked { suffix_drafts, ..Asked::of(&prompt, &output) }, false);
        assert!(world.num_verified as usize <= most, "{} rounds", world.num_verified);
        assert_eq!(world.drafts.is_empty(), !suffix_drafts);
    }
}

#[test]
fn a_source_that_is_wrong_is_given_up_by_its_sequence_and_its_lane() {
    // Each 7 8 is followed by a different id.
    let output: Vec<TokenId> = (0..200).flat_map(|i| [7, 8, 1_000 + i]).collect();
    let asked = Asked { suffix_drafts: true, ..Asked::of(&[1, 2], &output) };
    let drafted = |world: &World| world.drafts.iter().map(|draft| draft.token_ids.len()).sum::<usize>();
    let world = run(&asked, false);
    assert_eq!(world.num_verified as usize, output.len());
    let first = drafted(&world);
    assert!((1..20).contains(&first), "{first}");
    assert_eq!(drafted(&world.run(&asked)), first, "the lane's rates know it");
}

#[test]
fn a_draft_worker_goes_on_where_the_prediction_is_of_another_text() {
    let (output, predicted) = (text(100, 200), text(1_000, 200));
    let asked = Asked { prediction: Some(&predicted), ..Asked::of(&[1, 2], &output) };
    let mut world = World::new(&asked, true);
    world.draft_is_right = true;
    let world = world.run(&asked);
    let mut plain = World::new(&asked, true);
    plain.draft_is_right = true;
    let plain = plain.run(&Asked::of(&[1, 2], &output));
    assert!(world.num_proposals > 10, "{}", world.num_proposals);
    assert!(world.num_verified <= plain.num_verified + 2, "{} {}", world.num_verified, plain.num_verified);
}

#[test]
fn a_fixed_draft_length_is_the_draft_workers() {
    let file = text(100, 120);
    let speculation = SpeculationRequest { num_draft_tokens: Some(3), ..SpeculationRequest::default() };
    let asked = Asked { prediction: Some(&file), speculation, ..Asked::of(&[1, 2], &file) };
    let with = run(&asked, true);
    assert_eq!(with.num_proposals + 1, with.num_verified, "the first round has the prompt");
    let without = run(&asked, false);
    assert!(without.drafts.iter().all(|draft| draft.token_ids.len() <= 3));
    assert!(without.num_verified < 40, "{}", without.num_verified);
}

#[test]
fn a_request_that_wants_no_drafts_gets_none_and_is_told_what_appeared() {
    let file = text(100, 100);
    let speculation = SpeculationRequest { enabled: Some(false), ..SpeculationRequest::default() };
    let asked = Asked {
        prediction: Some(&file),
        suffix_drafts: true,
        speculation,
        ..Asked::of(&[1, 2, 3], &file[..60])
    };
    let world = run(&asked, true);
    assert_eq!((world.drafts.len(), world.num_verified), (0, 60));
    let usage = world.usage.unwrap();
    assert_eq!((usage.accepted_prediction_tokens, usage.rejected_prediction_tokens), (60, 40));
}

#[test]
fn a_crowded_target_verifies_no_lookup_drafts_even_without_a_draft_worker() {
    let file = text(100, 100);
    for (max_batch, is_drafted) in [(Some(0), false), (Some(1), true), (None, true)] {
        for with_draft_worker in [false, true] {
            let asked = Asked { prediction: Some(&file), max_batch, ..Asked::of(&[1, 2, 3], &file) };
            let world = run(&asked, with_draft_worker);
            assert_eq!(!world.drafts.is_empty(), is_drafted, "{max_batch:?} {with_draft_worker}");
        }
    }
}

#[test]
fn in_rejection_mode_a_looked_up_id_is_certain_of_itself() {
    let file = text(100, 50);
    let acceptance = AcceptanceMode::Rejection;
    let asked = Asked { prediction: Some(&file), acceptance, ..Asked::of(&[1, 2, 3], &file) };
    let world = run(&Asked { temperature: 1.0, ..asked }, false);
    assert!(!world.drafts.is_empty());
    for draft in &world.drafts {
        assert_eq!(draft.q, speculation::ngram::point_distributions(&draft.token_ids));
    }
    let greedy = run(&asked, false);
    assert!(!greedy.drafts.is_empty());
    assert!(
        greedy.drafts.iter().all(|draft| draft.q.is_empty()),
        "a greedy sequence is coupled in every mode"
    );
}

#[test]
fn sources_outlive_the_target() {
    let file = text(100, 300);
    let output = edited(&file);
    let asked = Asked { prediction: Some(&file), ..Asked::of(&[1, 2, 3], &output) };
    for lost_after in [1, 30, 130, 250] {
        let mut world = World::new(&asked, false);
        world.loses_target_at = Some(lost_after);
        let world = world.run(&asked);
        assert_eq!((world.loses_target_at, world.roles.len()), (None, 2));
        assert!(world.num_verified < 60, "{lost_after}: {} rounds", world.num_verified);
    }
}
