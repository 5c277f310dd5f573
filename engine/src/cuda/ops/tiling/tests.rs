//! Every query is in one tile, every split in one work item and one chunk; sizes of tilings.

use cpu_kernels::TreeSegment;
use proptest::prelude::*;

use super::*;

const NO_LIMITS: Limits = Limits {
    max_parts: usize::MAX,
    max_own_blocks: usize::MAX,
    min_runs: usize::MAX,
    running: [usize::MAX; WIDTHS],
    last_block_parts: LAST_BLOCK_PARTS,
    parts: Some(PartSize::Split),
    has_panels: false,
    is_padded: false,
};

proptest! {
    /// Every split that a tile needs is in one work item of its chunk and has its own partial results; no
    /// chunk exceeds its limit. Tiles that their last blocks merge know how many blocks they have.
    #[test]
    fn work_covers_every_split_once(
        lens in prop::collection::vec((1usize..40, 0u32..3000), 1..5),
        group in 1usize..9,
        window in prop::option::of(1u32..400),
        max_parts in prop_oneof![1usize..2000, Just(usize::MAX)],
        min_runs in 1usize..40,
        last_block_parts in 0usize..17,
        parts in prop::sample::select(vec![None, Some(PartSize::Split), Some(PartSize::Group), Some(PartSize::All)]),
        running in 1usize..40,
        has_panels in any::<bool>(),
    ) {
        let mut segments = Vec::new();
        let mut row = 0;
        for &(rows, start) in &lens {
            segments.push(Segment { rows: row..row + rows, start, block_table: &[], tree: None });
            row += rows;
        }
        let starts = vec![0; lens.len()];
        let running = [running; WIDTHS];
        let limits = Limits { max_parts, min_runs, last_block_parts, parts, running, has_panels, ..NO_LIMITS };
        let key = TilingKey { group, window, limits };
        let tiling = Tiling::new(&segments, &starts, &OwnBlocks::default(), key);
        let Tiling { tiles, work, tile_of, chunks } = tiling;
        let (mut next_query, mut next_work) = (0, 0);
        for chunk in &chunks {
            prop_assert_eq!((chunk.queries.start, chunk.work[0].start), (next_query, next_work));
            prop_assert!(chunk.work.windows(2).all(|two| two[0].end == two[1].start));
            (next_query, next_work) = (chunk.queries.end, chunk.work[PANELS].end);
            let mut seen = vec![false; chunk.num_parts];
            let mut in_chunk = std::collections::BTreeMap::new();
            let real = |which: &Range<usize>| work[which.clone()].iter().filter(|work| work.split != NO_SPLIT).count();
            for (work, width) in chunk.work.iter().enumerate()
                .flat_map(|(width, range)| work[range.clone()].iter().map(move |work| (work, width)))
                .filter(|(work, _)| work.split != NO_SPLIT)
            {
                let tile = &tiles[work.tile as usize];
                *in_chunk.entry(work.tile).or_insert(0) += 1;
                let widths = [16, 32, 64].iter().filter(|queries| tile.num_queries > **queries);
                prop_assert_eq!(widths.count(), width);
                prop_assert!(width < PANELS || (has_panels && tile.part_splits != 1));
                prop_assert!(work.split < work.end_split);
                prop_assert!(tile.part_splits == 0 || work.end_split - work.split <= 8);
                prop_assert!(chunk.queries.contains(&(tile.first_query as usize)));
                let splits = work.split as usize..work.end_split as usize;
                prop_assert!(tile.splits().contains(&splits.start) && splits.end <= tile.splits().end);
                // The parts that this block alone writes: those of all its splits.
                let (of_part, first) = (tile.part_splits as usize, tile.splits().start);
                let parts = match of_part {
                    0 => 0..if width == PANELS { 0 } else { splits.len().min(2) },
                    _ => splits.start / of_part - first / of_part..splits.end.div_ceil(of_part) - first / of_part,
                };
                prop_assert!(of_part != 0 || splits == tile.splits());
                for i in parts {
                    let first = tile.first_part as usize + i * tile.num_queries as usize;
                    for seen in &mut seen[first..first + tile.num_queries as usize] {
                        prop_assert!(!std::mem::replace(seen, true), "part {} of {:?} twice", i, tile);
                    }
                }
            }
            prop_assert!(seen.iter().all(|seen| *seen));
            prop_assert!(chunk.num_parts <= max_parts || in_chunk.len() == 1);
            prop_assert!(chunk.work.iter().all(|range| range.len() * 16 <= real(range) * 17));
            let (mut by_blocks, mut by_launch) = (0, 0);
            for (&tile, &runs) in &in_chunk {
                let tile = &tiles[tile as usize];
                let few = tile.width() < PANELS && tile.merged_parts() <= last_block_parts;
                let is_by_blocks = tile.part_splits == 0 || few;
                prop_assert_eq!(tile.num_runs, if is_by_blocks { runs } else { 0 });
                let most = if is_by_blocks { &mut by_blocks } else { &mut by_launch };
                *most = tile.merged_parts().max(*most);
            }
            prop_assert_eq!((chunk.blocks_merge, chunk.launch_merges), (by_blocks, by_launch));
        }
        prop_assert_eq!((next_query, next_work), (row * group, work.len()));
        for (query, tile) in tile_of.iter().enumerate() {
            let tile = &tiles[*tile as usize];
            prop_assert!((tile.first_query..tile.first_query + tile.num_queries).contains(&(query as u32)));
        }
        prop_assert_eq!(tile_of.len(), row * group);
    }

    /// Tiles hold every query once, and cover exactly the keys that their queries attend to.
    #[test]
    fn tiles_cover_the_queries_of_every_segment(
        lens in prop::collection::vec((1usize..40, 0u32..300), 1..5),
        group in 1usize..9,
        window in prop::option::of(1u32..200),
    ) {
        let mut segments = Vec::new();
        let mut row = 0;
        for &(rows, start) in &lens {
            segments.push(Segment { rows: row..row + rows, start, block_table: &[], tree: None });
            row += rows;
        }
        let starts: Vec<u32> = (0..lens.len() as u32).map(|i| i * 1000).collect();
        let mut next = 0;
        let key = TilingKey { group, window, limits: NO_LIMITS };
        for tile in Tiling::new(&segments, &starts, &OwnBlocks::default(), key).tiles {
            prop_assert_eq!(tile.first_query, next);
            next += tile.num_queries;
            let rows: Vec<usize> = (tile.first_query..next).map(|query| query as usize / group).collect();
            let segment = &segments[(tile.table / 1000) as usize];
            prop_assert!(rows.iter().all(|row| segment.rows.contains(row)));
            let ends = rows.iter().map(|row| segment.start + (row - segment.rows.start) as u32 + 1);
            prop_assert_eq!(Some(tile.end_key), ends.clone().max());
            let begins = ends.map(|end| window.map_or(0, |window| end.saturating_sub(window)));
            prop_assert_eq!(Some(tile.first_key), begins.min());
        }
        prop_assert_eq!(next as usize, row * group);
    }

    /// Token trees beside chains: every split that a row attends to is summed for it once, over its own
    /// blocks from the tree's split on.
    #[test]
    fn rows_of_trees_are_summed_once(
        trees in prop::collection::vec((1u32..600, prop::collection::vec(any::<bool>(), 1..64)), 1..4),
        group in 1usize..20,
        window in prop::option::of(1u32..400),
        (max_parts, max_own_blocks) in (prop_oneof![1usize..2000, Just(usize::MAX)], 1usize..40),
    ) {
        // An id is a child or a sibling of the one before it.
        let parents_of = |steps: &Vec<bool>| {
            let parent = |(parent, last): &mut (u32, u32), step: &bool| {
                (*parent, *last) = (if *step { *last } else { *parent }, *last + 1);
                Some(*parent)
            };
            steps.iter().scan((0, 0), parent).collect::<Vec<u32>>()
        };
        let parents: Vec<Vec<u32>> = trees.iter().map(|(_, steps)| parents_of(steps)).collect();
        let block_tables: Vec<Vec<u32>> = trees.iter().map(|(start, steps)| (0..start / 16 + steps.len() as u32 / 16 + 2).collect()).collect();
        let (mut segments, mut starts, mut tables, mut row) = (Vec::new(), Vec::new(), Vec::new(), 0);
        for (i, (start, steps)) in trees.iter().enumerate() {
            let block_table = block_tables[i].as_slice();
            let tree = TreeSegment { start: *start, first: 0, parents: &parents[i] };
            for (rows, tree) in [(2, None), (steps.len(), Some(tree))] {
                segments.push(Segment { rows: row..row + rows, start: *start, block_table, tree });
                starts.push(tables.len() as u32);
                tables.extend_from_slice(block_table);
                row += rows;
            }
        }
        let own = OwnBlocks::new(&segments, &mut tables);
        let limits = Limits { max_parts, max_own_blocks, min_runs: 4, ..NO_LIMITS };
        let key = TilingKey { group, window, limits };
        let Tiling { tiles, work, tile_of, chunks } = Tiling::new(&segments, &starts, &own, key);
        prop_assert_eq!(tile_of.len(), row * group);
        for chunk in &chunks {
            let mut seen = vec![0; chunk.num_parts];
            let mut shared = std::collections::BTreeSet::new();
            for work in chunk.work.iter().flat_map(|range| &work[range.clone()]).filter(|work| work.split != NO_SPLIT) {
                let tile = &tiles[work.tile as usize];
                shared.insert(tile_of[tile.first_query as usize]);
                for split in work.split..work.end_split {
                    let first = tile.first_part + (split - tile.first_key / 128) * tile.part_stride;
                    (first..first + tile.num_queries).for_each(|part| seen[part as usize] += 1);
                    // It reads only blocks of the sequence or own blocks of the chunk.
                    for block in (split * 8).max(tile.first_key / 16)..(split * 8 + 8).min(tile.end_key.div_ceil(16)) {
                        let id = tables[(tile.table + block) as usize];
                        let is_own = id >> 31 == 1 && chunk.own.contains(&((id & !(1 << 31)) as usize));
                        prop_assert!(id == block || is_own, "block {} is {:#x}", block, id);
                    }
                }
            }
            prop_assert!(seen.iter().all(|times| *times <= 1));
            prop_assert!((chunk.num_parts <= max_parts && chunk.own.len() <= max_own_blocks) || shared.len() == 1);
            // Queries of a tree have splits in several tiles, none of which has a last block.
            prop_assert!(chunk.own.is_empty() || chunk.launch_merges > 0);
            for query in chunk.queries.clone() {
                let (row, tile) = (query / group, &tiles[tile_of[query] as usize]);
                let of_chain = |segment: &&Segment<'_>| segment.rows.contains(&row);
                let chain = segments.iter().find(of_chain).map(|segment| segment.start + (row - segment.rows.start) as u32);
                let end = own.row(row).map_or(chain.unwrap(), |row| row.position) + 1;
                for split in window.map_or(0, |window| end.saturating_sub(window)) / 128..end.div_ceil(128) {
                    let part = tile.first_part + (split - tile.first_key / 128) * tile.num_queries + query as u32 - tile.first_query;
                    prop_assert_eq!(seen[part as usize], 1, "query {} split {}", query, split);
                }
            }
        }
    }
}

/// 512 rows of an 8B model at 131,072 positions: 8.7 GB if the partial results of all splits were in memory
/// at once.
#[test]
fn long_contexts_take_turns_in_half_a_gigabyte() {
    let layout = HeadLayout { num_heads: 32, num_kv_heads: 8, head_dim: 128 };
    let segment = Segment { rows: 0..512, start: 131_072 - 512, block_table: &[], tree: None };
    for has_warpgroups in [false, true] {
        let key = TilingKey::of(layout, None, has_warpgroups);
        let tiling = Tiling::new(std::slice::from_ref(&segment), &[0], &OwnBlocks::default(), key);
        let most =
            tiling.chunks.iter().map(|chunk| chunk.num_parts).max().unwrap_or(0) * part_len(layout) * 4;
        let bytes = partial_bytes(512, layout, 131_072);
        println!("{} chunks, {most} bytes at most, {bytes} counted", tiling.chunks.len());
        assert!(most <= bytes && bytes <= 1 << 30, "{most} of {bytes}");
        assert!(tiling.tiles.iter().all(|tile| (tile.width() == PANELS) == has_warpgroups));
    }
    assert_eq!(partial_bytes(3, layout, 300), 12 * 3 * 8 * 136 * 4);
}

/// One long sequence among 63 short ones: formerly every tile had a block for each split of the longest.
#[test]
fn short_sequences_launch_no_blocks_for_a_long_one() {
    let start = |i: usize| if i == 0 { 32_767 } else { 100 };
    let segments: Vec<Segment<'_>> =
        (0..64).map(|i| Segment { rows: i..i + 1, start: start(i), block_table: &[], tree: None }).collect();
    let limits = Limits { max_parts: 1 << 20, min_runs: 1024, ..NO_LIMITS };
    let key = TilingKey { group: 4, window: None, limits };
    let tiling = Tiling::new(&segments, &[0; 64], &OwnBlocks::default(), key);
    let useful = tiling.work.iter().filter(|work| work.split != NO_SPLIT).count();
    println!("{} pieces of work, {useful} useful, before {}", tiling.work.len(), 64 * 256);
    assert_eq!(useful, 256 + 63);
    assert!(tiling.work.len() * 10 <= useful * 11, "{}", tiling.work.len());
}

/// 8B model, twelve verify rows in a tree and in a chain: each row of the tree reads its own split, and they
/// share the earlier ones.
#[test]
fn rows_of_a_tree_read_their_split_each() {
    let layout = HeadLayout { num_heads: 32, num_kv_heads: 8, head_dim: 128 };
    let parents = [0, 0, 0, 2, 2, 2, 5, 5, 5, 8, 8, 8];
    for (start, ratio, blocks) in [(8_192u32, 1.0..1.1, 7), (100, 8.0..13.0, 0)] {
        let block_table: Vec<u32> = (0..start / 16 + 2).collect();
        let read = |tree: Option<TreeSegment<'_>>| {
            let segment = Segment { rows: 0..12, start, block_table: &block_table, tree };
            let mut tables = block_table.clone();
            let own = OwnBlocks::new(std::slice::from_ref(&segment), &mut tables);
            count_attention(&Tiling::new(&[segment], &[0], &own, TilingKey::of(layout, None, true)), layout)
        };
        let tree = read(Some(TreeSegment { start, first: 0, parents: &parents }));
        let chain = read(None);
        let times = tree.bytes_read as f64 / chain.bytes_read as f64;
        println!("behind {start}: {} bytes, {times:.2} times those of a chain", tree.bytes_read);
        assert!(ratio.contains(&times) && tree.blocks[2] >= blocks * 8 && tree.blocks[0] == 12 * 8);
    }
}

/// Keys and values read for a prompt of 2,048 rows of an 8B model behind 32,768 tokens, compared with tiles
/// of 16 queries, each of which reads all of them.
#[test]
fn a_long_prompt_reads_its_keys_a_quarter_as_often() {
    let layout = HeadLayout { num_heads: 32, num_kv_heads: 8, head_dim: 128 };
    let segment = Segment { rows: 0..2048, start: 32_768, block_table: &[], tree: None };
    let limits = Limits::of(layout, false);
    let [wide, narrow] = [limits, Limits { max_parts: 0, ..limits }].map(|limits| {
        let own = OwnBlocks::default();
        let key = TilingKey { limits, ..TilingKey::of(layout, None, true) };
        count_attention(&Tiling::new(std::slice::from_ref(&segment), &[0], &own, key), layout)
    });
    println!("{wide:?}\n{narrow:?}");
    assert_eq!(wide.warp_blocks, narrow.warp_blocks);
    assert!(wide.bytes_read * 7 < narrow.bytes_read * 2, "{wide:?}, {narrow:?}");
}

/// Prompts of 8B in tiles of warpgroups and of warps: half the keys, and no partial results. Prompts that
/// leave multiprocessors without work, verify rows, and rows of trees take other tiles.
#[test]
fn prompts_take_tiles_of_warpgroups() {
    let layout = HeadLayout { num_heads: 32, num_kv_heads: 8, head_dim: 128 };
    let parents = vec![0; 2048];
    let count = |(sequences, rows): (usize, usize), start: u32, has_warpgroups: bool, is_tree: bool| {
        let tree = is_tree.then_some(TreeSegment { start, first: 0, parents: &parents });
        let segment = |i: usize| Segment { rows: i * rows..(i + 1) * rows, start, block_table: &[], tree };
        let segments: Vec<Segment<'_>> = (0..sequences).map(segment).collect();
        let key = TilingKey::of(layout, None, has_warpgroups);
        count_attention(&Tiling::new(&segments, &vec![0; sequences], &OwnBlocks::default(), key), layout)
    };
    for start in [128, 8_192, 32_768] {
        let [warps, panels] =
            [false, true].map(|has_warpgroups| count((1, 2048), start, has_warpgroups, false));
        println!("behind {start}\n{warps:?}\n{panels:?}");
        assert_eq!(panels.blocks, [0, 0, 0, 64 * 8]);
        assert_eq!([panels.written_parts, panels.folded_parts, panels.merged_parts], [0; 3]);
        let keys = |counts: &AttentionCounts| counts.key_blocks.iter().sum::<usize>();
        // The first 64 of 128 queries, 16 rows, do without the last block of keys in a tile of their own.
        assert_eq!(keys(&panels) * 2 - keys(&warps), 64 * 8);
    }
    let panels = |shape, start| count(shape, start, true, false).blocks[PANELS];
    // The last 32 queries of 1,000 rows take another tile; 64 rows have enough blocks behind a long context
    // only.
    assert_eq!(panels((2, 1000), 0), 2 * 31 * 8);
    assert_eq!([0, 8_192].map(|start| panels((1, 64), start)), [0, 2 * 9 * 8]);
    assert_eq!(panels((32, 5), 8_192), 0);
    assert_eq!(count((1, 2048), 8_192, true, true).blocks[PANELS], 0);
}

/// Bytes of partial results of a layer of 8B, written, added to and merged, compared with a partial result of
/// every split: prompts of 2,048 rows, verify rows of 32 sequences, and a row, which has no work for fewer.
#[test]
fn prompts_write_few_partial_results() {
    let layout = HeadLayout { num_heads: 32, num_kv_heads: 8, head_dim: 128 };
    let serving = Limits::of(layout, false);
    for (sequences, rows, start, times) in [
        (1, 2048, 128, 5),
        (1, 2048, 8_192, 7),
        (1, 2048, 32_768, 7),
        (32, 5, 8_192, 1),
        (32, 5, 32_768, 1),
        (1, 1, 8_192, 1),
        (1, 1, 32_768, 1),
    ] {
        let segment =
            |i: usize| Segment { rows: i * rows..(i + 1) * rows, start, block_table: &[], tree: None };
        let segments: Vec<Segment<'_>> = (0..sequences).map(segment).collect();
        let count = |parts| {
            let key = TilingKey { limits: Limits { parts, ..serving }, ..TilingKey::of(layout, None, true) };
            let tiling = Tiling::new(&segments, &vec![0; sequences], &OwnBlocks::default(), key);
            let counted = count_attention(&tiling, layout);
            let most = tiling.chunks.iter().map(|chunk| chunk.num_parts).max().unwrap_or(0);
            println!(
                "{sequences} x {rows} behind {start}, {parts:?}: {} blocks, {} written, {} folded, {} merged, \
                 {} chunks, {} bytes at once",
                counted.blocks.iter().sum::<usize>(),
                counted.written_parts,
                counted.folded_parts,
                counted.merged_parts,
                tiling.chunks.len(),
                most * part_len(layout) * size_of::<f32>()
            );
            counted.written_parts + counted.folded_parts + counted.merged_parts
        };
        let (chosen, of_splits) = (count(None), count(Some(PartSize::Split)));
        assert!(chosen * times <= of_splits, "behind {start}: {chosen} of {of_splits}");
    }
}
