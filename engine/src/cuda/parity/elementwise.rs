//! Operations on single rows, heads and numbers.

use cpu_kernels::{HeadLayout, reference};
use half::bf16;

use super::kv_layout::{key_index, value_index};
use super::{Numbers, Parity, Scale, compare, compare_equal, widened};
use crate::cuda::CudaError;
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::{
    Angles, Embedding, FinishSum, GroupSums, InputLayout, NormHeads, RmsNorm, Swiglu, WriteKv, add,
    multiply_only, read_words, rotate, take_rows, to_bf16,
};

pub(super) fn cases<E: Executor>(e: &mut E, scale: Scale) -> Result<Vec<Parity>, CudaError> {
    let mut parities = vec![embedding(e, scale)?];
    parities.extend(rows(e, scale.pick((5, 33), (512, 4096)))?);
    for width in scale.pick([48, 300, 8500], [4096, 8192, 9000]) {
        parities.push(rms_norm(e, scale.pick(3, 64), width)?);
        parities.extend(joined_norm(e, (scale.pick(3, 64), width))?);
    }
    for (num_heads, num_kv_heads, head_dim) in [(4, 2, 16), (3, 1, 32), (2, 2, 64), (8, 2, 128)] {
        parities.extend(heads(e, HeadLayout { num_heads, num_kv_heads, head_dim })?);
    }
    parities.push(silu(e, scale.pick((3, 300), (64, 14_336)))?);
    parities.push(silu(e, (3, 301))?);
    for len in scale.pick(vec![4, 1020, 9000], vec![4, 1 << 24, (1 << 24) + 12]) {
        parities.push(reading(e, (len, scale.pick(2, 640)))?);
    }
    parities.push(multiplying(e, scale.pick((2, 5), (640, 1000)))?);
    Ok(parities)
}

/// Checks the results of blocks that only read memory.
fn reading<E: Executor>(e: &mut E, (len, blocks): (usize, usize)) -> Result<Parity, CudaError> {
    let mut numbers = Numbers(12);
    let words: Vec<u32> = (0..len).map(|_| numbers.bits() as u32).collect();
    let on_device = Tensor::of(e, &words, "words")?;
    let mut sums = Tensor::zeros(e, blocks, "sums")?;
    read_words(e, &on_device, &mut sums)?;
    let mut expected = vec![0; blocks];
    words.iter().enumerate().for_each(|(i, word)| expected[i / (4 * 256) % blocks] ^= word);
    Ok(compare_equal(format!("read_words, {len} in {blocks} blocks"), &sums.read(e, 0..blocks)?, &expected))
}

/// Checks the results of blocks that only multiply ones, and the reported number of operations.
fn multiplying<E: Executor>(e: &mut E, (blocks, rounds): (usize, usize)) -> Result<Parity, CudaError> {
    let mut sums = Tensor::zeros(e, blocks, "sums")?;
    let work = multiply_only(e, rounds, &mut sums)?;
    // A product and a sum count as two operations; each thread's accumulators begin with four times 0 to 7.
    let expected = vec![(work / 2 / blocks as u64 + 256 * 4 * 28) as f32; blocks];
    Ok(compare(format!("multiply_only, {rounds} rounds"), 0.0, &sums.read(e, 0..blocks)?, &expected))
}

fn embedding<E: Executor>(e: &mut E, scale: Scale) -> Result<Parity, CudaError> {
    let (vocab, hidden) = scale.pick((19, 40), (32_000, 4096));
    let table = Numbers(1).bf16s(vocab * hidden, 1.0);
    let ids: Vec<u32> = [0, 1, vocab / 2, vocab - 1, 1].map(|id| id as u32).to_vec();
    let on_device = Tensor::of(e, &table, "table")?;
    let token_ids = Tensor::of(e, &ids, "ids")?;
    let mut out = Tensor::zeros(e, ids.len() * hidden, "out")?;
    Embedding { table: &on_device, is_tiled: false, token_ids: token_ids.view(), out: &mut out }.launch(
        e,
        ids.len(),
        hidden,
    )?;
    let expected: Vec<f32> =
        ids.iter().flat_map(|&id| widened(&table[id as usize * hidden..][..hidden])).collect();
    Ok(compare(format!("embedding of {hidden}"), 0.0, &out.read(e, 0..expected.len())?, &expected))
}

fn rows<E: Executor>(e: &mut E, (rows, width): (usize, usize)) -> Result<Vec<Parity>, CudaError> {
    let (mut numbers, len) = (Numbers(2), rows * width);
    let (mut x, y) = (numbers.vec(len, 2.0), numbers.vec(len, 1.0));
    (x[0], x[1]) = (f32::NAN, f32::INFINITY);
    let (scales, bias) = (numbers.vec(width, 1.0), numbers.vec(width, 1.0));
    let on_device = (Tensor::of(e, &x, "x")?, Tensor::of(e, &y, "y")?);

    let mut sum = Tensor::of(e, &x, "sum")?;
    add(e, &mut sum, &on_device.1, len)?;
    let sums: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
    let mut parities = vec![compare("add", 0.0, &sum.read(e, 0..len)?, &sums)];

    let mut rounded = Tensor::zeros(e, len, "rounded")?;
    to_bf16(e, &on_device.0, &mut rounded, len)?;
    let bits = |numbers: Vec<bf16>| numbers.into_iter().map(bf16::to_bits).collect::<Vec<_>>();
    let expected = bits(x.iter().map(|&x| bf16::from_f32(x)).collect());
    parities.push(compare_equal("to_bf16", &bits(rounded.read(e, 0..len)?), &expected));

    let which = [rows as u32 - 1, 0];
    let mut taken = Tensor::zeros(e, 2 * width, "rows")?;
    let which_on_device = Tensor::of(e, &which, "which")?;
    take_rows(e, (&on_device.1, width), which_on_device.view(), &mut taken)?;
    let expected = [&y[(rows - 1) * width..], &y[..width]].concat();
    parities.push(compare("take_rows", 0.0, &taken.read(e, 0..2 * width)?, &expected));

    let mut finished = Tensor::of(e, &y, "sum")?;
    let (scales_on_device, bias_on_device) =
        (Tensor::of(e, &scales, "scales")?, Tensor::of(e, &bias, "bias")?);
    FinishSum { sum: &mut finished, scales: Some(&scales_on_device), bias: Some(&bias_on_device) }
        .launch(e, rows, width)?;
    let expected: Vec<f32> =
        y.iter().enumerate().map(|(i, y)| y * scales[i % width] + bias[i % width]).collect();
    parities.push(compare("finish_sum", 0.0, &finished.read(e, 0..len)?, &expected));
    Ok(parities)
}

fn rms_norm<E: Executor>(e: &mut E, rows: usize, width: usize) -> Result<Parity, CudaError> {
    let mut numbers = Numbers(3);
    let (x, weight, eps) = (numbers.vec(rows * width, 2.0), numbers.vec(width, 1.0), 1e-5);
    let (on_device, weight_on_device) = (Tensor::of(e, &x, "x")?, Tensor::of(e, &weight, "weight")?);
    let mut out = Tensor::zeros(e, rows * width, "out")?;
    RmsNorm { x: &on_device, weight: &weight_on_device, eps, out: &mut out, rounded: None }
        .launch(e, rows)?;
    let expected: Vec<f32> =
        x.chunks_exact(width).flat_map(|row| reference::rms_norm(row, &weight, eps)).collect();
    Ok(compare(format!("rms_norm of {width}"), 1e-6, &out.read(e, 0..expected.len())?, &expected))
}

/// Whether a number was rounded to bf16, bit for bit.
fn is_rounded(x: f32, rounded: bf16) -> bool {
    bf16::from_f32(x).to_bits() == rounded.to_bits()
}

/// A sum, its norm and the rounded norm, by one fused launch and by three launches.
fn joined_norm<E: Executor>(e: &mut E, (rows, width): (usize, usize)) -> Result<Vec<Parity>, CudaError> {
    let (mut numbers, len) = (Numbers(21), rows * width);
    let (x, delta, eps) = (numbers.vec(len, 2.0), numbers.vec(len, 1.0), 1e-5);
    let weight = Tensor::of(e, &numbers.vec(width, 1.0), "weight")?;
    let delta = Tensor::of(e, &delta, "delta")?;
    let mut apart =
        (Tensor::of(e, &x, "x")?, Tensor::zeros(e, len, "out")?, Tensor::zeros(e, len, "rounded")?);
    add(e, &mut apart.0, &delta, len)?;
    RmsNorm { x: &apart.0, weight: &weight, eps, out: &mut apart.1, rounded: None }.launch(e, rows)?;
    to_bf16(e, &apart.1, &mut apart.2, len)?;
    let mut joined =
        (Tensor::of(e, &x, "x")?, Tensor::zeros(e, len, "out")?, Tensor::zeros(e, len, "rounded")?);
    let rounded = Some((&mut joined.2, InputLayout::Rows));
    let launch = RmsNorm { x: &joined.0, weight: &weight, eps, out: &mut joined.1, rounded };
    // SAFETY: `delta` has the length of `x`, which has no other user.
    unsafe { launch.launch_with_add(e, rows, Some(GroupSums::of_one(delta.address(), len))) }?;
    let bits = |numbers: Vec<bf16>| numbers.into_iter().map(bf16::to_bits).collect::<Vec<_>>();
    Ok(vec![
        compare(format!("joined sum of {width}"), 0.0, &joined.0.read(e, 0..len)?, &apart.0.read(e, 0..len)?),
        compare(
            format!("joined norm of {width}"),
            0.0,
            &joined.1.read(e, 0..len)?,
            &apart.1.read(e, 0..len)?,
        ),
        compare_equal(
            format!("joined rounding of {width}"),
            &bits(joined.2.read(e, 0..len)?),
            &bits(apart.2.read(e, 0..len)?),
        ),
    ])
}

/// Rows of queries, keys and values, and the inputs of the operations on heads.
struct HeadRows {
    layout: HeadLayout,
    /// Slot of each row's keys and values: block times 16, plus the offset in the block.
    slots: [u32; 3],
    layers: usize,
    layer: usize,
    blocks: usize,
    /// `[rows, layout.row_width()]`.
    qkv: Vec<f32>,
    /// Position of each row.
    positions: [u32; 3],
    /// Cosines and sines by position, `[positions][head_dim]`.
    angles: Vec<f32>,
    /// Norm weights of queries and keys, `[head_dim]` each.
    norms: [Vec<f32>; 2],
    eps: (f32, f32),
}

/// Results of the twins.
struct ExpectedHeads {
    normed: Vec<f32>,
    turned: Vec<f32>,
    kv: Vec<bf16>,
}

impl HeadRows {
    fn new(layout: HeadLayout) -> Self {
        let slots = [35u32, 2, 16];
        let mut numbers = Numbers(4);
        let qkv = numbers.vec(slots.len() * layout.row_width(), 1.5);
        let positions = [5u32, 0, 2];
        let angles = numbers.vec(6 * layout.head_dim, 1.0);
        let norms = [numbers.vec(layout.head_dim, 1.0), numbers.vec(layout.head_dim, 1.0)];
        Self {
            layout,
            slots,
            layers: 3,
            layer: 1,
            blocks: 4,
            qkv,
            positions,
            angles,
            norms,
            eps: (1e-6, 1e-5),
        }
    }

    /// Size of all keys and values in numbers.
    fn kv_len(&self) -> usize {
        self.blocks * self.layers * self.layout.num_kv_heads * 2 * 16 * self.layout.head_dim
    }

    fn expected(&self) -> ExpectedHeads {
        let HeadLayout { num_heads, num_kv_heads, head_dim } = self.layout;
        let head_len = 16 * head_dim;
        let (mut normed, mut turned) = (self.qkv.clone(), Vec::new());
        let mut kv = vec![bf16::ZERO; self.kv_len()];
        for (row, x) in normed.chunks_exact_mut(self.layout.row_width()).enumerate() {
            for (head, x) in x.chunks_exact_mut(head_dim).enumerate().take(num_heads + num_kv_heads) {
                let is_query = head < num_heads;
                let eps = if is_query { self.eps.0 } else { self.eps.1 };
                x.copy_from_slice(&reference::rms_norm(x, &self.norms[usize::from(!is_query)], eps));
            }
            let mut x = x.to_vec();
            let angles = &self.angles[self.positions[row] as usize * head_dim..][..head_dim];
            let (cos, sin) = angles.split_at(head_dim / 2);
            for (head, x) in x.chunks_exact_mut(head_dim).enumerate() {
                if head < num_heads + num_kv_heads {
                    reference::rotate(x, cos, sin);
                }
                let Some(kv_head) = head.checked_sub(num_heads) else { continue };
                let (block, offset) = (self.slots[row] as usize / 16, self.slots[row] as usize % 16);
                let block_layer = block * self.layers + self.layer;
                let start = (block_layer * num_kv_heads + kv_head % num_kv_heads) * 2 * head_len;
                for (d, &x) in x.iter().enumerate() {
                    let place = if kv_head < num_kv_heads { key_index } else { value_index };
                    kv[start + place(offset, d, head_dim)] = bf16::from_f32(x);
                }
            }
            turned.extend(x);
        }
        ExpectedHeads { normed, turned, kv }
    }
}

fn heads<E: Executor>(e: &mut E, layout: HeadLayout) -> Result<Vec<Parity>, CudaError> {
    let given = HeadRows::new(layout);
    let (rows, len, layer) = (given.slots.len(), given.qkv.len(), (given.layer, given.layers));
    let mut on_device = Tensor::of(e, &given.qkv, "qkv")?;
    let norms = (Tensor::of(e, &given.norms[0], "norm")?, Tensor::of(e, &given.norms[1], "norm")?);
    let (positions, table) =
        (Tensor::of(e, &given.positions, "positions")?, Tensor::of(e, &given.angles, "angles")?);
    let angles = Angles { positions: positions.view(), table: &table };
    let ((q_weight, k_weight), (q_eps, k_eps)) = ((&norms.0, &norms.1), given.eps);
    NormHeads { qkv: &mut on_device, layout, q_weight, q_eps, k_weight, k_eps }.launch(e, rows)?;
    let normed = on_device.read(e, 0..len)?;
    rotate(e, &mut on_device, &angles, (rows, layout))?;
    let turned = on_device.read(e, 0..len)?;
    let mut kv = Tensor::<_, bf16>::zeros(e, given.kv_len(), "kv")?;
    let slots = Tensor::of(e, &given.slots, "slots")?;
    WriteKv { qkv: &on_device, slots: slots.view(), kv: &mut kv, layout, layer }.launch(e, rows)?;

    let joined = Tensor::of(e, &normed, "qkv")?;
    let mut joined_kv = Tensor::<_, bf16>::zeros(e, kv.len(), "kv")?;
    let write = WriteKv { qkv: &joined, slots: slots.view(), kv: &mut joined_kv, layout, layer };
    // SAFETY: `joined` has no other user.
    unsafe { write.launch_with_rotate(e, &angles, rows) }?;
    let (width, q_width) = (layout.row_width(), layout.q_width());
    let queries =
        |x: &[f32]| x.chunks_exact(width).flat_map(|row| row[..q_width].to_vec()).collect::<Vec<_>>();
    let joined_turned = queries(&joined.read(e, 0..len)?);

    let expected = given.expected();
    let HeadLayout { num_heads, num_kv_heads, head_dim } = layout;
    let case = format!("{num_heads}/{num_kv_heads} heads of {head_dim}");
    let (kv, joined_kv) = (kv.read(e, 0..expected.kv.len())?, joined_kv.read(e, 0..expected.kv.len())?);
    Ok(vec![
        compare(format!("norm_heads, {case}"), 0.0, &normed, &expected.normed),
        compare(format!("rotate, {case}"), 0.0, &turned, &expected.turned),
        compare_equal(format!("write_kv, {case}"), &kv, &expected.kv),
        compare(format!("queries of rotate_and_write_kv, {case}"), 0.0, &joined_turned, &queries(&turned)),
        compare_equal(format!("kv of rotate_and_write_kv, {case}"), &joined_kv, &expected.kv),
    ])
}

fn silu<E: Executor>(e: &mut E, (rows, width): (usize, usize)) -> Result<Parity, CudaError> {
    let mut gate_up = Numbers(5).vec(rows * 2 * width, 6.0);
    // The limits of exp on both sides.
    gate_up[..4].copy_from_slice(&[-95.0, 95.0, -87.5, 0.0]);
    let on_device = Tensor::of(e, &gate_up, "gate_up")?;
    let mut out = Tensor::zeros(e, rows * width, "out")?;
    let mut rounded = Tensor::zeros(e, rows * width, "rounded")?;
    let rounded_out = Some((&mut rounded, InputLayout::Rows));
    Swiglu { gate_up: &on_device, out: &mut out, rounded: rounded_out }.launch(e, rows, width)?;
    let (out, rounded) = (out.read(e, 0..rows * width)?, rounded.read(e, 0..rows * width)?);
    if let Some(wrong) = (0..out.len()).find(|&i| !is_rounded(out[i], rounded[i])) {
        let case = format!("swiglu of {width}, rounded at {wrong}");
        return Ok(compare(case, 0.0, &[rounded[wrong].to_f32()], &[out[wrong]]));
    }
    let expected: Vec<f32> = gate_up
        .chunks_exact(2 * width)
        .flat_map(|row| reference::silu_mul(&row[..width], &row[width..]))
        .collect();
    Ok(compare(format!("swiglu of {width}"), 0.0, &out, &expected))
}
