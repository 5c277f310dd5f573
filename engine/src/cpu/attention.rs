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
use super::lanes::{Element, LANES, Lanes, fold};
use super::threads::Shared;
use crate::block_manager::BLOCK_SIZE;
use crate::kv_cache::{KvBlocks, KvElement};
use crate::model_config::MAX_HEAD_DIM;

const _: () = assert!(BLOCK_SIZE == LANES, "a block's scores are one vector");

/// Queries computed side by side, so that keys are widened once for all of them.
const TILE_QUERIES: usize = 4;
/// Sums over dimensions that run side by side in a score.
const SCORE_CHAINS: usize = 4;

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
        for block in first_key / BLOCK_SIZE..end_key.div_ceil(BLOCK_SIZE) {
            let (k, v) = self.kv.keys_and_values(self.block_table[block], self.layer, self.kv_head);
            // SAFETY: V's instructions are there; each query holds head_dim numbers, k as many times sixteen.
            let scores = unsafe { scores::<V, T, Q>(queries, k) };
            for q in 0..Q {
                let begin = block * BLOCK_SIZE;
                let keys = visible[q].start.max(begin)..visible[q].end.min(begin + BLOCK_SIZE);
                if keys.is_empty() {
                    continue;
                }
                let keys = keys.start - begin..keys.end - begin;
                // SAFETY: V's instructions are there; keys lie inside the block.
                unsafe { merge::<V, T>(&mut running[q], &mut values[q][..head_dim], scores[q], keys, v) };
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

/// Merges a block's visible keys into a query's running softmax.
///
/// # Safety
/// V's instructions are there; `keys` lies in 0..16, `v` is sixteen rows of `values.len()`.
#[inline(always)]
unsafe fn merge<V: Lanes, T: Element>(
    running: &mut Running,
    values: &mut [f32],
    scores: [f32; LANES],
    keys: Range<usize>,
    v: &[T],
) {
    let head_dim = values.len();
    let scale = 1.0 / (head_dim as f32).sqrt();
    let mut probabilities = [f32::NEG_INFINITY; LANES];
    for j in 0..LANES {
        let score = scores[j] * scale;
        probabilities[j] = if j >= keys.start && j < keys.end { score } else { f32::NEG_INFINITY };
    }
    let mut max = running.max;
    for &score in &probabilities {
        max = if score > max { score } else { max };
    }
    let rescale = exp(running.max - max);
    for p in &mut probabilities {
        *p = exp(*p - max);
    }
    running.sum = running.sum.mul_add(rescale, fold(probabilities));
    running.max = max;

    let weights = BlockWeights { rescale, probabilities, keys };
    let mut d = 0;
    // SAFETY: each call stays within head_dim.
    unsafe {
        while d + 4 * LANES <= head_dim {
            weights.add_values::<V, T, 4>(&mut values[d..], v.as_ptr().add(d), head_dim);
            d += 4 * LANES;
        }
        while d + LANES <= head_dim {
            weights.add_values::<V, T, 1>(&mut values[d..], v.as_ptr().add(d), head_dim);
            d += LANES;
        }
    }
    for d in d..head_dim {
        let start = values[d] * weights.rescale;
        let add = |sum, t: usize| weights.probabilities[t].mul_add(v[t * head_dim + d].widen(), sum);
        values[d] = weights.keys.clone().fold(start, add);
    }
}

/// How a block's values enter the sums so far.
struct BlockWeights {
    rescale: f32,
    probabilities: [f32; LANES],
    keys: Range<usize>,
}

impl BlockWeights {
    /// `values = values * rescale + sum over t of p[t] * v[t]` for D vectors of dimensions.
    ///
    /// # Safety
    /// V's instructions are there; `values` and each visible row of `v`, `head_dim` apart, hold D vectors.
    #[inline(always)]
    unsafe fn add_values<V: Lanes, T: Element, const D: usize>(
        &self,
        values: &mut [f32],
        v: *const T,
        head_dim: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let start = values.as_mut_ptr();
            let rescale = V::splat(self.rescale);
            let mut sums = [rescale; D];
            for i in 0..D {
                sums[i] = V::load(start.add(i * LANES)).mul(rescale);
            }
            for t in self.keys.start..self.keys.end {
                let p = V::splat(self.probabilities[t]);
                for i in 0..D {
                    sums[i] = sums[i].fma(p, T::load::<V>(v.add(t * head_dim + i * LANES)));
                }
            }
            for i in 0..D {
                sums[i].store(start.add(i * LANES));
            }
        }
    }
}
