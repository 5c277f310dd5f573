//! Generates texts with both models of a pair in this process: the draft proposes, the target verifies.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use engine::{Engine, LoadOptions, Logits, SequenceRows, SlotId, TokenId, TreeRows, WeightFormat};
use speculation::acceptance::{Guess, RawRows, Verification, finish_reason, guess, guess_candidates, verify};
use speculation::logits::{TokenCounts, apply_filters};
use speculation::noise::{Noise, Purpose};
use speculation::tree::{DraftOutcome, MAX_CANDIDATES, ROWS_PER_FORWARD, TreeGrowth, with_leaves};
use speculation::{AcceptanceMode, Draft, SamplingParams, SequenceSpec};
use tests::block_verification::{Block, pick};

use crate::by_rank::{DrawnByRank, by_rank};
use crate::counts::Counts;
use crate::shape::{Kind, Shape};

pub(crate) struct Pair {
    target: Engine,
    draft: Engine,
    /// Rates by which static trees are shaped.
    drawn_by_rank: DrawnByRank,
}

/// State of the draft model for a text.
struct DraftState {
    slot: SlotId,
    /// Ids whose KV the draft has.
    cached_ids: Vec<TokenId>,
    counts: Counts,
}

impl Pair {
    pub(crate) fn load(dir: &Path) -> anyhow::Result<Self> {
        let load =
            |role: &str| Engine::load(&LoadOptions::new(dir.join(role), WeightFormat::AsStored, 256 << 20));
        Ok(Self { target: load("target")?, draft: load("draft")?, drawn_by_rank: [1.0; MAX_CANDIDATES] })
    }

    /// Measures the rates of static trees on texts of the target: the rank of each of its draws among the
    /// draft's candidates.
    pub(crate) fn measure_ranks<'a>(
        &mut self,
        texts: impl Iterator<Item = (&'a SequenceSpec, &'a [TokenId])>,
    ) -> anyhow::Result<()> {
        let (mut drawn, mut num_draws) = ([0_u32; MAX_CANDIDATES], 0_u32);
        for (spec, ids) in texts {
            let slot = self.draft.open();
            let (prompt, output) = ids.split_at(spec.prompt_len as usize);
            let token_ids = &ids[..ids.len() - 1];
            let batch = [SequenceRows { slot, token_ids, num_logits: output.len() }];
            let mut logits = self.draft.forward(&batch)?;
            for (row, token_id) in output.iter().enumerate() {
                let at = ((prompt.len() + row) as u32, MAX_CANDIDATES);
                let candidates = guess_candidates(spec, &TokenCounts::default(), at, logits.row_mut(row))?;
                num_draws += 1;
                if let Some(rank) = candidates.token_ids.iter().position(|id| id == token_id) {
                    drawn[rank] += 1;
                }
            }
            self.draft.close(slot);
        }
        // Each rank counts once more, so that none has the rate 0.
        self.drawn_by_rank = drawn.map(|times| f64::from(times + 1) / f64::from(num_draws.max(1)));
        Ok(())
    }

    pub(crate) fn stop_token_ids(&self) -> Vec<TokenId> {
        self.target.info().eos_token_ids.clone()
    }

    /// Generates the text of `spec`, prompt included, with drafts of a shape.
    pub(crate) fn write(
        &mut self,
        spec: &SequenceSpec,
        prompt: &[TokenId],
        shape: Shape,
    ) -> anyhow::Result<(Vec<TokenId>, Counts)> {
        let target = self.target.open();
        let mut state =
            DraftState { slot: self.draft.open(), cached_ids: Vec::new(), counts: Counts::default() };
        let mut ids = prompt.to_vec();
        loop {
            let spec = in_round(spec, shape.kind, state.counts.steps as u32);
            let shape = shape.within(spec.max_len as usize - ids.len() - 1);
            let same = state.cached_ids.iter().zip(&ids).take_while(|(a, b)| a == b).count();
            state.cached_ids.truncate(same.min(ids.len() - 1));
            self.draft.truncate(state.slot, state.cached_ids.len() as u32);
            // Prefill is not part of a proposal.
            if state.cached_ids.is_empty() {
                self.prefill(&mut state, &ids[..ids.len() - 1])?;
            }
            let started_at = cpu_time()?;
            let drafted = match (shape.depth, shape.kind) {
                (0, _) => Draft::default(),
                (_, Kind::Chain | Kind::Leaves) => self.propose_chain(&mut state, &spec, &ids, shape)?,
                (_, Kind::Point) => self.propose_chain(&mut state, &greedy(&spec), &ids, shape)?,
                (_, Kind::Branches | Kind::Static) => self.propose_tree(&mut state, &spec, &ids, shape)?,
                (_, Kind::Rejection | Kind::Block) => {
                    self.propose_sampled(&mut state, &spec, &ids, shape.depth)?
                }
            };
            let counts = &mut state.counts;
            counts.proposing += cpu_time()?.saturating_sub(started_at);
            (counts.steps, counts.drafted) = (counts.steps + 1, counts.drafted + drafted.token_ids.len());
            let (is_finished, outcome) = self.verify(target, &spec, shape.kind, (&mut ids, &drafted))?;
            let is_covered = outcome.mismatch.is_none_or(|mismatch| mismatch.rank.is_some());
            state.counts.covered += usize::from(is_covered);
            if is_finished {
                self.target.close(target);
                self.draft.close(state.slot);
                state.counts.written = ids.len() - prompt.len();
                return Ok((ids, state.counts));
            }
        }
    }

    /// Prefills the draft before its first proposal.
    fn prefill(&mut self, state: &mut DraftState, ids: &[TokenId]) -> anyhow::Result<()> {
        if !ids.is_empty() {
            self.draft.forward(&[SequenceRows { slot: state.slot, token_ids: ids, num_logits: 0 }])?;
        }
        state.cached_ids = ids.to_vec();
        Ok(())
    }

    /// The draft's row after `context`.
    fn draft_row(&mut self, state: &mut DraftState, context: &[TokenId]) -> anyhow::Result<Logits> {
        let token_ids = &context[state.cached_ids.len()..];
        let logits = self.draft.forward(&[SequenceRows { slot: state.slot, token_ids, num_logits: 1 }])?;
        state.counts.forwards += 1;
        state.counts.rows += token_ids.len();
        state.cached_ids = context.to_vec();
        Ok(logits)
    }

    /// Proposes a chain, with leaves if `tokens` allows any.
    fn propose_chain(
        &mut self,
        state: &mut DraftState,
        spec: &SequenceSpec,
        ids: &[TokenId],
        Shape { depth, tokens, .. }: Shape,
    ) -> anyhow::Result<Draft> {
        let counts = TokenCounts::default();
        let mut positions = Vec::new();
        let mut context = ids.to_vec();
        while positions.len() < depth {
            let mut logits = self.draft_row(state, &context)?;
            let limit = MAX_CANDIDATES.min(1 + tokens.saturating_sub(depth));
            let at = (context.len() as u32, limit);
            let candidates = guess_candidates(spec, &counts, at, logits.row_mut(0))?;
            let first = candidates.token_ids[0];
            context.push(first);
            positions.push(candidates);
            if spec.stop_token_ids.contains(&first) {
                break;
            }
        }
        Ok(with_leaves(&positions, tokens))
    }

    /// Proposes a chain with the distributions that its tokens were drawn from.
    fn propose_sampled(
        &mut self,
        state: &mut DraftState,
        spec: &SequenceSpec,
        ids: &[TokenId],
        depth: usize,
    ) -> anyhow::Result<Draft> {
        let counts = TokenCounts::default();
        let mut draft = Draft::default();
        let mut context = ids.to_vec();
        while draft.token_ids.len() < depth {
            let mut logits = self.draft_row(state, &context)?;
            let Guess { token_id, q } = guess(spec, &counts, context.len() as u32, logits.row_mut(0))?;
            context.push(token_id);
            draft.token_ids.push(token_id);
            draft.q.push(q);
            if spec.stop_token_ids.contains(&token_id) {
                break;
            }
        }
        Ok(draft)
    }

    /// Proposes a tree with branches, as `draft-worker/src/propose.rs` does.
    fn propose_tree(
        &mut self,
        state: &mut DraftState,
        spec: &SequenceSpec,
        ids: &[TokenId],
        Shape { kind, depth, tokens, rows }: Shape,
    ) -> anyhow::Result<Draft> {
        let (slot, start) = (state.slot, ids.len() as u32);
        let mut tree = TreeGrowth::new(depth, tokens, rows.unwrap_or(*ROWS_PER_FORWARD.start()));
        let mut token_ids = ids[state.cached_ids.len()..].to_vec();
        loop {
            let paths = tree.next_paths();
            let rows = [SequenceRows { slot, token_ids: &token_ids, num_logits: paths.len() }];
            let parents = tree.row_parents();
            let of_tree = [TreeRows { sequence: 0, num_stored: tree.num_stored(), parents: &parents }];
            let trees = if parents.is_empty() { &[][..] } else { &of_tree };
            let mut logits = self.draft.forward_with_trees(&rows, &[], trees)?.logits;
            state.counts.forwards += 1;
            state.counts.rows += token_ids.len();
            let mut found = Vec::new();
            for (i, path) in paths.iter().enumerate() {
                let at = (start + path.len() as u32, MAX_CANDIDATES);
                let counts = TokenCounts::default();
                let candidates = guess_candidates(spec, &counts, at, logits.row_mut(i))?;
                found.push(match kind {
                    Kind::Static => by_rank(candidates, &self.drawn_by_rank),
                    _ => candidates,
                });
            }
            tree.add_candidates(&found, |id| spec.stop_token_ids.contains(&id));
            if tree.num_next() == 0 {
                break;
            }
            token_ids = tree.next_ids();
        }
        let draft = tree.draft();
        let first = draft.first_path();
        let kept = &first[..first.len() - 1];
        self.draft.keep_path(slot, start, (&tree.rows_on_path(kept), kept))?;
        state.cached_ids = [ids, kept].concat();
        Ok(draft)
    }

    /// Appends the tokens that the target commits. Returns whether the text is finished, and the outcome for
    /// the draft.
    fn verify(
        &mut self,
        slot: SlotId,
        spec: &SequenceSpec,
        kind: Kind,
        (ids, draft): (&mut Vec<TokenId>, &Draft),
    ) -> anyhow::Result<(bool, DraftOutcome)> {
        let start = ids.len() as u32;
        let held = self.target.len(slot) as usize;
        let token_ids = [&ids[held..], &draft.token_ids].concat();
        let batch = [SequenceRows { slot, token_ids: &token_ids, num_logits: 1 + draft.token_ids.len() }];
        let tree = TreeRows { sequence: 0, num_stored: 0, parents: &draft.parents };
        let trees = if draft.is_tree() { vec![tree] } else { Vec::new() };
        let mut logits = self.target.forward_with_trees(&batch, &[], &trees)?.logits;
        let verdict = if kind == Kind::Block && !spec.sampling.is_greedy() {
            verify_block(spec, start, draft, &logits)?
        } else {
            let (rows, vocab_size) = (0..logits.rows(), logits.vocab_size());
            let rows = RawRows::new(logits.rows_mut(rows), vocab_size);
            verify(spec, &mut TokenCounts::default(), start, draft, rows)?
        };
        let accepted = &verdict.token_ids[..verdict.num_accepted as usize];
        if draft.is_tree() {
            let path: Vec<usize> = draft.rows_on_path(accepted).into_iter().map(|row| row - 1).collect();
            self.target.keep_path(slot, start, (&path, accepted))?;
        } else {
            self.target.truncate(slot, start + verdict.num_accepted);
        }
        let drawn = verdict.token_ids.get(accepted.len()).copied();
        let outcome = draft.outcome(accepted, drawn);
        ids.extend(verdict.token_ids);
        Ok((verdict.finish.is_some(), outcome))
    }
}

/// The spec by which draft and target draw in one round of a text.
fn in_round(spec: &SequenceSpec, kind: Kind, round: u32) -> SequenceSpec {
    let mut spec = spec.clone();
    if matches!(kind, Kind::Rejection | Kind::Block) {
        spec.acceptance = AcceptanceMode::Rejection;
    }
    if kind == Kind::Block {
        // A key of the noise: each round of block verification needs noise of its own.
        spec.choice = round;
    }
    spec
}

/// The spec of a draft that proposes its most likely tokens.
fn greedy(spec: &SequenceSpec) -> SequenceSpec {
    let sampling = SamplingParams { temperature: 0.0, ..spec.sampling.clone() };
    SequenceSpec { sampling, ..spec.clone() }
}

/// Verifies a chain as a whole. Plain sampling only: rows are not processed.
fn verify_block(
    spec: &SequenceSpec,
    start: u32,
    draft: &Draft,
    logits: &Logits,
) -> anyhow::Result<Verification> {
    let vocab_size = logits.vocab_size();
    let mut of_target = Vec::new();
    for (row, position) in (0..logits.rows()).zip(start..) {
        let kept = apply_filters(logits.row(row), &spec.sampling, position)?;
        of_target.push(by_id(&kept.probabilities(), vocab_size));
    }
    let of_draft: Vec<Vec<f64>> = draft.q.iter().map(|q| by_id(&normalized(q), vocab_size)).collect();
    let block = Block { token_ids: &draft.token_ids, draft: &of_draft, target: &of_target };
    let noise = Noise { seed: spec.seed, choice: spec.choice };
    let num_accepted = pick(&block.chances(), noise.uniform(start, 0, Purpose::Accept));
    let next = pick(&block.next_weights(num_accepted), noise.uniform(start, 0, Purpose::Residual));
    let committed = [&draft.token_ids[..num_accepted], &[next as TokenId]].concat();
    let mut verification = Verification { num_accepted: num_accepted as u32, ..Verification::default() };
    for (token_id, position) in committed.into_iter().zip(start..) {
        verification.token_ids.push(token_id);
        verification.finish = finish_reason(spec, position, token_id);
        // Of the drafted ids only the last may end the text, so the number of accepted ones stays true.
        if verification.finish.is_some() {
            break;
        }
    }
    Ok(verification)
}

fn normalized(q: &[(TokenId, f32)]) -> Vec<(TokenId, f64)> {
    let sum: f64 = q.iter().map(|&(_, weight)| f64::from(weight)).sum();
    q.iter().map(|&(id, weight)| (id, f64::from(weight) / sum)).collect()
}

/// The probability of every id; 0 for those that are not listed.
fn by_id(listed: &[(TokenId, f64)], vocab_size: usize) -> Vec<f64> {
    let mut probabilities = vec![0.0; vocab_size];
    for &(id, probability) in listed {
        probabilities[id as usize] = probability;
    }
    probabilities
}

/// CPU time of this thread, as Linux reports it.
fn cpu_time() -> anyhow::Result<Duration> {
    let schedstat = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanos = schedstat.split_whitespace().next().context("the system does not report thread times")?;
    Ok(Duration::from_nanos(nanos.parse()?))
}
