//! Results of a pass in which some rows are drawn: ids, logprobs and candidates as requested, and logits of
//! the other rows. All kernels are launched before the first result is read, so the host waits for the device
//! once.

use speculation::acceptance::{DrawResult, candidates_from_processed, draw_processed};
use speculation::tree::{Candidates, MAX_CANDIDATES};

use super::State;
use crate::EngineError;
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::{
    DrawRow, Drawn, FilterRow, LogitsShape, apply_filters, candidates, copy_edited_rows, copy_raw_rows,
    draw as launch_draw, drawn, edit_logits, find_candidates, score, scores, undecided,
};
use crate::cuda::{CudaError, ScoreRow};
use crate::draws::{DrawPlan, Filter, RankOutput};

/// Draws rows as planned and reads all results. `logits` `[num_rows, width]` are changed in place.
pub(super) fn draw<E: Executor>(
    state: &mut State<E>,
    logits: &mut Tensor<E::Memory, f32>,
    (num_rows, width): (usize, usize),
    (plan, outputs): (&DrawPlan, &mut RankOutput),
) -> Result<(), EngineError> {
    let filters: Vec<FilterRow> = plan.filters.iter().map(|filter| filter.row).collect();
    let listed: Vec<DrawRow> = plan.candidates.iter().map(|candidate| candidate.draw).collect();
    let draws = plan.draws_of_scores();
    let shape = LogitsShape { vocab: plan.vocab, stride: width };
    launch(state, logits, &Launches { plan, filters: &filters, listed: &listed, draws: &draws }, shape)?;

    let State { executor, drawing, scoring, listing, .. } = state;
    let vocab = plan.vocab;
    let undecided = undecided(executor, drawing, &filters)?;
    let mut drawn_rows = Vec::new();
    for (row, drawn) in plan.rows.iter().zip(drawn(executor, drawing, &plan.rows)?) {
        let is_left = undecided.contains(&row.row);
        let filter = plan.filters.iter().find(|filter| is_left && filter.row.row == row.row);
        drawn_rows.push(match filter {
            // The device has edited the row's logits but not filtered them.
            Some(Filter { spec, position, .. }) => {
                let start = row.row as usize * width;
                draw_processed(spec, *position, &logits.read(executor, start..start + vocab)?)
            }
            None => row_draw(drawn),
        });
    }
    let redrawn = |(&draw, score): (&Option<u32>, &ScoreRow)| match drawn_rows[draw? as usize] {
        DrawResult::Token(id) => undecided.contains(&score.row).then_some(id),
        _ => None,
    };
    let redrawn: Vec<Option<u32>> = draws.iter().zip(&plan.scores).map(redrawn).collect();
    outputs.scores.extend(scores(executor, scoring, (&plan.scores, &redrawn), shape)?);
    outputs.drawn.extend(drawn_rows);
    for (candidate, found) in plan.candidates.iter().zip(candidates(executor, listing, &listed, vocab)?) {
        let DrawRow { row, position, .. } = candidate.draw;
        outputs.candidates.push(if undecided.contains(&row) {
            let start = row as usize * width;
            let logits = logits.read(executor, start..start + vocab)?;
            candidates_from_processed(&candidate.spec, (position, MAX_CANDIDATES), &logits)
                .unwrap_or_default()
        } else {
            Candidates::from_scores(&candidate.spec.sampling, &found.best, found.surprise)
        });
    }
    for rows in plan.other_rows(num_rows) {
        outputs.logits.extend(logits.read(executor, rows.start * width..rows.end * width)?);
    }
    Ok(())
}

/// A plan in the form that kernels read.
struct Launches<'a> {
    plan: &'a DrawPlan,
    filters: &'a [FilterRow],
    /// Rows whose candidates are listed.
    listed: &'a [DrawRow],
    /// Index of the draw of each score, unless its token is given.
    draws: &'a [Option<u32>],
}

/// Launches all kernels of the plan.
fn launch<E: Executor>(
    state: &mut State<E>,
    logits: &mut Tensor<E::Memory, f32>,
    &Launches { plan, filters, listed, draws }: &Launches<'_>,
    shape: LogitsShape,
) -> Result<(), CudaError> {
    let State { executor, drawing, scoring, listing, .. } = state;
    let width = shape.stride;
    copy_raw_rows(executor, scoring, logits, (&plan.scores, width))?;
    edit_logits(executor, drawing, logits, &plan.edits, width)?;
    copy_edited_rows(executor, listing, logits, (listed, width))?;
    apply_filters(executor, drawing, logits, filters, shape)?;
    launch_draw(executor, drawing, logits, &plan.rows, shape)?;
    score(executor, (scoring, drawing), (&plan.scores, draws), shape)?;
    let places: Vec<Option<u32>> = listed.iter().map(|draw| plan.draw_index(draw.row)).collect();
    find_candidates(executor, (listing, drawing), logits, (listed, &places), shape)
}

fn row_draw(drawn: Drawn) -> DrawResult {
    match drawn.status {
        0 => DrawResult::Token(drawn.token_id),
        1 => DrawResult::NotANumber(drawn.token_id),
        _ => DrawResult::NothingAllowed,
    }
}
