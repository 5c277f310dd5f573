//! The guarantee of coupled mode for token trees (contract B9), checked with `==`: for any tree, the
//! committed ids, their scores and the finish reason equal those of drawing one token at a time. Rows
//! computed with wrong ancestors must be detected.

use speculation::acceptance::{
    DrawResult, RawRows, check_draft, draw_processed, guess_candidates, has_independent_rows, verify,
    verify_draws,
};
use speculation::logits::{TokenCounts, process, score};
use speculation::noise::{Noise, Purpose};
use speculation::tree::{Candidates, MAX_TREE_TOKENS, with_leaves};
use speculation::{AcceptanceMode, Draft, SequenceSpec, TokenId, TokenLogprobs};

use crate::exactness::{DRAFT, TARGET, Text, alone, prompt, spec_of, spec_with_exclusions};

/// Sources of trees.
#[derive(Debug, Clone, Copy)]
enum Drafter {
    /// Random shapes; knows the text and sometimes hides it in the tree.
    Random,
    /// A different model's chain with the next best tokens as leaves.
    Leaves { k: usize, num_tokens: usize },
    /// The best three children of every node, up to a depth.
    Full { depth: u32 },
}

/// Faults of the rows used by the verification.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    Nothing,
    /// Each row sees all ids sent before it, as in a chain.
    WrongAncestors,
    /// The rows of two siblings are swapped.
    SwappedSiblings,
    /// A row does not see its own id.
    WithoutItself,
}

struct Dice(Noise, u32);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.1 += 1;
        (self.0.uniform(self.1, 0, Purpose::Draw) * n as f64) as usize
    }
}

fn candidates(spec: &SequenceSpec, context: &[TokenId], count: usize) -> Candidates {
    let mut counts = TokenCounts::new(spec.prompt_len);
    context.iter().for_each(|&id| counts.push(id));
    guess_candidates(spec, &counts, (context.len() as u32, count), &mut DRAFT.row(context)).unwrap()
}

fn propose(drafter: Drafter, spec: &SequenceSpec, ids: &[TokenId], truth: &[TokenId]) -> Draft {
    match drafter {
        Drafter::Random => random_tree(spec, ids, truth),
        Drafter::Leaves { k, num_tokens } => {
            let mut context = ids.to_vec();
            let mut positions = Vec::new();
            for _ in 0..k {
                positions.push(candidates(spec, &context, 4));
                context.push(positions.last().unwrap().token_ids[0]);
            }
            with_leaves(&positions, num_tokens)
        }
        Drafter::Full { depth } => {
            let mut draft = Draft::default();
            let mut level = vec![(0, ids.to_vec())];
            for _ in 0..depth {
                for (row, context) in std::mem::take(&mut level) {
                    for id in candidates(spec, &context, 3).token_ids {
                        draft.token_ids.push(id);
                        draft.parents.push(row);
                        level.push((draft.token_ids.len() as u32, [&context[..], &[id]].concat()));
                    }
                }
            }
            draft
        }
    }
}

fn random_tree(spec: &SequenceSpec, ids: &[TokenId], truth: &[TokenId]) -> Draft {
    let mut dice = Dice(Noise { seed: spec.seed ^ 0x7ee5, choice: ids.len() as u32 }, 0);
    let mut draft = Draft::default();
    // Rows of the deepest level, and whether the text leads there.
    let mut level = vec![(0, true)];
    for depth in 0..1 + dice.below(6) {
        for (row, leads) in std::mem::take(&mut level) {
            let right = truth.get(ids.len() + depth).copied().filter(|_| leads);
            let mut children: Vec<TokenId> = Vec::new();
            for _ in 0..dice.below(4) {
                let child = match right {
                    Some(id) if dice.below(2) == 0 => id,
                    _ => dice.below(26) as TokenId,
                };
                if !children.contains(&child) && draft.token_ids.len() < MAX_TREE_TOKENS {
                    children.push(child);
                    draft.token_ids.push(child);
                    draft.parents.push(row);
                    level.push((draft.token_ids.len() as u32, right == Some(child)));
                }
            }
        }
    }
    draft
}

/// The ids on the path to a row, its own included.
fn path(draft: &Draft, mut row: usize) -> Vec<TokenId> {
    let mut path = Vec::new();
    while row > 0 {
        path.push(draft.token_ids[row - 1]);
        row = draft.parent(row - 1);
    }
    path.reverse();
    path
}

fn rows(ids: &[TokenId], draft: &Draft, fault: Fault) -> Vec<f32> {
    let mut contexts: Vec<Vec<TokenId>> = (0..=draft.token_ids.len()).map(|row| path(draft, row)).collect();
    match fault {
        Fault::Nothing => {}
        Fault::WrongAncestors => {
            (1..contexts.len()).for_each(|row| contexts[row] = draft.token_ids[..row].to_vec());
        }
        Fault::SwappedSiblings => {
            let siblings = (1..draft.token_ids.len()).find(|&i| draft.parent(i) == draft.parent(i - 1));
            siblings.into_iter().for_each(|i| contexts.swap(i, i + 1));
        }
        Fault::WithoutItself => {
            contexts.iter_mut().for_each(|context| context.truncate(context.len().saturating_sub(1)))
        }
    }
    contexts.iter().flat_map(|context| TARGET.row(&[ids, context].concat())).collect()
}

/// What a device draws from each row of a tree, and the scores of the draws if the spec requests them.
fn device_draws(
    spec: &SequenceSpec,
    counts: &TokenCounts,
    draft: &Draft,
    rows: &[f32],
) -> (Vec<DrawResult>, Vec<TokenLogprobs>) {
    let (mut drawn, mut scores) = (Vec::new(), Vec::new());
    for (row, raw) in rows.chunks_exact(TARGET.vocab_size).enumerate() {
        let mut counts = counts.clone();
        path(draft, row).into_iter().for_each(|id| counts.push(id));
        let (position, mut logits) = (counts.len(), raw.to_vec());
        process(&mut logits, spec, &counts, position);
        let draw = draw_processed(spec, position, &logits);
        let token_id = draw.token(position).unwrap();
        scores.extend(spec.logprobs.map(|top_n| score(raw, token_id, top_n)));
        drawn.push(draw);
    }
    (drawn, scores)
}

/// The text, and the number of ids accepted in total. A device's draws of all rows lead to the same verdicts.
fn generate(spec: &SequenceSpec, drafter: Drafter, truth: &[TokenId], fault: Fault) -> (Text, u32) {
    let mut ids = prompt(spec);
    let mut counts = TokenCounts::new(spec.prompt_len);
    ids.iter().for_each(|&id| counts.push(id));
    let (mut logprobs, mut num_accepted) = (Vec::new(), 0);
    loop {
        let draft = propose(drafter, spec, &ids, truth);
        assert_eq!(draft.check_shape(), Ok(()), "{drafter:?}");
        let mut rows = rows(&ids, &draft, fault);
        let before = counts.clone();
        let start = ids.len() as u32;
        let (drawn, scores) = device_draws(spec, &counts, &draft, &rows);
        let verification =
            verify(spec, &mut counts, start, &draft, RawRows::new(&mut rows, TARGET.vocab_size)).unwrap();
        assert_eq!(counts, before, "counts are restored");
        assert_eq!(has_independent_rows(spec), !spec.sampling.has_exclusions());
        assert_eq!(verify_draws(spec, start, &draft, (&drawn, &scores)), Ok(verification.clone()));
        let accepted = &verification.token_ids[..verification.num_accepted as usize];
        assert_eq!(draft.rows_on_path(accepted).len(), accepted.len(), "accepted ids are a path");
        num_accepted += verification.num_accepted;
        verification.token_ids.iter().for_each(|&id| counts.push(id));
        ids.extend(verification.token_ids);
        logprobs.extend(verification.logprobs);
        if let Some(finish) = verification.finish {
            return (Text { ids, logprobs, finish }, num_accepted);
        }
    }
}

const DRAFTERS: [Drafter; 5] = [
    Drafter::Random,
    Drafter::Leaves { k: 1, num_tokens: 4 },
    Drafter::Leaves { k: 4, num_tokens: 9 },
    Drafter::Leaves { k: 6, num_tokens: 6 },
    Drafter::Full { depth: 3 },
];

#[test]
fn any_tree_commits_what_no_draft_commits() {
    let mut accepted = [0; DRAFTERS.len()];
    for seed in 0..200 {
        let spec = spec_of(seed);
        let alone = alone(&spec);
        for (drafter, accepted) in DRAFTERS.into_iter().zip(&mut accepted) {
            let (text, num_accepted) = generate(&spec, drafter, &alone.ids, Fault::Nothing);
            assert_eq!(text, alone, "seed {seed}, {drafter:?}: {spec:?}");
            *accepted += num_accepted;
        }
    }
    assert!(accepted.iter().all(|&n| n > 500), "{accepted:?}");
    assert!(accepted[4] > accepted[3], "a wide tree accepts more a step than a chain: {accepted:?}");
}

/// A bad word may end on any branch, behind ids of that branch only.
#[test]
fn trees_change_no_text_with_excluded_tokens() {
    let mut accepted = [0; DRAFTERS.len()];
    for seed in 0..150 {
        let spec = spec_with_exclusions(seed);
        let alone = alone(&spec);
        for (drafter, accepted) in DRAFTERS.into_iter().zip(&mut accepted) {
            let (text, num_accepted) = generate(&spec, drafter, &alone.ids, Fault::Nothing);
            assert_eq!(text, alone, "seed {seed}, {drafter:?}: {spec:?}");
            *accepted += num_accepted;
        }
    }
    assert!(accepted.iter().all(|&n| n > 200), "{accepted:?}");
}

#[test]
fn rows_of_other_ancestors_are_noticed() {
    for fault in [Fault::WrongAncestors, Fault::SwappedSiblings, Fault::WithoutItself] {
        for drafter in [Drafter::Random, Drafter::Leaves { k: 4, num_tokens: 9 }, Drafter::Full { depth: 3 }]
        {
            let differs = |&seed: &u64| {
                let spec = spec_of(seed);
                let alone = alone(&spec);
                generate(&spec, drafter, &alone.ids, fault).0 != alone
            };
            let caught = (0..60).filter(differs).count();
            assert!(caught > 10, "{fault:?} of {drafter:?}: only {caught} of 60 texts differ");
        }
    }
}

#[test]
fn only_sequences_whose_text_no_draft_can_change_take_trees() {
    let tree = Draft { token_ids: vec![1, 2], parents: vec![0, 0], ..Draft::default() };
    for acceptance in [AcceptanceMode::Rejection, AcceptanceMode::Typical] {
        let spec = SequenceSpec { acceptance, max_len: 50, ..SequenceSpec::default() };
        let refused = check_draft(&spec, 4, &tree).unwrap_err().to_string();
        assert!(refused.contains("send a chain"), "{refused}");
        let mut greedy = spec;
        greedy.sampling.temperature = 0.0;
        assert_eq!(check_draft(&greedy, 4, &tree), Ok(()));
    }
    let broken = Draft { parents: vec![0, 7], ..tree };
    let refused = check_draft(&SequenceSpec::default(), 4, &broken).unwrap_err().to_string();
    assert!(refused.contains("is row 7, which comes after it"), "{refused}");
}
