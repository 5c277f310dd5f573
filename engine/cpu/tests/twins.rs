//! Every kernel against its naive twin with `==`, on every instruction set of this machine, over odd shapes.
#![expect(clippy::unwrap_used, reason = "the lint sees tests, but not what tests call")]

use std::ops::Range;
use std::sync::Arc;

use cpu_kernels::{
    Angles, AttentionStep, BLOCK_SIZE, Cpu, FloatMatrix, HeadLayout, KSlices, KvCache, KvShape, KvSlot,
    Linear, LinearWeights, Matrix, MatrixData, MatrixFormat, Norm, PackedMatrix, PassRows, QuantizedFormat,
    Segment, Table, Threads, reference,
};
use half::bf16;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

/// Plain numbers of about unit size, with some exact zeros and both signs of them.
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        match state % 37 {
            0 => 0.0,
            1 => -0.0,
            _ => (state >> 40) as f32 / (1 << 23) as f32 - 1.0,
        }
    };
    (0..len).map(|_| next()).collect()
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

fn to_bf16(numbers: &[f32]) -> Vec<bf16> {
    numbers.iter().map(|&x| bf16::from_f32(x)).collect()
}

fn rounded(numbers: &[f32]) -> Vec<f32> {
    numbers.iter().map(|&x| bf16::from_f32(x).to_f32()).collect()
}

/// All instruction sets of this machine, and several threads.
fn every_cpu() -> impl Iterator<Item = Cpu> {
    Cpu::every_isa().unwrap().into_iter().chain([Cpu::eager(3).unwrap()])
}

fn config() -> ProptestConfig {
    ProptestConfig { cases: 200, rng_seed: RngSeed::Fixed(7), ..ProptestConfig::default() }
}

/// A product with one matrix for each width.
#[derive(Debug, Clone)]
struct Product {
    rows: usize,
    k: usize,
    widths: Vec<usize>,
    /// K-slices of so many columns a unit, or one slice.
    unit: Option<usize>,
    bf: bool,
    bias: bool,
}

fn product() -> impl Strategy<Value = Product> {
    let shape = (1..40usize, 1..120usize, prop::collection::vec(1..50usize, 1..4));
    (shape, prop::option::of(1..40usize), any::<(bool, bool)>())
        .prop_map(|((rows, k, widths), unit, (bf, bias))| Product { rows, k, widths, unit, bf, bias })
}

fn check_linear(product: &Product) {
    let Product { rows, k, ref widths, unit, bf, bias } = *product;
    let slices = unit.map_or_else(|| KSlices::whole(k), |unit| KSlices::eighths(k, unit));
    let x = numbers(rows * k, 1);
    let weights: Vec<Vec<f32>> =
        widths.iter().enumerate().map(|(i, n)| numbers(n * k, 2 + i as u64)).collect();
    let width: usize = widths.iter().sum();
    let bias = bias.then(|| numbers(width, 99));
    let all = weights.concat();
    let (format, data) = match bf {
        true => (MatrixFormat::Bf16, MatrixData::from(to_bf16(&all))),
        false => (MatrixFormat::F32, MatrixData::from(all.clone())),
    };
    let matrix = Matrix::new(data, [width, k]);
    let packed = FloatMatrix::pack(format, &matrix, &slices, &Threads::new(1).unwrap()).unwrap();
    let packed = Arc::new(packed);
    check_rows(&Table::Rows(matrix), &packed);
    let linear = Linear { weights: LinearWeights::Floats(packed), bias: bias.clone() };

    let (x_in, weights_in) = if bf { (rounded(&x), rounded(&all)) } else { (x.clone(), all) };
    let expected =
        reference::Linear { x: &x_in, weights: &weights_in, k, slices: &slices, bias: bias.as_deref() }
            .compute();
    for cpu in every_cpu() {
        let mut out = vec![f32::NAN; rows * width];
        cpu.linear(&linear, &mut x.clone(), &mut out);
        assert_eq!(bits(&out), bits(&expected), "{cpu:?}: {product:?}");
    }
}

/// A row looked up in panels is the row that was packed.
fn check_rows(stored: &Table, packed: &Arc<FloatMatrix>) {
    let ids: Vec<u32> = (0..packed.width() as u32).collect();
    let rows = |table: &Table| {
        let mut rows = vec![f32::NAN; ids.len() * packed.k()];
        Cpu::new(1).unwrap().embed(table, &ids, &mut rows);
        bits(&rows)
    };
    assert_eq!(rows(&Table::Panels(Arc::clone(packed))), rows(stored));
}

/// Shapes of several windows of K, of windows widened beforehand, and of several blocks of rows.
#[test]
fn a_linear_of_many_rows_is_its_twin() {
    for (rows, k, unit, bf) in [
        (13, 401, None, true),
        (50, 777, None, true),
        (50, 777, None, false),
        (49, 1_700, Some(35), true),
        (38, 1_700, Some(300), false),
        (100, 4_001, None, true),
    ] {
        check_linear(&Product { rows, k, widths: vec![33, 5], unit, bf, bias: true });
    }
}

/// The same product in integers: `extremes` are numbers of very different size, and rows of zeros.
fn check_quantized(product: &Product, format: QuantizedFormat, extremes: bool) {
    let Product { rows, k, ref widths, unit, bias, .. } = *product;
    let slices = unit.map_or_else(|| KSlices::whole(k), |unit| KSlices::eighths(k, unit));
    let width: usize = widths.iter().sum();
    let (mut x, mut weights) = (numbers(rows * k, 1), numbers(width * k, 2));
    if extremes {
        let size = |i: usize| [1.0, 1e-20, 3e18, 0.0, 1e-38, 1e-31][i % 6];
        x.iter_mut().enumerate().for_each(|(i, x)| *x *= size(i / 7));
        weights.iter_mut().enumerate().for_each(|(i, x)| *x *= size(i / k));
    }
    let bias = bias.then(|| numbers(width, 99));
    check_packed(format, &slices, (&x, &weights), bias);
}

/// Rows of activations times rows of weights, as long as the slices.
fn check_packed(
    format: QuantizedFormat,
    slices: &KSlices,
    (x, weights): (&[f32], &[f32]),
    bias: Option<Vec<f32>>,
) {
    let k = slices.ranges().last().expect("there are slices").end;
    let (rows, width) = (x.len() / k, weights.len() / k);
    let matrix = Matrix::new(MatrixData::from(weights.to_vec()), [width, k]);
    let packed = PackedMatrix::pack(format, slices, &matrix, &Threads::new(1).unwrap()).unwrap();
    let twin = reference::QuantizedWeights::new(format, weights, k);
    let expected = twin.multiply(x, slices, bias.as_deref());
    let linear = Linear { weights: LinearWeights::Packed(packed), bias };
    for cpu in every_cpu() {
        let mut out = vec![f32::NAN; rows * width];
        cpu.linear(&linear, &mut x.to_vec(), &mut out);
        assert_eq!(
            bits(&out),
            bits(&expected),
            "{cpu:?}: {format:?}, {rows} rows, {width} columns, {slices:?}"
        );
    }
}

/// A group's sums where all products are as large as they can be, of one sign or the other: those of 16 bits still fit.
#[test]
fn the_largest_sums_of_a_group_of_int4_fit() {
    let (k, width) = (96, 20);
    // The number farthest from zero becomes step -8, the others 7 or, in odd rows, -8 too.
    let weight = |i: usize| if i.is_multiple_of(32) || i / k % 2 == 1 { -8.0 } else { 7.0 };
    let weights: Vec<f32> = (0..width * k).map(weight).collect();
    for rows in 1..14 {
        let sign = |i: usize| if (i / k).is_multiple_of(2) { 1.0 } else { -1.0 };
        let x: Vec<f32> = (0..rows * k).map(sign).collect();
        for format in [QuantizedFormat::Int8, QuantizedFormat::Int4] {
            check_packed(format, &KSlices::whole(k), (&x, &weights), None);
        }
    }
}

/// The largest sums that int8 can make still fit.
#[test]
fn the_longest_sum_of_int8_fits() {
    let k = 131_072;
    let slices = KSlices::whole(k);
    let threads = Threads::new(1).unwrap();
    let pack = |slices: &KSlices, k| {
        let matrix = Matrix::new(MatrixData::from([vec![1.0; k], vec![-1.0; k]].concat()), [2, k]);
        PackedMatrix::pack(QuantizedFormat::Int8, slices, &matrix, &threads)
    };
    let packed = pack(&slices, k).unwrap();
    let linear = Linear { weights: LinearWeights::Packed(packed), bias: None };
    for cpu in Cpu::every_isa().unwrap() {
        let mut out = [0.0; 2];
        cpu.linear(&linear, &mut vec![1.0; k], &mut out);
        // Steps of 127 on both sides, and the scales take them back up to rounding.
        assert!((out[0] - k as f32).abs() < 0.1 && out[0] == -out[1], "{cpu:?}: {out:?}");
    }
    let longer = pack(&KSlices::whole(k + 1), k + 1).unwrap_err().to_string();
    assert!(longer.contains("131072"), "{longer}");
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn quantized_linear_is_its_twin(product in product(), int4 in any::<bool>(), extremes in any::<bool>()) {
        let format = if int4 { QuantizedFormat::Int4 } else { QuantizedFormat::Int8 };
        check_quantized(&product, format, extremes);
    }

    #[test]
    fn linear_is_its_twin(product in product()) {
        check_linear(&product);
    }

    #[test]
    fn rows_of_numbers_are_their_twins(rows in 1..5usize, half in 1..70usize, seed in any::<u64>()) {
        let width = 2 * half;
        let (x, y) = (numbers(rows * width, seed), numbers(rows * width, seed ^ 1));
        let (weight, cos, sin) = (numbers(width, 3), numbers(half, 4), numbers(half, 5));
        let scaled: Vec<f32> = x.iter().map(|x| x * 40.0).collect();
        let gate_up: Vec<f32> =
            scaled.chunks(width).zip(y.chunks(width)).flat_map(|(gate, up)| [gate, up].concat()).collect();
        let norm = Norm { weight: weight.clone(), eps: 1e-5 };
        let layout = HeadLayout { num_heads: 1, num_kv_heads: 0, head_dim: width };
        let angles = Angles { cos: cos.repeat(rows), sin: sin.repeat(rows), half };
        for cpu in Cpu::every_isa().unwrap() {
            let mut out = vec![0.0; x.len()];
            cpu.rms_norm(&norm, &x, &mut out);
            let expected: Vec<f32> =
                x.chunks(width).flat_map(|x| reference::rms_norm(x, &weight, 1e-5)).collect();
            prop_assert_eq!(bits(&out), bits(&expected));

            let mut heads = x.clone();
            cpu.rotate(layout, &angles, &mut heads);
            let mut expected = x.clone();
            expected.chunks_mut(width).for_each(|head| reference::rotate(head, &cos, &sin));
            prop_assert_eq!(bits(&heads), bits(&expected));

            cpu.silu_mul(&gate_up, width, &mut out);
            let expected: Vec<f32> =
                scaled.chunks(width).zip(y.chunks(width)).flat_map(|(g, u)| reference::silu_mul(g, u)).collect();
            prop_assert_eq!(bits(&out), bits(&expected));
        }
    }
}

/// A sequence that is attended to: `held` positions were there before the pass adds `new`.
#[derive(Debug, Clone)]
struct Text {
    held: usize,
    new: usize,
}

fn text() -> impl Strategy<Value = Text> {
    (0..70usize, 1..23usize).prop_map(|(held, new)| Text { held, new })
}

/// Block tables over a shuffled pool, so that no two sequences lie where they would in order.
fn block_tables(texts: &[Text]) -> Vec<Vec<u32>> {
    let needed: Vec<usize> = texts.iter().map(|t| (t.held + t.new).div_ceil(BLOCK_SIZE)).collect();
    let total: usize = needed.iter().sum();
    // 7 is odd and total may be its multiple: step by a number that shares no factor.
    let step = (total / 2 + 1..).find(|step| gcd(*step, total) == 1).unwrap();
    let mut blocks = (0..total).map(|i| (i * step % total) as u32);
    needed.iter().map(|&n| blocks.by_ref().take(n).collect()).collect()
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Rows of texts, of each those from a position on, as a pass.
#[derive(Default)]
struct Pass<'a> {
    positions: Vec<u32>,
    slot_mapping: Vec<KvSlot>,
    segments: Vec<Segment<'a>>,
}

impl<'a> Pass<'a> {
    fn add(&mut self, positions: Range<usize>, block_table: &'a [u32]) {
        let first = self.positions.len();
        for position in positions.clone() {
            self.positions.push(position as u32);
            let (block, offset) = (block_table[position / BLOCK_SIZE], (position % BLOCK_SIZE) as u32);
            self.slot_mapping.push(KvSlot { block, offset });
        }
        let (rows, start) = (first..self.positions.len(), positions.start as u32);
        self.segments.push(Segment { rows, start, block_table, tree: None });
    }

    fn of(positions: Range<usize>, block_table: &'a [u32]) -> Self {
        let mut pass = Self::default();
        pass.add(positions, block_table);
        pass
    }

    fn rows(&self) -> PassRows<'_> {
        let Self { positions, slot_mapping, segments } = self;
        PassRows { positions, slot_mapping, segments }
    }
}

/// A cache in which every number that was not written is a NaN: reading one would show.
fn poisoned_cache(shape: KvShape, num_blocks: usize, bf: bool) -> KvCache {
    let mut kv = KvCache::new(shape, if bf { MatrixFormat::Bf16 } else { MatrixFormat::F32 });
    kv.grow_to(num_blocks as u32).unwrap();
    let nan = vec![f32::NAN; shape.num_kv_heads * shape.head_dim];
    let layout = HeadLayout { num_heads: 0, num_kv_heads: shape.num_kv_heads, head_dim: shape.head_dim };
    for block in 0..num_blocks as u32 {
        let table = [block];
        let pass = Pass::of(0..BLOCK_SIZE, &table);
        let qkv = [nan.clone(), nan.clone()].concat().repeat(BLOCK_SIZE);
        for layer in 0..shape.num_layers {
            let step = AttentionStep { layout, layer, window: None, pass: pass.rows(), qkv: &qkv };
            Cpu::new(1).unwrap().write_kv(&mut kv, &step);
        }
    }
    kv
}

/// Rows `positions` of a text's `[q | k | v]`.
fn rows_of(qkv: &[f32], layout: HeadLayout, positions: Range<usize>) -> &[f32] {
    &qkv[positions.start * layout.row_width()..positions.end * layout.row_width()]
}

fn expected_attention(
    qkv: &[f32],
    text: &Text,
    layout: HeadLayout,
    window: Option<u32>,
    bf: bool,
) -> Vec<f32> {
    let stored = |x: &[f32]| if bf { rounded(x) } else { x.to_vec() };
    let head = |row: &[f32], start: usize| stored(&row[start..start + layout.head_dim]);
    let mut out = Vec::new();
    for position in text.held..text.held + text.new {
        for h in 0..layout.num_heads {
            let kv_head = h / (layout.num_heads / layout.num_kv_heads) * layout.head_dim;
            let rows = || qkv.chunks_exact(layout.row_width());
            let keys: Vec<Vec<f32>> = rows().map(|row| head(row, layout.q_width() + kv_head)).collect();
            let values: Vec<Vec<f32>> =
                rows().map(|row| head(row, layout.q_width() + layout.kv_width() + kv_head)).collect();
            let row = rows_of(qkv, layout, position..position + 1);
            let query = &row[h * layout.head_dim..(h + 1) * layout.head_dim];
            let first = window.map_or(0, |w| (position + 1).saturating_sub(w as usize));
            out.extend(reference::attention(query, &keys, &values, first..position + 1));
        }
    }
    out
}

fn check_attention(texts: &[Text], layout: HeadLayout, window: Option<u32>, bf: bool) {
    let shape = KvShape { num_layers: 2, num_kv_heads: layout.num_kv_heads, head_dim: layout.head_dim };
    let tables = block_tables(texts);
    let mut kv = poisoned_cache(shape, tables.iter().map(Vec::len).sum(), bf);
    let qkvs: Vec<Vec<f32>> = texts
        .iter()
        .enumerate()
        .map(|(i, text)| numbers((text.held + text.new) * layout.row_width(), i as u64 + 1))
        .collect();
    let cpu = Cpu::new(1).unwrap();
    let layer = 1;
    for ((text, table), qkv) in texts.iter().zip(&tables).zip(&qkvs).filter(|((text, _), _)| text.held > 0) {
        let pass = Pass::of(0..text.held, table);
        let qkv = rows_of(qkv, layout, 0..text.held);
        cpu.write_kv(&mut kv, &AttentionStep { layout, layer, window, pass: pass.rows(), qkv });
    }
    let mut new = Pass::default();
    texts.iter().zip(&tables).for_each(|(text, table)| new.add(text.held..text.held + text.new, table));
    let qkv: Vec<f32> = texts
        .iter()
        .zip(&qkvs)
        .flat_map(|(text, qkv)| rows_of(qkv, layout, text.held..text.held + text.new).to_vec())
        .collect();
    let step = AttentionStep { layout, layer, window, pass: new.rows(), qkv: &qkv };
    cpu.write_kv(&mut kv, &step);

    let expected: Vec<f32> = texts
        .iter()
        .zip(&qkvs)
        .flat_map(|(text, qkv)| expected_attention(qkv, text, layout, window, bf))
        .collect();
    for cpu in every_cpu() {
        let mut out = vec![f32::NAN; expected.len()];
        cpu.attention(&kv, &step, &mut out);
        assert_eq!(bits(&out), bits(&expected), "{cpu:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 80, ..config() })]

    #[test]
    fn attention_is_its_twin(
        texts in prop::collection::vec(text(), 1..4),
        num_kv_heads in 1..3usize,
        group in 1..6usize,
        half_dim in 1..45usize,
        window in prop::option::of(1..40u32),
        bf in any::<bool>(),
    ) {
        let layout = HeadLayout { num_heads: num_kv_heads * group, num_kv_heads, head_dim: 2 * half_dim };
        check_attention(&texts, layout, window, bf);
    }
}

#[test]
fn a_number_that_is_not_one_stays_in_its_row() {
    let k = 48;
    let mut x = numbers(3 * k, 1);
    x[k + 5] = f32::NAN;
    let weights = numbers(20 * k, 2);
    let data = MatrixData::from(weights);
    let slices = KSlices::whole(k);
    let (matrix, threads) = (Matrix::new(data, [20, k]), Threads::new(1).unwrap());
    let packed = FloatMatrix::pack(MatrixFormat::F32, &matrix, &slices, &threads).unwrap();
    let linear = Linear { weights: LinearWeights::Floats(Arc::new(packed)), bias: None };
    for cpu in Cpu::every_isa().unwrap() {
        let mut out = vec![0.0; 60];
        cpu.linear(&linear, &mut x.clone(), &mut out);
        let nans: Vec<bool> = out.chunks(20).map(|row| row.iter().all(|x| x.is_nan())).collect();
        assert_eq!(nans, [false, true, false]);
        assert!(out[..20].iter().chain(&out[40..]).all(|x| x.is_finite()));
    }
}

#[test]
fn a_number_that_is_not_one_is_seen_through_quantization() {
    let k = 48;
    let slices = KSlices::eighths(k, 6);
    for (format, bad) in [
        (QuantizedFormat::Int8, f32::NAN),
        (QuantizedFormat::Int8, f32::INFINITY),
        (QuantizedFormat::Int4, f32::NAN),
    ] {
        let (mut x, mut weights) = (numbers(3 * k, 1), numbers(20 * k, 2));
        x[k + 5] = bad;
        weights[7 * k + 40] = bad;
        let matrix = Matrix::new(MatrixData::from(weights), [20, k]);
        let packed = PackedMatrix::pack(format, &slices, &matrix, &Threads::new(1).unwrap()).unwrap();
        let linear = Linear { weights: LinearWeights::Packed(packed), bias: None };
        for cpu in Cpu::every_isa().unwrap() {
            let mut out = vec![0.0; 60];
            cpu.linear(&linear, &mut x.clone(), &mut out);
            for (i, number) in out.iter().enumerate() {
                assert_eq!(number.is_nan(), i / 20 == 1 || i % 20 == 7, "{cpu:?}: {format:?}, {i}");
            }
        }
    }
}
