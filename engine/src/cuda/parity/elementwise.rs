//! Embedding, norm, rope with the way into KV, SwiGLU, random weights.

use half::bf16;

use super::{Numbers, Parity, Scale, compare, compare_equal, widened};
use crate::backend::HeadLayout;
use crate::cpu::{Threads, reference};
use crate::cuda::CudaError;
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::{Embedding, Output, RandomRows, RmsNorm, RopeKv, Swiglu};
use crate::weights::{MatrixData, MatrixFormat, RandomTensors, TensorPart, TensorSource};

pub(super) fn cases<E: Executor>(e: &mut E, scale: Scale) -> Result<Vec<Parity>, CudaError> {
    let mut parities = vec![embedding(e, scale)?];
    for width in scale.pick([48, 256, 300], [2048, 4096, 8192]) {
        parities.extend(rms_norm(e, scale.pick(3, 64), width)?);
    }
    for (layout, normed) in [(layout(4, 2, 16), false), (layout(3, 1, 32), true), (layout(2, 2, 64), true)] {
        parities.extend(rope_kv(e, layout, normed)?);
    }
    parities.extend(rope_kv(e, layout(8, 2, 128), true)?);
    parities.extend(swiglu(e, scale.pick(3, 64), scale.pick(300, 14_336))?);
    parities.push(random(e, scale.pick(3, 64), scale.pick(70, 4096))?);
    Ok(parities)
}

fn layout(num_heads: usize, num_kv_heads: usize, head_dim: usize) -> HeadLayout {
    HeadLayout { num_heads, num_kv_heads, head_dim }
}

fn embedding<E: Executor>(e: &mut E, scale: Scale) -> Result<Parity, CudaError> {
    let (vocab, hidden) = scale.pick((19, 40), (32_000, 4096));
    let mut numbers = Numbers(1);
    let table = numbers.bf16s(vocab * hidden, 1.0);
    let ids: Vec<u32> = [0, 1, vocab / 2, vocab - 1, 1].map(|id| id as u32).to_vec();
    let device_table = Tensor::of(e, &table, "table")?;
    let token_ids = Tensor::of(e, &ids, "ids")?;
    let mut out = Tensor::zeros(e, ids.len() * hidden, "out")?;
    Embedding { table: &device_table, token_ids: &token_ids, out: &mut out }.launch(e, ids.len(), hidden)?;
    let expected: Vec<f32> =
        ids.iter().flat_map(|&id| widened(&table[id as usize * hidden..][..hidden])).collect();
    Ok(compare(format!("embedding of {hidden}"), 0.0, &out.read(e, expected.len())?, &expected))
}

fn rms_norm<E: Executor>(e: &mut E, rows: usize, width: usize) -> Result<Vec<Parity>, CudaError> {
    let mut numbers = Numbers(2);
    let (hidden, delta) = (numbers.vec(rows * width, 2.0), numbers.vec(rows * width, 1.0));
    let (weight, eps) = (numbers.vec(width, 1.0), 1e-5);
    let mut on_device = Tensor::of(e, &hidden, "hidden")?;
    let delta_on_device = Tensor::of(e, &delta, "delta")?;
    let weight_on_device = Tensor::of(e, &weight, "weight")?;
    let mut out = Tensor::zeros(e, rows * width, "out")?;
    let norm = RmsNorm {
        hidden: &mut on_device,
        delta: Some(&delta_on_device),
        weight: &weight_on_device,
        row_map: None,
        eps,
        out: Output::F32(&mut out),
    };
    norm.launch(e, (rows, rows))?;
    let sums: Vec<f32> = hidden.iter().zip(&delta).map(|(h, d)| h + d).collect();
    let expected: Vec<f32> =
        sums.chunks_exact(width).flat_map(|row| reference::rms_norm(row, &weight, eps)).collect();
    let mut parities = vec![
        compare(format!("rms_norm of {width}: the sum"), 0.0, &on_device.read(e, sums.len())?, &sums),
        compare(format!("rms_norm of {width}"), 1e-6, &out.read(e, expected.len())?, &expected),
    ];

    // The last row alone, by a map, rounded.
    let map = Tensor::of(e, &[rows as u32 - 1], "row map")?;
    let mut rounded = Tensor::zeros(e, width, "out")?;
    let norm = RmsNorm {
        hidden: &mut on_device,
        delta: None,
        weight: &weight_on_device,
        row_map: Some(&map),
        eps,
        out: Output::Bf16(&mut rounded),
    };
    norm.launch(e, (1, rows))?;
    let whole: Vec<bf16> =
        out.read(e, rows * width)?[(rows - 1) * width..].iter().map(|&x| bf16::from_f32(x)).collect();
    parities.push(compare_equal(
        format!("rms_norm of {width}: one row, bf16"),
        &rounded.read(e, width)?,
        &whole,
    ));
    Ok(parities)
}

fn rope_kv<E: Executor>(e: &mut E, layout: HeadLayout, normed: bool) -> Result<Vec<Parity>, CudaError> {
    let HeadLayout { num_heads, num_kv_heads, head_dim } = layout;
    let (positions, slots, layers, layer, blocks) = ([0u32, 5, 40], [35u32, 2, 16], 3, 1, 4);
    let (max_len, half, rows, eps) = (41, head_dim / 2, 3, 1e-6);
    let mut numbers = Numbers(3);
    let qkv = numbers.vec(rows * layout.row_width(), 1.5);
    let (cos, sin) = (numbers.vec(max_len * half, 1.0), numbers.vec(max_len * half, 1.0));
    let norms = [numbers.vec(head_dim, 1.0), numbers.vec(head_dim, 1.0)];

    let mut on_device = Tensor::of(e, &qkv, "qkv")?;
    let angles = (Tensor::of(e, &cos, "cos")?, Tensor::of(e, &sin, "sin")?);
    let norms_on_device = (Tensor::of(e, &norms[0], "norm")?, Tensor::of(e, &norms[1], "norm")?);
    let head_len = 16 * head_dim;
    let mut kv = Tensor::<_, bf16>::zeros(e, blocks * layers * num_kv_heads * 2 * head_len, "kv")?;
    let rope = RopeKv {
        qkv: &mut on_device,
        norms: normed.then_some((&norms_on_device.0, &norms_on_device.1)),
        angles: (&angles.0, &angles.1),
        positions: &Tensor::of(e, &positions, "positions")?,
        slots: &Tensor::of(e, &slots, "slots")?,
        kv: &mut kv,
        heads: layout,
        layer: (layer, layers),
        eps,
    };
    rope.launch(e, rows)?;

    let mut expected = qkv.clone();
    let mut expected_kv = vec![bf16::ZERO; kv.len()];
    for (row, turned) in expected.chunks_exact_mut(layout.row_width()).enumerate() {
        let at = positions[row] as usize * half;
        for (head, x) in turned.chunks_exact_mut(head_dim).enumerate() {
            let (is_query, is_value) = (head < num_heads, head >= num_heads + num_kv_heads);
            if !is_value {
                if normed {
                    x.copy_from_slice(&reference::rms_norm(x, &norms[usize::from(!is_query)], eps));
                }
                reference::rotate(x, &cos[at..at + half], &sin[at..at + half]);
            }
            let (block, offset) = (slots[row] as usize / 16, slots[row] as usize % 16);
            let kv_head = head.saturating_sub(num_heads) % num_kv_heads;
            let start = ((block * layers + layer) * num_kv_heads + kv_head) * 2 * head_len;
            for (d, &x) in x.iter().enumerate().filter(|_| !is_query) {
                let place = if is_value { head_len + d * 16 + offset } else { offset * head_dim + d };
                expected_kv[start + place] = bf16::from_f32(x);
            }
        }
    }
    let found = on_device.read(e, qkv.len())?;
    let q_width = layout.q_width();
    let queries = |all: &[f32]| -> Vec<f32> {
        all.chunks_exact(layout.row_width()).flat_map(|row| row[..q_width].to_vec()).collect()
    };
    let case = format!("rope_kv of {num_heads}/{num_kv_heads} heads of {head_dim}, norms {normed}");
    Ok(vec![
        compare(format!("{case}: queries"), 0.0, &queries(&found), &queries(&expected)),
        compare_equal(format!("{case}: kv"), &kv.read(e, expected_kv.len())?, &expected_kv),
    ])
}

fn swiglu<E: Executor>(e: &mut E, rows: usize, width: usize) -> Result<Vec<Parity>, CudaError> {
    let mut gate_up = Numbers(4).vec(rows * 2 * width, 6.0);
    // Where exp ends on both sides.
    gate_up[..4].copy_from_slice(&[-95.0, 95.0, -87.5, 0.0]);
    let on_device = Tensor::of(e, &gate_up, "gate_up")?;
    let mut out = Tensor::zeros(e, rows * width, "out")?;
    Swiglu { gate_up: &on_device, out: Output::F32(&mut out) }.launch(e, rows, width)?;
    let mut rounded = Tensor::zeros(e, rows * width, "out")?;
    Swiglu { gate_up: &on_device, out: Output::Bf16(&mut rounded) }.launch(e, rows, width)?;
    let expected: Vec<f32> = gate_up
        .chunks_exact(2 * width)
        .flat_map(|row| reference::silu_mul(&row[..width], &row[width..]))
        .collect();
    let expected_rounded: Vec<bf16> = expected.iter().map(|&x| bf16::from_f32(x)).collect();
    Ok(vec![
        compare(format!("swiglu of {width}"), 0.0, &out.read(e, expected.len())?, &expected),
        compare_equal(
            format!("swiglu of {width}, bf16"),
            &rounded.read(e, expected.len())?,
            &expected_rounded,
        ),
    ])
}

fn random<E: Executor>(e: &mut E, rows: usize, len: usize) -> Result<Parity, CudaError> {
    let (seed, name) = (7, "model.layers.3.mlp.up_proj.weight");
    let mut out = Tensor::zeros(e, (rows + 1) * len, "out")?;
    RandomRows { seed, name, len }.launch(e, (0, rows), (Output::Bf16(&mut out), 1))?;
    let threads = Threads::new(1).expect("one thread is the calling one");
    let part = TensorPart::whole(name.to_owned(), [rows, len]);
    let twin = RandomTensors { seed, threads: &threads }.matrix(&part, MatrixFormat::Bf16);
    let expected = match twin.expect("random tensors are always there").data() {
        MatrixData::Bf16(numbers) => numbers.as_slice().to_vec(),
        MatrixData::F32(_) => Vec::new(),
    };
    Ok(compare_equal("random weights", &out.read(e, (rows + 1) * len)?[len..], &expected))
}
