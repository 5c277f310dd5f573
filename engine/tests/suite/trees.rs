//! A row of a token tree gives the bits of a chain of its ancestors (docs/contract.md C3), and keeping a path
//! leaves the KV that a chain would have left: for any tree, any position of its start in a block, any other
//! rows in the batch. Compared by `==`.

use engine::{Engine, LoadOptions, SequenceRows, SlotId, TokenId, TreeRows, WeightFormat};

use crate::support::{Random, demo_dir, feed, golden_dir, load};

const FORMATS: [WeightFormat; 5] =
    [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Fp8, WeightFormat::Int8, WeightFormat::Int4];

struct Tree {
    ids: Vec<TokenId>,
    parents: Vec<u32>,
}

impl Tree {
    /// A random shape, built level by level.
    fn random(random: &mut Random, (most, vocab): (usize, usize)) -> Self {
        let mut tree = Self { ids: Vec::new(), parents: Vec::new() };
        let mut level = vec![0];
        while tree.ids.len() < most && !level.is_empty() {
            for row in std::mem::take(&mut level) {
                for child in 0..random.below(4) {
                    if tree.ids.len() < most {
                        // Siblings differ.
                        tree.ids.push((random.below(vocab / 4) * 4 + child) as TokenId);
                        tree.parents.push(row);
                        level.push(tree.ids.len() as u32);
                    }
                }
            }
        }
        if tree.ids.is_empty() { Self { ids: vec![1, 2], parents: vec![0, 0] } } else { tree }
    }

    /// Rows from the tree's first position to `row`.
    fn path(&self, row: usize) -> Vec<usize> {
        let parent = |&row: &usize| (self.parents[row] as usize).checked_sub(1);
        let mut path: Vec<usize> = std::iter::successors(Some(row), parent).collect();
        path.reverse();
        path
    }

    fn ids_of(&self, path: &[usize]) -> Vec<TokenId> {
        path.iter().map(|&row| self.ids[row]).collect()
    }
}

/// Logits of a separate sequence after these ids.
fn alone(engine: &mut Engine, ids: &[TokenId]) -> Vec<f32> {
    let slot = engine.open();
    let logits = feed(engine, slot, ids, 1).remove(0);
    engine.close(slot);
    logits
}

/// Runs `context` and a tree after it, with another sequence in the batch. Returns the logits after the
/// context and after each row.
fn run(engine: &mut Engine, slot: SlotId, context: &[TokenId], tree: &Tree) -> Vec<Vec<f32>> {
    let other = engine.open();
    let token_ids = [context, &tree.ids].concat();
    let batch = [
        SequenceRows { slot: other, token_ids: &[5, 6, 7], num_logits: 0 },
        SequenceRows { slot, token_ids: &token_ids, num_logits: 1 + tree.ids.len() },
    ];
    let trees = [TreeRows { sequence: 1, num_stored: 0, parents: &tree.parents }];
    let logits = engine.forward_with_trees(&batch, &[], &trees).unwrap().logits;
    engine.close(other);
    (0..logits.rows()).map(|row| logits.row(row).to_vec()).collect()
}

/// Like [`run`] in several calls, each of which adds `calls[i]` rows of the tree.
fn run_in_parts(
    engine: &mut Engine,
    (slot, context): (SlotId, &[TokenId]),
    (tree, calls): (&Tree, &[usize]),
) -> Vec<Vec<f32>> {
    let mut found = vec![feed(engine, slot, context, 1).remove(0)];
    for num_new in calls {
        let num_stored = found.len() - 1;
        let end = num_stored + num_new;
        let other = engine.open();
        let batch = [
            SequenceRows { slot: other, token_ids: &[5, 6, 7], num_logits: 0 },
            SequenceRows { slot, token_ids: &tree.ids[num_stored..end], num_logits: *num_new },
        ];
        let trees = [TreeRows { sequence: 1, num_stored, parents: &tree.parents[..end] }];
        let logits = engine.forward_with_trees(&batch, &[], &trees).unwrap().logits;
        engine.close(other);
        found.extend((0..logits.rows()).map(|row| logits.row(row).to_vec()));
    }
    found
}

/// Reorders the tree as a draft model may run it: each call adds some rows whose parents earlier calls ran,
/// in order of depth. Also returns the number of rows of each call.
fn in_parts(random: &mut Random, tree: &Tree) -> (Tree, Vec<usize>) {
    let (mut order, mut calls): (Vec<usize>, Vec<usize>) = (Vec::new(), Vec::new());
    while order.len() < tree.ids.len() {
        let is_next = |row: &usize| {
            let parent = (tree.parents[*row] as usize).checked_sub(1);
            !order.contains(row) && parent.is_none_or(|parent| order.contains(&parent))
        };
        let mut next: Vec<usize> = (0..tree.ids.len()).filter(is_next).collect();
        while next.len() > 1 + random.below(3) {
            next.remove(random.below(next.len()));
        }
        next.sort_by_key(|&row| tree.path(row).len());
        order.extend(&next);
        calls.push(next.len());
    }
    let row_of = |parent: u32| match (parent as usize).checked_sub(1) {
        None => 0,
        Some(parent) => 1 + order.iter().position(|&row| row == parent).unwrap() as u32,
    };
    let ids = order.iter().map(|&row| tree.ids[row]).collect();
    let parents = order.iter().map(|&row| row_of(tree.parents[row])).collect();
    (Tree { ids, parents }, calls)
}

/// Checks a text with a tree after it at `start`: checks every row, keeps one path and continues the text,
/// four times.
fn check(engine: &mut Engine, random: &mut Random, start: usize, what: &str) {
    let vocab = engine.info().vocab_size as usize;
    let mut text: Vec<TokenId> = (0..start).map(|_| random.below(vocab) as TokenId).collect();
    let slot = engine.open();
    engine.share_prefix(slot, 3, &text);
    let held = engine.len(slot) as usize;
    let first = start - 1;
    if first > held {
        feed(engine, slot, &text[held..first], 0);
    }
    for round in 0..4 {
        let what = format!("{what}, start {start}, round {round}");
        let most = 1 + random.below(20);
        let tree = Tree::random(random, (most, vocab));
        let context = text[engine.len(slot) as usize..].to_vec();
        let (tree, calls) = if round % 2 == 0 { (tree, Vec::new()) } else { in_parts(random, &tree) };
        let found = match &calls[..] {
            [] => run(engine, slot, &context, &tree),
            calls => run_in_parts(engine, (slot, &context), (&tree, calls)),
        };
        assert_eq!(found[0], alone(engine, &text), "{what}: after the context");
        for row in 0..tree.ids.len() {
            let ids = [&text[..], &tree.ids_of(&tree.path(row))].concat();
            assert_eq!(found[1 + row], alone(engine, &ids), "{what}: row {row} of {:?}", tree.parents);
        }
        let row = random.below(tree.ids.len() + 1);
        let path = row.checked_sub(1).map(|row| tree.path(row)).unwrap_or_default();
        engine.keep_path(slot, text.len() as u32, (&path, &tree.ids_of(&path))).unwrap();
        text.extend(tree.ids_of(&path));
        assert_eq!(engine.len(slot) as usize, text.len());
        text.push(random.below(vocab) as TokenId);
    }
    let held = engine.len(slot) as usize;
    assert_eq!(feed(engine, slot, &text[held..], 1).remove(0), alone(engine, &text), "{what}: the end");
    // Its published blocks give the same results as computing them.
    let second = engine.open();
    let held = engine.share_prefix(second, 3, &text).len as usize;
    assert!(held >= (start.saturating_sub(1)) / 16 * 16, "{what}: {held} of {} are shared", text.len());
    assert_eq!(feed(engine, second, &text[held..], 1).remove(0), alone(engine, &text), "{what}: shared");
    engine.close(second);
    engine.close(slot);
    assert_eq!(engine.stats().referenced_blocks, 0, "{what}");
}

#[test]
fn tree_rows_equal_chains_of_their_ancestors() {
    for case in ["llama_wide_heads", "mistral_window", "qwen2_window_layers", "qwen3_norms"] {
        for format in FORMATS {
            let engine = &mut load(&golden_dir().join(case), format, 1);
            let mut random = Random::new(7);
            for start in [1, 3, 15, 16, 17, 30, 50] {
                check(engine, &mut random, start, &format!("{case} {format:?}"));
            }
        }
    }
}

#[test]
fn threads_and_ranks_change_no_bit() {
    for (threads, tensor_parallel) in [(3, 1), (2, 2)] {
        let options = LoadOptions {
            threads,
            tensor_parallel,
            ..LoadOptions::new(demo_dir("target"), WeightFormat::AsStored, 64 << 20)
        };
        let engine = &mut Engine::load(&options).unwrap();
        let mut random = Random::new(threads as u64);
        for start in [9, 33] {
            check(engine, &mut random, start, &format!("{threads} threads, {tensor_parallel} ranks"));
        }
    }
}

/// Shows that the checks above can fail: other ancestors, and another path's KV, change the bits.
#[test]
fn other_ancestors_and_another_path_give_other_bits() {
    let engine = &mut load(&golden_dir().join("qwen3_norms"), WeightFormat::Bf16, 1);
    let text: Vec<TokenId> = (0..20).map(|i| i * 13 % 112).collect();
    let slot = engine.open();
    let rows = |engine: &mut Engine, parents: &[u32]| {
        engine.truncate(slot, 0);
        let tree = Tree { ids: vec![10, 20, 30, 40], parents: parents.to_vec() };
        run(engine, slot, &text, &tree)
    };
    let (a, b) = (rows(engine, &[0, 0, 1, 2]), rows(engine, &[0, 0, 2, 1]));
    assert_eq!(a[..3], b[..3], "rows that do not depend on the changed parents");
    assert_ne!(a[3], b[3], "30 after 10 is not 30 after 20");
    assert_ne!(a[3], rows(engine, &[0, 1, 2, 3])[3], "nor is it 30 after both");
    // Nor if 10 and 20 were stored by an earlier call.
    let mut later = |parents: &[u32]| {
        engine.truncate(slot, 0);
        let tree = Tree { ids: vec![10, 20, 30, 40], parents: parents.to_vec() };
        run_in_parts(engine, (slot, &text), (&tree, &[2, 2]))
    };
    assert_eq!((later(&[0, 0, 1, 2]), later(&[0, 0, 2, 1])), (a, b));
    let mut kept = |path: &[usize], ids: &[TokenId]| {
        rows(engine, &[0, 0, 1, 2]);
        engine.keep_path(slot, 20, (path, ids)).unwrap();
        let found = feed(engine, slot, &[50], 1).remove(0);
        (found == alone(engine, &[&text[..], &[10, 30, 50]].concat()), engine.len(slot))
    };
    assert_eq!(kept(&[0, 2], &[10, 30]), (true, 23));
    assert_eq!(kept(&[0, 3], &[10, 30]), (false, 23), "KV of 40 instead of 30");
    assert_eq!(kept(&[1, 2], &[10, 30]), (false, 23), "KV of 20 instead of 10");
}

#[test]
fn invalid_trees_are_rejected_and_change_nothing() {
    let engine = &mut load(&golden_dir().join("llama_tied"), WeightFormat::F32, 1);
    let slot = engine.open();
    let mut refused = |parents: &[u32], trees: usize, words: &str| {
        let batch = [SequenceRows { slot, token_ids: &[1, 2, 3], num_logits: 1 }];
        let tree = TreeRows { sequence: trees - 1, num_stored: 0, parents };
        let error = engine.forward_with_trees(&batch, &[], &vec![tree; trees]).unwrap_err().to_string();
        assert!(error.contains(words), "{error} lacks {words}");
        assert_eq!((engine.len(slot), engine.stats().forwards), (0, 0));
    };
    refused(&[0, 2], 1, "before children");
    refused(&[1], 1, "before children");
    refused(&[0, 0, 0], 1, "a token before the tree");
    refused(&[], 1, "one tree with new ids");
    refused(&[0], 2, "no such sequence");
    feed(engine, slot, &[1, 2, 3], 0);
    let mut refused_later = |num_stored: usize, parents: &[u32], words: &str| {
        let batch = [SequenceRows { slot, token_ids: &[4, 5], num_logits: 1 }];
        let trees = [TreeRows { sequence: 0, num_stored, parents }];
        let error = engine.forward_with_trees(&batch, &[], &trees).unwrap_err().to_string();
        assert!(error.contains(words), "{error} lacks {words}");
        assert_eq!(engine.len(slot), 3);
    };
    refused_later(2, &[0, 1], "one tree with new ids");
    refused_later(2, &[0, 1, 2], "only add rows");
    refused_later(3, &[0, 0, 0, 1, 2], "a token before the tree");
    refused_later(1, &[0, 1, 0], "in order of depth");
    refused_later(1, &[0, 1, 4], "before children");
    for (path, ids) in [(&[5][..], &[9][..]), (&[1, 0], &[9, 9]), (&[0], &[9, 9])] {
        assert!(engine.keep_path(slot, 1, (path, ids)).unwrap_err().to_string().contains("not a path"));
    }
}
