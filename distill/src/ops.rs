//! The parts of a layer, each forward and backward. `d_x` is the gradient of the loss with respect to `x`.
//! Each backward function returns the gradients of its weights and of its input. Rows are positions.

use ndarray::{Array1, Array2, ArrayView1, Axis, Zip};

/// `x W^T`, plus `b` if there is a bias (one row): `[positions, inputs]` to `[positions, outputs]`.
pub fn linear(x: &Array2<f32>, weight: &Array2<f32>, bias: Option<&Array2<f32>>) -> Array2<f32> {
    let mut y = x.dot(&weight.t());
    if let Some(bias) = bias {
        y += bias;
    }
    y
}

/// Gradients of weight, bias and input.
pub fn linear_backward(
    x: &Array2<f32>,
    weight: &Array2<f32>,
    d_y: &Array2<f32>,
) -> (Array2<f32>, Array2<f32>, Array2<f32>) {
    let d_weight = d_y.t().dot(x);
    let d_bias = d_y.sum_axis(Axis(0)).insert_axis(Axis(0));
    (d_weight, d_bias, d_y.dot(weight))
}

/// `x / rms(x) * weight` per row, and `1 / rms(x)` of each row, which the backward pass needs.
pub fn rms_norm(x: &Array2<f32>, weight: ArrayView1<'_, f32>, eps: f32) -> (Array2<f32>, Array1<f32>) {
    let width = x.ncols() as f32;
    let scales = x.map_axis(Axis(1), |row| 1.0 / (row.dot(&row) / width + eps).sqrt());
    let mut y = x.clone();
    Zip::from(y.rows_mut()).and(&scales).for_each(|mut row, &scale| {
        Zip::from(&mut row).and(weight).for_each(|y, &weight| *y *= scale * weight);
    });
    (y, scales)
}

/// Gradients of the weight (one row) and of the input.
///
/// With `r = (mean(x^2) + eps)^(-1/2)` and `y_j = x_j r w_j`:
/// `d x_j = r d y_j w_j - x_j r^3 / n sum_i(d y_i w_i x_i)`.
pub fn rms_norm_backward(
    x: &Array2<f32>,
    weight: ArrayView1<'_, f32>,
    scales: &Array1<f32>,
    d_y: &Array2<f32>,
) -> (Array2<f32>, Array2<f32>) {
    let width = x.ncols() as f32;
    let mut d_weight = Array2::zeros((1, x.ncols()));
    let mut d_x = Array2::zeros(x.raw_dim());
    for (row, &scale) in scales.indexed_iter() {
        let (x, d_y) = (x.row(row), d_y.row(row));
        let shared =
            Zip::from(x).and(d_y).and(weight).fold(0.0, |sum, x, d_y, weight| sum + x * d_y * weight);
        let shared = shared * scale * scale * scale / width;
        Zip::from(d_x.row_mut(row)).and(x).and(d_y).and(weight).for_each(|d_x, x, d_y, weight| {
            *d_x = scale * d_y * weight - x * shared;
        });
        Zip::from(d_weight.row_mut(0))
            .and(x)
            .and(d_y)
            .for_each(|d_weight, x, d_y| *d_weight += d_y * x * scale);
    }
    (d_weight, d_x)
}

/// `silu(gate) * up`.
pub fn gated(gate: &Array2<f32>, up: &Array2<f32>) -> Array2<f32> {
    Zip::from(gate).and(up).map_collect(|&gate, &up| gate * sigmoid(gate) * up)
}

/// Gradients of gate and up.
pub fn gated_backward(gate: &Array2<f32>, up: &Array2<f32>, d_y: &Array2<f32>) -> (Array2<f32>, Array2<f32>) {
    let d_gate = Zip::from(gate).and(up).and(d_y).map_collect(|&gate, &up, &d_y| {
        let s = sigmoid(gate);
        d_y * up * s * (1.0 + gate * (1.0 - s))
    });
    let d_up = Zip::from(gate).and(d_y).map_collect(|&gate, &d_y| d_y * gate * sigmoid(gate));
    (d_gate, d_up)
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Logits to log probabilities, row by row.
pub fn log_softmax(logits: &mut Array2<f32>) {
    for mut row in logits.rows_mut() {
        let most = row.fold(f32::NEG_INFINITY, |most, &x| most.max(x));
        let sum: f64 = row.iter().map(|x| f64::from((x - most).exp())).sum();
        let log_sum = most + sum.ln() as f32;
        row.mapv_inplace(|x| x - log_sum);
    }
}
