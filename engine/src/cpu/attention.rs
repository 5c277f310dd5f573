//! Attention of a few rows of one sequence over its KV blocks, for the query heads that share one key-value
//! head.
//!
//! The order is fixed by absolute position (docs/contract.md C3): blocks of sixteen keys, merged one after
//! the other by the running maximum; inside a block, score j = ((a0 + a1) + (a2 + a3)) with a_i the sum over
//! dimensions d = i mod 4 in order of d, probabilities summed by halves, values added in order of position. A
//! masked key is left out, a block without a key is not merged. Which queries are computed side by side
//! changes nothing.
#![expect(
    clippy::needless_range_loop,
    reason = "the indices are the matrix notation, and the loops are unrolled"
)]

use std::ops::Range;

use super::dispatch::Kernel;
use super::exp::exp;
use super::lanes::{Element, LANES, Lanes};
use super::threads::Shared;
use crate::block_manager::BLOCK_SIZE;
use crate::kv_cache::{KvBlocks, KvElement};
use crate::model_config::MAX_HEAD_DIM;

const _: () = assert!(BLOCK_SIZE == LANES, "a block's scores are one vector");

/// Queries computed side by side, so that keys are widened once for all of them.
const TILE_QUERIES: usize = 4;
/// Sums over dimensions that run side by side in a score.
const SCORE_CHAINS: usize = 4;

/// Bytes that are fetched at a time.
const CACHE_LINE: usize = 64;

/// What one task attends with and to.
pub(super) struct Attend<'a, T> {
    /// `[rows, query_stride]`; a row begins with its query heads.
    pub(super) queries: &'a [f32],
    pub(super) query_stride: usize,
    pub(super) kv: &'a KvBlocks<T>,
    pub(super) layer: usize,
    pub(super) kv_head: usize,
    /// Query heads that share the key-value head.
    pub(super) group: usize,
    pub(super) head_dim: usize,
    pub(super) window: Option<u32>,
    pub(super) block_table: &'a [u32],
    /// Rows of the pass, all of one sequence.
    pub(super) rows: Range<usize>,
    /// Position of the first of them.
    pub(super) start: u32,
    /// `[rows, out_stride]`, laid out as the queries.
    pub(super) out: &'a Shared<'a, f32>,
    pub(super) out_stride: usize,
}

/// A query's running softmax.
#[derive(Clone, Copy)]
struct Running {
    max: f32,
    sum: f32,
}

impl<T: Element + KvElement> Kernel for Attend<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let num_queries = self.rows.len() * self.group;
        for first in (0..num_queries).step_by(TILE_QUERIES) {
            // SAFETY: V's instructions are there by this function's contract.
            unsafe {
                match num_queries - first {
                    1 => self.tile::<V, 1>(first),
                    2 => self.tile::<V, 2>(first),
                    3 => self.tile::<V, 3>(first),
                    _ => self.tile::<V, 4>(first),
                }
            }
        }
    }
}

impl<T: Element + KvElement> Attend<'_, T> {
    /// The row and head of the i-th query of this task.
    #[inline(always)]
    fn query(&self, i: usize) -> (usize, usize) {
        (self.rows.start + i / self.group, self.kv_head * self.group + i % self.group)
    }

    /// # Safety
    /// V's instructions are there.
    #[inline(always)]
    unsafe fn tile<V: Lanes, const Q: usize>(&self, first: usize) {
        let head_dim = self.head_dim;
        let queries: [&[f32]; Q] = std::array::from_fn(|q| {
            let (row, head) = self.query(first + q);
            let start = row * self.query_stride + head * head_dim;
            &self.queries[start..start + head_dim]
        });
        let visible: [Range<usize>; Q] = std::array::from_fn(|q| self.visible(self.query(first + q).0));
        let first_key = visible.iter().map(|keys| keys.start).min().unwrap_or(0);
        let end_key = visible.iter().map(|keys| keys.end).max().unwrap_or(0);

        let mut running = [Running { max: f32::NEG_INFINITY, sum: 0.0 }; Q];
        let mut values = [[0.0f32; MAX_HEAD_DIM]; Q];
        let blocks = first_key / BLOCK_SIZE..end_key.div_ceil(BLOCK_SIZE);
        for block in blocks.clone() {
            let (k, v) = self.kv.keys_and_values(self.block_table[block], self.layer, self.kv_head);
            let begin = block * BLOCK_SIZE;
            // SAFETY: V's instructions are there; each query holds head_dim numbers, k and v sixteen times as many;
            // keys lie inside the block.
            unsafe {
                if first == 0 && block + 1 < blocks.end {
                    self.fetch::<V>(block + 1);
                }
                let scores = scores::<V, T, Q>(queries, k);
                if visible.iter().all(|keys| keys.start <= begin && keys.end >= begin + BLOCK_SIZE) {
                    let mut weights = [BlockWeights { rescale: 1.0, probabilities: [0.0; LANES] }; Q];
                    for q in 0..Q {
                        weights[q] = weigh::<V>(&mut running[q], scores[q], head_dim);
                    }
                    add_values_of_all::<V, T, Q>(&mut values, weights, v);
                    continue;
                }
                for q in 0..Q {
                    let keys = visible[q].start.max(begin)..visible[q].end.min(begin + BLOCK_SIZE);
                    if !keys.is_empty() {
                        let keys = keys.start - begin..keys.end - begin;
                        let mut scores = scores[q];
                        for (j, score) in scores.iter_mut().enumerate() {
                            *score = if keys.contains(&j) { *score } else { f32::NEG_INFINITY };
                        }
                        let weights = weigh::<V>(&mut running[q], scores, head_dim);
                        add_values::<V, T>(&mut values[q][..head_dim], weights, (keys, v));
                    }
                }
            }
        }
        for q in 0..Q {
            let (row, head) = self.query(first + q);
            let start = row * self.out_stride + head * head_dim;
            // SAFETY: no other task has this row and head.
            let out = unsafe { self.out.slice_mut(start..start + head_dim) };
            for (out, value) in out.iter_mut().zip(&values[q]) {
                *out = value / running[q].sum;
            }
        }
    }

    /// Asks for the keys and values of a block, which lies elsewhere than the one before.
    ///
    /// # Safety
    /// V's instructions are there.
    #[inline(always)]
    unsafe fn fetch<V: Lanes>(&self, block: usize) {
        let (k, v) = self.kv.keys_and_values(self.block_table[block], self.layer, self.kv_head);
        for part in [k, v] {
            for start in (0..size_of_val(part)).step_by(CACHE_LINE) {
                // SAFETY: the caller's promise.
                unsafe { V::prefetch_near(part.as_ptr().cast::<u8>().wrapping_add(start)) };
            }
        }
    }

    /// The keys that a row may attend to.
    #[inline(always)]
    fn visible(&self, row: usize) -> Range<usize> {
        let position = self.start as usize + row - self.rows.start;
        let first = self.window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
        first..position + 1
    }
}

/// Unscaled scores of Q queries with the sixteen keys of a block.
///
/// # Safety
/// V's instructions are there; the queries are equally long, and `keys` is sixteen times as long.
#[inline(always)]
unsafe fn scores<V: Lanes, T: Element, const Q: usize>(
    queries: [&[f32]; Q],
    keys: &[T],
) -> [[f32; LANES]; Q] {
    let head_dim = keys.len() / LANES;
    let mut out = [[0.0; LANES]; Q];
    // SAFETY: d < head_dim, so key row d and each query's element d exist.
    unsafe {
        let mut chains = [[V::splat(0.0); SCORE_CHAINS]; Q];
        let mut d = 0;
        while d + SCORE_CHAINS <= head_dim {
            for chain in 0..SCORE_CHAINS {
                let key = T::load::<V>(keys.as_ptr().add((d + chain) * LANES));
                for q in 0..Q {
                    chains[q][chain] =
                        chains[q][chain].fma(V::splat(*queries[q].as_ptr().add(d + chain)), key);
                }
            }
            d += SCORE_CHAINS;
        }
        let mut chain = 0;
        while d + chain < head_dim {
            let key = T::load::<V>(keys.as_ptr().add((d + chain) * LANES));
            for q in 0..Q {
                chains[q][chain] = chains[q][chain].fma(V::splat(*queries[q].as_ptr().add(d + chain)), key);
            }
            chain += 1;
        }
        for q in 0..Q {
            let [a, b, c, d] = chains[q];
            a.add(b).add(c.add(d)).store(out[q].as_mut_ptr());
        }
    }
    out
}

/// How a block's values enter a query's sums so far.
#[derive(Clone, Copy)]
struct BlockWeights {
    rescale: f32,
    probabilities: [f32; LANES],
}

/// Takes a block's scores, those of masked keys at minus infinity, into a query's running softmax.
///
/// # Safety
/// V's instructions are there.
#[inline(always)]
unsafe fn weigh<V: Lanes>(running: &mut Running, scores: [f32; LANES], head_dim: usize) -> BlockWeights {
    let scale = 1.0 / (head_dim as f32).sqrt();
    let mut probabilities = scores.map(|score| score * scale);
    // SAFETY: the caller's promise; sixteen numbers are there.
    let largest = unsafe { V::load(probabilities.as_ptr()).largest() };
    let max = if largest > running.max { largest } else { running.max };
    // e to the 0 is 1 exactly.
    let rescale = if running.max == max { 1.0 } else { exp(running.max - max) };
    for p in &mut probabilities {
        *p = exp(*p - max);
    }
    // SAFETY: as above.
    let sum = unsafe { V::load(probabilities.as_ptr()).fold() };
    *running = Running { max, sum: running.sum.mul_add(rescale, sum) };
    BlockWeights { rescale, probabilities }
}

/// `values = values * rescale + sum over t of p[t] * v[t]` for Q queries that see all keys of a block.
///
/// # Safety
/// V's instructions are there; `v` is sixteen rows of a head.
#[inline(always)]
unsafe fn add_values_of_all<V: Lanes, T: Element, const Q: usize>(
    values: &mut [[f32; MAX_HEAD_DIM]; Q],
    weights: [BlockWeights; Q],
    v: &[T],
) {
    const D: usize = 2;
    let head_dim = v.len() / LANES;
    let mut d = 0;
    // SAFETY: the caller's promise; each access stays within head_dim.
    unsafe {
        while d + D * LANES <= head_dim {
            let mut sums = [[V::splat(0.0); Q]; D];
            for q in 0..Q {
                let rescale = V::splat(weights[q].rescale);
                for i in 0..D {
                    sums[i][q] = V::load(values[q].as_ptr().add(d + i * LANES)).mul(rescale);
                }
            }
            for t in 0..LANES {
                for i in 0..D {
                    let value = T::load::<V>(v.as_ptr().add(t * head_dim + d + i * LANES));
                    for q in 0..Q {
                        sums[i][q] = sums[i][q].fma(V::splat(weights[q].probabilities[t]), value);
                    }
                }
            }
            for q in 0..Q {
                for i in 0..D {
                    sums[i][q].store(values[q].as_mut_ptr().add(d + i * LANES));
                }
            }
            d += D * LANES;
        }
        for q in 0..Q {
            add_values_from::<V, T>(d, &mut values[q][..head_dim], weights[q], (0..LANES, v));
        }
    }
}

/// The same for one query, which sees some of the keys.
///
/// # Safety
/// V's instructions are there; `keys` lies in 0..16, `v` is sixteen rows of `values.len()`.
#[inline(always)]
unsafe fn add_values<V: Lanes, T: Element>(
    values: &mut [f32],
    weights: BlockWeights,
    seen: (Range<usize>, &[T]),
) {
    // SAFETY: the caller's promise.
    unsafe { add_values_from::<V, T>(0, values, weights, seen) };
}

/// Dimensions from `d` on.
///
/// # Safety
/// As for `add_values`.
#[inline(always)]
unsafe fn add_values_from<V: Lanes, T: Element>(
    mut d: usize,
    values: &mut [f32],
    weights: BlockWeights,
    (keys, v): (Range<usize>, &[T]),
) {
    let head_dim = values.len();
    let BlockWeights { rescale, probabilities } = weights;
    // SAFETY: the caller's promise; each access stays within head_dim.
    unsafe {
        while d + LANES <= head_dim {
            let mut sum = V::load(values.as_ptr().add(d)).mul(V::splat(rescale));
            for t in keys.clone() {
                let value = T::load::<V>(v.as_ptr().add(t * head_dim + d));
                sum = sum.fma(V::splat(probabilities[t]), value);
            }
            sum.store(values.as_mut_ptr().add(d));
            d += LANES;
        }
    }
    for d in d..head_dim {
        let add = |sum, t: usize| probabilities[t].mul_add(v[t * head_dim + d].widen(), sum);
        values[d] = keys.clone().fold(values[d] * rescale, add);
    }
}
