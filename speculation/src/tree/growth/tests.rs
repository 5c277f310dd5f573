//! Properties of trees grown from made-up candidates, and comparison with the likeliest possible tree.

use proptest::prelude::*;

use super::*;
use crate::SamplingParams;

/// A draft whose candidates after a path are a function of the path: `num_candidates` of them.
#[derive(Debug, Clone, Copy)]
struct MadeUp {
    seed: u64,
    /// Scale of the margins, in logits.
    spread: f64,
    num_candidates: usize,
}

const STOP: TokenId = 9;

impl MadeUp {
    fn behind(&self, path: &[TokenId]) -> Candidates {
        let mut state = path.iter().fold(self.seed, |state, &id| mix(state ^ u64::from(id)));
        let mut below = |n: u64| {
            state = mix(state);
            (state >> 20) % n
        };
        let first = below(10) as TokenId;
        let token_ids: Vec<TokenId> = (0..self.num_candidates as TokenId).map(|i| (first + i) % 10).collect();
        let mut margin = 0.0;
        let scores = token_ids.into_iter().enumerate().map(|(rank, id)| {
            // Some margins are equal.
            margin += if rank == 0 { 0.0 } else { below(4) as f64 / 3.0 * self.spread };
            (id, -margin)
        });
        let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        Candidates::from_scores(&greedy, &scores.collect::<Vec<_>>(), 0.5)
    }

    /// Grows a tree; returns it with the number of rows of each forward after the context.
    fn grow(&self, mut tree: TreeGrowth) -> (TreeGrowth, Vec<usize>) {
        let mut forwards = Vec::new();
        loop {
            let paths = tree.next_paths();
            if paths.is_empty() {
                return (tree, forwards[1..].to_vec());
            }
            forwards.push(paths.len());
            let found: Vec<Candidates> = paths.iter().map(|path| self.behind(path)).collect();
            tree.add_candidates(&found, |id| id == STOP);
            check_rows(&tree);
        }
    }

    /// The likeliest of all possible paths, computed without running rows in any order.
    fn likeliest(&self, num_positions: usize, num_tokens: usize) -> Vec<(f64, Vec<TokenId>)> {
        let mut all: Vec<(f64, Vec<TokenId>)> = Vec::new();
        let mut level = vec![(1.0, Vec::new())];
        for _ in 0..num_positions {
            for (chance, path) in std::mem::take(&mut level) {
                let candidates = self.behind(&path);
                for (&id, &of_row) in candidates.token_ids.iter().zip(candidates.chances()) {
                    let node = (chance * of_row, [&path[..], &[id]].concat());
                    all.push(node.clone());
                    level.extend((id != STOP).then_some(node));
                }
            }
        }
        all.sort_by(|a, b| b.0.total_cmp(&a.0));
        all.truncate(num_tokens);
        all
    }
}

fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^ (x >> 29)
}

/// Checks that the parents of rows have run, and that the rows of a forward are in order of depth.
fn check_rows(tree: &TreeGrowth) {
    let parents = tree.row_parents();
    let num_stored = tree.num_stored();
    assert_eq!(parents.len(), num_stored + tree.num_next());
    assert!(parents.iter().all(|&parent| parent as usize <= num_stored), "{parents:?}, {num_stored} ran");
    let paths = tree.next_paths();
    assert!(paths.is_sorted_by_key(Vec::len), "{paths:?}");
    let ids: Vec<TokenId> = paths.iter().filter_map(|path| path.last().copied()).collect();
    assert_eq!(ids, tree.next_ids());
    assert!(paths.iter().flatten().all(|&id| id != STOP), "nothing follows a stop token: {paths:?}");
}

fn paths(draft: &Draft) -> Vec<Vec<TokenId>> {
    let mut paths: Vec<Vec<TokenId>> = Vec::new();
    for (i, &id) in draft.token_ids.iter().enumerate() {
        let before = draft.parent(i).checked_sub(1).map_or(Vec::new(), |parent| paths[parent].clone());
        paths.push([&before[..], &[id]].concat());
    }
    paths
}

fn made_up() -> impl Strategy<Value = MadeUp> {
    (any::<u64>(), prop_oneof![Just(0.0), 0.1..6.0], 1_usize..9)
        .prop_map(|(seed, spread, num_candidates)| MadeUp { seed, spread, num_candidates })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_tree_is_one_that_a_target_takes(
        made_up in made_up(),
        (num_positions, num_tokens, num_rows) in (1_usize..12, 1_usize..70, 1_usize..6),
    ) {
        let (tree, forwards) = made_up.grow(TreeGrowth::new(num_positions, num_tokens, num_rows));
        let draft = tree.draft();
        // Closed under parents, in order of depth, no id twice below one row.
        prop_assert_eq!(draft.check_shape(), Ok(()));
        prop_assert!(draft.token_ids.len() <= num_tokens.min(MAX_TREE_TOKENS));
        prop_assert!(draft.depth() as usize <= num_positions && !draft.token_ids.is_empty());
        prop_assert!(forwards.len() < num_positions && forwards.iter().all(|&rows| rows <= num_rows));
        prop_assert!(forwards.iter().sum::<usize>() <= TreeGrowth::max_rows(num_positions, num_rows));
        // Every row's children are its best candidates, best first.
        for row in 0..=draft.token_ids.len() {
            let children: Vec<TokenId> = (0..draft.token_ids.len())
                .filter(|&i| draft.parent(i) == row)
                .map(|i| draft.token_ids[i])
                .collect();
            let path = row.checked_sub(1).map_or(Vec::new(), |i| paths(&draft)[i].clone());
            prop_assert_eq!(&children[..], &made_up.behind(&path).token_ids[..children.len()]);
        }
        // The ids that become part of the sequence's KV have run: the first path without its last id.
        let first = draft.first_path();
        let kept = tree.rows_on_path(&first[..first.len() - 1]);
        prop_assert_eq!(kept.len(), first.len() - 1);
        let parents = tree.row_parents();
        for (i, &row) in kept.iter().enumerate() {
            let before = i.checked_sub(1).map_or(0, |i| kept[i] + 1);
            prop_assert_eq!(parents[row] as usize, before);
        }
    }

    #[test]
    fn with_rows_enough_it_is_the_likeliest_of_all(
        made_up in made_up(),
        (num_positions, num_tokens) in (1_usize..5, 1_usize..20),
    ) {
        let unbounded = TreeGrowth::new(num_positions, num_tokens, usize::MAX);
        let (tree, _) = made_up.grow(unbounded);
        let mut chances: Vec<f64> = tree.best().iter().map(|&node| tree.nodes[node].chance).collect();
        chances.sort_by(|a, b| b.total_cmp(a));
        // Among equally likely nodes any may be chosen.
        let expected: Vec<f64> =
            made_up.likeliest(num_positions, num_tokens).into_iter().map(|(chance, _)| chance).collect();
        prop_assert_eq!(chances, expected);
    }
}

#[test]
fn a_sure_draft_goes_deep_and_an_unsure_one_wide() {
    let depth = |spread: f64| {
        let made_up = MadeUp { seed: 4, spread, num_candidates: 4 };
        made_up.grow(TreeGrowth::new(8, 8, 2)).0.draft().depth()
    };
    assert!((depth(0.0), depth(1e6) >= 5) == (2, true), "{} and {}", depth(0.0), depth(1e6));
}

#[test]
fn without_other_candidates_it_is_the_chain() {
    let made_up = MadeUp { seed: 11, spread: 1.0, num_candidates: 1 };
    let (tree, forwards) = made_up.grow(TreeGrowth::new(5, 9, 2));
    let draft = tree.draft();
    assert!(!draft.is_tree());
    assert_eq!((draft.token_ids.len(), forwards), (5, vec![1, 1, 1, 1]));
    assert_eq!(tree.rows_on_path(&draft.token_ids[..4]), [0, 1, 2, 3]);
}
