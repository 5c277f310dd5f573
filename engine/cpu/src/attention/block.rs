//! The arithmetic of a task's queries with one block of sixteen keys and values. Within a block, score j =
//! ((a0 + a1) + (a2 + a3)), where a_i is the sum over dimensions d = i mod 4 in order of d. Probabilities are
//! summed by halves and values added in order of position (docs/contract.md C3). A masked key is skipped; a
//! block without a visible key is not merged.
#![expect(
    clippy::needless_range_loop,
    reason = "the indices are the matrix notation, and the loops are unrolled"
)]

use std::ops::Range;

use crate::dispatch::Kernel;
use crate::exp::exp;
use crate::kv_cache::BLOCK_SIZE;
use crate::simd::{Element, F32x16, LANES};

/// Independent accumulation chains of a score, each over every fourth dimension.
const SCORE_CHAINS: usize = 4;
/// Bytes per prefetch.
const CACHE_LINE: usize = 64;

/// Addresses to prefetch while a block is processed: the keys of the next block (`l1`) and of a later one
/// (`l2`), each followed by its values.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockPrefetch {
    pub(super) l1: Option<*const u8>,
    pub(super) l2: Option<*const u8>,
}

impl BlockPrefetch {
    pub(super) const NONE: Self = Self { l1: None, l2: None };

    /// The same addresses, moved past `part`.
    pub(super) fn advanced_past<T>(self, part: &[T]) -> Self {
        let advanced_past = |from: *const u8| from.wrapping_add(size_of_val(part));
        Self { l1: self.l1.map(advanced_past), l2: self.l2.map(advanced_past) }
    }

    /// # Safety
    /// The CPU supports V's instructions.
    #[inline(always)]
    unsafe fn issue<V: F32x16>(self, from: usize, bytes: usize) {
        let lines = bytes / CACHE_LINE;
        // SAFETY: guaranteed by the caller.
        unsafe {
            if let Some(l1) = self.l1 {
                (0..lines).for_each(|line| V::prefetch_l1(l1.wrapping_add(from + line * CACHE_LINE)));
            }
            if let Some(l2) = self.l2 {
                (0..lines).for_each(|line| V::prefetch_l2(l2.wrapping_add(from + line * CACHE_LINE)));
            }
        }
    }
}

/// A block of a sequence.
#[derive(Clone, Copy)]
pub(super) struct Block<'a, U> {
    /// Index in the sequence's block table.
    pub(super) index: usize,
    /// `[head_dim][BLOCK_SIZE]`.
    pub(super) keys: &'a [U],
    /// `[BLOCK_SIZE][head_dim]`.
    pub(super) values: &'a [U],
    pub(super) prefetch: BlockPrefetch,
}

/// Widens stored numbers to f32.
///
/// # Safety
/// The CPU supports V's instructions; both are equally long, a multiple of sixteen.
#[inline(always)]
pub(super) unsafe fn widen<V: F32x16, T: Element>(from: &[T], to: &mut [f32], prefetch: BlockPrefetch) {
    let lines = CACHE_LINE / size_of::<T>();
    for i in (0..from.len()).step_by(LANES) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            if i % lines == 0 {
                prefetch.issue::<V>(i * size_of::<T>(), CACHE_LINE);
            }
            T::load::<V>(from.as_ptr().add(i)).store(to.as_mut_ptr().add(i));
        }
    }
}

/// A query's running softmax.
#[derive(Debug, Clone, Copy)]
struct RunningSoftmax {
    max: f32,
    sum: f32,
}

/// The queries of a task and their accumulators; reused by the next task without a new allocation.
#[derive(Debug, Default)]
pub(super) struct Queries {
    head_dim: usize,
    /// 1 / sqrt(head_dim).
    scale: f32,
    /// `[query][head_dim]`.
    numbers: Vec<f32>,
    /// Keys that each query may attend to.
    visible: Vec<Range<usize>>,
    running: Vec<RunningSoftmax>,
    /// `[query][head_dim]`.
    values: Vec<f32>,
}

/// Kernel over some queries, each of which attends to at least one key of the block.
pub(super) struct AttendRange<'a, U> {
    pub(super) queries: &'a mut Queries,
    pub(super) range: Range<usize>,
    pub(super) block: Block<'a, U>,
}

impl<U: Element> Kernel for AttendRange<'_, U> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        // SAFETY: this function's contract guarantees V's instructions; it is made for queries and a block
        // that fit.
        unsafe { self.queries.attend_range::<V, U>(self.range, self.block) };
    }
}

impl Queries {
    pub(super) fn clear(&mut self, head_dim: usize) {
        self.head_dim = head_dim;
        self.scale = 1.0 / (head_dim as f32).sqrt();
        self.numbers.clear();
        self.visible.clear();
        self.running.clear();
        self.values.clear();
    }

    /// Adds queries that may attend to the same keys.
    pub(super) fn add(&mut self, queries: &[f32], visible: &Range<usize>) {
        self.numbers.extend_from_slice(queries);
        self.values.resize(self.numbers.len(), 0.0);
        let queries = self.numbers.len() / self.head_dim;
        self.visible.resize(queries, visible.clone());
        self.running.resize(queries, RunningSoftmax { max: f32::NEG_INFINITY, sum: 0.0 });
    }

    pub(super) fn len(&self) -> usize {
        self.running.len()
    }

    /// Writes results to `out`, from element `start` of all queries' results on.
    pub(super) fn write(&self, start: usize, out: &mut [f32]) {
        let head_dim = self.head_dim;
        for (i, out) in out.chunks_exact_mut(head_dim).enumerate() {
            let query = start / head_dim + i;
            let sum = self.running[query].sum;
            let values = &self.values[query * head_dim..(query + 1) * head_dim];
            for (out, value) in out.iter_mut().zip(values) {
                *out = value / sum;
            }
        }
    }

    /// Merges a block into the accumulators of all queries.
    ///
    /// # Safety
    /// The CPU supports V's instructions; keys and values are sixteen rows of head_dim.
    #[inline(always)]
    pub(super) unsafe fn attend<V: F32x16, U: Element>(&mut self, block: Block<'_, U>) {
        let queries = self.len();
        assert!(
            self.numbers.len() == queries * self.head_dim
                && self.values.len() == self.numbers.len()
                && self.visible.len() == queries
                && block.keys.len() == self.head_dim * BLOCK_SIZE
                && block.values.len() == block.keys.len(),
            "operands of a block have inconsistent shapes"
        );
        // Queries are in row order, so the ends of their key ranges are non-decreasing.
        let begin = block.index * BLOCK_SIZE;
        let first = self.visible.partition_point(|keys| keys.end <= begin);
        let last = self.visible.partition_point(|keys| keys.start < begin + BLOCK_SIZE);
        // SAFETY: guaranteed by the caller.
        unsafe { V::run_outlined(AttendRange { queries: self, range: first..last, block }) };
    }

    /// Changes the keys that some queries may attend to.
    pub(super) fn set_visible(&mut self, queries: Range<usize>, visible: &Range<usize>) {
        self.visible[queries].fill(visible.clone());
    }

    /// Merges a block into the accumulators of some queries, each of which attends to at least one of its
    /// keys.
    ///
    /// # Safety
    /// As for `attend`.
    #[inline(always)]
    unsafe fn attend_range<V: F32x16, U: Element>(&mut self, queries: Range<usize>, mut block: Block<'_, U>) {
        let Range { start: mut first, end: last } = queries;
        while first < last {
            // SAFETY: guaranteed by the caller; an arm takes at most as many queries as are left, and all of
            // them attend to a key.
            unsafe {
                first += match last - first {
                    1 => self.tile::<V, U, 1>(first, block),
                    2 | 3 => self.tile::<V, U, 2>(first, block),
                    6.. if const { V::ATTENTION_ACCUMULATORS >= 6 } => self.tile::<V, U, 6>(first, block),
                    _ => self.tile::<V, U, 4>(first, block),
                };
            }
            block.prefetch = BlockPrefetch::NONE;
        }
    }

    /// Merges the block into the accumulators of Q queries from `first` on, each of which attends to some of
    /// its keys. Returns Q.
    ///
    /// # Safety
    /// As for `attend`; the queries exist.
    #[inline(always)]
    unsafe fn tile<V: F32x16, U: Element, const Q: usize>(
        &mut self,
        first: usize,
        block: Block<'_, U>,
    ) -> usize {
        let head_dim = self.head_dim;
        let begin = block.index * BLOCK_SIZE;
        let visible: &[Range<usize>; Q] = self.visible[first..].first_chunk().expect("all Q queries exist");
        let visible_keys = visible
            .each_ref()
            .map(|keys| keys.start.saturating_sub(begin)..BLOCK_SIZE.min(keys.end.saturating_sub(begin)));
        let (earliest, latest) = (&visible_keys[0], &visible_keys[Q - 1]);
        // Keys that all of these queries attend to.
        let shared = latest.start..earliest.end;
        // SAFETY: guaranteed by the caller; keys lie inside the block.
        unsafe {
            let queries = self.numbers.as_ptr().add(first * head_dim);
            let mut scores = match const { V::ATTENTION_ACCUMULATORS / Q } {
                0 | 1 => scores::<V, U, Q, 1>(queries, block),
                2 | 3 => scores::<V, U, Q, 2>(queries, block),
                _ => scores::<V, U, Q, SCORE_CHAINS>(queries, block),
            };
            if shared != (0..BLOCK_SIZE) {
                mask(&mut scores, &visible_keys);
            }
            let running: &mut [RunningSoftmax; Q] =
                self.running[first..].first_chunk_mut().expect("all Q queries exist");
            let mut weights = softmax_weights::<V, Q>(running, scores, self.scale);
            let values = &mut self.values[first * head_dim..(first + Q) * head_dim];
            if latest.start == 0 {
                let shared_values = (shared.end, block.values);
                match const { V::ATTENTION_ACCUMULATORS / Q } {
                    0 | 1 => add_values_of_all::<V, U, Q, 1>(values, &weights, shared_values),
                    2 | 3 => add_values_of_all::<V, U, Q, 2>(values, &weights, shared_values),
                    _ => add_values_of_all::<V, U, Q, 4>(values, &weights, shared_values),
                }
                for q in 0..Q {
                    weights[q].rescale = 1.0;
                    let keys = shared.end..visible_keys[q].end;
                    if !keys.is_empty() {
                        let values = &mut values[q * head_dim..(q + 1) * head_dim];
                        add_values::<V, U>((0, values), &weights[q], (keys, block.values));
                    }
                }
            } else {
                for q in 0..Q {
                    let values = &mut values[q * head_dim..(q + 1) * head_dim];
                    add_values::<V, U>((0, values), &weights[q], (visible_keys[q].clone(), block.values));
                }
            }
        }
        Q
    }
}

/// Sets the scores of keys that a query must not attend to to minus infinity.
#[inline(always)]
fn mask<const Q: usize>(scores: &mut [[f32; LANES]; Q], visible_keys: &[Range<usize>; Q]) {
    for (scores, visible_keys) in scores.iter_mut().zip(visible_keys) {
        for (j, score) in scores.iter_mut().enumerate() {
            *score = if visible_keys.contains(&j) { *score } else { f32::NEG_INFINITY };
        }
    }
}

/// Unscaled scores of Q queries with the sixteen keys of a block, C chains at a time.
///
/// # Safety
/// The CPU supports V's instructions; `queries` is `[Q][head_dim]`.
#[inline(always)]
unsafe fn scores<V: F32x16, U: Element, const Q: usize, const C: usize>(
    queries: *const f32,
    block: Block<'_, U>,
) -> [[f32; LANES]; Q] {
    let Block { keys, prefetch, .. } = block;
    let head_dim = keys.len() / LANES;
    // Bytes of keys per iteration, and the same again for values.
    let bytes = 2 * SCORE_CHAINS * LANES * size_of::<U>();
    let mut out = [[0.0; LANES]; Q];
    // SAFETY: d < head_dim, so key row d and each query's element d exist.
    unsafe {
        let mut chains = [[V::splat(0.0); SCORE_CHAINS]; Q];
        for first in (0..SCORE_CHAINS).step_by(C) {
            let mut sums = [[V::splat(0.0); C]; Q];
            let mut d = first;
            while d - first + SCORE_CHAINS <= head_dim {
                if first == 0 {
                    prefetch.issue::<V>(d / SCORE_CHAINS * bytes, bytes);
                }
                for chain in 0..C {
                    let key = U::load::<V>(keys.as_ptr().add((d + chain) * LANES));
                    for q in 0..Q {
                        let number = V::splat(*queries.add(q * head_dim + d + chain));
                        sums[q][chain] = sums[q][chain].fma(number, key);
                    }
                }
                d += SCORE_CHAINS;
            }
            for chain in 0..C.min(head_dim.saturating_sub(d)) {
                let key = U::load::<V>(keys.as_ptr().add((d + chain) * LANES));
                for q in 0..Q {
                    let number = V::splat(*queries.add(q * head_dim + d + chain));
                    sums[q][chain] = sums[q][chain].fma(number, key);
                }
            }
            for q in 0..Q {
                chains[q][first..first + C].copy_from_slice(&sums[q]);
            }
        }
        for q in 0..Q {
            let [a, b, c, d] = chains[q];
            a.add(b).add(c.add(d)).store(out[q].as_mut_ptr());
        }
    }
    out
}

/// Weights that merge a block's values into a query's accumulators. Aligned, so that a vector load reads back
/// exactly what one store wrote: a load that spans two stores stalls the processor.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct BlockWeights {
    probabilities: [f32; LANES],
    rescale: f32,
}

/// Merges a block's scores, with minus infinity for masked keys, into the running softmax of Q queries. Does
/// each step for all queries and without branches, because every step depends on the one before.
///
/// # Safety
/// The CPU supports V's instructions.
#[inline(always)]
unsafe fn softmax_weights<V: F32x16, const Q: usize>(
    running: &mut [RunningSoftmax; Q],
    scores: [[f32; LANES]; Q],
    scale: f32,
) -> [BlockWeights; Q] {
    let mut weights = [BlockWeights { rescale: 1.0, probabilities: [0.0; LANES] }; Q];
    let mut maxima = [0.0; Q];
    // One lane per query.
    let mut rescales = [0.0; LANES];
    for q in 0..Q {
        // SAFETY: guaranteed by the caller; a row of scores has sixteen numbers.
        let largest = unsafe {
            let scaled = V::load(scores[q].as_ptr()).mul(V::splat(scale));
            scaled.store(weights[q].probabilities.as_mut_ptr());
            scaled.reduce_max()
        };
        let max = if largest > running[q].max { largest } else { running[q].max };
        (maxima[q], rescales[q]) = (max, running[q].max - max);
    }
    // e^0 is exactly 1, and e^(minus infinity) is 0.
    for rescale in &mut rescales {
        *rescale = exp(*rescale);
    }
    for q in 0..Q {
        for p in &mut weights[q].probabilities {
            *p = exp(*p - maxima[q]);
        }
    }
    for q in 0..Q {
        // SAFETY: as above.
        let sum = unsafe { V::load(weights[q].probabilities.as_ptr()).reduce_sum() };
        running[q] = RunningSoftmax { max: maxima[q], sum: running[q].sum.mul_add(rescales[q], sum) };
        weights[q].rescale = rescales[q];
    }
    weights
}

/// `values = values * rescale + sum over t of p[t] * v[t]` for Q queries that attend to the first `keys` keys
/// of a block, D vectors of dimensions at a time.
///
/// # Safety
/// The CPU supports V's instructions; `values` is `[Q][head_dim]`, `v` is sixteen rows of a head, `keys` is
/// at most sixteen.
#[inline(always)]
unsafe fn add_values_of_all<V: F32x16, U: Element, const Q: usize, const D: usize>(
    values: &mut [f32],
    weights: &[BlockWeights; Q],
    (keys, v): (usize, &[U]),
) {
    let head_dim = v.len() / LANES;
    let mut d = 0;
    // SAFETY: guaranteed by the caller; each access stays within head_dim.
    unsafe {
        while d + D * LANES <= head_dim {
            let at = values.as_mut_ptr().add(d);
            let mut sums = [[V::splat(0.0); Q]; D];
            for q in 0..Q {
                let rescale = V::splat(weights[q].rescale);
                for i in 0..D {
                    sums[i][q] = V::load(at.add(q * head_dim + i * LANES)).mul(rescale);
                }
            }
            for t in 0..keys {
                let mut row = [V::splat(0.0); D];
                for i in 0..D {
                    row[i] = U::load::<V>(v.as_ptr().add(t * head_dim + d + i * LANES));
                }
                for q in 0..Q {
                    let p = V::splat(weights[q].probabilities[t]);
                    for i in 0..D {
                        sums[i][q] = sums[i][q].fma(p, row[i]);
                    }
                }
            }
            for q in 0..Q {
                for i in 0..D {
                    sums[i][q].store(at.add(q * head_dim + i * LANES));
                }
            }
            d += D * LANES;
        }
        for q in 0..Q {
            let values = &mut values[q * head_dim..(q + 1) * head_dim];
            add_values::<V, U>((d, values), &weights[q], (0..keys, v));
        }
    }
}

/// Like [`add_values_of_all`] for one query that may attend to only some of the keys, in dimensions from `d`
/// on.
///
/// # Safety
/// The CPU supports V's instructions; `keys` lies in 0..16, `v` is sixteen rows of `values.len()`.
#[inline(always)]
unsafe fn add_values<V: F32x16, U: Element>(
    (mut d, values): (usize, &mut [f32]),
    weights: &BlockWeights,
    (keys, v): (Range<usize>, &[U]),
) {
    let head_dim = values.len();
    let BlockWeights { rescale, probabilities } = weights;
    // SAFETY: guaranteed by the caller; each access stays within head_dim.
    unsafe {
        while d + LANES <= head_dim {
            let mut sum = V::load(values.as_ptr().add(d)).mul(V::splat(*rescale));
            for t in keys.clone() {
                let value = U::load::<V>(v.as_ptr().add(t * head_dim + d));
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
