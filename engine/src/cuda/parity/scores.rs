//! Compares log probabilities with `speculation::logits::score`, equal bits: rows like a model's, rows with
//! ties everywhere, mostly masked rows, rows without valid probabilities, and tokens that the host has drawn.

use speculation::logits::score as twin;
use speculation::{SequenceSpec, TokenLogprobs};

use super::sampling::model_row;
use super::{Parity, Scale, compare_equal};
use crate::cuda::CudaError;
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::{
    DrawBuffers, DrawRow, LogitsShape, ScoreBuffers, ScoreRow, ScoredToken, copy_raw_rows, draw, score,
    scores,
};

pub(super) fn cases<E: Executor>(e: &mut E, scale: Scale) -> Result<Vec<Parity>, CudaError> {
    let mut parities = Vec::new();
    for vocab in scale.pick(vec![1, 2, 33, 257, 1000], vec![1, 4096, 128_256, 151_936]) {
        for top_n in [0, 1, 20, 64] {
            parities.push(scored(e, (vocab, scale.pick(6, 48)), top_n)?);
        }
    }
    Ok(parities)
}

/// Bits of a token's log probability, and of the most likely tokens with their ids.
type Bits = (u32, Vec<(u32, u32)>);

fn bits(scored: &TokenLogprobs) -> Bits {
    // A NaN means unknown, whatever its bits.
    let of = |x: f32| if x.is_nan() { u32::MAX } else { x.to_bits() };
    (of(scored.logprob), scored.top.iter().map(|&(id, logprob)| (id, of(logprob))).collect())
}

/// Every second row is scored. One in three of those has a token that the host has drawn, one in three a
/// given token.
pub(super) fn scored<E: Executor>(
    e: &mut E,
    (vocab, rows): (usize, usize),
    top_n: u32,
) -> Result<Parity, CudaError> {
    // Rows are longer than the vocabulary; the numbers past it would be most likely.
    let stride = vocab + 3;
    let spec = SequenceSpec { seed: 77, max_len: u32::MAX, ..SequenceSpec::default() };
    let (mut logits, mut draws) = (Vec::new(), Vec::new());
    for row in 0..2 * rows as u32 {
        let mut numbers = model_row(vocab, row);
        match row / 2 % 6 {
            1 => numbers.iter_mut().for_each(|x| *x = x.round()),
            2 => numbers.iter_mut().skip(1).step_by(2).for_each(|x| *x = f32::NEG_INFINITY),
            3 => numbers.iter_mut().enumerate().for_each(|(i, x)| *x = if i % 3 == 0 { -0.0 } else { 0.0 }),
            4 => numbers[vocab / 2] = f32::NAN,
            5 => numbers[vocab - 1] += 300.0,
            _ => {}
        }
        logits.extend(numbers);
        logits.extend([1e30; 3]);
        draws.push(DrawRow::new(row, &spec, row));
    }
    let token = |i: u32| i * 7 % vocab as u32;
    let scored = |i: u32| match i % 3 {
        2 => ScoredToken::Given(token(i)),
        _ => ScoredToken::Drawn { draw_idx: 2 * i },
    };
    let wanted: Vec<ScoreRow> =
        (0..rows as u32).map(|i| ScoreRow { row: 2 * i, top_n, token: scored(i) }).collect();
    let redrawn: Vec<Option<u32>> = (0..rows as u32).map(|i| (i % 3 == 1).then_some(token(i))).collect();

    let (mut drawing, mut scoring) = (DrawBuffers::default(), ScoreBuffers::default());
    let mut on_device = Tensor::of(e, &logits, "logits")?;
    drawing.prepare(LogitsShape { vocab, stride }, Vec::new(), draws);
    scoring.prepare(&mut drawing, wanted.clone());
    drawing.upload(e)?;
    copy_raw_rows(e, &mut scoring, &drawing, &on_device)?;
    draw(e, &mut drawing, &on_device)?;
    // Later changes of the rows must not matter.
    on_device.write(e, 0, &vec![f32::NAN; logits.len()])?;
    score(e, &scoring, &drawing)?;
    let results = drawing.download(e)?;
    let found = scores(e, &scoring, &results, &redrawn)?;
    let ids = drawing.drawn(&results);
    let row_of = |score: &ScoreRow| &logits[score.row as usize * stride..][..vocab];
    let expected = wanted.iter().zip(&redrawn).map(|(score, redrawn)| {
        let id = redrawn.unwrap_or(match score.token {
            ScoredToken::Drawn { draw_idx } => ids[draw_idx as usize].token_id,
            ScoredToken::Given(token_id) => token_id,
        });
        bits(&twin(row_of(score), id, top_n))
    });
    let (found, expected): (Vec<Bits>, Vec<Bits>) = (found.iter().map(bits).collect(), expected.collect());
    Ok(compare_equal(format!("score {rows} rows of {vocab}, {top_n} likeliest"), &found, &expected))
}
