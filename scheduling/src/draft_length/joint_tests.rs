//! Draft lengths of lanes that share a target.

use super::tests::{Chance, World};
use super::*;

/// Draft lengths to which lanes of one sequence each converge on a shared target; `num_right` returns the
/// number of right tokens in a lane's draft.
fn converged<const N: usize>(micros_a_row: f64, mut num_right: impl FnMut(usize) -> u32) -> [u32; N] {
    let (target, draft) = (World::cost(|rows| 20_000.0 + micros_a_row * rows), World::cost(|_| 300.0));
    let mut lanes = [(); N].map(|()| DraftLength::new(8));
    for _ in 0..200 {
        for own in 0..N {
            let view = |lane: &DraftLength| LaneView {
                sequences: 1,
                k: lane.k,
                num_leaves: lane.num_leaves(),
                context: 0.0,
                round_us: 0.0,
                joint: lane.joint(),
            };
            let views: Vec<LaneView> = lanes.iter().map(view).collect();
            let load = Load::of(&views, own, N as u32);
            let k = lanes[own].choose(load, &target, &draft).num_draft_tokens;
            let right = num_right(own);
            lanes[own].observe_agreement(k..k + 1, u32::from(k < right));
            lanes[own].observe_verification(k, k.min(right));
        }
    }
    lanes.map(|lane| lane.k)
}

/// The same, if each lane always has the same number of right tokens.
fn beside_each_other<const N: usize>(num_right: [u32; N], micros_a_row: f64) -> [u32; N] {
    converged(micros_a_row, |own| num_right[own])
}

#[test]
fn lanes_that_gain_together_draft_beside_each_other_though_rows_cost() {
    assert_eq!(beside_each_other([0, 0], 2_000.0), [0, 0]);
    assert_eq!(
        beside_each_other([8, 0], 2_000.0),
        [0, 0],
        "the second lane would wait for the rows of the first"
    );
    let ks = beside_each_other([8, 8], 2_000.0);
    assert!(ks.iter().all(|k| *k >= 2), "{ks:?}");
    assert_eq!(beside_each_other([8, 8], 1_000_000.0), [0, 0], "rows cost as much as drafts gain");
}

#[test]
fn lanes_that_draft_together_mind_what_the_others_wait_for() {
    let alone = beside_each_other([2], 2_000.0)[0];
    assert_eq!(alone, 2);
    // All tokens are right, and each row costs a tenth of a forward. One lane drafts the maximum; six stop
    // where the delay of the others outweighs their gain.
    let (one, six) = (beside_each_other([8], 2_000.0), beside_each_other([8; 6], 2_000.0));
    assert_eq!(one, [8]);
    assert!(six.iter().all(|k| (1..8).contains(k)), "{six:?}");
}

#[test]
fn many_lanes_draft_one_token_each_where_longer_drafts_would_slow_one_down() {
    // Seven lanes with acceptance 0.85 would draft two tokens or more. Their rows would cost the eighth, with
    // 0.4, more than its drafts gain.
    let mut chance = Chance(1);
    let ks = converged::<8>(900.0, |own| {
        let rate: f64 = if own == 0 { 0.4 } else { 0.85 };
        (chance.next().ln() / rate.ln()) as u32
    });
    assert_eq!(ks, [1; 8]);
}
