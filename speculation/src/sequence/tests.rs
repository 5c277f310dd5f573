//! Tests of single sequences, frame by frame: the contract's worked example and every kind of frame that does
//! not fit.

mod ahead;
mod exclusions;
mod malformed;

use super::*;
use crate::{RefusalCause, SamplingParams, TokenLogprobs};

const NOW: Duration = Duration::from_secs(1);
const WAIT: Duration = Duration::from_millis(20);

fn sequence(prompt: &[TokenId], max_len: u32) -> Sequence {
    let spec = SequenceSpec { prompt_len: prompt.len() as u32, max_len, ..SequenceSpec::default() };
    let limits = SequenceConfig { vocab_size: 50_000, target_deadline: Duration::from_secs(30) };
    Sequence::new(SequenceId(7), Arc::new(spec), prompt, limits)
}

fn assigned(mut sequence: Sequence) -> Sequence {
    sequence.step(NOW, Event::Assigned(Role::Draft));
    assert_eq!(sequence.step(NOW, Event::Assigned(Role::Target)), [Action::Ready]);
    sequence
}

fn begin(sequence: &mut Sequence, k: u32) -> Vec<Action> {
    let feed_draft = sequence.due_feed(NOW, true).is_some();
    begin_feeding(sequence, k, feed_draft)
}

fn begin_feeding(sequence: &mut Sequence, num_draft_tokens: u32, feed_draft: bool) -> Vec<Action> {
    let (num_tree_tokens, draft_wait) = (0, WAIT);
    sequence.step(NOW, Event::BeginRound { num_draft_tokens, num_tree_tokens, draft_wait, feed_draft })
}

/// The only step sent to `role` among the actions.
fn sent(actions: &[Action], role: Role) -> Step {
    let steps: Vec<_> = actions
        .iter()
        .filter_map(|a| if let Action::Send(r, s) = a { (*r == role).then_some(s) } else { None })
        .collect();
    assert_eq!(steps.len(), 1, "{actions:?}");
    steps[0].clone()
}

fn answer(sequence: &mut Sequence, role: Role, step: &Step, body: ReplyBody) -> Vec<Action> {
    sequence.step(NOW, Event::Reply(role, Reply::to(step, body)))
}

fn fed(step: &Step) -> ReplyBody {
    ReplyBody::Fed { cached_len: step.start(), prompt_logprobs: None }
}

fn proposal(step: &Step, ids: &[TokenId]) -> ReplyBody {
    ReplyBody::Proposal(Proposal { start: step.start(), draft: Draft::chain(ids.to_vec()) })
}

fn span(step: &Step, num_accepted: u32, ids: &[TokenId]) -> ReplyBody {
    ReplyBody::Span(TokenSpan {
        start: step.start(),
        num_accepted,
        token_ids: ids.to_vec(),
        ..TokenSpan::default()
    })
}

/// One full round with `k` = 4: returns (draft base, draft context, target base, target context).
fn round(sequence: &mut Sequence, accepted: u32) -> (u32, u32, u32, u32) {
    let draft = sent(&begin(sequence, 4), Role::Draft);
    let actions = answer(sequence, Role::Draft, &draft, proposal(&draft, &[11, 12, 13, 14]));
    let target = sent(&actions, Role::Target);
    let mut ids = vec![11, 12, 13, 14][..accepted as usize].to_vec();
    ids.push(99);
    answer(sequence, Role::Target, &target, span(&target, accepted, &ids));
    (draft.base_len, draft.append_ids.len() as u32, target.base_len, target.append_ids.len() as u32)
}

#[test]
fn worked_example_of_the_contract() {
    // Prompt of 20,000, k = 4: docs/contract.md, part A, last paragraph.
    let prompt: Vec<TokenId> = (0..20_000).collect();
    let mut sequence = assigned(sequence(&prompt, 30_000));
    let mut actions = begin(&mut sequence, 4);
    for (base, len) in [(0, 8192), (8192, 8192), (16_384, 3616)] {
        let draft = sent(&actions, Role::Draft);
        assert_eq!((draft.base_len, draft.append_ids.len()), (base, len));
        assert_eq!(draft.work, Work::Feed);
        let target = sent(&actions, Role::Target);
        assert_eq!((target.base_len, target.append_ids.len()), (base, len));
        actions = answer(&mut sequence, Role::Draft, &draft, fed(&draft));
        if base < 16_384 {
            assert_eq!(target.work, Work::Feed);
            actions.extend(answer(&mut sequence, Role::Target, &target, fed(&target)));
        } else {
            assert_eq!(target.work, Work::Verify { draft: Draft::default() }, "the target draws on the last");
            answer(&mut sequence, Role::Target, &target, span(&target, 0, &[99]));
        }
    }
    assert_eq!(sequence.ids().len(), 20_001);
    assert_eq!(round(&mut sequence, 4), (20_000, 1, 20_000, 1));
    assert_eq!(sequence.ids().len(), 20_006);
    assert_eq!(round(&mut sequence, 0), (20_004, 2, 20_005, 1));
    assert_eq!(sequence.ids().len(), 20_007);
    assert_eq!(round(&mut sequence, 2), (20_006, 1, 20_006, 1));
    assert_eq!(sequence.ids().len(), 20_010);
    let draft = sent(&begin(&mut sequence, 4), Role::Draft);
    assert_eq!((draft.base_len, draft.append_ids.len()), (20_009, 1), "draft valid to 20009");
    let target = answer(&mut sequence, Role::Draft, &draft, proposal(&draft, &[]));
    assert_eq!(sent(&target, Role::Target).base_len, 20_009, "target valid to 20009");
}

#[test]
fn a_late_proposal_is_used_by_its_rest() {
    let mut sequence = assigned(sequence(&[1, 2, 3], 100));
    let draft = sent(&begin(&mut sequence, 4), Role::Draft);
    let actions = sequence.step(NOW + WAIT, Event::Tick);
    let target = sent(&actions, Role::Target);
    assert_eq!(
        target.work,
        Work::Verify { draft: Draft::default() },
        "verification does not wait past the deadline"
    );
    answer(&mut sequence, Role::Draft, &draft, proposal(&draft, &[11, 12, 13, 14]));
    answer(&mut sequence, Role::Target, &target, span(&target, 0, &[11]));
    let next = sent(&begin(&mut sequence, 2), Role::Target);
    assert_eq!(next.work, Work::Verify { draft: Draft::chain(vec![12, 13]) });
    answer(&mut sequence, Role::Target, &next, span(&next, 2, &[12, 13, 50]));
    let draft = sent(&begin(&mut sequence, 4), Role::Draft);
    assert_eq!(draft.base_len, 3 + 3, "the draft worker holds 11, 12, 13 of its own proposal");
}

#[test]
fn a_silent_draft_worker_costs_one_deadline_then_none() {
    let mut sequence = assigned(sequence(&[1, 2, 3], 100));
    begin(&mut sequence, 4);
    let actions = sequence.step(NOW + WAIT, Event::Tick);
    let target = sent(&actions, Role::Target);
    answer(&mut sequence, Role::Target, &target, span(&target, 0, &[11]));
    let actions = begin(&mut sequence, 4);
    assert_eq!(actions.len(), 1, "no draft is asked while the last one is unanswered: {actions:?}");
    assert_eq!(sent(&actions, Role::Target).append_ids, [11]);
}

#[test]
fn hostile_proposals_never_reach_the_target_whole() {
    let cases: [(&[TokenId], &[TokenId]); 4] = [
        (&[11, 12, 13, 14, 15], &[]), // too many
        (&[11, 50_000, 13], &[11]),   // out of the vocabulary
        (&[], &[]),                   // none
        (&[11, 12, 13, 14], &[11, 12, 13, 14]),
    ];
    for (proposed, verified) in cases {
        let mut sequence = assigned(sequence(&[1, 2, 3], 100));
        let draft = sent(&begin(&mut sequence, 4), Role::Draft);
        let actions = answer(&mut sequence, Role::Draft, &draft, proposal(&draft, proposed));
        let Work::Verify { draft } = sent(&actions, Role::Target).work else { panic!("{actions:?}") };
        assert_eq!(draft.token_ids, verified);
    }
}

#[test]
fn an_answer_that_no_draft_worker_may_give_ends_the_wait_and_the_assignment() {
    let answers: [fn(&Step) -> ReplyBody; 2] = [fed, |step| span(step, 0, &[11])];
    for body in answers {
        let mut sequence = assigned(sequence(&[1, 2, 3], 100));
        let draft = sent(&begin(&mut sequence, 4), Role::Draft);
        let actions = answer(&mut sequence, Role::Draft, &draft, body(&draft));
        assert_eq!(sent(&actions, Role::Target).work, Work::Verify { draft: Draft::default() });
        assert!(actions.contains(&Action::Anomaly(Anomaly::MalformedReply)), "{actions:?}");
        assert!(actions.contains(&Action::Assign(Role::Draft)), "{actions:?}");
    }
}

#[test]
fn unsound_spans_cost_the_target_its_assignment() {
    let broken: [(u32, &[TokenId], u32); 6] = [
        (1, &[77, 99], 3),                 // accepted an id that was not drafted
        (5, &[11, 12, 13, 14, 15, 99], 3), // more than was drafted
        (0, &[], 3),                       // nothing
        (0, &[1, 2], 3),                   // more than one draw
        (0, &[50_000], 3),                 // out of the vocabulary
        (0, &[9], 2),                      // wrong start
    ];
    for (num_accepted, ids, start) in broken {
        let mut sequence = assigned(sequence(&[1, 2, 3], 100));
        let draft = sent(&begin(&mut sequence, 4), Role::Draft);
        let actions = answer(&mut sequence, Role::Draft, &draft, proposal(&draft, &[11, 12, 13, 14]));
        let step = sent(&actions, Role::Target);
        let span = TokenSpan { start, num_accepted, token_ids: ids.to_vec(), ..TokenSpan::default() };
        let actions = answer(&mut sequence, Role::Target, &step, ReplyBody::Span(span));
        assert!(actions.contains(&Action::Assign(Role::Target)), "{ids:?}: {actions:?}");
        assert_eq!(sequence.ids(), [1, 2, 3], "nothing is committed");
    }
}

/// A text that is cut short, or that continues past its end, would be another text.
#[test]
fn a_span_ends_the_sequence_where_the_spec_does_and_nowhere_else() {
    let (stop, length) = (Some(FinishReason::Stop), Some(FinishReason::Length));
    let spec =
        SequenceSpec { prompt_len: 3, max_len: 6, stop_token_ids: vec![12], ..SequenceSpec::default() };
    let limits = SequenceConfig { vocab_size: 50_000, target_deadline: Duration::from_secs(30) };
    for (drafted, num_accepted, ids, finish, is_sound) in [
        (&[11, 13][..], 1, &[11, 99][..], None, true),
        (&[11, 13], 1, &[11, 99], stop, false),
        (&[11, 13], 1, &[11, 99], length, false),
        // The stop token as the target's own draw, and as an accepted id.
        (&[11, 13], 1, &[11, 12], stop, true),
        (&[11, 13], 1, &[11, 12], None, false),
        (&[11, 13], 1, &[11, 12], length, false),
        (&[11, 12], 2, &[11, 12], stop, true),
        (&[11, 12], 2, &[11, 12, 99], None, false),
        (&[11, 12], 2, &[11, 12, 99], length, false),
        // The maximum length.
        (&[11, 13], 2, &[11, 13, 99], length, true),
        (&[11, 13], 2, &[11, 13, 99], None, true),
        (&[11, 13], 2, &[11, 13, 99], stop, false),
        (&[11, 13], 2, &[11, 13, 12], stop, true),
        (&[11, 13], 2, &[11, 13, 12], length, false),
    ] {
        let mut sequence = assigned(Sequence::new(SequenceId(7), Arc::new(spec.clone()), &[1, 2, 3], limits));
        let draft = sent(&begin(&mut sequence, 4), Role::Draft);
        let actions = answer(&mut sequence, Role::Draft, &draft, proposal(&draft, drafted));
        let step = sent(&actions, Role::Target);
        let (start, token_ids) = (step.start(), ids.to_vec());
        let span = TokenSpan { start, num_accepted, token_ids, finish, ..TokenSpan::default() };
        let actions = answer(&mut sequence, Role::Target, &step, ReplyBody::Span(span));
        let committed = if is_sound { ids } else { &[] };
        assert_eq!(sequence.ids()[3..], *committed, "{ids:?}, {finish:?}");
        assert_eq!(actions.contains(&Action::Assign(Role::Target)), !is_sound, "{ids:?}, {finish:?}");
        let is_over = is_sound && (finish.is_some() || ids.len() == 3);
        assert_eq!(sequence.is_done(), is_over, "{ids:?}, {finish:?}");
    }
}

#[test]
fn a_target_that_only_says_fed_to_a_verification_is_left() {
    let mut sequence = assigned(sequence(&[1, 2, 3], 100));
    let step = sent(&begin(&mut sequence, 0), Role::Target);
    let fed = ReplyBody::Fed { cached_len: 3, prompt_logprobs: None };
    let actions = answer(&mut sequence, Role::Target, &step, fed);
    assert!(actions.contains(&Action::TargetFault(TargetFault::ProtocolViolation)), "{actions:?}");
    assert!(actions.contains(&Action::Assign(Role::Target)), "{actions:?}");
}

#[test]
fn a_refused_sequence_wants_another_target() {
    let mut sequence = assigned(sequence(&[1, 2, 3], 100));
    let step = sent(&begin(&mut sequence, 0), Role::Target);
    let refusal = Refusal { cause: RefusalCause::Capacity, reason: "no memory".to_owned() };
    let actions = answer(&mut sequence, Role::Target, &step, ReplyBody::Refused(refusal.clone()));
    let fault = Action::TargetFault(TargetFault::Refused(refusal));
    assert_eq!(actions, [fault, Action::Close(Role::Target, 1), Action::Assign(Role::Target)]);
    assert_eq!(sequence.step(NOW, Event::Assigned(Role::Target)), [Action::Ready]);
}

#[test]
fn need_context_resends_then_resends_all_then_asks_for_another_worker() {
    let mut sequence = assigned(sequence(&[1, 2, 3], 100));
    let mut step = sent(&begin(&mut sequence, 0), Role::Target);
    answer(&mut sequence, Role::Target, &step, span(&step, 0, &[9]));
    step = sent(&begin(&mut sequence, 0), Role::Target);
    assert_eq!((step.base_len, step.spec.is_some()), (3, false));
    for (cached_len, has_spec, base) in [(1, true, 1), (2, true, 0)] {
        let actions =
            answer(&mut sequence, Role::Target, &step, ReplyBody::NeedContext { cached_len, has_spec });
        step = sent(&actions, Role::Target);
        assert_eq!((step.base_len, step.spec.is_some()), (base, base == 0));
    }
    let need = ReplyBody::NeedContext { cached_len: 0, has_spec: false };
    let actions = answer(&mut sequence, Role::Target, &step, need);
    let fault = Action::TargetFault(TargetFault::ProtocolViolation);
    assert_eq!(actions, [fault, Action::Close(Role::Target, 1), Action::Assign(Role::Target)]);
}

#[test]
fn a_target_that_takes_feeds_and_loses_them_is_given_up() {
    let prompt: Vec<TokenId> = (0..10_000).collect();
    let mut sequence = assigned(sequence(&prompt, 20_000));
    let mut step = sent(&begin(&mut sequence, 0), Role::Target);
    let mut actions = Vec::new();
    let mut replies = 0;
    while replies < 20 && !actions.contains(&Action::TargetFault(TargetFault::ProtocolViolation)) {
        let body = match step.work {
            Work::Feed => fed(&step),
            _ => ReplyBody::NeedContext { cached_len: 0, has_spec: true },
        };
        actions = answer(&mut sequence, Role::Target, &step, body);
        replies += 1;
        step = match actions.last() {
            Some(Action::Send(Role::Target, next)) => next.clone(),
            _ => step,
        };
    }
    assert_eq!(replies, 6, "three feeds, each lost");
}

#[test]
fn a_lost_target_is_replayed_from_ids() {
    let mut sequence = assigned(sequence(&[1, 2, 3], 100));
    let step = sent(&begin(&mut sequence, 0), Role::Target);
    answer(&mut sequence, Role::Target, &step, span(&step, 0, &[9]));
    begin(&mut sequence, 0);
    assert_eq!(sequence.step(NOW, Event::Lost(Role::Target)), [Action::Assign(Role::Target)]);
    assert_eq!(sequence.step(NOW, Event::Assigned(Role::Target)), [Action::Ready]);
    let step = sent(&begin(&mut sequence, 0), Role::Target);
    assert_eq!((step.epoch, step.base_len, step.append_ids.as_slice()), (2, 0, &[1, 2, 3, 9][..]));
    assert!(step.spec.is_some());
}

#[test]
fn prompt_scores_come_once_and_in_order() {
    let mut sequence = {
        let spec =
            SequenceSpec { prompt_len: 4, max_len: 4, prompt_logprobs: Some(0), ..SequenceSpec::default() };
        let limits = SequenceConfig { vocab_size: 100, target_deadline: Duration::from_secs(30) };
        Sequence::new(SequenceId(1), Arc::new(spec), &[1, 2, 3, 4], limits)
    };
    let actions = sequence.step(NOW, Event::Assigned(Role::Target));
    let step = sent(&actions, Role::Target);
    assert_eq!((step.work.clone(), step.append_ids.len()), (Work::Feed, 4));
    let entries = vec![TokenLogprobs::default(); 3];
    let body = ReplyBody::Fed {
        cached_len: 4,
        prompt_logprobs: Some(PromptLogprobs { start: 1, entries: entries.clone() }),
    };
    assert_eq!(
        answer(&mut sequence, Role::Target, &step, body),
        [
            Action::PromptLogprobs(PromptLogprobs { start: 1, entries }),
            Action::Close(Role::Target, 1),
            Action::Finished(FinishReason::Length)
        ]
    );
}

#[test]
fn cancel_closes_both_workers_and_nothing_follows() {
    let mut sequence = assigned(sequence(&[1, 2, 3], 100));
    let step = sent(&begin(&mut sequence, 4), Role::Draft);
    assert_eq!(
        sequence.step(NOW, Event::Cancel),
        [Action::Close(Role::Draft, 1), Action::Close(Role::Target, 1)]
    );
    assert_eq!(answer(&mut sequence, Role::Draft, &step, proposal(&step, &[1])), []);
}

#[test]
fn a_proposal_that_nobody_waits_for_is_used_when_it_comes() {
    let mut sequence = assigned(sequence(&[1, 2, 3], 100));
    let probe = Event::BeginRound {
        num_draft_tokens: 2,
        num_tree_tokens: 0,
        draft_wait: Duration::ZERO,
        feed_draft: true,
    };
    let actions = sequence.step(NOW, probe.clone());
    let (draft, target) = (sent(&actions, Role::Draft), sent(&actions, Role::Target));
    assert_eq!(draft.work, Work::Propose { num_draft_tokens: 2, num_tree_tokens: 0 });
    assert_eq!(target.work, Work::Verify { draft: Draft::default() }, "verification left at once");
    assert!(!sequence.can_request_proposal(NOW));
    answer(&mut sequence, Role::Target, &target, span(&target, 0, &[11]));
    assert!(!actions.contains(&Action::Anomaly(Anomaly::LateDraft)));
    answer(&mut sequence, Role::Draft, &draft, proposal(&draft, &[11, 12]));
    let next = begin(&mut sequence, 4);
    let expected = Work::Verify { draft: Draft::chain(vec![12]) };
    assert_eq!(sent(&next, Role::Target).work, expected);
}

/// Runs plain rounds, some of which feed the draft worker, and answers every step. Returns base and length of
/// the draft worker's steps, with the number of drawn ids when each was sent.
fn plain_rounds(
    sequence: &mut Sequence,
    rounds: u32,
    feeds_draft: impl Fn(&Sequence) -> bool,
) -> Vec<(u32, u32, u32)> {
    let mut feeds = Vec::new();
    for _ in 0..rounds {
        let (drawn, feed_draft) = (sequence.num_drawn(), feeds_draft(sequence));
        let actions = begin_feeding(sequence, 0, feed_draft);
        if let Some(step) = actions.iter().find_map(|action| match action {
            Action::Send(Role::Draft, step) => Some(step.clone()),
            _ => None,
        }) {
            assert_eq!(step.work, Work::Feed);
            feeds.push((drawn, step.base_len, step.append_ids.len() as u32));
            answer(sequence, Role::Draft, &step, fed(&step));
        }
        let target = sent(&actions, Role::Target);
        answer(sequence, Role::Target, &target, span(&target, 0, &[99]));
    }
    feeds
}

#[test]
fn a_draft_worker_that_is_hardly_asked_gets_the_prompt_and_then_ids_to_compare() {
    let prompt: Vec<TokenId> = (0..1_000).collect();
    let rarely = |sequence: &Sequence| sequence.due_feed(NOW, false).is_some();
    let mut long = assigned(sequence(&prompt, 2_000));
    assert_eq!(plain_rounds(&mut long, 8, rarely), [], "most short outputs are never fed");
    assert_eq!(plain_rounds(&mut long, 60, rarely), [(8, 0, 1_000), (32, 1_000, 32), (64, 1_032, 32)]);
    let mut short = assigned(sequence(&[1, 2, 3], 2_000));
    assert_eq!(plain_rounds(&mut short, 70, rarely), [(29, 0, 3), (32, 3, 32), (64, 35, 32)]);
    let soon = |sequence: &Sequence| sequence.due_feed(NOW, true).is_some();
    let mut soon_asked = assigned(sequence(&prompt, 2_000));
    assert_eq!(plain_rounds(&mut soon_asked, 20, soon), [(0, 0, 1_000), (8, 1_000, 8), (16, 1_008, 8)]);
}

#[test]
fn a_draft_worker_that_was_not_fed_for_long_is_fed_before_it_drafts() {
    let prompt: Vec<TokenId> = (0..1_000).collect();
    let mut sequence = assigned(sequence(&prompt, 2_000));
    assert_eq!(plain_rounds(&mut sequence, 50, |_| false), []);
    let actions = begin_feeding(&mut sequence, 4, false);
    let feed = sent(&actions, Role::Draft);
    assert_eq!((feed.work.clone(), feed.append_ids.len()), (Work::Feed, 1_018));
    let target = sent(&actions, Role::Target);
    answer(&mut sequence, Role::Draft, &feed, fed(&feed));
    answer(&mut sequence, Role::Target, &target, span(&target, 0, &[99]));
    let request = sent(&begin_feeding(&mut sequence, 4, false), Role::Draft);
    assert_eq!((request.base_len, request.append_ids.len()), (1_018, 33));
    assert!(request.is_comparable(sequence.spec()));
}

#[test]
fn a_draft_worker_that_is_given_up_is_closed_and_another_one_chosen() {
    let mut sequence = assigned(sequence(&[1, 2, 3], 100));
    let draft = sent(&begin(&mut sequence, 4), Role::Draft);
    let actions = sequence.step(NOW, Event::Reassign(Role::Draft));
    assert_eq!(actions[0], Action::Close(Role::Draft, draft.epoch));
    assert!(actions.contains(&Action::Assign(Role::Draft)));
    assert_eq!(sent(&actions, Role::Target).work, Work::Verify { draft: Draft::default() });
    assert_eq!(sequence.step(NOW, Event::Reassign(Role::Draft)), [], "nobody to give up");
}

/// A greedy sequence is coupled in every mode (contract B5): its drafts need no distributions.
#[test]
fn a_greedy_sequence_takes_drafts_without_distributions_in_rejection_mode() {
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let acceptance = AcceptanceMode::Rejection;
    let spec = SequenceSpec { prompt_len: 3, max_len: 100, sampling, acceptance, ..SequenceSpec::default() };
    let limits = SequenceConfig { vocab_size: 50_000, target_deadline: Duration::from_secs(30) };
    let mut sequence = assigned(Sequence::new(SequenceId(7), Arc::new(spec), &[1, 2, 3], limits));
    let draft = sent(&begin(&mut sequence, 2), Role::Draft);
    let actions = answer(&mut sequence, Role::Draft, &draft, proposal(&draft, &[11, 12]));
    let target = sent(&actions, Role::Target);
    assert_eq!(target.work, Work::Verify { draft: Draft::chain(vec![11, 12]) });
    answer(&mut sequence, Role::Target, &target, span(&target, 2, &[11, 12, 13]));
    // A late one is used as well.
    let draft = sent(&begin(&mut sequence, 2), Role::Draft);
    let target = sent(&sequence.step(NOW + WAIT, Event::Tick), Role::Target);
    answer(&mut sequence, Role::Draft, &draft, proposal(&draft, &[14, 15]));
    answer(&mut sequence, Role::Target, &target, span(&target, 0, &[14]));
    let next = sent(&begin(&mut sequence, 2), Role::Target);
    assert_eq!(next.work, Work::Verify { draft: Draft::chain(vec![15]) });
}

/// Prompts are scored by the target alone: a draft worker would compute every row's logits for nothing.
#[test]
fn a_draft_worker_is_not_asked_for_log_probabilities() {
    let (logprobs, prompt_logprobs) = (Some(5), Some(5));
    let spec =
        SequenceSpec { prompt_len: 3, max_len: 100, logprobs, prompt_logprobs, ..SequenceSpec::default() };
    let limits = SequenceConfig { vocab_size: 50_000, target_deadline: Duration::from_secs(30) };
    let mut sequence = assigned(Sequence::new(SequenceId(7), Arc::new(spec.clone()), &[1, 2, 3], limits));
    let draft = sent(&begin(&mut sequence, 2), Role::Draft);
    let of_draft = draft.spec.as_deref().unwrap();
    assert_eq!((of_draft.logprobs, of_draft.prompt_logprobs), (None, None));
    let target = sent(&answer(&mut sequence, Role::Draft, &draft, proposal(&draft, &[])), Role::Target);
    assert_eq!(target.spec.as_deref(), Some(&spec));
}
