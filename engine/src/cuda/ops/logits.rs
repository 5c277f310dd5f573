//! Edits of raw logits (bias, penalties, excluded stop tokens): listed on the host, applied on the device.

use speculation::SequenceSpec;

use super::DrawBuffers;
use crate::TokenId;
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, check, check_len};
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

/// The changes that `speculation::logits::process` makes to the logits after a context. Ids outside the
/// vocabulary are omitted.
#[derive(Debug, Clone)]
pub(crate) struct ContextEdits<'a> {
    spec: &'a SequenceSpec,
    vocab: usize,
    /// Number of ids in the context.
    len: usize,
    /// One per token, ascending by id. Stop tokens are flagged for any length; see [`ContextEdits::of_row`].
    edits: Vec<LogitEdit>,
}

impl<'a> ContextEdits<'a> {
    /// The edits after `ids`.
    pub(crate) fn new(spec: &'a SequenceSpec, ids: &[TokenId], vocab: usize) -> Result<Self, CudaError> {
        let sampling = &spec.sampling;
        let edits = if sampling.has_penalties() { penalties(spec, ids, vocab) } else { Vec::new() };
        let mut this = Self { spec, vocab, len: ids.len(), edits };
        for &(id, bias) in &sampling.logit_bias {
            let Some(edit) = this.entry(id) else { continue };
            // Two biases would be rounded twice, but an edit has only one.
            let is_first = edit.flags & BIASED == 0;
            check("edit_logits", ("a biased token id", id as usize), is_first, "once in logit_bias")?;
            (edit.flags, edit.bias) = (edit.flags | BIASED, bias);
        }
        if sampling.min_tokens > 0 {
            for &id in &spec.stop_token_ids {
                if let Some(edit) = this.entry(id) {
                    edit.flags |= EXCLUDED;
                }
            }
        }
        Ok(this)
    }

    /// Appends an id to the context.
    pub(crate) fn push(&mut self, id: TokenId) {
        let is_output = self.len >= self.spec.prompt_len as usize;
        self.len += 1;
        if self.spec.sampling.has_penalties()
            && let Some(edit) = self.entry(id)
        {
            edit.flags |= SEEN;
            edit.in_output += u32::from(is_output);
        }
    }

    /// Position of the token to draw: the number of ids in the context.
    pub(crate) fn position(&self) -> u32 {
        self.len as u32
    }

    /// The edits as those of row `row`, ascending by token id.
    pub(crate) fn of_row(&self, row: u32) -> impl Iterator<Item = LogitEdit> {
        let num_output = self.position().saturating_sub(self.spec.prompt_len);
        let kept = if num_output < self.spec.sampling.min_tokens { u32::MAX } else { !EXCLUDED };
        let edits = self.edits.iter().map(move |edit| LogitEdit { row, flags: edit.flags & kept, ..*edit });
        edits.filter(|edit| edit.flags != 0)
    }

    /// The edit of a token, added if there is none.
    fn entry(&mut self, token_id: TokenId) -> Option<&mut LogitEdit> {
        if token_id as usize >= self.vocab {
            return None;
        }
        let found = self.edits.binary_search_by_key(&token_id, |edit| edit.token_id);
        let at = found.unwrap_or_else(|at| {
            self.edits.insert(at, no_edit(self.spec, token_id));
            at
        });
        Some(&mut self.edits[at])
    }
}

/// An edit without flags.
fn no_edit(spec: &SequenceSpec, token_id: TokenId) -> LogitEdit {
    let sampling = &spec.sampling;
    LogitEdit {
        row: 0,
        token_id,
        flags: 0,
        bias: 0.0,
        in_output: 0,
        repetition: sampling.repetition_penalty,
        frequency: sampling.frequency_penalty,
        presence: sampling.presence_penalty,
    }
}

/// One edit for each distinct id, ascending. Sorted instead of collected in a map, because every step of a
/// sequence lists its whole context.
fn penalties(spec: &SequenceSpec, ids: &[TokenId], vocab: usize) -> Vec<LogitEdit> {
    let prompt_len = (spec.prompt_len as usize).min(ids.len());
    let of_prompt = ids[..prompt_len].iter().map(|&id| u64::from(id) << 1);
    let of_output = ids[prompt_len..].iter().map(|&id| (u64::from(id) << 1) | 1);
    // An id, and in the lowest bit whether it is in the output.
    let mut seen: Vec<u64> = of_prompt.chain(of_output).filter(|key| key >> 1 < vocab as u64).collect();
    seen.sort_unstable();
    let of_tokens = seen.chunk_by(|a, b| a >> 1 == b >> 1);
    let edit = |keys: &[u64]| {
        let in_output = keys.iter().filter(|key| *key & 1 == 1).count() as u32;
        LogitEdit { flags: SEEN, in_output, ..no_edit(spec, (keys[0] >> 1) as TokenId) }
    };
    of_tokens.map(edit).collect()
}

impl<M> DrawBuffers<M> {
    /// Adds edits, the last inputs of a step: the number of edits changes with every token, and would move the
    /// arrays after them.
    pub(crate) fn put_edits(&mut self, edits: &[LogitEdit]) {
        self.put_edits_of_turn(edits, MAX_EDITS);
    }

    /// The same with at most `most` edits per launch.
    fn put_edits_of_turn(&mut self, edits: &[LogitEdit], most: usize) {
        self.edits = self.arrays.put_last(&edits[..edits.len().min(most)], most);
    }
}

/// Applies `edits`, those of [`DrawBuffers::put_edits`], to `logits` `[rows, vocab]`. Each (row, id) may occur
/// once, because threads apply edits in any order.
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

/// The same with at most `most` edits per launch; launches reuse the memory of their edits, and those after
/// the first upload theirs.
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
    let DrawBuffers { arrays, edits: place, .. } = buffers;
    if !edits.is_empty() {
        check_len(kernel.name, "edits", arrays.input(place).len(), edits.len().min(most))?;
    }
    for (turn, edits) in edits.chunks(most).enumerate() {
        if turn > 0 {
            arrays.overwrite(executor, place, edits)?;
        }
        let params = Params::default().write(logits).view(arrays.input(place)).u32(edits.len()).u32(vocab);
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
        format_args!("below {vocab}, in {rows} rows"),
    )?;
    let twice = places.windows(2).find(|pair| pair[0] == pair[1]);
    let found = twice.map_or(0, |pair| pair[0].1 as usize);
    check(kernel, ("an edited token id", found), twice.is_none(), "once a row")
}

#[cfg(test)]
mod tests {
    use speculation::SamplingParams;

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
            buffers.put_edits_of_turn(&edits, most);
            buffers.upload(&mut e).unwrap();
            edit_in_turns(&mut e, &mut buffers, &mut logits, (&edits, most), 7).unwrap();
            assert_eq!(logits.read(&mut e, 0..21).unwrap(), expected, "at most {most}");
            let words = most * size_of::<LogitEdit>() / size_of::<u32>();
            assert_eq!(buffers.arrays.input_words(), words.next_power_of_two(), "at most {most}");
        }
    }

    /// An id that is appended has the effect of one that was there from the start.
    #[test]
    fn appended_ids_count_as_those_of_the_context() {
        const VOCAB: usize = 12;
        let logit_bias = vec![(9, 0.5), (2, 1.0), (700, 1.0)];
        let plain = SamplingParams::default();
        let sampling = SamplingParams { repetition_penalty: 1.2, min_tokens: 3, logit_bias, ..plain };
        let stop_token_ids = vec![7, 2, 800];
        let spec = SequenceSpec { prompt_len: 4, sampling, stop_token_ids, ..SequenceSpec::default() };
        let ids = [5, 2, 5, 11, 2, 900, 3, 5, 11];
        let edits_after = |context: &[TokenId], appended: &[TokenId]| -> Vec<LogitEdit> {
            let mut edits = ContextEdits::new(&spec, context, VOCAB).unwrap();
            appended.iter().for_each(|&id| edits.push(id));
            assert_eq!(edits.position() as usize, context.len() + appended.len());
            edits.of_row(6).collect()
        };
        for len in 0..=ids.len() {
            let expected = edits_after(&ids[..len], &[]);
            assert!(expected.iter().all(|edit| edit.row == 6));
            for split in 0..len {
                let (context, appended) = ids[..len].split_at(split);
                assert_eq!(edits_after(context, appended), expected, "{split} of {len}");
            }
        }
        let said = |len: usize| -> Vec<(TokenId, u32, u32)> {
            let edits = edits_after(&ids[..len], &[]).into_iter();
            edits.map(|edit| (edit.token_id, edit.flags, edit.in_output)).collect()
        };
        let of_six =
            [(2, EXCLUDED | BIASED | SEEN, 1), (5, SEEN, 0), (7, EXCLUDED, 0), (9, BIASED, 0), (11, SEEN, 0)];
        assert_eq!(said(6), of_six);
        let of_all = [(2, BIASED | SEEN, 1), (3, SEEN, 1), (5, SEEN, 1), (9, BIASED, 0), (11, SEEN, 1)];
        assert_eq!(said(9), of_all);
    }

    #[test]
    fn a_token_with_two_biases_is_refused() {
        let sampling = SamplingParams { logit_bias: vec![(3, 1.0), (3, 2.0)], ..SamplingParams::default() };
        let spec = SequenceSpec { sampling, ..SequenceSpec::default() };
        let error = ContextEdits::new(&spec, &[], 12).unwrap_err().to_string();
        assert!(error.contains("a biased token id is 3, expected once in logit_bias"), "{error}");
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
