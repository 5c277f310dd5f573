//! Results of a pass in which some rows are drawn: ids, logprobs and candidates as requested, and logits of
//! the other rows. What all kernels read is uploaded with the inputs of the pass. All of
//! them are launched before one copy downloads their results, so the host waits for the device once.

use speculation::acceptance::{DrawResult, candidates_from_processed, draw_processed};
use speculation::tree::{Candidates, MAX_CANDIDATES};

use super::{GpuRows, State};
use crate::EngineError;
use crate::cuda::CudaError;
use crate::cuda::executor::{Executor, Tensor, check_len};
use crate::cuda::ops::{
    DrawRow, Drawn, LogitsShape, ScoreRow, ScoredToken, apply_filters, candidates, copy_edited_rows,
    copy_raw_rows, draw, edit_logits, find_candidates, padded_rows, score, score_first_candidates, scores,
};
use crate::draws::{DrawPlan, Filter, RankOutput};

impl<E: Executor> State<E> {
    /// Begins the arrays of a step with those of its draws, padded or not.
    pub(super) fn prepare_draws(&mut self, plan: &DrawPlan, is_padded: bool) {
        let State { drawing, scoring, listing, .. } = self;
        let shape = LogitsShape { vocab: plan.vocab, stride: plan.stride };
        let filters = plan.filters.iter().map(|filter| filter.row).collect();
        let len = plan.rows.len();
        let padded = if is_padded { padded_rows(len) } else { len };
        drawing.prepare_padded(shape, filters, (plan.rows.clone(), padded));
        scoring.prepare(drawing, plan.scores.clone());
        listing.prepare(drawing, plan.candidates.iter().map(|candidate| candidate.row).collect());
    }

    /// Draws rows as planned and reads all results. The `num_rows` rows of `logits` are changed in place. The
    /// plan is that of [`State::begin`].
    pub(super) fn draw(
        &mut self,
        logits: &mut GpuRows<E::Memory>,
        num_rows: usize,
        plan: &DrawPlan,
        outputs: &mut RankOutput,
    ) -> Result<(), EngineError> {
        let (logits, len) = logits.write();
        let (vocab, width) = (plan.vocab, plan.stride);
        check_len("draw", "logits", len, num_rows * width)?;
        self.launch_draws(logits, plan)?;

        let State { executor, drawing, scoring, listing, .. } = self;
        let results = drawing.download(executor)?;
        let undecided = drawing.undecided(&results);
        let mut drawn_rows = Vec::new();
        for (row, drawn) in plan.rows.iter().zip(drawing.drawn(&results)) {
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
        outputs.scores.extend(scores(executor, scoring, &results, &redrawn)?);
        outputs.drawn.extend(drawn_rows);
        for (candidate, found) in plan.candidates.iter().zip(candidates(executor, listing, &results)?) {
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
        plan: &DrawPlan,
    ) -> Result<(), CudaError> {
        let State { executor, drawing, scoring, listing, .. } = self;
        // A graph of their own: what is drawn changes more often than the sizes of a pass, whose graph would
        // then not be replayed either.
        executor.flush()?;
        copy_raw_rows(executor, scoring, drawing, logits)?;
        edit_logits(executor, drawing, logits, &plan.edits, plan.stride)?;
        copy_edited_rows(executor, listing, drawing, logits)?;
        apply_filters(executor, drawing, logits)?;
        draw(executor, drawing, logits)?;
        score(executor, scoring, drawing)?;
        score_first_candidates(executor, listing, drawing)?;
        find_candidates(executor, listing, drawing, logits)
    }
}

fn row_draw(drawn: Drawn) -> DrawResult {
    match drawn.status {
        0 => DrawResult::Token(drawn.token_id),
        1 => DrawResult::NotANumber(drawn.token_id),
        _ => DrawResult::NothingAllowed,
    }
}
