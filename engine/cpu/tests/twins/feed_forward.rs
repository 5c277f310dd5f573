//! A feed-forward layer, whose two products and gate share passes over the data, equals the three operations
//! done one after the other.

use std::sync::Arc;

use cpu_kernels::{
    Cpu, FeedForwardStep, FloatMatrix, KSlices, Linear, LinearWeights, Matrix, MatrixData, MatrixFormat,
    PackedMatrix, QuantizedFormat, Threads,
};
use proptest::prelude::*;

use super::{bits, config, every_cpu, numbers};

#[derive(Debug, Clone, Copy)]
enum Format {
    Float(MatrixFormat),
    Quantized(QuantizedFormat),
}

const FORMATS: [Format; 4] = [
    Format::Float(MatrixFormat::F32),
    Format::Float(MatrixFormat::Bf16),
    Format::Quantized(QuantizedFormat::Int8),
    Format::Quantized(QuantizedFormat::Int4),
];

/// Random weights `[width, k]` with a bias; float weights get scales too.
fn linear(format: Format, [width, k]: [usize; 2], slices: &KSlices, seed: u64) -> Linear {
    let matrix = Matrix::new(MatrixData::from(numbers(width * k, seed)), [width, k]);
    let threads = Threads::new(1).unwrap();
    let bias = Some(numbers(width, seed + 1));
    match format {
        Format::Float(format) => {
            let packed = FloatMatrix::pack(format, &matrix, slices, &threads).unwrap();
            let scales = Some(numbers(width, seed + 2));
            Linear { weights: LinearWeights::Floats(Arc::new(packed)), scales, bias }
        }
        Format::Quantized(format) => {
            let packed = PackedMatrix::pack(format, slices, &matrix, &threads).unwrap();
            Linear { weights: LinearWeights::Packed(packed), scales: None, bias }
        }
    }
}

/// `shape` is rows, k, columns of the gate, outputs. Down_proj has K-slices of whole `unit`s.
fn check(formats: (Format, Format), shape: [usize; 4], unit: Option<usize>) {
    let [rows, k, width, outputs] = shape;
    let slices = unit.map_or_else(|| KSlices::whole(width), |unit| KSlices::eighths(width, unit));
    let gate_up = linear(formats.0, [2 * width, k], &KSlices::whole(k), 1);
    let down = linear(formats.1, [outputs, width], &slices, 11);
    let x = numbers(rows * k, 21);
    let buffers = || (vec![f32::NAN; 2 * rows * width], vec![f32::NAN; rows * width]);

    let cpu = Cpu::new(1).unwrap();
    let (mut gates_and_ups, mut gated) = buffers();
    let mut expected = vec![f32::NAN; rows * outputs];
    cpu.linear(&gate_up, &x, &mut gates_and_ups);
    cpu.silu_mul(&gates_and_ups, width, &mut gated);
    cpu.linear(&down, &gated, &mut expected);
    for cpu in every_cpu() {
        let (mut gates_and_ups, mut gated) = buffers();
        let mut out = vec![f32::NAN; rows * outputs];
        cpu.feed_forward(FeedForwardStep {
            gate_up: &gate_up,
            down: &down,
            x: &x,
            gates_and_ups: &mut gates_and_ups,
            gated: &mut gated,
            out: &mut out,
        });
        assert_eq!(bits(&out), bits(&expected), "{cpu:?}: {formats:?}, {shape:?}, {unit:?}");
    }
}

/// More rows than one tile, and more columns than a thread computes at a time.
#[test]
fn a_feed_forward_layer_of_many_rows_is_its_parts() {
    for format in FORMATS {
        check((format, format), [100, 40, 448, 33], Some(32));
        check((format, format), [3, 65, 5_632, 16], None);
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_feed_forward_layer_is_its_parts(
        rows in 1..40usize,
        k in 1..80usize,
        // Whole panels, which are packed as they are computed, or any other width.
        width in prop_oneof![(1..5usize).prop_map(|panels| 32 * panels), 1..130usize],
        outputs in 1..40usize,
        unit in prop::option::of(1..40usize),
        formats in (prop::sample::select(&FORMATS[..]), prop::sample::select(&FORMATS[..])),
    ) {
        check(formats, [rows, k, width, outputs], unit);
    }
}
