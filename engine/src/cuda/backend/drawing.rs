//! Results of a pass in which some rows are drawn: ids, logprobs and candidates as requested, and logits of
//! the other rows. All kernels are launched before the first result is read, so the host waits for the device
//! once.

use speculation::acceptance::{DrawResult, candidates_from_processed, draw_processed};
use speculation::tree::{Candidates, MAX_CANDIDATES};

use super::{GpuRows, State};
use crate::EngineError;
use crate::cuda::CudaError;
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::{
    DrawRow, Drawn, FilterRow, ListedRow, LogitsShape, ScoreRow, ScoredToken, apply_filters, candidates,
    copy_edited_rows, copy_raw_rows, draw, drawn, edit_logits, find_candidates, score,
    score_first_candidates, scores, undecided,
};
use crate::draws::{DrawPlan, Filter, RankOutput};

/// A plan in the form that kernels read.
struct Launches<'a> {
    plan: &'a DrawPlan,
    filters: Vec<FilterRow>,
    /// Rows whose candidates are listed.
    listed: Vec<ListedRow>,
}

impl<'a> Launches<'a> {
    fn of(plan: &'a DrawPlan) -> Self {
        let filters = plan.filters.iter().map(|filter| filter.row).collect();
        let listed = plan.candidates.iter().map(|candidate| candidate.row).collect();
        Self { plan, filters, listed }
    }
}

impl<E: Executor> State<E> {
    /// Draws rows as planned and reads all results. The `num_rows` rows of `logits` are changed in place.
    pub(super) fn draw(
        &mut self,
        logits: &mut GpuRows<E::Memory>,
        num_rows: usize,
        plan: &DrawPlan,
        outputs: &mut RankOutput,
    ) -> Result<(), EngineError> {
        let (logits, len) = logits.write();
        let (vocab, width) = (plan.vocab, len / num_rows);
        let shape = LogitsShape { vocab, stride: width };
        let launches = Launches::of(plan);
        self.launch_draws(logits, &launches, shape)?;

        let Launches { filters, listed, .. } = launches;
        let State { executor, drawing, scoring, listing, .. } = self;
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
        let redrawn = |score: &ScoreRow| {
            let ScoredToken::Drawn { draw_idx } = score.token else { return None };
            let DrawResult::Token(id) = drawn_rows[draw_idx as usize] else { return None };
            undecided.contains(&score.row).then_some(id)
        };
        let redrawn: Vec<Option<u32>> = plan.scores.iter().map(redrawn).collect();
        outputs.scores.extend(scores(executor, scoring, &plan.scores, &redrawn, shape)?);
        outputs.drawn.extend(drawn_rows);
        for (candidate, found) in plan.candidates.iter().zip(candidates(executor, listing, &listed, vocab)?) {
            let DrawRow { row, position, .. } = candidate.row.draw;
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

    /// Launches all kernels of the plan.
    fn launch_draws(
        &mut self,
        logits: &mut Tensor<E::Memory, f32>,
        launches: &Launches<'_>,
        shape: LogitsShape,
    ) -> Result<(), CudaError> {
        let Launches { plan, filters, listed } = launches;
        let State { executor, drawing, scoring, listing, .. } = self;
        let width = shape.stride;
        copy_raw_rows(executor, scoring, logits, (&plan.scores, width))?;
        edit_logits(executor, drawing, logits, &plan.edits, width)?;
        copy_edited_rows(executor, listing, logits, (listed, width))?;
        apply_filters(executor, drawing, logits, filters, shape)?;
        draw(executor, drawing, logits, &plan.rows, shape)?;
        score(executor, scoring, drawing, &plan.scores, shape)?;
        score_first_candidates(executor, listing, drawing, listed, shape)?;
        find_candidates(executor, listing, logits, listed, shape)
    }
}

fn row_draw(drawn: Drawn) -> DrawResult {
    match drawn.status {
        0 => DrawResult::Token(drawn.token_id),
        1 => DrawResult::NotANumber(drawn.token_id),
        _ => DrawResult::NothingAllowed,
    }
}
