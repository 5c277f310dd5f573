//! Compares random weights with the generator on the host: equal bits, also for rows and columns in parts.

use cpu_kernels::NumbersMut;
use half::bf16;

use super::{Numbers, Parity, Scale, compare, compare_equal};
use crate::cuda::CudaError;
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::{random_bf16, random_f32};
use crate::weights::{RandomTensors, StackedRows, TensorPart};

pub(super) fn cases<E: Executor>(e: &mut E, scale: Scale) -> Result<Vec<Parity>, CudaError> {
    let (rows, columns) = scale.pick((7, 300), (1000, 8192));
    let part = |name: &str| TensorPart::whole(name.to_owned(), [rows, columns]);
    let cut = |name: &str| TensorPart { rows: 2..rows - 1, columns: 16..columns / 2, ..part(name) };
    let mut parities = Vec::new();
    for (what, parts) in [
        ("whole", vec![part("a"), part("model.layers.11.mlp.up_proj.weight")]),
        ("in part", vec![cut("a"), cut("b")]),
    ] {
        let source = RandomTensors { seed: Numbers(14).bits() };
        let stacked = StackedRows::new(&source, parts).expect("a generator has every tensor");
        let rows = 1..stacked.rows();
        let seeds = stacked.seeds(rows.clone()).expect("its numbers are made");
        let len = rows.len() * stacked.columns();

        let (mut floats, mut halves) = (vec![0.0; len], vec![bf16::ZERO; len]);
        let read = |numbers| stacked.read(rows.clone(), numbers).expect("a generator reads no file");
        read(NumbersMut::F32(&mut floats));
        read(NumbersMut::Bf16(&mut halves));

        // One row is left unused in front.
        let before = stacked.columns();
        let mut out = Tensor::zeros(e, before + len, "out")?;
        random_f32(e, &seeds, (&mut out, 1))?;
        parities.push(compare(
            format!("random_f32 {what}"),
            0.0,
            &out.read(e, before..before + len)?,
            &floats,
        ));
        let mut out = Tensor::zeros(e, before + len, "out")?;
        random_bf16(e, &seeds, (&mut out, 1))?;
        let bits = |numbers: &[bf16]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let found = bits(&out.read(e, before..before + len)?);
        parities.push(compare_equal(format!("random_bf16 {what}"), &found, &bits(&halves)));
        parities.push(compare("in front of it", 0.0, &widened_row(&out, e, before)?, &vec![0.0; before]));
    }
    Ok(parities)
}

fn widened_row<E: Executor>(
    out: &Tensor<E::Memory, bf16>,
    e: &mut E,
    len: usize,
) -> Result<Vec<f32>, CudaError> {
    Ok(super::widened(&out.read(e, 0..len)?))
}
