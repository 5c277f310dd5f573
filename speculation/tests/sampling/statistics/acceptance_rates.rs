//! Acceptance rates of each mode against theory for the same distributions: rows of 128 tokens with the long
//! tails of language models, and drafts with small, medium and large deviations.

use speculation::acceptance::{RawRows, guess, verify};
use speculation::logits::TokenCounts;
use speculation::step::DraftDistribution;
use speculation::{AcceptanceMode, Draft, SequenceSpec};

use crate::toy::ToyModel;

const NUM_POSITIONS: u32 = 2_000;
const VOCAB_SIZE: usize = 128;
const TARGET: ToyModel = ToyModel { vocab_size: VOCAB_SIZE, family: 33, deviation: 0.0 };

/// Acceptance rate and its theoretical values, averaged over positions.
#[derive(Debug, Default)]
struct Rates {
    measured: f64,
    /// The exact acceptance probability of the mode.
    expected: f64,
    /// Standard deviation of `measured`.
    sigma: f64,
    /// (1 - TV) / (1 + TV).
    coupling_bound: f64,
    /// 1 - TV, an upper bound for any scheme.
    optimum: f64,
}

fn rates(acceptance: AcceptanceMode, deviation: f64) -> Rates {
    let draft_model = ToyModel { deviation, ..TARGET };
    let spec = SequenceSpec { seed: 8, acceptance, max_len: u32::MAX, ..SequenceSpec::default() };
    let mut rates = Rates::default();
    let mut variance = 0.0;
    for position in 0..NUM_POSITIONS {
        let context = [position, position + 1];
        let (row, mut draft_row) = (TARGET.row(&context), draft_model.row(&context));
        let (p, full_q) = (softmax(&row), softmax(&draft_row));
        let mut counts = TokenCounts::default();
        let guess = guess(&spec, &counts, position, &mut draft_row).unwrap();
        let q = if acceptance == AcceptanceMode::Rejection { shipped(&guess.q) } else { full_q };
        let draft = Draft {
            q: if guess.q.is_empty() { vec![] } else { vec![guess.q] },
            ..Draft::chain(vec![guess.token_id])
        };
        let mut rows = [&row[..], &row[..]].concat();
        let verification =
            verify(&spec, &mut counts, position, &draft, RawRows::new(&mut rows, VOCAB_SIZE)).unwrap();

        let overlap: f64 = p.iter().zip(&q).map(|(p, q)| p.min(*q)).sum();
        let coupling_bound = overlap / (2.0 - overlap);
        let expected = if acceptance == AcceptanceMode::Rejection { overlap } else { agreement(&p, &q) };
        assert!(coupling_bound <= expected + 1e-12 && expected <= overlap + 1e-12);
        rates.measured += f64::from(verification.num_accepted);
        rates.expected += expected;
        rates.coupling_bound += coupling_bound;
        rates.optimum += overlap;
        variance += expected * (1.0 - expected);
    }
    let n = f64::from(NUM_POSITIONS);
    Rates {
        measured: rates.measured / n,
        expected: rates.expected / n,
        sigma: variance.max(0.0).sqrt() / n,
        coupling_bound: rates.coupling_bound / n,
        optimum: rates.optimum / n,
    }
}

/// Pr[argmax(ln p + G) = argmax(ln q + G)]: both choose v iff its exponential clock fires before that of
/// every u, scaled by max(p(u)/p(v), q(u)/q(v)).
fn agreement(p: &[f64], q: &[f64]) -> f64 {
    let both_choose = |v: usize| {
        let (scale_p, scale_q) = (1.0 / p[v], 1.0 / q[v]);
        1.0 / p.iter().zip(q).map(|(p, q)| (p * scale_p).max(q * scale_q)).sum::<f64>()
    };
    (0..p.len()).map(both_choose).sum()
}

fn softmax(row: &[f32]) -> Vec<f64> {
    let total: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
    row.iter().map(|&logit| f64::from(logit).exp() / total).collect()
}

fn shipped(q: &DraftDistribution) -> Vec<f64> {
    let total: f64 = q.iter().map(|&(_, weight)| f64::from(weight)).sum();
    let mut law = vec![0.0; VOCAB_SIZE];
    q.iter().for_each(|&(id, weight)| law[id as usize] = f64::from(weight) / total);
    law
}

#[test]
fn modes_accept_as_often_as_theory_says() {
    for (deviation, at_most) in [(0.0, 1.0), (0.3, 0.9), (0.8, 0.7), (1.5, 0.4)] {
        for mode in [AcceptanceMode::Coupled, AcceptanceMode::Rejection] {
            let rates = rates(mode, deviation);
            // Five standard deviations: a false positive has probability 6e-7 per pair.
            let slack = 5.0 * rates.sigma + 1e-9;
            assert!((rates.measured - rates.expected).abs() <= slack, "{mode:?}, {deviation}: {rates:?}");
            assert!(rates.measured >= rates.coupling_bound - slack, "{mode:?}, {deviation}: {rates:?}");
            assert!(rates.measured <= rates.optimum + slack, "{mode:?}, {deviation}: {rates:?}");
            assert!(rates.optimum <= at_most + 1e-9, "the models differ as much as intended: {rates:?}");
        }
    }
}

#[test]
fn equal_models_always_agree_in_coupled_mode() {
    assert_eq!(rates(AcceptanceMode::Coupled, 0.0).measured, 1.0);
}
