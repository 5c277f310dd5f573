//! What a pass's rows come to where some are drawn: ids, probabilities where they are asked for, and logits for the rest. Everything is
//! launched before anything is read, so that the device is waited for once.

use speculation::acceptance::{RowDraw, draw_processed};

use super::State;
use crate::EngineError;
use crate::cuda::ScoreRow;
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::{
    Drawn, FilterRow, draw as launch_draw, drawn, edit_logits, keep, keep_raw, score, scores, undecided,
};
use crate::draws::{DrawPlan, Filter, Outputs};

/// `logits` `[num_rows, width]` are changed in place.
pub(super) fn draw<E: Executor>(
    state: &mut State<E>,
    logits: &mut Tensor<E::Memory, f32>,
    (num_rows, width): (usize, usize),
    (plan, outputs): (&DrawPlan, &mut Outputs),
) -> Result<(), EngineError> {
    let State { executor, drawing, scoring, .. } = state;
    let (vocab, wanted) = (plan.vocab, plan.scores.as_slice());
    let filters: Vec<FilterRow> = plan.filters.iter().map(|filter| filter.row).collect();
    keep_raw(executor, scoring, logits, (wanted, width))?;
    edit_logits(executor, drawing, logits, &plan.edits, width)?;
    keep(executor, drawing, logits, &filters, (vocab, width))?;
    launch_draw(executor, drawing, logits, &plan.rows, (vocab, width))?;
    let draws = plan.draws_of_scores();
    score(executor, (scoring, drawing), (wanted, &draws), (vocab, width))?;

    let undecided = undecided(executor, drawing, &filters)?;
    let first = outputs.drawn.len();
    for (row, drawn) in plan.rows.iter().zip(drawn(executor, drawing, &plan.rows)?) {
        let is_left = undecided.contains(&row.row);
        let filter = plan.filters.iter().find(|filter| is_left && filter.row.row == row.row);
        outputs.drawn.push(match filter {
            // The row was edited and is otherwise as it was.
            Some(Filter { spec, position, .. }) => {
                let start = row.row as usize * width;
                draw_processed(spec, *position, &logits.read(executor, start..start + vocab)?)
            }
            None => row_draw(drawn),
        });
    }
    let redrawn = |(&draw, score): (&Option<u32>, &ScoreRow)| match outputs.drawn[first + draw? as usize] {
        RowDraw::Token(id) => undecided.contains(&score.row).then_some(id),
        _ => None,
    };
    let redrawn: Vec<Option<u32>> = draws.iter().zip(wanted).map(redrawn).collect();
    outputs.scores.extend(scores(executor, scoring, (wanted, &redrawn), (vocab, width))?);
    for rows in plan.other_rows(num_rows) {
        outputs.logits.extend(logits.read(executor, rows.start * width..rows.end * width)?);
    }
    Ok(())
}

fn row_draw(drawn: Drawn) -> RowDraw {
    match drawn.status {
        0 => RowDraw::Token(drawn.token_id),
        1 => RowDraw::NotANumber(drawn.token_id),
        _ => RowDraw::NothingAllowed,
    }
}
