//! Edits of raw logits (bias, penalties, excluded stop tokens): listed on the host, applied on the device.

use std::collections::BTreeMap;

use speculation::SequenceSpec;

use super::DrawBuffers;
use crate::TokenId;
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, check};
use crate::cuda::sources::LOGITS;

/// Excluded by min_tokens.
const EXCLUDED: u32 = 1;
/// Has a bias.
const BIASED: u32 = 2;
/// Occurs before the position.
const SEEN: u32 = 4;

/// Edit of one logit, in the layout of `logits.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct LogitEdit {
    pub(crate) row: u32,
    pub(crate) token_id: u32,
    /// [`EXCLUDED`], [`BIASED`], [`SEEN`].
    pub(crate) flags: u32,
    pub(crate) bias: f32,
    pub(crate) in_output: u32,
    pub(crate) repetition: f32,
    pub(crate) frequency: f32,
    pub(crate) presence: f32,
}

/// Edits per launch: penalties over long contexts list millions in a step.
const MAX_EDITS: usize = 1 << 18;

/// Size of the edits of a launch, in bytes.
pub(crate) const EDIT_BYTES: usize = MAX_EDITS * size_of::<LogitEdit>();

/// Returns the changes that `speculation::logits::process` makes to the logits after `ids`, as edits of row
/// `row`. Ids outside the vocabulary are omitted.
pub(crate) fn edits_of(
    row: u32,
    spec: &SequenceSpec,
    ids: &[TokenId],
    vocab: usize,
) -> Result<Vec<LogitEdit>, CudaError> {
    let sampling = &spec.sampling;
    let mut edits = BTreeMap::new();
    let new = |token_id| LogitEdit {
        row,
        token_id,
        flags: 0,
        bias: 0.0,
        in_output: 0,
        repetition: sampling.repetition_penalty,
        frequency: sampling.frequency_penalty,
        presence: sampling.presence_penalty,
    };
    if (ids.len() as u32).saturating_sub(spec.prompt_len) < sampling.min_tokens {
        for &id in &spec.stop_token_ids {
            edits.entry(id).or_insert_with(|| new(id)).flags |= EXCLUDED;
        }
    }
    for &(id, bias) in &sampling.logit_bias {
        let edit = edits.entry(id).or_insert_with(|| new(id));
        // Two biases would be rounded twice, but an edit has only one.
        check(
            "edit_logits",
            ("a biased token id", id as usize),
            edit.flags & BIASED == 0,
            "once in logit_bias",
        )?;
        (edit.flags, edit.bias) = (edit.flags | BIASED, bias);
    }
    if sampling.has_penalties() {
        for (position, &id) in ids.iter().enumerate() {
            let edit = edits.entry(id).or_insert_with(|| new(id));
            edit.flags |= SEEN;
            edit.in_output += u32::from(position >= spec.prompt_len as usize);
        }
    }
    Ok(edits.into_values().filter(|edit| (edit.token_id as usize) < vocab).collect())
}

/// Applies `edits` to `logits` `[rows, vocab]`. Each (row, id) may occur once, because threads apply edits in
/// any order.
pub(crate) fn edit_logits<E: Executor>(
    executor: &mut E,
    buffers: &mut DrawBuffers<E::Memory>,
    logits: &mut Tensor<E::Memory, f32>,
    edits: &[LogitEdit],
    vocab: usize,
) -> Result<(), CudaError>
where
    E::Memory: DeviceMemory,
{
    edit_in_turns(executor, buffers, logits, (edits, MAX_EDITS), vocab)
}

/// The same with at most `most` edits per launch; launches reuse the memory of their edits.
fn edit_in_turns<E: Executor>(
    executor: &mut E,
    buffers: &mut DrawBuffers<E::Memory>,
    logits: &mut Tensor<E::Memory, f32>,
    (edits, most): (&[LogitEdit], usize),
    vocab: usize,
) -> Result<(), CudaError>
where
    E::Memory: DeviceMemory,
{
    let kernel = LOGITS.kernel(0);
    check_edits(kernel.name, edits, logits.len() / vocab, vocab)?;
    for edits in edits.chunks(most) {
        let on_device = buffers.edits.fill(executor, edits, "logit edits")?;
        let params = Params::default().write(logits).read(on_device).u32(edits.len()).u32(vocab);
        let grid = [edits.len().div_ceil(kernel.threads as usize) as u32, 1, 1];
        // SAFETY: these are the kernel's parameters; the check ensures that every edit is in bounds and that
        // no two threads edit the same logit.
        unsafe { executor.launch(kernel, grid, &mut { params }) }?;
    }
    Ok(())
}

fn check_edits(
    kernel: &'static str,
    edits: &[LogitEdit],
    rows: usize,
    vocab: usize,
) -> Result<(), CudaError> {
    let mut places: Vec<(u32, u32)> = edits.iter().map(|edit| (edit.row, edit.token_id)).collect();
    places.sort_unstable();
    let outside = places.iter().find(|&&(row, id)| row as usize >= rows || id as usize >= vocab);
    let found = outside.map_or(0, |&(_, id)| id as usize);
    check(
        kernel,
        ("an edited token id", found),
        outside.is_none(),
        format!("below {vocab}, in {rows} rows"),
    )?;
    let twice = places.windows(2).find(|pair| pair[0] == pair[1]);
    let found = twice.map_or(0, |pair| pair[0].1 as usize);
    check(kernel, ("an edited token id", found), twice.is_none(), "once a row")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::emulator::Emulator;

    /// The memory of a step's edits does not grow with the context.
    #[test]
    fn many_edits_take_turns_in_little_memory() {
        let biased = |i: u32| {
            let (row, token_id, bias) = (i / 7, i % 7, i as f32);
            LogitEdit { row, token_id, bias, flags: BIASED, ..bytemuck::Zeroable::zeroed() }
        };
        let edits: Vec<LogitEdit> = (0..21).map(biased).collect();
        let expected: Vec<f32> = (0..21u16).map(|i| 0.5 + f32::from(i)).collect();
        for most in [2, 4, 7, 21, 100] {
            let (mut e, mut buffers) = (Emulator::build(), DrawBuffers::default());
            // Launches are collected, so that edits which are overwritten too early would show.
            e.enable_graphs();
            let mut logits = Tensor::of(&mut e, &[0.5f32; 21], "logits").unwrap();
            edit_in_turns(&mut e, &mut buffers, &mut logits, (&edits, most), 7).unwrap();
            assert_eq!(logits.read(&mut e, 0..21).unwrap(), expected, "at most {most}");
            assert!(buffers.edits.tensor().len() <= most.min(21).next_power_of_two(), "at most {most}");
        }
    }

    #[test]
    fn edits_outside_or_twice_are_refused() {
        let edit = |row, token_id| LogitEdit { row, token_id, ..bytemuck::Zeroable::zeroed() };
        assert_eq!(check_edits("edit", &[edit(0, 4), edit(1, 4)], 2, 5), Ok(()));
        for (edits, says) in [
            ([edit(2, 0), edit(0, 0)], "in 2 rows"),
            ([edit(0, 5), edit(0, 0)], "token id is 5, expected below 5"),
            ([edit(1, 3), edit(1, 3)], "token id is 3, expected once a row"),
        ] {
            let error = check_edits("edit", &edits, 2, 5).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
