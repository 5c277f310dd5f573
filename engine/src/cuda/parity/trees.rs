//! Attention of rows of token trees: equal to the bits of chains of their ancestors, whatever else is in the
//! pass and however it is divided. Also copies of single tokens, compared with copies on the host.

use cpu_kernels::{BLOCK_SIZE, HeadLayout, KvShape, KvSlot, TokenCopy};
use half::bf16;

use super::attention::{NO_LIMITS, Part, Pass, Sequence, kv_memory, layout_of};
use super::kv_layout::{key_index, value_index};
use super::{Numbers, Parity, Scale, compare_equal};
use crate::cuda::CudaError;
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::{Limits, PartSize, StepBuffer, copy_tokens};

/// First position of rows, their parents in a token tree, and, if there are no parents, the number of rows of
/// a chain.
pub(super) type Rows<'a> = (u32, &'a [u32], usize);

pub(super) fn cases<E: Executor>(e: &mut E, scale: Scale) -> Result<Vec<Parity>, CudaError> {
    // A tree of depth seven across a split's border; two leaves per row; siblings of one id.
    let (deep, leaves, wide) = (&[0, 0, 1, 1, 2, 3, 6, 7, 8, 9, 9][..], &[0, 0, 1, 1, 3][..], &[0, 0, 0][..]);
    let mut parities = Vec::new();
    for (heads, window, rows) in [
        ([4, 2, 16], None, &[(125, deep, 0), (3, &[][..], 4), (10, leaves, 0)][..]),
        ([4, 4, 32], Some(7), &[(125, deep, 0)]),
        ([6, 1, 64], Some(130), &[(140, leaves, 0), (0, &[], 3)]),
        ([20, 1, 16], None, &[(130, leaves, 0)]),
        ([2, 1, 96], None, &[(15, wide, 0)]),
        ([8, 1, 128], None, &[(16, wide, 0)]),
    ] {
        parities.extend(trees(e, layout_of(heads), window, rows)?);
    }
    if scale == Scale::Large {
        let rows = [(1020, deep, 0), (1, leaves, 0), (500, &[][..], 5), (2040, leaves, 0)];
        parities.extend(trees(e, layout_of([32, 8, 128]), None, &rows)?);
    }
    for (shape, copies) in [((2, 3, 16), 5), ((1, 1, 128), 9), ((3, 2, 96), 1)] {
        parities.push(copied(e, shape, copies)?);
    }
    Ok(parities)
}

/// Trees and chains in one pass, compared with every row as a separate chain.
pub(super) fn trees<E: Executor>(
    e: &mut E,
    layout: HeadLayout,
    window: Option<u32>,
    rows: &[Rows<'_>],
) -> Result<Vec<Parity>, CudaError> {
    let HeadLayout { num_heads, num_kv_heads, head_dim } = layout;
    let pass = with_trees(layout, window, rows);
    let chains = pass.as_chains();
    let each: Vec<Part> = (0..chains.sequences.len()).map(|sequence| (sequence, 0..1)).collect();
    let expected = bits(&chains.run(e, &each, NO_LIMITS)?);
    let whole: Vec<Part> = pass.sequences.iter().enumerate().map(|(i, of)| (i, 0..of.rows.1)).collect();
    let name =
        format!("trees, {num_heads}/{num_kv_heads} heads of {head_dim}, window {}", window.unwrap_or(0));
    let mut parities = Vec::new();
    for (how, limits) in [
        ("at once", NO_LIMITS),
        ("in chunks by parts", Limits { max_parts: 40, ..NO_LIMITS }),
        ("in chunks by blocks", Limits { max_own_blocks: 3, ..NO_LIMITS }),
        ("in runs", Limits { min_runs: 1, ..NO_LIMITS }),
        ("chains in groups", Limits { parts: Some(PartSize::Group), ..NO_LIMITS }),
        ("chains undivided", Limits { parts: Some(PartSize::All), ..NO_LIMITS }),
    ] {
        let found = bits(&pass.run(e, &whole, limits)?);
        parities.push(compare_equal(format!("{name}: {how}"), &found, &expected));
    }
    let in_parts = whole.iter().flat_map(|(sequence, rows)| {
        rows.clone().step_by(3).map(|first| (*sequence, first..rows.end.min(first + 3)))
    });
    let mut found = Vec::new();
    for part in in_parts {
        found.extend(bits(&pass.run(e, &[part], NO_LIMITS)?));
    }
    parities.push(compare_equal(format!("{name}: in parts"), &found, &expected));
    Ok(parities)
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

fn with_trees(layout: HeadLayout, window: Option<u32>, rows: &[Rows<'_>]) -> Pass {
    let len =
        |&(start, parents, rows): &Rows<'_>| (start, if parents.is_empty() { rows } else { parents.len() });
    let mut pass = Pass::new(layout, window, &rows.iter().map(len).collect::<Vec<_>>());
    for (sequence, (_, parents, _)) in pass.sequences.iter_mut().zip(rows) {
        sequence.parents = parents.to_vec();
    }
    pass
}

impl Pass {
    /// Every row as the last row of a separate sequence, whose keys and values are stored in order.
    fn as_chains(&self) -> Self {
        let mut sequences = Vec::new();
        let mut next_block = 0;
        for sequence in &self.sequences {
            for row in 0..sequence.rows.1 {
                let stored_at = sequence.seen_by(row);
                let pick = |heads: &[Vec<Vec<bf16>>]| -> Vec<Vec<Vec<bf16>>> {
                    let of_head =
                        |head: &Vec<Vec<bf16>>| stored_at.iter().map(|&at| head[at].clone()).collect();
                    heads.iter().map(of_head).collect()
                };
                let (keys, values) = (pick(&sequence.keys), pick(&sequence.values));
                let blocks = stored_at.len().div_ceil(BLOCK_SIZE) as u32;
                let table = (next_block..next_block + blocks).rev().collect();
                next_block += blocks;
                let rows = (stored_at.len() as u32 - 1, 1);
                sequences.push(Sequence { keys, values, table, rows, parents: Vec::new() });
            }
        }
        let kv = kv_memory(self.layout, &sequences, next_block as usize);
        Self { layout: self.layout, window: self.window, sequences, qkv: self.qkv.clone(), kv }
    }
}

impl Sequence {
    /// Storage positions of the keys that a row attends to, in order of position.
    fn seen_by(&self, row: usize) -> Vec<usize> {
        let start = self.rows.0 as usize;
        let parent = |&row: &usize| match self.parents.get(row) {
            None => row.checked_sub(1),
            Some(&parent) => (parent as usize).checked_sub(1),
        };
        let mut path: Vec<usize> = std::iter::successors(Some(row), parent).map(|row| start + row).collect();
        path.reverse();
        (0..start).chain(path).collect()
    }
}

/// Dependent copies: some of them copy from where an earlier one wrote.
pub(super) fn copied<E: Executor>(
    e: &mut E,
    (num_layers, num_kv_heads, head_dim): (usize, usize, usize),
    num_copies: usize,
) -> Result<Parity, CudaError> {
    const BLOCKS: usize = 3;
    let shape = KvShape { num_layers, num_kv_heads, head_dim };
    let mut numbers = Numbers(num_copies as u64);
    let mut kv = numbers.bf16s(BLOCKS * shape.block_len(), 1.0);
    let mut slot = || {
        let at = numbers.bits() as usize % (BLOCKS * BLOCK_SIZE);
        KvSlot { block: (at / BLOCK_SIZE) as u32, offset: (at % BLOCK_SIZE) as u32 }
    };
    let mut copies: Vec<TokenCopy> =
        (0..num_copies).map(|_| TokenCopy { from: slot(), to: slot() }).collect();
    for i in 1..num_copies {
        if i % 3 == 1 {
            copies[i].from = copies[i - 1].to;
        }
    }
    let mut on_device = Tensor::of(e, &kv, "kv")?;
    copy_tokens(e, (&mut on_device, shape), &copies, &mut StepBuffer::default())?;
    for copy in &copies {
        for head in 0..num_layers * num_kv_heads {
            let place = |slot: KvSlot| {
                let heads = num_layers * num_kv_heads;
                ((slot.block as usize * heads + head) * 2 * BLOCK_SIZE * head_dim, slot.offset as usize)
            };
            let ((from, from_offset), (to, to_offset)) = (place(copy.from), place(copy.to));
            for d in 0..head_dim {
                for index in [key_index, value_index] {
                    kv[to + index(to_offset, d, head_dim)] = kv[from + index(from_offset, d, head_dim)];
                }
            }
        }
    }
    let found = on_device.read(e, 0..kv.len())?;
    let case = format!("{num_copies} tokens copied, {num_layers} layers, {num_kv_heads} heads of {head_dim}");
    Ok(compare_equal(case, &found, &kv))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::emulator::Emulator;

    /// The cases above can fail: a row gets another parent than its own, among many with the same context.
    #[test]
    fn another_parent_is_another_sum() {
        let (layout, parents) =
            (HeadLayout { num_heads: 4, num_kv_heads: 2, head_dim: 16 }, [0, 0, 1, 2, 3, 3, 4]);
        let e = &mut Emulator::build();
        let mut rows = |parents: &[u32]| {
            let pass = with_trees(layout, None, &[(140, parents, 0)]);
            let found = bits(&pass.run(e, &[(0, 0..parents.len())], NO_LIMITS).unwrap());
            found.chunks_exact(layout.q_width()).map(<[u32]>::to_vec).collect::<Vec<_>>()
        };
        let right = rows(&parents);
        let mut mutant = parents;
        mutant[4] = 4;
        let differ: Vec<usize> = rows(&mutant)
            .iter()
            .zip(&right)
            .enumerate()
            .filter(|(_, (a, b))| a != b)
            .map(|(row, _)| row)
            .collect();
        assert_eq!(differ, [4], "row 4 alone has other ancestors");
    }
}
