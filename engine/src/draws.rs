//! Sampling on the device: what callers request, and the plan per row. A device that can sample returns ids
//! and scores, no logits. All other rows are returned as logits and sampled by the caller, with the same
//! result.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use speculation::acceptance::{DrawResult, has_independent_rows};
use speculation::tree::Candidates;
use speculation::{SequenceSpec, TokenLogprobs};

use crate::cuda::{ContextEdits, DrawRow, FilterRow, ListedRow, LogitEdit, ScoreRow, ScoredToken};
use crate::{EngineError, Logits, SequenceRows, TokenId};

/// Requests draws of one sequence's rows instead of their logits. The last row predicts the id after `prefix`
/// and all of `suffix`; each earlier row has one id of `suffix` less in its context.
#[derive(Debug, Clone, Copy)]
pub struct DrawRequest<'a> {
    /// The sequence's spec; [`crate::Engine::draws`] returns whether the device can draw it.
    pub spec: &'a SequenceSpec,
    /// Ids of the sequence that are in the context of every row.
    pub prefix: &'a [TokenId],
    /// Ids after those: drafted ids, or a guess. If the last of them are a token tree, a row's context has
    /// the row itself and its ancestors in the tree.
    pub suffix: &'a [TokenId],
    /// Number of vocabulary entries that may be drawn; the rest is padding. Equal in all requests of a
    /// forward.
    pub vocab_size: u32,
    /// Number of most likely tokens to report beside the log probability of each drawn one; `None` reports
    /// neither.
    pub logprobs: Option<u32>,
    /// Set if rows predict ids of the prompt: these are scored, not drawn.
    pub prompt: Option<PromptRows>,
    /// Number of rows, counted from the last one, whose best
    /// [`MAX_CANDIDATES`](speculation::tree::MAX_CANDIDATES) tokens are listed beside the draw.
    pub candidate_rows: usize,
}

/// Number of answers to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NumAnswers {
    /// Rows that are drawn.
    pub drawn: usize,
    /// Rows that are scored. Rows of the prompt come first.
    pub scored: usize,
    /// Rows whose candidates are listed.
    pub candidates: usize,
}

/// Request for rows whose next id is part of the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptRows {
    /// Number of most likely tokens to report beside the log probability of each id.
    pub top_n: u32,
    /// The id after `suffix`, if the prompt continues after the rows. Without it the last row's score is
    /// meaningless.
    pub next: Option<TokenId>,
}

impl DrawRequest<'_> {
    /// Number of answers if the request's last `num_rows` rows run.
    pub fn answers(&self, num_rows: usize) -> NumAnswers {
        let first = self.prefix.len() + self.suffix.len() + 1 - num_rows;
        let left = (self.spec.prompt_len as usize).saturating_sub(first);
        let num_prompt = self.prompt.map_or(0, |_| left.min(num_rows));
        let drawn = num_rows - num_prompt;
        let scored = num_prompt + self.logprobs.map_or(0, |_| drawn);
        NumAnswers { drawn, scored, candidates: self.candidate_rows }
    }
}

/// Answers to requests, in batch order.
#[derive(Debug, Clone, Copy)]
pub struct Answers<'a> {
    /// One for each row that is drawn.
    pub drawn: &'a [DrawResult],
    /// One for each row that is scored.
    pub scores: &'a [TokenLogprobs],
    /// One for each row with candidates; empty if nothing can be drawn from the row.
    pub candidates: &'a [Candidates],
}

impl<'a> Answers<'a> {
    /// Removes and returns the answers to the next request.
    pub fn take(&mut self, count: NumAnswers) -> Answers<'a> {
        let (drawn, scores, candidates);
        (drawn, self.drawn) = self.drawn.split_at(count.drawn);
        (scores, self.scores) = self.scores.split_at(count.scored);
        (candidates, self.candidates) = self.candidates.split_at(count.candidates);
        Answers { drawn, scores, candidates }
    }
}

/// Result of a forward.
#[derive(Debug, Clone, PartialEq)]
pub struct ForwardOutput {
    /// Logits of the sequences without a request, in batch order.
    pub logits: Logits,
    /// Draws of the other sequences, in batch order.
    pub drawn: Vec<DrawResult>,
    /// Log probabilities of drawn tokens and of prompt ids ([`speculation::logits::score`]), in batch order,
    /// one entry per row that requests them. Meaningless for a row where nothing could be drawn.
    pub scores: Vec<TokenLogprobs>,
    /// Best tokens of the rows that request them, in batch order; empty if nothing can be drawn from the row.
    pub candidates: Vec<Candidates>,
}

impl ForwardOutput {
    /// Splits into the logits and the answers to all requests.
    pub fn split(&mut self) -> (&mut Logits, Answers<'_>) {
        let Self { logits, drawn, scores, candidates } = self;
        (logits, Answers { drawn, scores, candidates })
    }
}

/// Result of a rank: [`ForwardOutput`] with flat logits.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct RankOutput {
    pub(crate) logits: Vec<f32>,
    pub(crate) drawn: Vec<DrawResult>,
    pub(crate) scores: Vec<TokenLogprobs>,
    pub(crate) candidates: Vec<Candidates>,
}

/// A drawn row whose best tokens are listed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CandidateRow {
    pub(crate) row: ListedRow,
    pub(crate) spec: Arc<SequenceSpec>,
}

/// A row's filters and the sequence that they belong to: for the device, and for the host if the device
/// cannot decide.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Filter {
    pub(crate) row: FilterRow,
    pub(crate) spec: Arc<SequenceSpec>,
    /// Position of the token to draw.
    pub(crate) position: u32,
}

/// Rows to draw, out of all rows with logits of a call or a pass: ascending, at most one entry per row.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct DrawPlan {
    pub(crate) rows: Vec<DrawRow>,
    /// Changes to the logits of those rows, applied first.
    pub(crate) edits: Vec<LogitEdit>,
    /// Filters of rows where not every token may be drawn.
    pub(crate) filters: Vec<Filter>,
    /// Rows whose log probabilities are reported.
    pub(crate) scores: Vec<ScoreRow>,
    /// Rows whose best tokens are listed.
    pub(crate) candidates: Vec<CandidateRow>,
    /// Number of valid entries of a row.
    pub(crate) vocab: usize,
    /// Number of entries of a row.
    pub(crate) stride: usize,
}

impl DrawPlan {
    /// Builds the plan of a call. `requests` has one entry per sequence of the batch, or is empty. `trees`
    /// has the parents of each sequence's token tree ([`crate::TreeRows`]), or is empty.
    pub(crate) fn new(
        batch: &[SequenceRows<'_>],
        (requests, trees): (&[Option<DrawRequest<'_>>], &[&[u32]]),
        vocab_size: u32,
    ) -> Result<Self, EngineError> {
        let mut plan = Self { stride: vocab_size as usize, ..Self::default() };
        let mut first = 0;
        for (i, (rows, request)) in batch.iter().zip(requests).enumerate() {
            if let Some(request) = request {
                let parents = trees.get(i).copied().unwrap_or_default();
                plan.add(rows.num_logits, first, (request, parents), vocab_size)?;
            }
            first += rows.num_logits;
        }
        Ok(plan)
    }

    fn add(
        &mut self,
        num_rows: usize,
        first: usize,
        (request, parents): (&DrawRequest<'_>, &[u32]),
        vocab_size: u32,
    ) -> Result<(), EngineError> {
        let DrawRequest { spec, prefix, suffix, vocab_size: vocab, logprobs, prompt, candidate_rows } =
            *request;
        let same_vocab = self.is_empty() || self.vocab == vocab as usize;
        // Prompt ids cannot form a tree.
        let is_valid_tree = parents.is_empty() || (parents.len() <= suffix.len() && prompt.is_none());
        let num_drawn = request.answers(num_rows.min(suffix.len() + 1)).drawn;
        let is_drawable = has_independent_rows(spec)
            && num_rows <= suffix.len() + 1
            && is_valid_tree
            && candidate_rows <= num_drawn;
        if !is_drawable || !same_vocab || vocab == 0 || vocab > vocab_size {
            let reason =
                format!("cannot draw {num_rows} rows after {} ids from {vocab} entries", suffix.len());
            return Err(EngineError::BadBatch(reason));
        }
        self.vocab = vocab as usize;
        let num_visible = suffix.len() + 1 - num_rows.min(suffix.len() + 1);
        let of_prefix = ContextEdits::new(spec, prefix, self.vocab)?;
        let mut context = of_prefix.clone();
        suffix[..num_visible].iter().for_each(|&id| context.push(id));
        let filter = FilterRow::new(0, &spec.sampling);
        let shared = (filter.is_some() || candidate_rows > 0).then(|| Arc::new(spec.clone()));
        for i in 0..num_rows {
            let row = (first + i) as u32;
            if !parents.is_empty() {
                context = of_prefix.clone();
                let path = context_in_tree(suffix, parents, num_visible + i);
                path.into_iter().for_each(|id| context.push(id));
            }
            if let Some(PromptRows { top_n, next }) = prompt.filter(|_| i < num_rows - num_drawn) {
                let given = suffix.get(num_visible + i).copied().or(next);
                let token = ScoredToken::Given(given.unwrap_or_default());
                self.scores.push(ScoreRow { row, top_n, token });
                given.into_iter().for_each(|id| context.push(id));
                continue;
            }
            let position = context.position();
            let (draw, draw_idx) = (DrawRow::new(row, spec, position), self.rows.len() as u32);
            if let (Some(filter), Some(spec)) = (&filter, &shared) {
                self.filters.push(Filter { row: filter.of_row(row), spec: Arc::clone(spec), position });
            }
            if let Some(spec) = shared.as_ref().filter(|_| i >= num_rows - candidate_rows) {
                let row = ListedRow { draw, draw_idx };
                self.candidates.push(CandidateRow { row, spec: Arc::clone(spec) });
            }
            self.rows.push(draw);
            let token = ScoredToken::Drawn { draw_idx };
            self.scores.extend(logprobs.map(|top_n| ScoreRow { row, top_n, token }));
            self.edits.extend(context.of_row(row));
            let next = suffix.get(num_visible + i).filter(|_| parents.is_empty());
            next.into_iter().for_each(|&id| context.push(id));
        }
        Ok(())
    }

    /// The part of the plan for the rows in `range`, with row numbers relative to its start.
    pub(crate) fn part(&self, range: Range<usize>) -> Cow<'_, Self> {
        // Most calls are one pass, and edits may be long.
        if range.start == 0 && self.end() <= range.end {
            return Cow::Borrowed(self);
        }
        let is_in = |row: u32| range.contains(&(row as usize));
        let first = range.start as u32;
        let rows = self.rows.iter().filter(|draw| is_in(draw.row));
        let edits = self.edits.iter().filter(|edit| is_in(edit.row));
        let filters = self.filters.iter().filter(|filter| is_in(filter.row.row)).cloned();
        let scores = self.scores.iter().filter(|score| is_in(score.row));
        let candidates = self.candidates.iter().filter(|candidate| is_in(candidate.row.draw.row));
        let draws_before = self.rows.iter().filter(|draw| draw.row < first).count() as u32;
        let token_of = |score: &ScoreRow| match score.token {
            ScoredToken::Drawn { draw_idx } => ScoredToken::Drawn { draw_idx: draw_idx - draws_before },
            ScoredToken::Given(token_id) => ScoredToken::Given(token_id),
        };
        let listed = |ListedRow { draw, draw_idx }: ListedRow| ListedRow {
            draw: draw.of_row(draw.row - first),
            draw_idx: draw_idx - draws_before,
        };
        Cow::Owned(Self {
            rows: rows.map(|draw| draw.of_row(draw.row - first)).collect(),
            edits: edits.map(|edit| LogitEdit { row: edit.row - first, ..*edit }).collect(),
            filters: filters
                .map(|filter| Filter { row: filter.row.of_row(filter.row.row - first), ..filter })
                .collect(),
            scores: scores
                .map(|score| ScoreRow { row: score.row - first, token: token_of(score), ..*score })
                .collect(),
            candidates: candidates
                .map(|CandidateRow { row, spec }| CandidateRow { row: listed(*row), spec: Arc::clone(spec) })
                .collect(),
            vocab: self.vocab,
            stride: self.stride,
        })
    }

    /// End of the range of rows that are drawn or scored.
    fn end(&self) -> usize {
        let last = self.rows.last().map(|draw| draw.row).max(self.scores.last().map(|score| score.row));
        last.map_or(0, |row| row as usize + 1)
    }

    /// Whether no row is drawn or scored.
    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.scores.is_empty()
    }

    /// Ranges within the first `num_rows` rows that are neither drawn nor scored with a given token.
    pub(crate) fn other_rows(&self, num_rows: usize) -> Vec<Range<usize>> {
        let mut runs = Vec::new();
        let mut next = 0;
        let is_given = |score: &&ScoreRow| matches!(score.token, ScoredToken::Given(_));
        let given = self.scores.iter().filter(is_given).map(|score| score.row);
        let mut answered: Vec<u32> = self.rows.iter().map(|draw| draw.row).chain(given).collect();
        answered.sort_unstable();
        for row in answered.into_iter().map(|row| row as usize).chain([num_rows]) {
            if next < row {
                runs.push(next..row);
            }
            next = row + 1;
        }
        runs
    }
}

/// The ids of `suffix` in a row's context, where the last ids of `suffix` are a token tree: the ids before
/// the tree, the row's ancestors and itself.
fn context_in_tree(suffix: &[TokenId], parents: &[u32], row: usize) -> Vec<TokenId> {
    let num_linear = suffix.len() - parents.len();
    let mut ids = suffix[..row.min(num_linear)].to_vec();
    let parent = |&row: &usize| (parents[row] as usize).checked_sub(1);
    let mut path: Vec<usize> = std::iter::successors(row.checked_sub(num_linear + 1), parent).collect();
    path.reverse();
    ids.extend(path.into_iter().map(|row| suffix[num_linear + row]));
    ids
}

#[cfg(test)]
mod tests {
    use speculation::SamplingParams;

    use super::*;
    use crate::SlotId;

    fn plan(num_logits: [usize; 3], drawn: [bool; 3], spec: &SequenceSpec) -> Result<DrawPlan, EngineError> {
        let ids = [1, 2, 3, 4];
        let batch: Vec<SequenceRows<'_>> = num_logits
            .iter()
            .map(|&num_logits| SequenceRows { slot: SlotId(0), token_ids: &ids, num_logits })
            .collect();
        let request = DrawRequest {
            spec,
            prefix: &ids,
            suffix: &[5, 6],
            vocab_size: 10,
            logprobs: spec.logprobs,
            prompt: None,
            candidate_rows: 0,
        };
        DrawPlan::new(&batch, (&drawn.map(|drawn| drawn.then_some(request)), &[]), 12)
    }

    #[test]
    fn rows_keep_their_indices_and_each_context_grows_by_one_id() {
        let mut spec = SequenceSpec::default();
        spec.sampling.presence_penalty = 1.0;
        let plan = plan([2, 3, 1], [false, true, true], &spec).unwrap();
        let places: Vec<(u32, u32)> = plan.rows.iter().map(|draw| (draw.row, draw.position)).collect();
        assert_eq!(places, [(2, 4), (3, 5), (4, 6), (5, 6)]);
        assert_eq!(plan.other_rows(7), [0..2, 6..7]);
        let seen = |row: u32| plan.edits.iter().filter(|edit| edit.row == row).count();
        assert_eq!([seen(2), seen(3), seen(4), seen(5)], [4, 5, 6, 6]);
        let part = plan.part(3..6);
        assert_eq!(part.rows.iter().map(|draw| draw.row).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(part.edits.len(), 17);
        assert!(part.filters.is_empty());
        assert!(plan.part(4..5).other_rows(1).is_empty());
        assert_eq!(plan.part(0..3).other_rows(4), [0..2, 3..4]);
        assert!(matches!(plan.part(0..6), Cow::Borrowed(_)), "edits of one pass are not copied");
        assert!(matches!(plan.part(0..5), Cow::Owned(_)) && plan.part(0..5).rows.len() == 3);
        assert_eq!((plan.stride, part.stride), (12, 12));
    }

    #[test]
    fn part_keeps_the_filters_of_its_rows() {
        let mut spec = SequenceSpec::default();
        spec.sampling.top_k = 3;
        let whole = plan([2, 3, 1], [false, true, true], &spec).unwrap();
        let part = whole.part(3..6);
        let places: Vec<(u32, u32)> =
            part.filters.iter().map(|filter| (filter.row.row, filter.position)).collect();
        assert_eq!(places, [(0, 5), (1, 6), (2, 6)]);
        assert!(part.filters.iter().all(|filter| *filter.spec == spec && filter.row.top_k == 3));
    }

    #[test]
    fn part_keeps_the_scores_of_its_rows() {
        let spec = SequenceSpec { logprobs: Some(4), ..SequenceSpec::default() };
        let whole = plan([2, 3, 1], [true, false, true], &spec).unwrap();
        let drawn = |(row, draw_idx)| ScoreRow { row, top_n: 4, token: ScoredToken::Drawn { draw_idx } };
        assert_eq!(whole.scores, [(0, 0), (1, 1), (5, 2)].map(drawn));
        assert_eq!(whole.part(1..6).scores, [(0, 0), (4, 1)].map(drawn));
        assert!(plan([2, 3, 1], [true; 3], &SequenceSpec::default()).unwrap().scores.is_empty());
    }

    #[test]
    fn candidates_are_listed_for_the_last_drawn_rows() {
        let spec = SequenceSpec { prompt_len: 4, ..SequenceSpec::default() };
        let ids = [1, 2, 3, 4];
        let rows = SequenceRows { slot: SlotId(0), token_ids: &ids, num_logits: 3 };
        let plan = |candidate_rows, prompt| {
            let (prefix, suffix) = (&ids[..2], &ids[2..]);
            let request = DrawRequest {
                spec: &spec,
                prefix,
                suffix,
                vocab_size: 10,
                logprobs: None,
                prompt,
                candidate_rows,
            };
            DrawPlan::new(&[rows], (&[Some(request)], &[]), 12)
        };
        let listed = |plan: &DrawPlan| -> Vec<(u32, u32)> {
            plan.candidates.iter().map(|CandidateRow { row, .. }| (row.draw.row, row.draw_idx)).collect()
        };
        let two = plan(2, None).unwrap();
        assert_eq!((listed(&two), listed(&two.part(2..3))), (vec![(1, 1), (2, 2)], vec![(0, 0)]));
        assert!(plan(0, None).unwrap().candidates.is_empty());
        let prompt = Some(PromptRows { top_n: 0, next: None });
        assert_eq!(listed(&plan(1, prompt).unwrap()), [(2, 0)]);
        assert!(plan(2, prompt).is_err(), "rows of the prompt are not drawn");
    }

    #[test]
    fn rows_of_the_prompt_are_scored_and_not_drawn() {
        let check = |prompt_len, next, num_logits, logprobs: Option<u32>| {
            let spec = SequenceSpec { prompt_len, ..SequenceSpec::default() };
            let prompt = Some(PromptRows { top_n: 3, next });
            let (prefix, suffix) = (&[1, 2][..], &[3, 4, 5][..]);
            let request = DrawRequest {
                spec: &spec,
                prefix,
                suffix,
                vocab_size: 10,
                logprobs,
                prompt,
                candidate_rows: 0,
            };
            let rows = SequenceRows { slot: SlotId(0), token_ids: &[2, 3, 4, 5], num_logits };
            let plan = DrawPlan::new(&[rows], (&[Some(request)], &[]), 12).unwrap();
            let NumAnswers { drawn, scored, .. } = request.answers(num_logits);
            assert_eq!((drawn, scored), (plan.rows.len(), plan.scores.len()));
            assert!(plan.other_rows(num_logits).is_empty() && !plan.is_empty());
            let draws: Vec<(u32, u32)> = plan.rows.iter().map(|draw| (draw.row, draw.position)).collect();
            (plan.scores.iter().map(|score| score.token).collect::<Vec<_>>(), draws)
        };
        let given = |ids: &[u32]| ids.iter().copied().map(ScoredToken::Given).collect::<Vec<_>>();
        assert_eq!(check(9, Some(6), 4, None), (given(&[3, 4, 5, 6]), vec![]));
        assert_eq!(check(9, None, 2, None), (given(&[5, 0]), vec![]));
        assert_eq!(check(5, None, 4, None), (given(&[3, 4, 5]), vec![(3, 5)]));
        let drawn = [0, 1, 2].map(|draw_idx| ScoredToken::Drawn { draw_idx });
        assert_eq!(
            check(3, None, 4, Some(1)),
            ([given(&[3]), drawn.to_vec()].concat(), vec![(1, 3), (2, 4), (3, 5)])
        );
    }

    /// One drafted id before the tree, which has two ids at its first position and three at the second.
    #[test]
    fn the_context_of_a_tree_row_has_its_ancestors() {
        let suffix = [5, 6, 7, 60, 61, 70];
        let parents = [0, 0, 1, 1, 2];
        let contexts: Vec<Vec<TokenId>> = (0..7).map(|row| context_in_tree(&suffix, &parents, row)).collect();
        let expected: [&[TokenId]; 7] = [&[], &[5], &[5, 6], &[5, 7], &[5, 6, 60], &[5, 6, 61], &[5, 7, 70]];
        assert_eq!(contexts, expected);

        let spec = SequenceSpec {
            sampling: SamplingParams { presence_penalty: 1.0, ..SamplingParams::default() },
            ..SequenceSpec::default()
        };
        let rows = SequenceRows { slot: SlotId(0), token_ids: &[4, 5, 6, 7, 60, 61, 70], num_logits: 6 };
        let request = DrawRequest {
            spec: &spec,
            prefix: &[4],
            suffix: &suffix,
            vocab_size: 100,
            logprobs: None,
            prompt: None,
            candidate_rows: 0,
        };
        let plan = DrawPlan::new(&[rows], (&[Some(request)], &[&parents]), 100).unwrap();
        let places: Vec<(u32, u32)> = plan.rows.iter().map(|draw| (draw.row, draw.position)).collect();
        assert_eq!(places, [(0, 2), (1, 3), (2, 3), (3, 4), (4, 4), (5, 4)]);
        let seen = |row: u32| -> Vec<TokenId> {
            plan.edits.iter().filter(|edit| edit.row == row).map(|edit| edit.token_id).collect()
        };
        assert_eq!((seen(2), seen(5)), (vec![4, 5, 7], vec![4, 5, 7, 70]));
        let too_many = DrawPlan::new(&[rows], (&[Some(request)], &[&[0; 7]]), 100);
        assert!(too_many.is_err(), "more rows of a tree than ids");
    }

    #[test]
    fn requests_that_cannot_be_drawn_are_rejected() {
        let spec = SequenceSpec::default();
        assert!(plan([1, 1, 4], [true, true, true], &spec).is_err(), "four rows need three ids");
        let lossy = SequenceSpec { acceptance: speculation::AcceptanceMode::Typical, ..spec };
        let error = plan([1, 1, 1], [true, false, false], &lossy).unwrap_err().to_string();
        assert!(error.contains("cannot draw"), "{error}");
    }
}
