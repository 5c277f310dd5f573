//! Single verifications: where a span ends, what is refused, and the thresholds of the probabilistic modes.

use speculation::acceptance::{MAX_Q_TOKENS, RawRows, Verification, check_draft, guess, verify};
use speculation::logits::{DrawError, TokenCounts};
use speculation::step::DraftDistribution;
use speculation::{AcceptanceMode, Draft, FinishReason, SamplingParams, SequenceSpec, TokenId, ngram};

const VOCAB_SIZE: usize = 4;

/// A row whose draw is certain: the token is 200 above all others.
fn certain(id: usize) -> [f32; VOCAB_SIZE] {
    let mut row = [0.0; VOCAB_SIZE];
    row[id] = 200.0;
    row
}

fn draft(token_ids: &[TokenId]) -> Draft {
    Draft::chain(token_ids.to_vec())
}

fn judge(spec: &SequenceSpec, draft: &Draft, rows: &[[f32; VOCAB_SIZE]]) -> Result<Verification, DrawError> {
    verify(spec, &mut TokenCounts::new(0), 10, draft, RawRows::new(&mut rows.concat(), VOCAB_SIZE))
}

fn spec() -> SequenceSpec {
    SequenceSpec { prompt_len: 10, max_len: 100, ..SequenceSpec::default() }
}

// === Where a span ends ===

#[test]
fn spans_end_where_contract_a_says() {
    let rows = [certain(1), certain(2), certain(3)];
    let check = |spec: &SequenceSpec, drafted: &[TokenId], accepted: u32, ids: &[TokenId], finish| {
        let verification = judge(spec, &draft(drafted), &rows[..=drafted.len()]).unwrap();
        assert_eq!(
            (verification.num_accepted, &verification.token_ids[..], verification.finish),
            (accepted, ids, finish)
        );
        assert!(verification.logprobs.is_empty());
    };
    let stops_at = |id| SequenceSpec { stop_token_ids: vec![id], ..spec() };
    let ends_at = |max_len| SequenceSpec { max_len, ..spec() };
    let (stop, length) = (Some(FinishReason::Stop), Some(FinishReason::Length));

    check(&spec(), &[], 0, &[1], None);
    check(&spec(), &[1, 2], 2, &[1, 2, 3], None);
    check(&spec(), &[1, 0], 1, &[1, 2], None);
    check(&spec(), &[0, 2], 0, &[1], None);
    // A stop token among the accepted ids, as the recovered token, as the bonus token.
    check(&stops_at(1), &[1, 2], 1, &[1], stop);
    check(&stops_at(2), &[1, 0], 1, &[1, 2], stop);
    check(&stops_at(3), &[1, 2], 2, &[1, 2, 3], stop);
    // A drafted stop token that the target does not draw ends nothing.
    check(&stops_at(0), &[1, 0], 1, &[1, 2], None);
    // Position 10 is the first draw, so max_len 11 leaves one token.
    check(&ends_at(11), &[1, 2], 1, &[1], length);
    check(&ends_at(12), &[1, 2], 2, &[1, 2], length);
    check(&ends_at(13), &[1, 2], 2, &[1, 2, 3], length);
    check(&ends_at(12), &[1, 0], 1, &[1, 2], length);
    // Both at once: the stop token counts.
    check(&SequenceSpec { max_len: 11, ..stops_at(1) }, &[1, 2], 1, &[1], stop);
}

#[test]
fn scores_are_raw_and_one_for_each_id() {
    let mut spec = SequenceSpec { logprobs: Some(1), ..spec() };
    spec.sampling.logit_bias = vec![(2, 500.0)];
    let verification = judge(&spec, &draft(&[2]), &[certain(1), certain(1)]).unwrap();
    assert_eq!(verification.token_ids, [2, 2], "bias decides the draw");
    for scored in &verification.logprobs {
        assert_eq!((scored.logprob, &scored.top[..]), (-200.0, &[(1, 0.0)][..]), "and not the score");
    }
}

// === What is refused ===

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let rows = [certain(1), certain(2)];
    let error = judge(&spec(), &draft(&[1, 2]), &rows).unwrap_err();
    assert_eq!(error, DrawError::WrongShape { position: 10, expected: 12, got: 8 });
    let empty = verify(&spec(), &mut TokenCounts::new(0), 10, &draft(&[]), RawRows::new(&mut [], 0));
    assert!(matches!(empty, Err(DrawError::WrongShape { .. })));
}

#[test]
fn an_error_behind_accepted_ids_names_its_position_and_restores_the_counts() {
    let mut spec = spec();
    spec.sampling.presence_penalty = 0.5;
    let mut counts = TokenCounts::new(10);
    (0..10).for_each(|_| counts.push(0));
    let before = counts.clone();
    let mut rows = [certain(1), certain(2), [f32::NAN; VOCAB_SIZE]].concat();
    let judged = verify(&spec, &mut counts, 10, &draft(&[1, 2]), RawRows::new(&mut rows, VOCAB_SIZE));
    assert_eq!(judged, Err(DrawError::NotANumber { position: 12, token_id: 0 }));
    assert_eq!(counts, before);
}

#[test]
fn rejection_mode_refuses_drafts_that_it_cannot_judge() {
    let spec = SequenceSpec { acceptance: AcceptanceMode::Rejection, ..spec() };
    let long: DraftDistribution = (0..=MAX_Q_TOKENS as u32).map(|id| (id, 1.0)).collect();
    let rows: [(&str, Vec<DraftDistribution>); 8] = [
        ("needs the distribution", vec![]),
        ("no weight in its own q", vec![vec![]]),
        ("no weight in its own q", vec![vec![(0, 1.0)]]),
        ("no weight in its own q", vec![vec![(1, 0.0), (2, 1.0)]]),
        ("at most 64", vec![long]),
        ("finite and not negative", vec![vec![(1, 1.0), (2, f32::NAN)]]),
        ("finite and not negative", vec![vec![(1, 1.0), (2, -0.5)]]),
        ("lists token 2 twice", vec![vec![(1, 1.0), (2, 0.5), (2, 0.5)]]),
    ];
    for (reason, q) in rows {
        let drafted = Draft { q, ..Draft::chain(vec![1]) };
        let error = check_draft(&spec, 10, &drafted).unwrap_err();
        assert!(error.to_string().contains(reason), "{error} should say {reason:?}");
        assert_eq!(judge(&spec, &drafted, &[certain(1), certain(1)]), Err(error), "the judge asks too");
        let coupled = SequenceSpec { acceptance: AcceptanceMode::Coupled, ..spec.clone() };
        assert_eq!(judge(&coupled, &drafted, &[certain(1), certain(1)]).unwrap().num_accepted, 1);
    }
    let surplus = Draft { q: vec![vec![(1, 1.0)]; 2], ..Draft::chain(vec![1]) };
    assert_eq!(
        check_draft(&spec, 10, &surplus).unwrap_err().to_string(),
        "draft at position 11 is refused: q has 2 distributions for 1 tokens, send one for each"
    );
}

// === The modes that weigh ===

#[test]
fn guesses_ship_what_they_were_drawn_from() {
    let spec = SequenceSpec { acceptance: AcceptanceMode::Rejection, ..spec() };
    let mut row: Vec<f32> = (0..200).map(|id| ((id * 7) % 40) as f32 / 4.0).collect();
    let drawn = guess(&spec, &TokenCounts::new(0), 10, &mut row).unwrap();
    assert_eq!(drawn.q.len(), MAX_Q_TOKENS);
    assert_eq!(drawn.q[0].1, 1.0);
    assert!(
        drawn
            .q
            .windows(2)
            .all(|pair| pair[0].1 > pair[1].1 || (pair[0].1 == pair[1].1 && pair[0].0 < pair[1].0))
    );
    let shipped = Draft { q: vec![drawn.q], ..Draft::chain(vec![drawn.token_id]) };
    assert_eq!(check_draft(&spec, 10, &shipped), Ok(()));

    // A weight that rounds to 0 is not sent: it could never have been drawn.
    let far = guess(&spec, &TokenCounts::new(0), 10, &mut [0.0, -104.0, -80.0]).unwrap();
    assert_eq!(far.q.iter().map(|&(id, _)| id).collect::<Vec<_>>(), [0, 2]);
    // Filters apply first.
    let filtered = SamplingParams { top_k: 2, ..SamplingParams::default() };
    let spec = SequenceSpec { sampling: filtered, ..spec };
    assert_eq!(guess(&spec, &TokenCounts::new(0), 10, &mut [0.0, 1.0, 2.0]).unwrap().q.len(), 2);
}

#[test]
fn looked_up_tokens_pass_rejection_mode_with_certain_distributions() {
    let spec = SequenceSpec { acceptance: AcceptanceMode::Rejection, ..spec() };
    let drafted = Draft { q: ngram::point_distributions(&[1, 0]), ..Draft::chain(vec![1, 0]) };
    let verification = judge(&spec, &drafted, &[certain(1), certain(2), certain(3)]).unwrap();
    assert_eq!((verification.num_accepted, &verification.token_ids[..]), (1, &[1, 2][..]));
}

#[test]
fn a_token_outside_the_vocabulary_is_never_accepted() {
    for acceptance in [AcceptanceMode::Coupled, AcceptanceMode::Rejection, AcceptanceMode::Typical] {
        let spec = SequenceSpec { acceptance, ..spec() };
        for id in [VOCAB_SIZE as u32, u32::MAX] {
            let drafted = Draft { q: ngram::point_distributions(&[id]), ..Draft::chain(vec![id]) };
            let verification = judge(&spec, &drafted, &[certain(1), certain(2)]).unwrap();
            assert_eq!(
                (verification.num_accepted, &verification.token_ids[..]),
                (0, &[1][..]),
                "{acceptance:?}"
            );
        }
    }
}

#[test]
fn typical_mode_weighs_probability_against_entropy() {
    // Two tokens, p and 1 - p: 0.3 exp(-H) is above 0.15, so 0.09 decides.
    check_typical(&[0.089, 0.911], 0, false);
    check_typical(&[0.091, 0.909], 0, true);
    // Flat over 100 tokens: H = ln 100, so probabilities above 0.003 are typical and those below are not.
    let mut flat = [0.998 / 99.0; 100];
    flat[7] = 0.002;
    check_typical(&flat, 7, false);
    check_typical(&flat, 8, true);
}

/// Checks whether token `id` is accepted although the target draws a different one.
fn check_typical(probabilities: &[f32], id: TokenId, expected: bool) {
    let row: Vec<f32> = probabilities.iter().map(|p| p.ln()).collect();
    let mut seen = 0;
    for seed in 0..40 {
        let mut spec = SequenceSpec { seed, ..spec() };
        let mut counts = TokenCounts::new(0);
        let own = verify(&spec, &mut counts, 10, &draft(&[]), RawRows::new(&mut row.clone(), row.len()))
            .unwrap()
            .token_ids[0];
        if own == id {
            continue;
        }
        seen += 1;
        spec.acceptance = AcceptanceMode::Typical;
        let mut rows = [&row[..], &row[..]].concat();
        let verification =
            verify(&spec, &mut counts, 10, &draft(&[id]), RawRows::new(&mut rows, row.len())).unwrap();
        assert_eq!(verification.num_accepted == 1, expected, "token {id}, seed {seed}");
        assert_eq!(
            verification.token_ids[0],
            if expected { id } else { own },
            "the recovered token is the coupled draw"
        );
    }
    assert!(seen > 10);
}
