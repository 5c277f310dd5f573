//! The guarantee of coupled mode, checked with `==`: for any draft, the committed ids, their scores and the
//! finish reason equal those of drawing one token at a time, and those of the naive twin.

use speculation::acceptance::{RawRows, guess, verify};
use speculation::logits::TokenCounts;
use speculation::noise::{Noise, Purpose};
use speculation::{
    AcceptanceMode, Draft, FinishReason, SamplingParams, SequenceSpec, TokenId, TokenLogprobs, ngram,
};

use crate::naive;
use crate::toy::ToyModel;

pub(crate) const TARGET: ToyModel = ToyModel { vocab_size: 24, family: 5, deviation: 0.0 };
pub(crate) const DRAFT: ToyModel = ToyModel { vocab_size: 24, family: 5, deviation: 0.5 };

/// Sources of drafts; none of them may change the text.
#[derive(Debug, Clone, Copy)]
enum Drafter {
    Nobody,
    /// Knows the text and proposes it.
    Oracle,
    /// Knows the text and corrupts about every third guess.
    SpoiledOracle,
    /// Random ids, some of them outside the vocabulary.
    Random,
    /// Repeats a stop token.
    Stopper,
    Ngram,
    /// A different model through [`guess`].
    Model,
}

const DRAFTERS: [Drafter; 6] = [
    Drafter::Oracle,
    Drafter::SpoiledOracle,
    Drafter::Random,
    Drafter::Stopper,
    Drafter::Ngram,
    Drafter::Model,
];

/// The output that a client sees.
#[derive(Debug, PartialEq)]
pub(crate) struct Text {
    pub(crate) ids: Vec<TokenId>,
    pub(crate) logprobs: Vec<TokenLogprobs>,
    pub(crate) finish: FinishReason,
}

/// A text and the number of verifications that produced it.
pub(crate) struct Run {
    pub(crate) text: Text,
    num_steps: usize,
}

/// The text committed without drafts.
pub(crate) fn alone(spec: &SequenceSpec) -> Text {
    generate(spec, Drafter::Nobody, 0, &[]).text
}

fn generate(spec: &SequenceSpec, drafter: Drafter, k: usize, truth: &[TokenId]) -> Run {
    let mut ids = prompt(spec);
    let mut counts = TokenCounts::new(spec.prompt_len);
    ids.iter().for_each(|&id| counts.push(id));
    let mut logprobs = Vec::new();
    for num_steps in 1.. {
        let draft = Draft::chain(propose(drafter, spec, &ids, (k, truth)));
        let mut rows = TARGET.rows(&ids, &draft.token_ids);
        let before = counts.clone();
        let start = ids.len() as u32;
        let verification =
            verify(spec, &mut counts, start, &draft, RawRows::new(&mut rows, TARGET.vocab_size)).unwrap();
        assert_eq!(counts, before, "counts are restored");
        let accepted = verification.num_accepted as usize;
        assert_eq!(verification.token_ids[..accepted], draft.token_ids[..accepted]);
        let drawn = verification.token_ids.len() - accepted;
        assert!(
            drawn == 1 || (drawn == 0 && verification.finish.is_some()),
            "one draw, or an end on an accepted id"
        );
        verification.token_ids.iter().for_each(|&id| counts.push(id));
        ids.extend(verification.token_ids);
        logprobs.extend(verification.logprobs);
        if let Some(finish) = verification.finish {
            return Run { text: Text { ids, logprobs, finish }, num_steps };
        }
    }
    unreachable!("max_len ends every sequence")
}

fn propose(
    drafter: Drafter,
    spec: &SequenceSpec,
    ids: &[TokenId],
    (k, truth): (usize, &[TokenId]),
) -> Vec<TokenId> {
    let dice = Noise { seed: spec.seed ^ 0xd1ce, choice: ids.len() as u32 };
    let below = |i: u32, n: u32| (dice.uniform(i, 0, Purpose::Draw) * f64::from(n)) as u32;
    let known = truth.get(ids.len()..).unwrap_or_default().iter().copied().take(k);
    match drafter {
        Drafter::Nobody => Vec::new(),
        Drafter::Oracle => known.collect(),
        Drafter::SpoiledOracle => (0..).zip(known).map(|(i, id)| id + u32::from(below(i, 3) == 0)).collect(),
        Drafter::Random => (0..k as u32).map(|i| below(i, 26)).chain([TokenId::MAX]).take(k).collect(),
        Drafter::Stopper => vec![spec.stop_token_ids.first().copied().unwrap_or(0); k],
        Drafter::Ngram => ngram::propose(ids, k),
        Drafter::Model => {
            let mut context = ids.to_vec();
            let mut counts = TokenCounts::new(spec.prompt_len);
            ids.iter().for_each(|&id| counts.push(id));
            for _ in 0..k {
                let guess = guess(spec, &counts, context.len() as u32, &mut DRAFT.row(&context)).unwrap();
                assert!(guess.q.is_empty(), "nothing to ship in coupled mode");
                counts.push(guess.token_id);
                context.push(guess.token_id);
            }
            context.split_off(ids.len())
        }
    }
}

pub(crate) fn prompt(spec: &SequenceSpec) -> Vec<TokenId> {
    (0..spec.prompt_len).map(|i| (spec.seed as u32 + 7 * i) % 24).collect()
}

/// The text drawn by the naive twin: no draft, no verification, no counts.
fn naive_ids(spec: &SequenceSpec) -> Vec<TokenId> {
    let mut ids = prompt(spec);
    loop {
        let id = naive::draw(&TARGET.row(&ids), spec, &ids);
        ids.push(id);
        if spec.stop_token_ids.contains(&id) || ids.len() >= spec.max_len as usize {
            return ids;
        }
    }
}

/// Settings derived from `seed`; over many seeds they cover all combinations.
pub(crate) fn spec_of(seed: u64) -> SequenceSpec {
    let dice = Noise { seed, choice: 0xd1ce };
    let pick = |i: u32, n: u32| (dice.uniform(i, 0, Purpose::Draw) * f64::from(n)) as usize;
    let sampling = SamplingParams {
        temperature: [0.0, 0.7, 1.0, 1.0, 2.5][pick(0, 5)],
        top_k: [0, 0, 3, 12][pick(1, 4)],
        top_p: [1.0, 1.0, 0.9, 0.5][pick(2, 4)],
        min_p: [0.0, 0.0, 0.05][pick(3, 3)],
        repetition_penalty: [1.0, 1.0, 1.3, 0.8][pick(4, 4)],
        frequency_penalty: [0.0, 0.0, 0.4, -0.2][pick(5, 4)],
        presence_penalty: [0.0, 0.0, 0.6][pick(6, 3)],
        logit_bias: [vec![], vec![(3, 2.5), (4, -100.0), (99, 1.0)]][pick(7, 2)].clone(),
        min_tokens: [0, 0, 9][pick(8, 3)],
        ..SamplingParams::default()
    };
    let prompt_len = 1 + pick(9, 6) as u32;
    SequenceSpec {
        seed,
        choice: pick(10, 3) as u32,
        prompt_len,
        sampling,
        stop_token_ids: [vec![], vec![2], vec![5, 17]][pick(11, 3)].clone(),
        max_len: prompt_len + 1 + pick(12, 40) as u32,
        logprobs: [None, Some(0), Some(3)][pick(13, 3)],
        ..SequenceSpec::default()
    }
}

/// [`spec_of`] with excluded tokens: all but some, the ends of bad words, or both. The toy models repeat ids,
/// so that bad words begin often. Two tokens are never excluded.
pub(crate) fn spec_with_exclusions(seed: u64) -> SequenceSpec {
    let mut spec = spec_of(seed);
    if !seed.is_multiple_of(3) {
        let bad_words = [&[3][..], &[9, 6], &[6, 9, 11], &[1, 1], &[22, 1], &[20, 20, 8], &[13, 4, 13, 7]];
        let pairs = (0..24).map(|id| vec![id, (id + spec.seed as u32) % 19]);
        spec.sampling.bad_words = bad_words.iter().map(|word| word.to_vec()).chain(pairs).collect();
    }
    if seed % 3 != 1 {
        spec.sampling.allowed_token_ids = vec![1, 2, 3, 5, 6, 8, 9, 11, 13, 17, 20, 22];
    }
    spec
}

#[test]
fn any_draft_commits_what_no_draft_commits() {
    let (mut finished_by_stop, mut finished_by_length) = (0, 0);
    for seed in 0..250 {
        let spec = spec_of(seed);
        let alone = generate(&spec, Drafter::Nobody, 0, &[]);
        assert_eq!(alone.text.ids, naive_ids(&spec), "seed {seed}: {spec:?}");
        let num_new = alone.text.ids.len() - spec.prompt_len as usize;
        assert_eq!(alone.text.logprobs.len(), if spec.logprobs.is_some() { num_new } else { 0 });
        match alone.text.finish {
            FinishReason::Stop => finished_by_stop += 1,
            FinishReason::Length => finished_by_length += 1,
        }
        for drafter in DRAFTERS {
            for k in [1, 2, 4, 8] {
                let drafted = generate(&spec, drafter, k, &alone.text.ids);
                assert_eq!(drafted.text, alone.text, "seed {seed}, {drafter:?}, k {k}: {spec:?}");
            }
        }
    }
    assert!(finished_by_stop > 40 && finished_by_length > 40, "both ways to end are covered");
}

#[test]
fn excluded_tokens_never_occur_and_no_draft_changes_the_text() {
    let mut num_changed = 0;
    for seed in 0..150 {
        let spec = spec_with_exclusions(seed);
        let SamplingParams { allowed_token_ids, bad_words, .. } = &spec.sampling;
        let alone = generate(&spec, Drafter::Nobody, 0, &[]).text;
        assert_eq!(alone.ids, naive_ids(&spec), "seed {seed}: {spec:?}");
        let output = &alone.ids[spec.prompt_len as usize..];
        for word in bad_words {
            assert!(output.windows(word.len()).all(|ids| ids != word), "seed {seed}: {word:?} in {output:?}");
        }
        let is_listed = |id: &TokenId| allowed_token_ids.is_empty() || allowed_token_ids.contains(id);
        assert!(output.iter().all(is_listed), "seed {seed}: {output:?}");
        let unlimited = generate(&spec_of(seed), Drafter::Nobody, 0, &[]).text;
        num_changed += usize::from(unlimited.ids != alone.ids);
        for drafter in DRAFTERS {
            for k in [1, 2, 4, 8] {
                let drafted = generate(&spec, drafter, k, &alone.ids).text;
                assert_eq!(drafted, alone, "seed {seed}, {drafter:?}, k {k}: {spec:?}");
            }
        }
    }
    assert!(num_changed > 75, "only {num_changed} texts had such tokens without the exclusions");
}

#[test]
fn a_perfect_draft_costs_one_step_for_each_k_plus_one_tokens() {
    for seed in 0..50 {
        let spec = spec_of(seed);
        let alone = generate(&spec, Drafter::Nobody, 0, &[]);
        let num_new = alone.text.ids.len() - spec.prompt_len as usize;
        assert_eq!(alone.num_steps, num_new);
        let drafted = generate(&spec, Drafter::Oracle, 4, &alone.text.ids);
        assert_eq!(drafted.num_steps, num_new.div_ceil(5), "seed {seed}");
    }
}

#[test]
fn greedy_sequences_are_exact_in_every_mode() {
    for seed in 0..60 {
        let mut spec = spec_of(seed);
        spec.sampling.temperature = 0.0;
        let alone = generate(&spec, Drafter::Nobody, 0, &[]).text;
        for mode in [AcceptanceMode::Rejection, AcceptanceMode::Typical] {
            spec.acceptance = mode;
            for drafter in DRAFTERS {
                assert_eq!(
                    generate(&spec, drafter, 3, &alone.ids).text,
                    alone,
                    "seed {seed}, {mode:?}, {drafter:?}"
                );
            }
        }
    }
}

#[test]
fn choices_and_seeds_of_one_prompt_differ() {
    let spec = SequenceSpec { seed: 3, prompt_len: 2, max_len: 30, ..SequenceSpec::default() };
    let texts: Vec<Vec<TokenId>> = [(3, 0), (3, 1), (3, 2), (4, 0), (3 + (1 << 32), 0)]
        .map(|(seed, choice)| SequenceSpec { seed, choice, ..spec.clone() })
        .map(|spec| generate(&spec, Drafter::Nobody, 0, &[]).text.ids[2..].to_vec())
        .to_vec();
    for (i, text) in texts.iter().enumerate() {
        assert!(texts[..i].iter().all(|other| other != text), "text {i} is not new");
    }
}
