//! Compares the logit pipeline and the coupled draw with `speculation`: equal bits and equal ids, and the
//! contract's known answers.

use speculation::acceptance::{RawRows, candidates_from_processed, verify};
use speculation::logits::{DrawError, TokenCounts, process};
use speculation::noise::{Noise, Purpose};
use speculation::tree::{Candidates, MAX_CANDIDATES};
use speculation::{Draft, SamplingParams, SequenceSpec};

use super::{Numbers, Parity, Scale, compare, compare_equal};
use crate::TokenId;
use crate::cuda::CudaError;
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::{
    CandidateBuffers, ContextEdits, DrawBuffers, DrawRow, Drawn, FilterRow, ListedRow, LogitEdit,
    LogitsShape, apply_filters, candidates, copy_edited_rows, draw, edit_logits, find_candidates,
    score_first_candidates,
};

pub(super) fn cases<E: Executor>(e: &mut E, scale: Scale) -> Result<Vec<Parity>, CudaError> {
    let mut parities = known_answers(e)?;
    parities.push(edits(e, scale.pick(200, 128_256))?);
    for vocab in scale.pick(vec![1, 2, 33, 1000], vec![1, 4096, 128_256, 151_936]) {
        for temperature in [0.0, 0.3, 1.0, 50.0] {
            parities.push(draws(e, (vocab, scale.pick(4, 64)), temperature)?);
            parities.push(several(e, (vocab, scale.pick(6, 16)), temperature)?);
        }
    }
    parities.push(bad_rows(e)?);
    for vocab in scale.pick(vec![1, 40, 1500, 3001], vec![1000, 32_000, 151_936]) {
        parities.extend(filters(e, (vocab, scale.pick(2, 8)))?);
    }
    parities.push(undecided(e, scale.pick(3000, 128_256))?);
    Ok(parities)
}

/// Applies filters and returns the rows that are left to the host.
fn keep_now<E: Executor>(
    e: &mut E,
    logits: &mut Tensor<E::Memory, f32>,
    filters: &[FilterRow],
    shape: LogitsShape,
) -> Result<Vec<u32>, CudaError> {
    let mut buffers = DrawBuffers::default();
    buffers.prepare(shape, filters.to_vec(), Vec::new());
    buffers.upload(e)?;
    apply_filters(e, &mut buffers, logits)?;
    Ok(buffers.undecided(&buffers.download(e)?))
}

/// Draws and returns the results.
fn draw_now<E: Executor>(
    e: &mut E,
    logits: &Tensor<E::Memory, f32>,
    draws: &[DrawRow],
    shape: LogitsShape,
) -> Result<Vec<Drawn>, CudaError> {
    let mut buffers = DrawBuffers::default();
    buffers.prepare(shape, Vec::new(), draws.to_vec());
    buffers.upload(e)?;
    draw(e, &mut buffers, logits)?;
    Ok(buffers.drawn(&buffers.download(e)?))
}

/// Filters of rows like a model's, of rows with ties everywhere, and of mostly masked rows: the result must
/// be the tokens that the host keeps, or the unchanged row if it is left to the host.
fn filters<E: Executor>(e: &mut E, (vocab, rows): (usize, usize)) -> Result<Vec<Parity>, CudaError> {
    let plain = SamplingParams::default();
    let mut parities = Vec::new();
    for (name, sampling) in [
        ("top-k 1", SamplingParams { top_k: 1, ..plain.clone() }),
        ("top-k 40", SamplingParams { top_k: 40, ..plain.clone() }),
        ("top-p 0.9", SamplingParams { top_p: 0.9, temperature: 0.7, ..plain.clone() }),
        ("top-p 0", SamplingParams { top_p: 0.0, ..plain.clone() }),
        ("min-p 0.05", SamplingParams { min_p: 0.05, temperature: 1.3, ..plain.clone() }),
        ("top-k 1024, top-p 0.8", SamplingParams { top_k: 1024, top_p: 0.8, ..plain.clone() }),
        ("all three", SamplingParams { top_k: 100, top_p: 0.95, min_p: 0.01, ..plain.clone() }),
        ("min-p and top-p, hot", SamplingParams { top_p: 0.7, min_p: 0.02, temperature: 4.0, ..plain }),
    ] {
        parities.push(filter(e, (vocab, rows), (name, &sampling))?);
    }
    Ok(parities)
}

/// One kind of filter on such rows; without a filter the rows must not change.
pub(super) fn filter<E: Executor>(
    e: &mut E,
    (vocab, rows): (usize, usize),
    (name, sampling): (&str, &SamplingParams),
) -> Result<Parity, CudaError> {
    let stride = vocab + 3;
    let (mut logits, mut expected, mut listed) = (Vec::new(), Vec::new(), Vec::new());
    for row in 0..rows as u32 {
        let mut numbers = model_row(vocab, row);
        match row % 4 {
            1 => numbers.iter_mut().for_each(|x| *x = x.round()),
            2 => numbers.iter_mut().skip(1).step_by(2).for_each(|x| *x = f32::NEG_INFINITY),
            3 => numbers.iter_mut().enumerate().for_each(|(i, x)| *x = if i % 3 == 0 { -0.0 } else { 0.0 }),
            _ => {}
        }
        listed.extend(FilterRow::new(row, sampling));
        expected.extend(kept_of(&numbers, sampling));
        expected.extend([1e30; 3]);
        logits.extend(numbers);
        logits.extend([1e30; 3]);
    }
    let mut on_device = Tensor::of(e, &logits, "logits")?;
    let left = keep_now(e, &mut on_device, &listed, LogitsShape { vocab, stride })?;
    let mut found = on_device.read(e, 0..logits.len())?;
    let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for row in &left {
        // A row that is left to the host must be unchanged; it then counts as correct.
        let range = *row as usize * stride..(*row as usize + 1) * stride;
        if bits(&found[range.clone()]) == bits(&logits[range.clone()]) {
            found[range.clone()].copy_from_slice(&expected[range]);
        }
    }
    let case = format!("{name} of {vocab}, {} of {rows} rows left to the host", left.len());
    Ok(compare(case, 0.0, &found, &expected))
}

/// Counts how often each number of two rows is read by top-p filters, and by the draw. Candidates passed on
/// by parts count by their size.
#[cfg(test)]
pub(super) fn passes(e: &mut crate::cuda::emulator::Emulator, vocab: usize) -> Result<[f64; 2], CudaError> {
    let sampling = SamplingParams { top_p: 0.9, ..SamplingParams::default() };
    let spec = SequenceSpec { sampling, max_len: u32::MAX, ..SequenceSpec::default() };
    let rows: Vec<f32> = (0..2).flat_map(|row| model_row(vocab, row)).collect();
    let mut logits = Tensor::of(e, &rows, "logits")?;
    let filters: Vec<FilterRow> = (0..2).filter_map(|row| FilterRow::new(row, &spec.sampling)).collect();
    let begin = e.global_bytes();
    keep_now(e, &mut logits, &filters, LogitsShape { vocab, stride: vocab })?;
    let filtered = e.global_bytes();
    let draws = [0, 1].map(|row| DrawRow::new(row, &spec, 9));
    draw_now(e, &logits, &draws, LogitsShape { vocab, stride: vocab })?;
    let bytes = [filtered - begin, e.global_bytes() - filtered];
    Ok(bytes.map(|bytes| bytes as f64 / (rows.len() * size_of::<f32>()) as f64))
}

/// A row with the tokens masked that the host's filters exclude.
fn kept_of(logits: &[f32], sampling: &SamplingParams) -> Vec<f32> {
    let kept = speculation::logits::apply_filters(logits, sampling, 0)
        .expect("a row with a number can be drawn from");
    let mut masked = vec![f32::NEG_INFINITY; logits.len()];
    kept.tokens.iter().for_each(|&(id, _)| masked[id as usize] = logits[id as usize]);
    masked
}

/// Exactly the rows whose border lies beyond the candidates are left to the host.
fn undecided<E: Executor>(e: &mut E, vocab: usize) -> Result<Parity, CudaError> {
    let plain = SamplingParams::default();
    let flat = vec![0.25f32; vocab];
    let mut peaked = flat.clone();
    peaked[vocab / 2] = 60.0;
    let rows = [
        (&flat, SamplingParams { top_p: 0.5, ..plain.clone() }),
        (&flat, SamplingParams { min_p: 0.5, ..plain.clone() }),
        (&flat, SamplingParams { top_k: 2000, ..plain.clone() }),
        (&flat, SamplingParams { top_k: 1024, top_p: 0.99, ..plain.clone() }),
        (&peaked, SamplingParams { top_p: 0.999, ..plain.clone() }),
        (&peaked, SamplingParams { min_p: 0.001, ..plain }),
    ];
    let logits: Vec<f32> = rows.iter().flat_map(|(row, _)| (*row).clone()).collect();
    let mut on_device = Tensor::of(e, &logits, "logits")?;
    let filters: Vec<FilterRow> =
        rows.iter().zip(0..).filter_map(|((_, sampling), row)| FilterRow::new(row, sampling)).collect();
    let left = keep_now(e, &mut on_device, &filters, LogitsShape { vocab, stride: vocab })?;
    Ok(compare_equal("rows that the host decides", &left, &[0, 1, 2]))
}

/// The host's draw, in the kernel's format.
fn twin(spec: &SequenceSpec, position: u32, mut logits: Vec<f32>) -> Drawn {
    let (vocab, mut counts) = (logits.len(), TokenCounts::new(spec.prompt_len));
    match verify(spec, &mut counts, position, &Draft::default(), RawRows::new(&mut logits, vocab)) {
        Ok(verdict) => Drawn { token_id: verdict.token_ids[0], status: 0 },
        Err(DrawError::NotANumber { token_id, .. }) => Drawn { token_id, status: 1 },
        Err(_) => Drawn { token_id: 0, status: 2 },
    }
}

/// Rows like a language model's: few tokens have high logits.
pub(super) fn model_row(vocab: usize, row: u32) -> Vec<f32> {
    let source = Noise { seed: 99, choice: row };
    (0..vocab as u32).map(|id| (2.0 * source.gumbel(0, id, Purpose::Draft)) as f32).collect()
}

fn draws<E: Executor>(
    e: &mut E,
    (vocab, rows): (usize, usize),
    temperature: f32,
) -> Result<Parity, CudaError> {
    // Rows are longer than the vocabulary, and what stands past it would win.
    let stride = vocab + 3;
    let (mut logits, mut draws, mut expected) = (Vec::new(), Vec::new(), Vec::new());
    for row in 0..rows as u32 {
        let sampling = SamplingParams { temperature, ..SamplingParams::default() };
        let seed = u64::from(row).wrapping_mul(0x1234_5678_9abc_def1);
        let spec =
            SequenceSpec { seed, choice: row % 3, sampling, max_len: u32::MAX, ..SequenceSpec::default() };
        let mut numbers = model_row(vocab, row);
        if row % 4 == 3 {
            // Ties everywhere: the lowest id among equals.
            numbers.iter_mut().for_each(|x| *x = x.round());
        }
        draws.push(DrawRow::new(row, &spec, 1000 + row));
        expected.push(twin(&spec, 1000 + row, numbers.clone()));
        logits.extend(numbers);
        logits.extend([1e30; 3]);
    }
    let logits = Tensor::of(e, &logits, "logits")?;
    let found = draw_now(e, &logits, &draws, LogitsShape { vocab, stride })?;
    Ok(compare_equal(format!("draw from {vocab} at T = {temperature}"), &found, &expected))
}

/// Candidates of rows like a model's, of rows with ties, and of rows in which only every third token or only
/// one is allowed: ids, scores and the surprise.
fn several<E: Executor>(
    e: &mut E,
    (vocab, rows): (usize, usize),
    temperature: f32,
) -> Result<Parity, CudaError> {
    // Rows are longer than the vocabulary, and what stands past it would win.
    let stride = vocab + 3;
    let sampling = SamplingParams { temperature, ..SamplingParams::default() };
    let (mut logits, mut draws, mut expected) = (Vec::new(), Vec::new(), Vec::new());
    for row in 0..rows as u32 {
        let (seed, sampling) = (u64::from(row).wrapping_mul(0x1234_5678_9abc_def1), sampling.clone());
        let spec =
            SequenceSpec { seed, choice: row % 3, sampling, max_len: u32::MAX, ..SequenceSpec::default() };
        let mut numbers = model_row(vocab, row);
        let is_masked: fn(usize) -> bool = match row % 4 {
            1 => |i| i % 3 != 0,
            2 => |i| i != 0,
            _ => |_| false,
        };
        numbers
            .iter_mut()
            .enumerate()
            .for_each(|(i, x)| *x = if is_masked(i) { f32::NEG_INFINITY } else { *x });
        if row % 4 == 3 {
            numbers.iter_mut().for_each(|x| *x = x.round());
        }
        draws.push(DrawRow::new(row, &spec, 1000 + row));
        expected.push(
            candidates_from_processed(&spec, (1000 + row, MAX_CANDIDATES), &numbers)
                .expect("a number is there"),
        );
        logits.extend(numbers);
        logits.extend([1e30; 3]);
    }
    let logits = Tensor::of(e, &logits, "logits")?;
    let (mut drawing, mut listing) = (DrawBuffers::default(), CandidateBuffers::default());
    let shape = LogitsShape { vocab, stride };
    let listed: Vec<ListedRow> =
        draws.iter().zip(0..).map(|(&draw, draw_idx)| ListedRow { draw, draw_idx }).collect();
    drawing.prepare(shape, Vec::new(), draws);
    listing.prepare(&mut drawing, listed);
    drawing.upload(e)?;
    draw(e, &mut drawing, &logits)?;
    copy_edited_rows(e, &mut listing, &drawing, &logits)?;
    score_first_candidates(e, &listing, &drawing)?;
    find_candidates(e, &mut listing, &drawing, &logits)?;
    let results = drawing.download(e)?;
    let found = candidates(e, &listing, &results)?;
    let found: Vec<Candidates> =
        found.iter().map(|found| Candidates::from_scores(&sampling, &found.best, found.surprise)).collect();
    Ok(compare_equal(format!("candidates of {vocab} at T = {temperature}"), &found, &expected))
}

fn bad_rows<E: Executor>(e: &mut E) -> Result<Parity, CudaError> {
    const VOCAB: usize = 300;
    let spec = SequenceSpec { max_len: u32::MAX, ..SequenceSpec::default() };
    let mut rows =
        vec![vec![0.5f32; VOCAB], vec![0.5; VOCAB], vec![f32::NEG_INFINITY; VOCAB], vec![0.5; VOCAB]];
    (rows[0][270], rows[0][290]) = (f32::NAN, f32::INFINITY);
    rows[1][5] = f32::INFINITY;
    rows[3].iter_mut().skip(1).for_each(|x| *x = f32::NEG_INFINITY);
    let draws: Vec<DrawRow> = (0..4).map(|i| DrawRow::new(i, &spec, i)).collect();
    let logits = Tensor::of(e, &rows.concat(), "logits")?;
    let found = draw_now(e, &logits, &draws, LogitsShape { vocab: VOCAB, stride: VOCAB })?;
    let expected: Vec<Drawn> = rows.into_iter().zip(0..).map(|(row, i)| twin(&spec, i, row)).collect();
    // If no token is allowed, the id is unspecified.
    let without_id = |drawn: Drawn| if drawn.status == 2 { Drawn { token_id: 0, ..drawn } } else { drawn };
    let found: Vec<Drawn> = found.into_iter().map(without_id).collect();
    Ok(compare_equal("draw from rows that cannot be drawn from", &found, &expected))
}

fn edits<E: Executor>(e: &mut E, vocab: usize) -> Result<Parity, CudaError> {
    let (mut numbers, prompt_len) = (Numbers(11), 6);
    let mut specs = Vec::new();
    for (repetition_penalty, frequency_penalty, presence_penalty, min_tokens) in
        [(1.3, 0.7, 0.4, 0), (0.9, 0.0, 0.0, 50), (1.0, -0.3, 1.1, 0), (1.0, 0.0, 0.0, 9)]
    {
        let logit_bias =
            vec![(5, 6.5), (9, f32::NEG_INFINITY), (vocab as u32 - 1, 0.1), (vocab as u32 + 7, 1.0)];
        let plain = SamplingParams::default();
        let sampling = SamplingParams {
            repetition_penalty,
            frequency_penalty,
            presence_penalty,
            min_tokens,
            logit_bias,
            ..plain
        };
        specs.push(SequenceSpec {
            prompt_len,
            sampling,
            stop_token_ids: vec![2, 5],
            ..SequenceSpec::default()
        });
    }
    let logits = numbers.vec(specs.len() * vocab, 4.0);
    let ids: Vec<TokenId> = (0..20).map(|i| (i * i % 11) as TokenId).collect();
    let mut expected = logits.clone();
    let mut all = Vec::new();
    for (row, (spec, expected)) in specs.iter().zip(expected.chunks_exact_mut(vocab)).enumerate() {
        // The last ids are appended to the context: in the rows' order 2, 7, 12 and 17 of them.
        let (context, appended) = ids.split_at(18 - 5 * row);
        let mut edits = ContextEdits::new(spec, context, vocab)?;
        appended.iter().for_each(|&id| edits.push(id));
        all.extend(edits.of_row(row as u32));
        let mut counts = TokenCounts::new(prompt_len);
        ids.iter().for_each(|&id| counts.push(id));
        process(expected, spec, &counts, ids.len() as u32);
    }
    let mut on_device = Tensor::of(e, &logits, "logits")?;
    edit_now(e, &mut on_device, &all, vocab)?;
    Ok(compare(format!("logit pipeline on {vocab}"), 0.0, &on_device.read(e, 0..logits.len())?, &expected))
}

/// Uploads edits and applies them.
fn edit_now<E: Executor>(
    e: &mut E,
    logits: &mut Tensor<E::Memory, f32>,
    edits: &[LogitEdit],
    vocab: usize,
) -> Result<(), CudaError> {
    let mut buffers = DrawBuffers::default();
    buffers.put_edits(edits);
    buffers.upload(e)?;
    edit_logits(e, &mut buffers, logits, edits, vocab)
}

/// The contract's frozen draws, as speculation's own tests generate them; cases with filters are drawn by the
/// host.
fn known_answers<E: Executor>(e: &mut E) -> Result<Vec<Parity>, CudaError> {
    const VOCAB: usize = 64;
    let answers = include_str!("../../../../speculation/tests/vectors/draws.txt");
    let mut parities = Vec::new();
    for line in answers.lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.split(' ');
        let name = words.next().unwrap_or_default();
        let Some(spec) = known_case(name) else { continue };
        let expected: Vec<TokenId> = words.filter_map(|word| word.parse().ok()).collect();
        let mut ids: Vec<TokenId> = vec![1, 2, 3];
        for _ in 0..expected.len() {
            let (last, len) = (ids[ids.len() - 1] as usize, ids.len());
            let row: Vec<f32> =
                (0..VOCAB).map(|v| ((v * 37 + last * 29 + len * 53) % 97) as f32 / 8.0 - 6.0).collect();
            let mut logits = Tensor::of(e, &row, "logits")?;
            let context = ContextEdits::new(&spec, &ids, VOCAB)?;
            let edits: Vec<LogitEdit> = context.of_row(0).collect();
            edit_now(e, &mut logits, &edits, VOCAB)?;
            let draws = [DrawRow::new(0, &spec, context.position())];
            let drawn = draw_now(e, &logits, &draws, LogitsShape { vocab: VOCAB, stride: VOCAB })?;
            ids.push(drawn[0].token_id);
        }
        parities.push(compare_equal(format!("known draws, {name}"), &ids[3..], &expected));
    }
    Ok(parities)
}

/// As in speculation/tests/sampling/vectors.rs.
fn known_case(name: &str) -> Option<SequenceSpec> {
    let plain = SamplingParams::default();
    let sampling = match name {
        "plain" | "second-choice" => plain,
        "greedy" => SamplingParams { temperature: 0.0, ..plain },
        "cool" => SamplingParams { temperature: 0.7, ..plain },
        "hot" => SamplingParams { temperature: 3.0, ..plain },
        "bias" => SamplingParams { logit_bias: vec![(5, 6.5), (9, -100.0), (63, 3.25)], ..plain },
        "repetition" => SamplingParams { repetition_penalty: 1.3, temperature: 0.0, ..plain },
        "frequency-and-presence" => SamplingParams { frequency_penalty: 0.7, presence_penalty: 1.1, ..plain },
        _ => return None,
    };
    let seed = if name == "hot" { u64::MAX } else { 7 };
    let choice = u32::from(name == "second-choice");
    Some(SequenceSpec { seed, choice, prompt_len: 3, sampling, max_len: 1_000, ..SequenceSpec::default() })
}
