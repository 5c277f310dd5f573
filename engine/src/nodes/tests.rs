//! Engines whose ranks are on several nodes, which are threads here, against engines in one process.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cpu_kernels::{NUM_SLICES, tree_sum};

use super::*;
use crate::collective::{Collective, across_nodes};
use crate::host::HostRows;
use crate::{Engine, LoadOptions, SequenceRows, TokenId, TreeRows, WeightFormat};

/// Numbers whose sum depends on the order.
fn part(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7 + rank * 13) % 11) as f32 * 10f32.powi((i + 3 * rank) as i32 % 9 - 4)).collect()
}

/// Runs `run` on each rank of `count` nodes with `local` ranks each; results are in order of rank.
fn on_every_rank<T: Send>(
    (count, local): (usize, usize),
    run: impl Fn(usize, &dyn Collective<HostRows>) -> T + Sync,
) -> Vec<T> {
    let ends: Vec<_> = nodes_of_threads(count)
        .into_iter()
        .flat_map(|node| {
            let ranks = ranks_of_node(local, Some(&node));
            let barrier = Arc::new(RankBarrier::of_node(ranks, Duration::from_secs(100)));
            across_nodes(&Arc::new(node), local, &barrier)
        })
        .collect();
    let run = &run;
    std::thread::scope(|scope| {
        let ranks = ends.iter().enumerate();
        let threads: Vec<_> = ranks.map(|(rank, end)| scope.spawn(move || run(rank, end.as_ref()))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

const SPLITS: [(usize, usize); 6] = [(2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)];

#[test]
fn every_rank_of_every_node_gets_the_tree_sum_of_the_contract() {
    for (count, local) in SPLITS {
        let ranks = count * local;
        for len in [1, 7, 300] {
            let sum = |i: usize| {
                // A rank's branch of the tree is its first slice; the other slices are zeros.
                let mut slices = [0.0; NUM_SLICES];
                (0..ranks).for_each(|rank| slices[rank * NUM_SLICES / ranks] = part(rank, len)[i]);
                tree_sum(slices).to_bits()
            };
            let expected: Vec<u32> = (0..len).map(sum).collect();
            let found = on_every_rank((count, local), |rank, end| {
                let mut sums = HostRows::default();
                for _ in 0..20 {
                    sums = part(rank, len).into();
                    end.all_reduce(&mut sums).unwrap();
                }
                sums.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            });
            assert!(found.iter().all(|sums| *sums == expected), "{count} nodes of {local}, {len} numbers");
        }
    }
}

#[test]
fn the_first_rank_of_all_gets_the_columns_of_every_rank() {
    for (count, local) in SPLITS {
        let widths: Vec<usize> = (0..count * local).map(|rank| 1 + rank % 3).collect();
        let found = on_every_rank((count, local), |rank, end| {
            let number = |i: usize| (100 * rank + 10 * (i / widths[rank]) + i % widths[rank]) as f32;
            let mut rows: HostRows = (0..2 * widths[rank]).map(number).collect::<Vec<_>>().into();
            end.gather(&mut rows, &widths).unwrap();
            // The next operation finds the buffers in order.
            end.all_reduce(&mut vec![1.0].into()).unwrap();
            rows.take()
        });
        let row = |row: usize| {
            let columns = |(rank, width): (usize, &usize)| {
                (0..*width).map(move |column| (100 * rank + 10 * row + column) as f32)
            };
            widths.iter().enumerate().flat_map(columns).collect::<Vec<_>>()
        };
        assert_eq!(found[0], [row(0), row(1)].concat(), "{count} nodes of {local}");
    }
}

fn options(tensor_parallel: usize, kv_memory_bytes: u64) -> LoadOptions {
    let model_dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/draft");
    LoadOptions { tensor_parallel, ..LoadOptions::new(model_dir, WeightFormat::AsStored, kv_memory_bytes) }
}

const KV_BYTES: u64 = 8 << 20;

/// Bits of logits over what an engine can be asked for: several sequences in a batch, a fork, a rewind, a
/// tree of which a path is kept.
fn bits(engine: &mut Engine) -> Vec<u32> {
    let ids: Vec<TokenId> = (0..60).map(|i| i * 29 % 500).collect();
    let rows = |slot, token_ids, num_logits| SequenceRows { slot, token_ids, num_logits };
    let (a, b) = (engine.open(), engine.open());
    let mut found = vec![engine.forward(&[rows(a, &ids[..37], 2), rows(b, &ids[5..25], 1)]).unwrap()];
    let fork = engine.fork(a, 35).unwrap();
    found.push(engine.forward(&[rows(fork, &ids[40..43], 3), rows(a, &ids[37..39], 1)]).unwrap());
    engine.truncate(b, 11);
    let tree = TreeRows { sequence: 0, num_stored: 0, parents: &[1, 1, 2, 3][..] };
    let tree = TreeRows { parents: &[0, 1, 1, 3], ..tree };
    let ran = engine.forward_with_trees(&[rows(b, &ids[10..15], 5)], &[], &[tree]).unwrap();
    found.push(ran.logits);
    engine.keep_path(b, 12, (&[0, 2, 3], &[ids[11], ids[13], ids[14]])).unwrap();
    found.push(engine.forward(&[rows(b, &ids[20..21], 1)]).unwrap());
    let rows = found.iter().flat_map(|logits| (0..logits.rows()).map(|i| logits.row(i)));
    rows.flatten().map(|x| x.to_bits()).collect()
}

/// Loads a model on `count` nodes, passes the leader's engine to `run`, and returns what followers end with.
fn on_nodes<T>(
    count: usize,
    options: impl Fn(usize) -> LoadOptions + Sync,
    run: impl FnOnce(Result<Engine, EngineError>) -> T,
) -> (T, Vec<EngineError>) {
    let mut nodes = nodes_of_threads(count);
    let leader = nodes.remove(0);
    let options = &options;
    std::thread::scope(|scope| {
        let follow = |(i, nodes): (usize, Nodes)| {
            scope.spawn(move || match Follower::load(&options(i + 1), nodes) {
                Ok(follower) => follower.run(),
                Err(error) => error,
            })
        };
        let followers: Vec<_> = nodes.into_iter().enumerate().map(follow).collect();
        let done = run(Engine::load_on_nodes(&options(0), leader));
        (done, followers.into_iter().map(|follower| follower.join().unwrap()).collect())
    })
}

#[test]
fn nodes_change_no_bit() {
    let expected = bits(&mut Engine::load(&options(1, KV_BYTES)).unwrap());
    for (count, ranks) in [(2, 2), (2, 4), (4, 4)] {
        let mut alone = Engine::load(&options(ranks, KV_BYTES)).unwrap();
        assert!(bits(&mut alone) == expected, "{ranks} ranks of one process");
        let (found, ends) = on_nodes(
            count,
            |_| options(ranks, KV_BYTES),
            |engine| {
                let mut engine = engine.unwrap();
                let found = bits(&mut engine);
                assert_eq!(engine.info().numerics_id, alone.info().numerics_id);
                assert_eq!(engine.info().kv_bytes_per_token, alone.info().kv_bytes_per_token);
                // Each node has that much memory.
                assert_eq!(engine.info().kv_blocks, count as u64 * alone.info().kv_blocks);
                found
            },
        );
        assert!(found == expected, "{count} nodes, {ranks} ranks");
        assert!(ends.iter().all(|error| error.to_string() == "node 0: it is gone"), "{ends:?}");
    }
}

#[test]
fn the_node_with_the_least_memory_determines_the_number_of_blocks() {
    let memory = |node| options(2, if node == 1 { KV_BYTES / 4 } else { KV_BYTES });
    let (blocks, _) = on_nodes(2, memory, |engine| engine.unwrap().info().kv_blocks);
    let alone = Engine::load(&options(1, KV_BYTES)).unwrap().info().kv_blocks;
    assert_eq!(blocks, 2 * alone / 4);
}

#[test]
fn nodes_with_other_bits_or_a_failure_fail_by_name_on_every_node() {
    let int8 = |node| LoadOptions {
        weights: if node == 1 { WeightFormat::Int8 } else { WeightFormat::AsStored },
        ..options(2, KV_BYTES)
    };
    let (error, ends) = on_nodes(2, int8, |engine| engine.map(drop).unwrap_err().to_string());
    assert!(error.starts_with("node 1 has the numerics id ") && error.contains("node 0 has "), "{error}");
    assert_eq!(ends[0].to_string(), format!("node 0: {error}"));

    let nowhere = |node| LoadOptions {
        model_dir: if node == 2 { "nowhere".into() } else { options(4, KV_BYTES).model_dir },
        ..options(4, KV_BYTES)
    };
    let (error, ends) = on_nodes(4, nowhere, |engine| engine.map(drop).unwrap_err().to_string());
    assert!(error.starts_with("node 2: cannot read nowhere"), "{error}");
    let expected = format!("node 0: {error}");
    assert!([0, 2].iter().all(|i| ends[*i].to_string() == expected), "{ends:?}");
}

/// A follower that is gone fails the forward that needs it, and all later calls.
#[test]
fn a_lost_node_fails_the_engine_by_name() {
    let mut nodes = nodes_of_threads(2);
    let (leader, follower) = (nodes.remove(0), nodes.remove(0));
    let options = options(2, KV_BYTES);
    std::thread::scope(|scope| {
        // Loads, and ends before it runs anything.
        let loaded = scope.spawn(|| Follower::load(&options, follower).map(drop));
        let mut engine = Engine::load_on_nodes(&options, leader).unwrap();
        loaded.join().unwrap().unwrap();
        let slot = engine.open();
        let rows = SequenceRows { slot, token_ids: &[1], num_logits: 1 };
        for _ in 0..2 {
            let error = engine.forward(&[rows]).unwrap_err();
            assert!(error.is_fatal());
            let expected = "rank 1 is lost: node 1: it is gone; the engine must be reloaded";
            assert_eq!(error.to_string(), expected);
        }
    });
}

#[test]
fn ranks_that_nodes_cannot_share_are_rejected() {
    let error = |tensor_parallel| {
        let (error, ends) =
            on_nodes(2, |_| options(tensor_parallel, KV_BYTES), |engine| engine.map(drop).unwrap_err());
        assert_eq!(ends.len(), 1);
        error.to_string()
    };
    assert!(error(1).contains("tensor_parallel is 1: expected a multiple of 2"), "{}", error(1));
    assert!(error(6).contains("expected 1, 2, 4 or 8"), "{}", error(6));
}

#[test]
fn a_leader_is_connected_to_its_followers_in_order() {
    let mut nodes = nodes_of_threads(4);
    assert_eq!(
        nodes.iter().map(|node| (node.node(), node.count())).collect::<Vec<_>>(),
        [(0, 4), (1, 4), (2, 4), (3, 4)]
    );
    let mut leader = nodes.remove(0);
    leader.peers.swap(0, 1);
    let peers = std::mem::take(&mut leader.peers);
    let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| Nodes::new(0, 4, peers)));
    assert!(made.is_err());
}
