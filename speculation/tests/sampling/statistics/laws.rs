//! The joint distribution of the first three tokens of a sequence: 125 cells, enumerated exactly, against
//! many seeds.
//!
//! A joint distribution shows faults that marginals hide: noise shared between positions, or a draft length
//! that depends on the draw.

use speculation::acceptance::{RawRows, guess, verify};
use speculation::logits::{TokenCounts, process};
use speculation::{AcceptanceMode, Draft, SamplingParams, SequenceSpec, TokenId};

use super::chi_square::p_value;
use super::mutants::Mutant;
use crate::naive;
use crate::toy::ToyModel;

pub(crate) const TARGET: ToyModel = ToyModel { vocab_size: 5, family: 21, deviation: 0.0 };
pub(crate) const DRAFT: ToyModel = ToyModel { vocab_size: 5, family: 21, deviation: 0.8 };
const PROMPT: [TokenId; 2] = [1, 2];
const NUM_TOKENS: usize = 3;
const NUM_SEEDS: u64 = 40_000;

/// A correct scheme falls below this with probability 1e-6 per check (with fixed seeds: always or never).
const FALSE_POSITIVES: f64 = 1e-6;

/// Draft and target side of a speculation scheme.
pub(crate) trait Rules {
    /// Returns up to k guesses for the ids after `ids`.
    fn propose(&self, spec: &SequenceSpec, ids: &[TokenId], k: usize) -> Draft;
    /// Returns the ids committed after `ids`, at least one.
    fn verify(&self, spec: &SequenceSpec, ids: &[TokenId], draft: &Draft) -> Vec<TokenId>;
}

/// The rules of this crate.
struct Ours;

impl Rules for Ours {
    fn propose(&self, spec: &SequenceSpec, ids: &[TokenId], k: usize) -> Draft {
        let mut draft = Draft::default();
        let mut context = ids.to_vec();
        for _ in 0..k {
            let mut row = DRAFT.row(&context);
            let guess = guess(spec, &TokenCounts::default(), context.len() as u32, &mut row).unwrap();
            context.push(guess.token_id);
            draft.token_ids.push(guess.token_id);
            if !guess.q.is_empty() {
                draft.q.push(guess.q);
            }
        }
        draft
    }

    fn verify(&self, spec: &SequenceSpec, ids: &[TokenId], draft: &Draft) -> Vec<TokenId> {
        let mut rows = TARGET.rows(ids, &draft.token_ids);
        let mut counts = TokenCounts::default();
        verify(spec, &mut counts, ids.len() as u32, draft, RawRows::new(&mut rows, TARGET.vocab_size))
            .unwrap()
            .token_ids
    }
}

/// The rules of this crate, with a deadline of 1 to k forwards that drops what arrives later. It depends only
/// on the position.
struct WithDeadline {
    /// A fault: the draft is answered once a stop token is drawn.
    ends_at_stop_token: bool,
}

/// The text of these tests goes on behind it.
const STOP_TOKEN: TokenId = 2;

impl Rules for WithDeadline {
    fn propose(&self, spec: &SequenceSpec, ids: &[TokenId], k: usize) -> Draft {
        let mut draft = Ours.propose(spec, ids, k);
        let stop = draft.token_ids.iter().position(|&id| id == STOP_TOKEN);
        let num_forwards = stop.filter(|_| self.ends_at_stop_token).map_or(k, |stop| stop + 1);
        if num_forwards > 1 + ids.len() % k {
            return Draft::default();
        }
        draft.truncate(k as u32, num_forwards);
        draft
    }

    fn verify(&self, spec: &SequenceSpec, ids: &[TokenId], draft: &Draft) -> Vec<TokenId> {
        Ours.verify(spec, ids, draft)
    }
}

/// P after the whole pipeline, one entry per token, computed with the naive twin.
pub(crate) fn probabilities(row: &[f32], spec: &SequenceSpec) -> Vec<f64> {
    let mut logits = row.to_vec();
    process(&mut logits, spec, &TokenCounts::default(), PROMPT.len() as u32);
    let mut law = vec![0.0; row.len()];
    for (id, x) in naive::apply_filters(&logits, &spec.sampling) {
        law[id as usize] = x.exp();
    }
    let total: f64 = law.iter().sum();
    law.iter().map(|weight| weight / total).collect()
}

/// The first tokens after the prompt, in rounds of `k` drafted tokens.
fn generate(rules: &dyn Rules, spec: &SequenceSpec, k: usize) -> [TokenId; NUM_TOKENS] {
    let mut ids = PROMPT.to_vec();
    while ids.len() < PROMPT.len() + NUM_TOKENS {
        let draft = rules.propose(spec, &ids, k);
        ids.extend(rules.verify(spec, &ids, &draft));
    }
    std::array::from_fn(|i| ids[PROMPT.len() + i])
}

fn cell(tokens: &[TokenId]) -> usize {
    tokens.iter().fold(0, |cell, &id| cell * TARGET.vocab_size + id as usize)
}

/// The exact distribution of the first three tokens of the target alone.
fn joint_law(spec: &SequenceSpec) -> Vec<f64> {
    let mut paths = vec![(PROMPT.to_vec(), 1.0)];
    for _ in 0..NUM_TOKENS {
        let longer = paths.iter().flat_map(|(ids, p)| {
            let next = probabilities(&TARGET.row(ids), spec);
            (0..).zip(next).map(move |(id, q)| ([&ids[..], &[id]].concat(), p * q))
        });
        paths = longer.collect();
    }
    let mut law = vec![0.0; TARGET.vocab_size.pow(NUM_TOKENS as u32)];
    for (ids, p) in paths {
        law[cell(&ids[PROMPT.len()..])] = p;
    }
    law
}

/// The p-value of `rules` over many seeds.
fn fit(rules: &dyn Rules, spec: &SequenceSpec, k: usize) -> f64 {
    let law = joint_law(spec);
    let mut counts = vec![0; law.len()];
    for seed in 0..NUM_SEEDS {
        counts[cell(&generate(rules, &SequenceSpec { seed, ..spec.clone() }, k))] += 1;
    }
    p_value(&counts, &law)
}

fn spec(acceptance: AcceptanceMode, sampling: SamplingParams) -> SequenceSpec {
    SequenceSpec { acceptance, sampling, prompt_len: 2, max_len: 1_000, ..SequenceSpec::default() }
}

fn plain() -> SamplingParams {
    SamplingParams::default()
}

fn filtered() -> SamplingParams {
    SamplingParams { temperature: 1.4, top_p: 0.9, top_k: 4, logit_bias: vec![(2, 0.75)], ..plain() }
}

#[test]
fn coupled_draws_follow_the_target() {
    for sampling in [plain(), filtered()] {
        let spec = spec(AcceptanceMode::Coupled, sampling);
        for k in [0, 2] {
            let p = fit(&Ours, &spec, k);
            assert!(p > FALSE_POSITIVES, "k {k}: p-value {p:e}");
        }
    }
}

#[test]
fn rejection_draws_follow_the_target_whatever_k() {
    for sampling in [plain(), filtered()] {
        let spec = spec(AcceptanceMode::Rejection, sampling);
        for k in [1, 2, 4] {
            let p = fit(&Ours, &spec, k);
            assert!(p > FALSE_POSITIVES, "k {k}: p-value {p:e}");
        }
    }
}

#[test]
fn planted_mutants_are_rejected() {
    let spec = spec(AcceptanceMode::Rejection, plain());
    let sound = fit(&Mutant::None, &spec, 2);
    assert!(sound > FALSE_POSITIVES, "the rule itself: p-value {sound:e}");
    for mutant in [
        Mutant::ReusedResidualNoise,
        Mutant::ReusedAcceptNoise,
        Mutant::TargetInsteadOfResidual,
        Mutant::UnnormalisedResidual,
        Mutant::StopThatDependsOnTheDraw,
    ] {
        let p = fit(&mutant, &spec, 2);
        assert!(p < FALSE_POSITIVES, "{mutant:?} passes with a p-value of {p:e}");
    }
    let p = fit(&Mutant::NoiseByOffset, &spec, 0);
    assert!(p < FALSE_POSITIVES, "noise by offset passes with a p-value of {p:e}");
}

#[test]
fn a_deadline_changes_no_law_if_every_draft_takes_k_forwards() {
    let spec = spec(AcceptanceMode::Rejection, plain());
    for k in [2, 3] {
        let p = fit(&WithDeadline { ends_at_stop_token: false }, &spec, k);
        assert!(p > FALSE_POSITIVES, "k {k}: p-value {p:e}");
        let p = fit(&WithDeadline { ends_at_stop_token: true }, &spec, k);
        assert!(p < FALSE_POSITIVES, "drafts that end at a stop token pass at k {k} with a p-value of {p:e}");
    }
}

/// Checks that the mutants above differ from the crate only by their fault.
#[test]
fn the_mutant_without_a_fault_is_the_crate() {
    for sampling in [plain(), filtered()] {
        let spec = spec(AcceptanceMode::Rejection, sampling);
        for seed in 0..3_000 {
            let spec = SequenceSpec { seed, ..spec.clone() };
            assert_eq!(generate(&Mutant::None, &spec, 2), generate(&Ours, &spec, 2), "seed {seed}");
        }
    }
}

#[test]
fn typical_draws_do_not_follow_the_target() {
    let p = fit(&Ours, &spec(AcceptanceMode::Typical, plain()), 2);
    assert!(p < FALSE_POSITIVES, "the docs call this mode lossy, yet its p-value is {p:e}");
}
