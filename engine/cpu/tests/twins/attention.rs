//! Attention over a paged KV cache compared with its naive twin: several sequences, grouped queries, windows,
//! both KV formats.

use std::ops::Range;

use cpu_kernels::{
    AttentionStep, BLOCK_SIZE, Cpu, HeadLayout, KvCache, KvShape, KvSlot, MatrixFormat, PassRows, Segment,
    reference,
};
use proptest::prelude::*;

use super::{bits, config, every_cpu, numbers, rounded};

/// A sequence with `held` positions before the pass, which adds `new`.
#[derive(Debug, Clone)]
struct Text {
    held: usize,
    new: usize,
}

fn text() -> impl Strategy<Value = Text> {
    (0..70usize, 1..23usize).prop_map(|(held, new)| Text { held, new })
}

/// Block tables over a shuffled pool, so that no sequence has its blocks in order.
fn block_tables(texts: &[Text]) -> Vec<Vec<u32>> {
    let needed: Vec<usize> = texts.iter().map(|t| (t.held + t.new).div_ceil(BLOCK_SIZE)).collect();
    let total: usize = needed.iter().sum();
    // Step by a number that has no common factor with `total`.
    let step = (total / 2 + 1..).find(|step| gcd(*step, total) == 1).unwrap();
    let mut blocks = (0..total).map(|i| (i * step % total) as u32);
    needed.iter().map(|&n| blocks.by_ref().take(n).collect()).collect()
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Rows of texts, each from some position on, as a pass.
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

/// A cache in which every number that was not written is a NaN, so that reading one shows in the result.
fn poisoned_cache(shape: KvShape, num_blocks: usize, bf: bool) -> KvCache {
    let format = if bf { MatrixFormat::Bf16 } else { MatrixFormat::F32 };
    let mut kv = KvCache::new(shape, format, num_blocks as u32);
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
