//! Replies whose distributions or scores violate the contract, and where the sequence goes from there.

use super::*;
use crate::step::DraftDistribution;

fn with_spec(spec: SequenceSpec, prompt: &[TokenId]) -> Sequence {
    let limits = SequenceConfig { vocab_size: 50_000, target_deadline: Duration::from_secs(30) };
    let prompt_len = prompt.len() as u32;
    Sequence::new(SequenceId(7), Arc::new(SequenceSpec { prompt_len, ..spec }), prompt, limits)
}

/// A target refuses such a draft, and the round is then sent to it a second time.
#[test]
fn a_draft_whose_distributions_a_target_refuses_is_not_sent_to_one() {
    let good: DraftDistribution = vec![(11, 1.0), (12, 0.5)];
    for (what, q, is_sent) in [
        ("one that it can have been drawn from", vec![good.clone()], true),
        ("none", vec![], false),
        ("one too many", vec![good.clone(), good], false),
        ("without the drafted id", vec![vec![(12, 1.0)]], false),
        ("without a weight for the drafted id", vec![vec![(11, 0.0), (12, 1.0)]], false),
        ("not a number", vec![vec![(11, f32::NAN)]], false),
        ("a negative weight", vec![vec![(11, 1.0), (12, -1.0)]], false),
        ("an id twice", vec![vec![(11, 1.0), (11, 0.5)]], false),
        ("an id outside the vocabulary", vec![vec![(11, 1.0), (50_000, 0.5)]], false),
        ("too many ids", vec![(0..65).map(|id| (id, 1.0)).collect()], false),
    ] {
        let acceptance = AcceptanceMode::Rejection;
        let spec = SequenceSpec { max_len: 100, acceptance, ..SequenceSpec::default() };
        let mut sequence = assigned(with_spec(spec, &[1, 2, 3]));
        let step = sent(&begin(&mut sequence, 2), Role::Draft);
        let draft = Draft { q, ..Draft::chain(vec![11]) };
        let proposal = Proposal { start: step.start(), draft: draft.clone() };
        let actions = answer(&mut sequence, Role::Draft, &step, ReplyBody::Proposal(proposal));
        let expected = if is_sent { draft } else { Draft::default() };
        assert_eq!(sent(&actions, Role::Target).work, Work::Verify { draft: expected }, "{what}");
        assert_eq!(actions.contains(&Action::Anomaly(Anomaly::MalformedReply)), !is_sent, "{what}");
    }
}

fn scores(start: u32, num: usize, num_top: usize) -> Option<PromptLogprobs> {
    let entry = TokenLogprobs { logprob: -1.0, top: vec![(5, -1.0); num_top] };
    Some(PromptLogprobs { start, entries: vec![entry; num] })
}

/// Scores of a prompt of four ids, of which the first has none, with at most two top tokens each.
#[test]
fn a_target_that_leaves_out_scores_of_the_prompt_is_left() {
    for (what, prompt_logprobs, is_sound) in [
        ("all", scores(1, 3, 2), true),
        ("all, with fewer top tokens", scores(1, 3, 0), true),
        ("none", None, false),
        ("no entry", scores(1, 0, 0), false),
        ("the last one is missing", scores(1, 2, 2), false),
        ("the first one is missing", scores(2, 2, 2), false),
        ("the highest position", scores(u32::MAX, 3, 2), false),
        ("more top tokens than requested", scores(1, 3, 3), false),
    ] {
        // Scored only, and scored by the step that draws the first token.
        for max_len in [4, 10] {
            let spec = SequenceSpec { max_len, prompt_logprobs: Some(2), ..SequenceSpec::default() };
            let mut sequence = with_spec(spec, &[1, 2, 3, 4]);
            let actions = sequence.step(NOW, Event::Assigned(Role::Target));
            let draws = max_len > 4;
            let actions = if draws { begin(&mut sequence, 0) } else { actions };
            let step = sent(&actions, Role::Target);
            let prompt_logprobs = prompt_logprobs.clone();
            let body = if draws {
                let (start, token_ids) = (step.start(), vec![9]);
                ReplyBody::Span(TokenSpan { start, token_ids, prompt_logprobs, ..TokenSpan::default() })
            } else {
                ReplyBody::Fed { cached_len: 4, prompt_logprobs }
            };
            let actions = answer(&mut sequence, Role::Target, &step, body);
            let fault = Action::TargetFault(TargetFault::ProtocolViolation);
            assert_eq!(actions.contains(&fault), !is_sound, "{what}, up to {max_len}: {actions:?}");
            let passes_on = actions.iter().any(|action| matches!(action, Action::PromptLogprobs(_)));
            assert_eq!(passes_on, is_sound, "{what}, up to {max_len}: {actions:?}");
            assert_eq!(sequence.ids().len(), if draws && is_sound { 5 } else { 4 }, "{what}");
        }
    }
}

/// It scores the prompt again from its beginning.
#[test]
fn scores_that_one_target_left_out_come_from_the_next_one() {
    let prompt: Vec<TokenId> = (0..10_000).collect();
    let spec = SequenceSpec { max_len: 10_000, prompt_logprobs: Some(0), ..SequenceSpec::default() };
    let mut sequence = with_spec(spec, &prompt);
    let mut actions = sequence.step(NOW, Event::Assigned(Role::Target));
    let mut passed_on = Vec::new();
    let replies = [(0, 8_192, true), (8_191, 1_809, false), (0, 8_192, true), (8_191, 1_809, true)];
    for (base, len, is_scored) in replies {
        let step = sent(&actions, Role::Target);
        assert_eq!((step.base_len, step.append_ids.len()), (base, len));
        let prompt_logprobs = scores(base + 1, len - 1, 0).filter(|_| is_scored);
        let body = ReplyBody::Fed { cached_len: step.start(), prompt_logprobs };
        actions = answer(&mut sequence, Role::Target, &step, body);
        passed_on.extend(actions.iter().filter_map(|action| match action {
            Action::PromptLogprobs(scores) => Some((scores.start, scores.entries.len())),
            _ => None,
        }));
        if !is_scored {
            assert!(actions.contains(&Action::Assign(Role::Target)), "{actions:?}");
            actions = sequence.step(NOW, Event::Assigned(Role::Target));
        }
    }
    assert_eq!(passed_on, [(1, 8_191), (8_192, 1_808)], "each once, in order");
    assert!(sequence.is_done());
}

#[test]
fn a_span_with_more_top_tokens_than_requested_is_not_committed() {
    for (num_top, is_sound) in [(0, true), (2, true), (3, false)] {
        let spec = SequenceSpec { max_len: 10, logprobs: Some(2), ..SequenceSpec::default() };
        let mut sequence = assigned(with_spec(spec, &[1, 2, 3]));
        let step = sent(&begin(&mut sequence, 0), Role::Target);
        let logprobs = vec![TokenLogprobs { logprob: -1.0, top: vec![(5, -1.0); num_top] }];
        let (start, token_ids) = (step.start(), vec![9]);
        let span = TokenSpan { start, token_ids, logprobs, ..TokenSpan::default() };
        let actions = answer(&mut sequence, Role::Target, &step, ReplyBody::Span(span));
        assert_eq!(sequence.ids().len(), if is_sound { 4 } else { 3 }, "{num_top}: {actions:?}");
    }
}
