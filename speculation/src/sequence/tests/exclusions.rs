//! Spans with excluded tokens, as a target sends them that does not know the fields.

use super::*;

/// Whether the target is left, and not as one that failed: its breaker stays closed.
fn is_refused(actions: &[Action]) -> bool {
    let is_refusal = |action: &Action| matches!(action, Action::TargetFault(fault) if !fault.is_failure());
    actions.contains(&Action::Assign(Role::Target)) && actions.iter().any(is_refusal)
}

#[test]
fn a_span_with_an_excluded_token_counts_as_a_refusal() {
    let sampling = SamplingParams {
        allowed_token_ids: vec![11, 12, 13, 14, 99],
        bad_words: vec![vec![12, 14], vec![11, 12, 13]],
        ..SamplingParams::default()
    };
    let spec = SequenceSpec { prompt_len: 3, max_len: 50, sampling, ..SequenceSpec::default() };
    let limits = SequenceConfig { vocab_size: 50_000, target_deadline: Duration::from_secs(30) };
    // The prompt ends with tokens of a bad word, which counts in the output only.
    let prompt = [1, 11, 12];
    for (spans, is_sound) in [
        (&[&[13][..]][..], true),
        (&[&[14]], true),
        (&[&[98]], false),
        (&[&[12], &[14]], false),
        (&[&[12], &[99], &[14]], true),
        (&[&[11], &[12], &[13]], false),
        (&[&[12], &[12], &[13]], true),
    ] {
        let mut sequence = assigned(Sequence::new(SequenceId(7), Arc::new(spec.clone()), &prompt, limits));
        let mut actions = Vec::new();
        for ids in spans {
            let draft = sent(&begin(&mut sequence, 4), Role::Draft);
            let step = answer(&mut sequence, Role::Draft, &draft, proposal(&draft, &[]));
            let step = sent(&step, Role::Target);
            actions = answer(&mut sequence, Role::Target, &step, span(&step, 0, ids));
        }
        assert_eq!(is_refused(&actions), !is_sound, "{spans:?}: {actions:?}");
        let num_committed = spans.len() - usize::from(!is_sound);
        assert_eq!(sequence.ids()[3..], spans[..num_committed].concat(), "{spans:?}");
    }
    // Inside a span: the draft's ids, and the target's own draw behind them.
    let mut sequence = assigned(Sequence::new(SequenceId(7), Arc::new(spec), &prompt, limits));
    let draft = sent(&begin(&mut sequence, 4), Role::Draft);
    let actions = answer(&mut sequence, Role::Draft, &draft, proposal(&draft, &[11, 12]));
    let step = sent(&actions, Role::Target);
    let actions = answer(&mut sequence, Role::Target, &step, span(&step, 2, &[11, 12, 13]));
    assert!(is_refused(&actions), "{actions:?}");
    assert_eq!(sequence.ids(), prompt);
}
