//! Causal attention with shared KV heads (GQA), and rope, forward and backward. Columns are heads, one after
//! the other.

use ndarray::{Array2, ArrayView2, ArrayViewMut2, Axis, Slice};

use crate::ops::log_softmax;

/// Layout of columns as heads.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    /// Number of query heads.
    pub queries: usize,
    /// Number of KV heads; each serves an equal number of consecutive query heads.
    pub kv: usize,
    /// Columns per head.
    pub dim: usize,
}

impl Heads {
    fn columns(&self, x: &Array2<f32>, head: usize) -> Array2<f32> {
        x.slice_axis(Axis(1), self.range(head)).to_owned()
    }

    fn columns_mut<'a>(&self, x: &'a mut Array2<f32>, head: usize) -> ArrayViewMut2<'a, f32> {
        x.slice_axis_mut(Axis(1), self.range(head))
    }

    fn range(&self, head: usize) -> Slice {
        Slice::from(head * self.dim..(head + 1) * self.dim)
    }

    /// The KV head of a query head.
    fn kv_of(&self, head: usize) -> usize {
        head / (self.queries / self.kv)
    }

    fn scale(&self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }
}

/// Cosines and sines of every position, `[positions, dim / 2]` each.
#[derive(Debug, Clone)]
pub struct Rope {
    cos: Array2<f32>,
    sin: Array2<f32>,
}

impl Rope {
    /// Creates the table for heads of `dim` columns with base `theta`.
    pub fn new(positions: usize, dim: usize, theta: f64) -> Self {
        let half = dim / 2;
        let frequency = |pair: usize| theta.powf(-(pair as f64) / half as f64) as f32;
        let angles = Array2::from_shape_fn((positions, half), |(at, pair)| at as f32 * frequency(pair));
        Self { cos: angles.mapv(f32::cos), sin: angles.mapv(f32::sin) }
    }

    /// Rotates each head of every row by its position.
    pub fn turn(&self, x: &mut Array2<f32>) {
        self.rotate(x, 1.0);
    }

    /// Rotates gradients back: the gradient of a rotation is the inverse rotation.
    pub fn rotate_back(&self, d_x: &mut Array2<f32>) {
        self.rotate(d_x, -1.0);
    }

    fn rotate(&self, x: &mut Array2<f32>, sign: f32) {
        let half = self.cos.ncols();
        for (position, mut row) in x.rows_mut().into_iter().enumerate() {
            for first in (0..row.len()).step_by(2 * half) {
                for pair in 0..half {
                    let (cos, sin) = (self.cos[(position, pair)], sign * self.sin[(position, pair)]);
                    let (a, b) = (row[first + pair], row[first + half + pair]);
                    row[first + pair] = a * cos - b * sin;
                    row[first + half + pair] = b * cos + a * sin;
                }
            }
        }
    }
}

/// Queries, keys and values of one layer.
#[derive(Clone, Copy)]
pub struct Projections<'a> {
    /// `[positions, query heads x dim]`
    pub q: &'a Array2<f32>,
    /// `[positions, KV heads x dim]`
    pub k: &'a Array2<f32>,
    /// `[positions, KV heads x dim]`
    pub v: &'a Array2<f32>,
}

/// Returns the attention output of every row over itself and the rows before it, and the probabilities of
/// each query head, which the backward pass needs.
pub fn attend(heads: Heads, of: Projections<'_>) -> (Array2<f32>, Vec<Array2<f32>>) {
    let Projections { q, k, v } = of;
    let mut mixed = Array2::zeros(q.raw_dim());
    let mut all = Vec::with_capacity(heads.queries);
    for head in 0..heads.queries {
        let (k, v) = (heads.columns(k, heads.kv_of(head)), heads.columns(v, heads.kv_of(head)));
        let mut probabilities = heads.columns(q, head).dot(&k.t()) * heads.scale();
        causal_softmax(&mut probabilities);
        heads.columns_mut(&mut mixed, head).assign(&probabilities.dot(&v));
        all.push(probabilities);
    }
    (mixed, all)
}

/// Gradients of queries, keys and values.
pub struct AttentionGradients {
    /// `[positions, query heads x dim]`
    pub q: Array2<f32>,
    /// `[positions, KV heads x dim]`
    pub k: Array2<f32>,
    /// `[positions, KV heads x dim]`
    pub v: Array2<f32>,
}

/// Gradients of [`attend`], given the gradient of its output.
pub fn attend_backward(
    heads: Heads,
    of: Projections<'_>,
    probabilities: &[Array2<f32>],
    d_mixed: &Array2<f32>,
) -> AttentionGradients {
    let Projections { q, k, v } = of;
    let zeros = |of: &Array2<f32>| Array2::zeros(of.raw_dim());
    let mut d = AttentionGradients { q: zeros(q), k: zeros(k), v: zeros(v) };
    for (head, p) in probabilities.iter().enumerate() {
        let kv = heads.kv_of(head);
        let d_out = heads.columns(d_mixed, head);
        add(heads.columns_mut(&mut d.v, kv), p.t().dot(&d_out).view());
        // Softmax: d s = p (d p - sum(p d p)).
        let mut d_scores = d_out.dot(&heads.columns(v, kv).t());
        for (mut d_row, p) in d_scores.rows_mut().into_iter().zip(p.rows()) {
            let mean = d_row.dot(&p);
            d_row.zip_mut_with(&p, |d, p| *d = p * (*d - mean));
        }
        d_scores *= heads.scale();
        heads.columns_mut(&mut d.q, head).assign(&d_scores.dot(&heads.columns(k, kv)));
        add(heads.columns_mut(&mut d.k, kv), d_scores.t().dot(&heads.columns(q, head)).view());
    }
    d
}

fn add(mut to: ArrayViewMut2<'_, f32>, more: ArrayView2<'_, f32>) {
    to += &more;
}

/// Converts scores to probabilities; a row does not attend to later rows.
fn causal_softmax(scores: &mut Array2<f32>) {
    for (position, mut row) in scores.rows_mut().into_iter().enumerate() {
        row.iter_mut().skip(position + 1).for_each(|score| *score = f32::NEG_INFINITY);
    }
    log_softmax(scores);
    scores.mapv_inplace(f32::exp);
}
