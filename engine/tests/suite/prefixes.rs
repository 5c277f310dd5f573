//! KV that another sequence computed gives the same results as recomputing it: logits are equal by `==`,
//! whether a prefix was found, waited for, abandoned, copied or evicted.

use engine::{Engine, LoadOptions, PrefixMatch, SequenceRows, SlotId, TokenId, WeightFormat};

use crate::support::{Random, demo_dir, feed, golden_dir, load};

/// Runs a text that may share its prefix, and returns the logits of its last row.
fn last_logits(engine: &mut Engine, slot: SlotId, key: u64, ids: &[TokenId]) -> Vec<f32> {
    let found = engine.share_prefix(slot, key, ids);
    assert!(!found.wait);
    feed(engine, slot, &ids[found.len as usize..], 1).remove(0)
}

fn text(len: usize, salt: u32, vocab: u32) -> Vec<TokenId> {
    (0..len as u32).map(|i| (i * i * 7 + i * 13 + salt) % vocab).collect()
}

#[test]
fn a_cached_prefix_gives_the_same_bits() {
    for format in
        [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Fp8, WeightFormat::Int8, WeightFormat::Int4]
    {
        for case in ["mistral_window", "qwen3_norms"] {
            let dir = golden_dir().join(case);
            let ids = text(75, 3, 112);
            let expected = {
                let engine = &mut load(&dir, format, 1);
                let slot = engine.open();
                feed(engine, slot, &ids, 1).remove(0)
            };
            let engine = &mut load(&dir, format, 1);
            let first = engine.open();
            assert_eq!(last_logits(engine, first, 1, &ids), expected, "computed");
            let second = engine.open();
            assert_eq!(last_logits(engine, second, 1, &ids), expected, "found in the cache");
            assert_eq!(engine.stats().rows, 75 + (75 - 64));
            engine.close(first);
            engine.close(second);
            assert_eq!((engine.stats().referenced_blocks, engine.stats().cached_blocks), (0, 4));
            let third = engine.open();
            assert_eq!(last_logits(engine, third, 1, &ids), expected, "cached, though unreferenced");
            let other_key = engine.open();
            assert_eq!(
                engine.share_prefix(other_key, 2, &ids),
                PrefixMatch { len: 0, wait: false },
                "another isolation key"
            );
        }
    }
}

#[test]
fn sequences_that_share_and_diverge_give_the_same_bits() {
    let engine = &mut load(&demo_dir("draft"), WeightFormat::Bf16, 1);
    let (start, vocab) = (text(40, 1, 4_096), 4_096);
    let (a, b) = (engine.open(), engine.open());
    last_logits(engine, a, 1, &start);
    last_logits(engine, b, 1, &start);
    // Both continue inside their first blocks, which are shared: from there each needs a private copy.
    let tails = [text(30, 50, vocab), text(30, 90, vocab)];
    for cut in [20, 37] {
        for (slot, tail) in [(a, &tails[0]), (b, &tails[1])] {
            engine.truncate(slot, cut);
            let ids = [&start[..engine.len(slot) as usize], tail].concat();
            let found = feed(engine, slot, &ids[engine.len(slot) as usize..], 1).remove(0);
            let alone = engine.open();
            assert_eq!(found, feed(engine, alone, &ids, 1).remove(0), "cut at {cut}");
            engine.close(alone);
            engine.truncate(slot, 20);
            feed(engine, slot, &start[20..], 0);
        }
    }
}

#[test]
fn evictions_change_no_bit() {
    let dir = golden_dir().join("llama_tied");
    let options = LoadOptions {
        tensor_parallel: 2,
        // Twelve blocks of two layers, two heads of 8, in f32.
        ..LoadOptions::new(&dir, WeightFormat::F32, 12 * 2 * 2 * 8 * 16 * 2 * 4)
    };
    let engine = &mut Engine::load(&options).unwrap();
    let plain = &mut load(&dir, WeightFormat::F32, 1);
    let mut random = Random::new(11);
    let mut open: Vec<(SlotId, Vec<TokenId>)> = Vec::new();
    for round in 0..400 {
        if open.len() > 3 || (!open.is_empty() && random.below(4) == 0) {
            let (slot, _) = open.remove(random.below(open.len()));
            engine.close(slot);
        }
        if open.is_empty() || random.below(2) == 0 {
            // Texts with common prefixes.
            let mut ids = text(1 + random.below(60), 5, 112);
            let at = random.below(ids.len());
            ids[at..].iter_mut().for_each(|id| *id = (*id + random.below(2) as u32) % 112);
            open.push((engine.open(), ids));
        }
        let i = random.below(open.len());
        let (slot, ids) = &mut open[i];
        engine.truncate(*slot, random.below(ids.len() + 1) as u32);
        let held = engine.share_prefix(*slot, 9, ids);
        assert!(!held.wait, "no other sequence is computing");
        let rest = &ids[held.len as usize..];
        if rest.is_empty() || engine.blocks_needed(*slot, rest.len() as u32) > engine.free_blocks() {
            let (slot, _) = open.remove(i);
            engine.close(slot);
            continue;
        }
        let rows = [SequenceRows { slot: *slot, token_ids: rest, num_logits: 1 }];
        let found = engine.forward(&rows).unwrap().row(0).to_vec();
        let alone = plain.open();
        assert_eq!(found, feed(plain, alone, ids, 1).remove(0), "round {round}");
        plain.close(alone);
    }
    let stats = engine.stats();
    assert!(stats.evicted_blocks > 20 && stats.rows < plain.stats().rows, "{stats:?}");
}
