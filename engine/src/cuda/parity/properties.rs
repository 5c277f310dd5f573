//! Compares kernels with their twins over random shapes, on the emulator: combinations of block tables,
//! splits, tiles, K-slices and ranks' parts that no list of cases covers. A normal test run tries few;
//! `PROPTEST_CASES=6400 cargo nextest run -p outrider-engine --lib properties` tries 200 of each.

use cpu_kernels::{HeadLayout, KSlices, tree_sum};
use proptest::prelude::*;
use proptest::test_runner::Config;
use speculation::SamplingParams;

use super::{attention, linear, sampling, scores, trees};
use crate::cuda::emulator::Emulator;
use crate::cuda::executor::Tensor;
use crate::cuda::ops::{concat_ranks, sum_ranks};

/// Fewer cases than other properties get, because the emulator is slow.
fn few() -> Config {
    let config = Config::default();
    Config { cases: (config.cases / 32).max(1), failure_persistence: None, ..config }
}

/// Layouts of heads of one of these sizes; `counts` is the number of KV heads and of heads that share one.
fn layouts(
    counts: impl Strategy<Value = (usize, usize)>,
    head_dims: &'static [usize],
) -> impl Strategy<Value = HeadLayout> {
    (counts, prop::sample::select(head_dims)).prop_map(|((num_kv_heads, group), head_dim)| HeadLayout {
        num_heads: num_kv_heads * group,
        num_kv_heads,
        head_dim,
    })
}

/// The first position of a token tree of any shape, and the parents of its ids.
fn any_tree() -> impl Strategy<Value = (u32, Vec<u32>)> {
    // Each id is on the last level or starts a new one: ids are in order of depth.
    let parents_of = |numbers: Vec<u32>| {
        let (mut parents, mut level) = (Vec::new(), 0..1u32);
        for number in numbers {
            if number % 3 == 0 && !parents.is_empty() && parents.len() as u32 >= level.end {
                level = level.end..parents.len() as u32 + 1;
            }
            parents.push(level.start + number / 3 % level.len() as u32);
        }
        parents
    };
    (1u32..150, prop::collection::vec(any::<u32>(), 1..9).prop_map(parents_of))
}

proptest! {
    #![proptest_config(few())]

    /// Decode, verify and prefill rows over block tables, with and without windows that begin inside a block
    /// or a split.
    #[test]
    fn attention_over_any_block_tables(
        layout in layouts((1usize..4, 1usize..6), &[16, 32, 64]),
        window in prop::option::of(1u32..180),
        lens in prop::collection::vec((prop_oneof![4 => 0u32..300, 1 => 900u32..1300], 1usize..6), 1..4),
        prefill in prop::option::of(1usize..40),
    ) {
        let mut lens = lens;
        lens.extend(prefill.map(|rows| (0, rows)));
        for parity in attention::attention(&mut Emulator::build(), layout, window, &lens).unwrap() {
            prop_assert!(parity.is_good(), "{}: {:?}", parity, lens);
        }
    }

    /// Tiles of warpgroups over any block tables: full and ragged ones, and the tiles of warps that are left.
    #[test]
    fn attention_by_warpgroups_over_any_block_tables(
        layout in layouts((1usize..3, prop::sample::select(vec![1usize, 4, 8])), &[64, 128]),
        window in prop::option::of(1u32..400),
        prompt in (prop_oneof![6 => 0u32..300, 1 => 950u32..1100], 10usize..50),
        other in prop::option::of((0u32..300, 1usize..20)),
    ) {
        let lens: Vec<(u32, usize)> = std::iter::once(prompt).chain(other).collect();
        for parity in attention::panels(&mut Emulator::build(), layout, window, &lens).unwrap() {
            prop_assert!(parity.is_good(), "{}: {:?}", parity, lens);
        }
    }

    /// Trees of any shape beside chains: any start, any number of heads per KV head, windows that begin
    /// inside a tree.
    #[test]
    fn rows_of_any_trees_are_chains(
        layout in layouts(prop_oneof![4 => (1usize..3, 1usize..6), 1 => Just((1, 17))], &[16, 32]),
        window in prop::option::of(1u32..150),
        token_trees in prop::collection::vec(any_tree(), 1..3),
        chain in prop::option::of((0u32..100, 1usize..4)),
    ) {
        let mut rows: Vec<trees::Rows<'_>> =
            token_trees.iter().map(|(start, parents)| (*start, parents.as_slice(), 0)).collect();
        rows.extend(chain.map(|(start, rows)| (start, &[][..], rows)));
        for parity in trees::trees(&mut Emulator::build(), layout, window, &rows).unwrap() {
            prop_assert!(parity.is_good(), "{}: {:?}", parity, rows);
        }
    }

    /// Products whose K-slices are of any unit, empty ones included.
    #[test]
    fn products_over_any_slices(
        (rows, n) in (1usize..40, 1usize..40),
        (unit, units) in (prop::sample::select(vec![16usize, 32]), 1usize..30),
        whole in any::<bool>(),
    ) {
        let slices = if whole { KSlices::whole(unit * units) } else { KSlices::eighths(unit * units, unit) };
        let mut e = Emulator::build();
        let parity = linear::gemm_bf16(&mut e, (rows, n), &slices).unwrap();
        prop_assert!(parity.is_good(), "{}", parity);
        for parity in linear::gemm_int8(&mut e, (rows, n), &slices).unwrap() {
            prop_assert!(parity.is_good(), "{}", parity);
        }
    }

    /// Every kernel of a product computes the same bits for an element: any rows, any slices, parts of ranks.
    #[test]
    fn kernels_of_products_agree(
        (rows, n) in (prop_oneof![1usize..40, 60usize..90, 1usize..300], 1usize..150),
        (unit, units) in (prop::sample::select(vec![8usize, 16, 32]), 1usize..20),
        ranks in prop::sample::select(vec![0usize, 1, 2, 4, 8]),
        seed in any::<u64>(),
    ) {
        let all = KSlices::eighths(unit * units, unit);
        // `ranks` 0: an unshared sum. Otherwise one of the ranks that have numbers.
        let owned = (0..ranks).map(|rank| all.owned(8 * rank / ranks..8 * (rank + 1) / ranks));
        let part = owned.filter(|part| part.start() < part.end()).nth(seed as usize % ranks.max(1));
        let slices = part.map_or(KSlices::whole(unit * units), |part| part.rebased());
        for parity in linear::kernels_agree(&mut Emulator::build(), (rows, n), &slices, seed).unwrap() {
            prop_assert!(parity.is_good(), "{}", parity);
        }
    }

    /// Filters of any strength, on rows whose length is close to the number of candidates.
    #[test]
    fn any_filters(
        vocab in prop_oneof![1usize..40, 200usize..300, 1000usize..1100, 2000usize..2600],
        top_k in prop::sample::select(vec![0u32, 0, 1, 7, 300, 1023, 1024, 1025, 4000]),
        top_p in prop::sample::select(vec![1.0f32, 1.0, 0.0, 0.3, 0.8, 0.99, 0.9999]),
        min_p in prop::sample::select(vec![0.0f32, 0.0, 1e-4, 0.03, 0.5, 1.0]),
        temperature in 0.2f32..3.0,
    ) {
        let sampling = SamplingParams { top_k, top_p, min_p, temperature, ..SamplingParams::default() };
        let parity = sampling::filter(&mut Emulator::build(), (vocab, 4), ("any", &sampling)).unwrap();
        prop_assert!(parity.is_good(), "{}: {:?}", parity, sampling);
    }

    /// Probabilities of rows of any length, and any number of most likely tokens.
    #[test]
    fn any_scores((vocab, rows) in (1usize..900, 1usize..8), top_n in 0u32..65) {
        let parity = scores::scored(&mut Emulator::build(), (vocab, rows), top_n).unwrap();
        prop_assert!(parity.is_good(), "{}", parity);
    }

    /// Sums over ranks follow the contract's tree, and concatenated parts equal the whole row.
    #[test]
    fn parts_of_any_ranks(
        ranks in prop::sample::select(vec![1usize, 2, 4, 8]),
        (rows, width) in (1usize..7, 8usize..700),
        seed in any::<u64>(),
    ) {
        let mut e = Emulator::build();
        let mut numbers = super::Numbers(seed);
        let parts: Vec<Vec<f32>> = (0..ranks).map(|_| numbers.vec(rows * width, 1e3)).collect();
        let on_device: Vec<_> = parts.iter().map(|part| Tensor::of(&mut e, part, "parts").unwrap()).collect();
        let addresses: Vec<u64> = on_device.iter().map(Tensor::address).collect();
        let mut sum = Tensor::zeros(&mut e, rows * width, "sum").unwrap();
        // SAFETY: every part has this length, and the emulator has finished when the call returns.
        unsafe { sum_ranks(&mut e, &addresses, &mut sum, rows * width) }.unwrap();
        let expected: Vec<f32> = (0..rows * width)
            .map(|i| {
                let mut slices = [0.0; 8];
                parts.iter().enumerate().for_each(|(rank, part)| slices[rank * 8 / ranks] = part[i]);
                tree_sum(slices)
            })
            .collect();
        prop_assert_eq!(sum.read(&mut e, 0..rows * width).unwrap(), expected);

        let whole = numbers.vec(rows * width, 1.0);
        let border = |rank: usize| rank * width / ranks;
        let cut: Vec<_> = (0..ranks)
            .map(|rank| {
                let columns = border(rank)..border(rank + 1);
                let part: Vec<f32> = whole.chunks_exact(width).flat_map(|row| row[columns.clone()].to_vec()).collect();
                Tensor::of(&mut e, &part, "columns").unwrap()
            })
            .collect();
        let addresses: Vec<u64> = cut.iter().map(Tensor::address).collect();
        let mut joined = Tensor::zeros(&mut e, rows * width, "rows").unwrap();
        // SAFETY: as above; each part has its own width.
        unsafe { concat_ranks(&mut e, &addresses, &mut joined, (rows, width)) }.unwrap();
        prop_assert_eq!(joined.read(&mut e, 0..rows * width).unwrap(), whole);
    }
}
