//! The logit pipeline against its naive twin, with `==`, and named edge cases of each filter.

use proptest::prelude::*;
use speculation::logits::{DrawError, TokenCounts, apply_filters, process, score};
use speculation::{SamplingParams, SequenceSpec, TokenId};

use crate::naive;

fn check_keep(logits: &[f32], sampling: &SamplingParams) {
    assert_eq!(
        apply_filters(logits, sampling, 0).unwrap().tokens,
        naive::apply_filters(logits, sampling),
        "{sampling:?}"
    );
}

// === Strategies ===

/// Few distinct values so that ties are common, both zeros, and masked tokens.
fn tied_logit() -> impl Strategy<Value = f32> {
    prop_oneof![4 => (-6_i8..6).prop_map(|n| f32::from(n) / 2.0), 1 => Just(-0.0), 1 => Just(f32::NEG_INFINITY)]
}

fn row(logit: impl Strategy<Value = f32>, sizes: std::ops::Range<usize>) -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec(logit, sizes).prop_map(|mut row| {
        // At least one token must be allowed.
        if row.iter().all(|logit| *logit == f32::NEG_INFINITY) {
            row[0] = 1.0;
        }
        row
    })
}

fn filters() -> impl Strategy<Value = SamplingParams> {
    let temperature = prop_oneof![Just(0.0), Just(1e-5), Just(1.0), 0.05_f32..4.0];
    let top_k = prop_oneof![2 => Just(0), 3 => 1_u32..60, 1 => Just(u32::MAX)];
    let top_p = prop_oneof![Just(1.0), Just(0.5), Just(0.0), 0.01_f32..1.0, Just(0.999_999_94)];
    let min_p = prop_oneof![Just(0.0), Just(1.0), Just(0.5), 0.000_1_f32..1.0];
    (temperature, top_k, top_p, min_p).prop_map(|(temperature, top_k, top_p, min_p)| SamplingParams {
        temperature,
        top_k,
        top_p,
        min_p,
        ..SamplingParams::default()
    })
}

fn penalties() -> impl Strategy<Value = SamplingParams> {
    let off_or = |off: f32, range: std::ops::Range<f32>| prop_oneof![Just(off), range];
    let bias = prop::collection::vec((0_u32..12, -5.0_f32..5.0), 0..4);
    (off_or(1.0, 0.2..3.0), off_or(0.0, -2.0..2.0), off_or(0.0, -2.0..2.0), bias, 0_u32..6).prop_map(
        |(repetition_penalty, frequency_penalty, presence_penalty, logit_bias, min_tokens)| SamplingParams {
            repetition_penalty,
            frequency_penalty,
            presence_penalty,
            logit_bias,
            min_tokens,
            ..SamplingParams::default()
        },
    )
}

proptest! {
    #[test]
    fn filters_of_rows_full_of_ties(logits in row(tied_logit(), 1..60), sampling in filters()) {
        check_keep(&logits, &sampling);
    }

    /// Long enough that the sorted part must grow several times.
    #[test]
    fn filters_of_rows_that_are_not_sorted_whole(
        seed in any::<u64>(),
        len in 4_200_usize..9_000,
        (spread, steps) in (0.2_f64..6.0, prop_oneof![Just(4.0), Just(1e4)]),
        sampling in filters(),
    ) {
        // Gumbel-tailed like a language model's logits; coarse steps produce ties.
        let noise = speculation::noise::Noise { seed, choice: 0 };
        let logit = |id| {
            let gumbel = noise.gumbel(0, id, speculation::noise::Purpose::Draft);
            ((spread * gumbel * steps).round() / steps) as f32
        };
        let logits: Vec<f32> = (0..len as u32).map(logit).collect();
        check_keep(&logits, &sampling);
        check_keep(&logits, &SamplingParams { top_k: 0, min_p: 0.0, top_p: 0.9, ..sampling });
    }

    #[test]
    fn filters_of_long_rows(logits in row(-9.0_f32..9.0, 1_000..3_000), sampling in filters()) {
        check_keep(&logits, &sampling);
    }

    #[test]
    fn penalties_bias_and_min_tokens(
        logits in row(tied_logit(), 10..11),
        sampling in penalties(),
        ids in prop::collection::vec(0_u32..12, 1..20),
        prompt_len in 1_u32..20,
        stop_token_ids in prop::collection::vec(0_u32..12, 0..3),
    ) {
        let prompt_len = prompt_len.min(ids.len() as u32);
        let spec = SequenceSpec { prompt_len, stop_token_ids, sampling, ..SequenceSpec::default() };
        let mut counts = TokenCounts::new(prompt_len);
        ids.iter().for_each(|&id| counts.push(id));
        // Pushing and popping ids leaves no trace.
        let before = counts.clone();
        for id in [3, 3, 11] { counts.push(id); }
        for id in [11, 3, 3] { counts.pop(id); }
        prop_assert_eq!(&counts, &before);

        let (mut processed, mut expected) = (logits.clone(), logits);
        process(&mut processed, &spec, &counts, ids.len() as u32);
        naive::process(&mut expected, &spec, &ids);
        prop_assert_eq!(processed, expected);

        for &id in ids.iter().rev() { counts.pop(id); }
        prop_assert_eq!(counts, TokenCounts::new(prompt_len), "ids of the prompt can be taken back too");
    }
}

// === Cases worth a name ===

#[test]
fn a_prefix_that_ends_exactly_on_top_p_is_found() {
    // All weights are 1 and every sum is exact, so the running sum and p times the total are exactly equal.
    for vocab_size in [2, 128, 1_000, 4_096] {
        let sampling = SamplingParams { top_p: 0.5, ..SamplingParams::default() };
        let kept = apply_filters(&vec![2.5; vocab_size], &sampling, 0).unwrap();
        let ids: Vec<TokenId> = kept.tokens.iter().map(|&(id, _)| id).collect();
        assert_eq!(ids, (0..vocab_size as u32 / 2).collect::<Vec<_>>());
    }
}

#[test]
fn ties_at_the_kth_keep_the_lowest_ids() {
    let sampling = SamplingParams { top_k: 3, ..SamplingParams::default() };
    let kept = apply_filters(&[1.0, 2.0, 1.0, 2.0, 1.0, -0.0], &sampling, 0).unwrap();
    assert_eq!(kept.tokens, [(0, 1.0), (1, 2.0), (3, 2.0)]);
    let zeros = apply_filters(&[-0.0, 0.0, -0.0], &SamplingParams { top_k: 2, ..sampling }, 0).unwrap();
    assert_eq!(zeros.tokens, [(0, 0.0), (1, 0.0)], "-0 and 0 are equal");
}

#[test]
fn filters_apply_one_after_another() {
    // Probabilities 0.4, 0.3, 0.2, 0.1. After top-k leaves two tokens, 0.4 is 0.57 of the sum, enough for a
    // top-p of 0.5. Over all four tokens it would not be, and two tokens would be kept.
    let logits = [0.4_f32.ln(), 0.3_f32.ln(), 0.2_f32.ln(), 0.1_f32.ln()];
    let kept = |top_k, top_p, min_p| {
        let sampling = SamplingParams { top_k, top_p, min_p, ..SamplingParams::default() };
        apply_filters(&logits, &sampling, 0).unwrap().tokens.len()
    };
    assert_eq!((kept(0, 0.5, 0.0), kept(2, 0.5, 0.0)), (2, 1));
    assert_eq!(kept(0, 1.0, 0.6), 2);
    // min-p leaves 0.4, 0.3, 0.2; the first two are 0.78 of their sum 0.9.
    assert_eq!((kept(0, 0.75, 0.0), kept(0, 0.75, 0.3)), (3, 2));
    assert_eq!(kept(0, 0.0, 0.0), 1, "never empty");
}

#[test]
fn greedy_takes_the_lowest_of_the_likeliest_and_ignores_filters() {
    let sampling = SamplingParams { temperature: 9e-6, top_k: 3, min_p: 0.1, ..SamplingParams::default() };
    let kept = apply_filters(&[1.0, 7.0, -3.0, 7.0], &sampling, 0).unwrap();
    assert_eq!(kept.tokens.iter().map(|&(id, _)| id).collect::<Vec<_>>(), [1]);
}

#[test]
fn rows_that_cannot_be_drawn_from_say_why() {
    let infinity = f32::INFINITY;
    for temperature in [0.0, 1.0] {
        let sampling = SamplingParams { temperature, ..SamplingParams::default() };
        let error = |row: &[f32]| apply_filters(row, &sampling, 9).unwrap_err();
        assert_eq!(error(&[-infinity; 4]), DrawError::NothingAllowed { position: 9 });
        assert_eq!(error(&[1.0, f32::NAN, 3.0]), DrawError::NotANumber { position: 9, token_id: 1 });
        assert_eq!(
            error(&[-infinity, infinity, f32::NAN]),
            DrawError::NotANumber { position: 9, token_id: 1 }
        );
    }
}

#[test]
fn probabilities_sum_to_one_in_id_order() {
    let kept = apply_filters(&[3.0, f32::NEG_INFINITY, 1.0, 2.0], &SamplingParams::default(), 0).unwrap();
    let probabilities = kept.probabilities();
    let total: f64 = probabilities.iter().map(|&(_, p)| p).sum();
    assert!((total - 1.0).abs() < 1e-15);
    assert_eq!(probabilities.iter().map(|&(id, _)| id).collect::<Vec<_>>(), [0, 2, 3]);
    assert!((probabilities[0].1 / probabilities[1].1 - 2_f64.exp()).abs() < 1e-12);
}

#[test]
fn scores_are_those_of_the_raw_row() {
    let row = [0.5_f32, 2.0, -1.0, 2.0, f32::NEG_INFINITY];
    let total: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
    let expected = |id: usize| (f64::from(row[id]) - total.ln()) as f32;
    let scored = score(&row, 2, 3);
    assert!((scored.logprob - expected(2)).abs() < 1e-6);
    assert_eq!(
        scored.top.iter().map(|&(id, _)| id).collect::<Vec<_>>(),
        [1, 3, 0],
        "lowest id first among equals"
    );
    for &(id, logprob) in &scored.top {
        assert!((logprob - expected(id as usize)).abs() < 1e-6);
    }
    assert_eq!(score(&row, 4, 0).logprob, f32::NEG_INFINITY, "a masked token");
    assert_eq!(score(&row, 99, 0).logprob, f32::NEG_INFINITY, "a token outside the row");
    assert_eq!((score(&row, 0, 0).top.len(), score(&row, 0, 50).top.len()), (0, 5));
}
