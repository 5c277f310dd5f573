//! Compares text on the device id by id: rows do not depend on the other rows of a batch, the device draws
//! what the host draws from the same logits, and a draft on the same device, or a tree of guesses, changes
//! only the number of steps.

use speculation::acceptance::{draw_rows, verify_draws};
use speculation::logits::TokenCounts;
use speculation::{Draft, SamplingParams, SequenceSpec, TokenId};

use super::{CheckTarget, Report};
use crate::cuda::whole_model::options;
use crate::{DrawRequest, Engine, EngineError, SequenceRows, SlotId, TreeRows, WeightFormat};

/// Ids of the prompt, ids drawn after it, and drafted ids per round.
struct Sizes {
    prompt: usize,
    drawn: usize,
    drafted: usize,
}

/// See the module documentation.
pub(super) fn text(target: &CheckTarget, report: &mut Report<'_>) -> Result<(), EngineError> {
    let sizes = if target.is_dry {
        Sizes { prompt: 6, drawn: 6, drafted: 3 }
    } else {
        Sizes { prompt: 100, drawn: 200, drafted: 4 }
    };
    let load = |dir: &std::path::PathBuf, weights| {
        Engine::load(&options(dir.clone(), weights).on_gpus(target.gpus()))
    };
    for weights in [WeightFormat::Bf16, WeightFormat::Int8] {
        let mut engines = (load(&target.pair.0, weights)?, load(&target.pair.1, weights)?);
        check_batching(&mut engines.1, &format!("{weights:?}"), report)?;
        let plain = SamplingParams::default();
        for (name, sampling) in [
            ("greedy", SamplingParams { temperature: 0.0, ..plain.clone() }),
            ("T = 1", plain.clone()),
            (
                "T = 0.7, penalties",
                SamplingParams { temperature: 0.7, frequency_penalty: 0.4, ..plain.clone() },
            ),
            ("T = 1, top-p 0.9", SamplingParams { top_p: 0.9, ..plain.clone() }),
            ("T = 1, top-k 40, min-p 0.02", SamplingParams { top_k: 40, min_p: 0.02, ..plain.clone() }),
        ] {
            // The host driver is slow.
            if target.is_dry && weights == WeightFormat::Int8 && !sampling.is_greedy() {
                continue;
            }
            let spec = SequenceSpec {
                seed: 20_261_120,
                prompt_len: sizes.prompt as u32,
                sampling,
                max_len: u32::MAX,
                ..SequenceSpec::default()
            };
            one_text(&mut engines, &spec, (&sizes, &format!("{weights:?}, {name}")), report)?;
        }
    }
    Ok(())
}

/// One sequence four times: drawn on the device, drawn on the host, drafted, and verified in trees of
/// guesses.
fn one_text(
    (draft, target): &mut (Engine, Engine),
    spec: &SequenceSpec,
    (sizes, name): (&Sizes, &str),
    report: &mut Report<'_>,
) -> Result<(), EngineError> {
    let vocab = draft.info().vocab_size.min(target.info().vocab_size);
    let prompt = prompt_of(sizes.prompt, vocab);
    let drawn_where = if target.draws(spec) { "drawn on the device" } else { "read and drawn on the host" };

    let plain = generate_undrafted(&mut Sequence::open(target, spec, vocab), &prompt, sizes.drawn)?;
    let mut by_host = Sequence::open(target, spec, vocab);
    by_host.on_host = true;
    let on_host = generate_undrafted(&mut by_host, &prompt, sizes.drawn)?;
    drop(by_host);
    report.check(plain == on_host, format!("{name}: {drawn_where} == drawn on the host"));

    let mut ids = prompt.clone();
    let (mut rounds, mut accepted) = (0, 0);
    let mut draft_sequence = Sequence::open(draft, spec, vocab);
    let mut target_sequence = Sequence::open(target, spec, vocab);
    while ids.len() < plain.len() {
        let start = ids.len();
        let mut guesses = ids.clone();
        for _ in 0..sizes.drafted {
            let guess = draft_sequence.draw(&guesses, &[])?[0];
            guesses.push(guess);
        }
        let drawn = target_sequence.draw(&ids, &guesses[start..])?;
        let right = drawn.iter().zip(&guesses[start..]).take_while(|(drawn, guess)| drawn == guess).count();
        ids.extend_from_slice(&drawn[..=right]);
        (rounds, accepted) = (rounds + 1, accepted + right);
        draft_sequence.cut((start + right) as u32);
        target_sequence.cut((start + right) as u32);
    }
    ids.truncate(plain.len());
    let share = accepted as f64 / f64::from(rounds * sizes.drafted as u32);
    report.check(
        ids == plain,
        format!(
            "{name}: {} drafted ids == undrafted ones, {rounds} rounds, {share:.2} of the guesses accepted",
            sizes.drawn
        ),
    );
    drop((draft_sequence, target_sequence));
    let mut sequence = Sequence::open(target, spec, vocab);
    let (ids, rounds) = sequence.verify_in_trees(&plain, prompt.len(), sizes.drafted)?;
    let is_good = ids == plain && rounds < sizes.drawn;
    report.check(is_good, format!("{name}: ids judged in trees == undrafted ones, {rounds} rounds"));
    Ok(())
}

/// A tree of the right ids, each a child of the previous one, with two wrong ids beside each of them; one
/// wrong id has a child.
fn tree_around(right: &[TokenId], vocab: u32) -> Draft {
    let mut draft = Draft::default();
    let (mut parent, mut wrong) = (0, 0);
    for &id in right {
        let others = [(wrong, id), (parent, (id + 1) % vocab), (parent, id), (parent, (id + 2) % vocab)];
        // At the first position there is no wrong parent yet.
        let others = &others[usize::from(draft.token_ids.is_empty())..];
        let first = draft.token_ids.len() as u32 + 1;
        draft.parents.extend(others.iter().map(|(parent, _)| parent));
        draft.token_ids.extend(others.iter().map(|(_, id)| id));
        let place = others.len() as u32 - 2;
        (wrong, parent) = (first + place - 1, first + place);
    }
    draft
}

/// Arbitrary prompt ids.
pub(super) fn prompt_of(len: usize, vocab: u32) -> Vec<TokenId> {
    (0..len as u32).map(|i| (i * i * 31 + i * 7 + 11) % vocab).collect()
}

/// The prompt and the ids drawn after it without a draft.
fn generate_undrafted(
    sequence: &mut Sequence<'_>,
    prompt: &[TokenId],
    num_drawn: usize,
) -> Result<Vec<TokenId>, EngineError> {
    let mut ids = prompt.to_vec();
    for _ in 0..num_drawn {
        let drawn = sequence.draw(&ids, &[])?[0];
        ids.push(drawn);
    }
    Ok(ids)
}

/// A sequence on an engine; dropping it closes the slot.
pub(super) struct Sequence<'a> {
    engine: &'a mut Engine,
    slot: SlotId,
    spec: &'a SequenceSpec,
    vocab: u32,
    /// Whether logits are read and the host draws.
    on_host: bool,
}

impl<'a> Sequence<'a> {
    pub(super) fn open(engine: &'a mut Engine, spec: &'a SequenceSpec, vocab: u32) -> Self {
        let (slot, on_host) = (engine.open(), !engine.draws(spec));
        Self { engine, slot, spec, vocab, on_host }
    }

    /// Ids drawn after `ids` and after each id of `drafted`. Part of `ids` may already be in the KV cache.
    pub(super) fn draw(&mut self, ids: &[TokenId], drafted: &[TokenId]) -> Result<Vec<TokenId>, EngineError> {
        let held = self.engine.len(self.slot) as usize;
        let token_ids = [&ids[held..], drafted].concat();
        let num_logits = drafted.len() + 1;
        let rows = SequenceRows { slot: self.slot, token_ids: &token_ids, num_logits };
        let drawn = if self.on_host {
            let mut logits = self.engine.forward(&[rows])?;
            let mut counts = TokenCounts::new(self.spec.prompt_len);
            ids.iter().for_each(|&id| counts.push(id));
            let width = logits.vocab_size();
            let values = logits.rows_mut(0..num_logits);
            values.chunks_exact_mut(width).for_each(|row| row[self.vocab as usize..].fill(f32::NEG_INFINITY));
            draw_rows(self.spec, &mut counts, (ids.len() as u32, drafted), values)
        } else {
            let request = DrawRequest {
                spec: self.spec,
                prefix: ids,
                suffix: drafted,
                vocab_size: self.vocab,
                logprobs: None,
                prompt: None,
                candidate_rows: 0,
            };
            self.engine.forward_and_draw(&[rows], &[Some(request)])?.drawn
        };
        let start = ids.len() as u32;
        let ids = drawn.into_iter().zip(start..).map(|(row, position)| row.token(position));
        ids.collect::<Result<_, _>>().map_err(|error| EngineError::BadBatch(error.to_string()))
    }

    /// Verifies `text` after its first `from` ids in trees of `depth` positions per round. Returns the
    /// committed ids and the number of rounds.
    fn verify_in_trees(
        &mut self,
        text: &[TokenId],
        from: usize,
        depth: usize,
    ) -> Result<(Vec<TokenId>, usize), EngineError> {
        let (mut ids, mut rounds) = (text[..from].to_vec(), 0);
        while ids.len() < text.len() {
            let start = ids.len();
            let draft = tree_around(&text[start..text.len().min(start + depth)], self.vocab);
            let held = self.engine.len(self.slot) as usize;
            let token_ids = [&ids[held..], &draft.token_ids].concat();
            let num_logits = draft.token_ids.len() + 1;
            let rows = SequenceRows { slot: self.slot, token_ids: &token_ids, num_logits };
            let request = DrawRequest {
                spec: self.spec,
                prefix: &ids,
                suffix: &draft.token_ids,
                vocab_size: self.vocab,
                logprobs: None,
                prompt: None,
                candidate_rows: 0,
            };
            let tree = TreeRows { sequence: 0, num_stored: 0, parents: &draft.parents };
            let drawn = self.engine.forward_with_trees(&[rows], &[Some(request)], &[tree])?.drawn;
            let bad = |error: speculation::logits::DrawError| EngineError::BadBatch(error.to_string());
            let verdict = verify_draws(self.spec, start as u32, &draft, (&drawn, &[])).map_err(bad)?;
            let accepted = &verdict.token_ids[..verdict.num_accepted as usize];
            let path: Vec<usize> = draft.rows_on_path(accepted).into_iter().map(|row| row - 1).collect();
            self.engine.keep_path(self.slot, start as u32, (&path, accepted))?;
            ids.extend(verdict.token_ids);
            rounds += 1;
        }
        ids.truncate(text.len());
        Ok((ids, rounds))
    }

    /// Removes positions at and after `len`.
    pub(super) fn cut(&mut self, len: u32) {
        self.engine.truncate(self.slot, len);
    }
}

impl Drop for Sequence<'_> {
    fn drop(&mut self) {
        self.engine.close(self.slot);
    }
}

/// Logits of a sequence's rows: in one forward, split in other ways, and in a batch with another sequence.
/// The bits must be equal.
fn check_batching(engine: &mut Engine, name: &str, report: &mut Report<'_>) -> Result<(), EngineError> {
    let vocab = engine.info().vocab_size;
    let ids: Vec<TokenId> = (0..40).map(|i| (2 + i * 5) % vocab).collect();
    let mut logits_of = |cuts: &[usize], beside: usize| -> Result<Vec<f32>, EngineError> {
        let (slot, other) = (engine.open(), engine.open());
        let (mut all, mut first) = (Vec::new(), 0);
        for &end in cuts {
            let mine = SequenceRows { slot, token_ids: &ids[first..end], num_logits: end - first };
            let neighbour = SequenceRows { slot: other, token_ids: &ids[..beside], num_logits: 0 };
            let batch = if beside > 0 { vec![neighbour, mine] } else { vec![mine] };
            let logits = engine.forward(&batch)?;
            all.extend((0..logits.rows()).flat_map(|row| logits.row(row).to_vec()));
            engine.truncate(other, 0);
            first = end;
        }
        engine.close(slot);
        engine.close(other);
        Ok(all)
    };
    let whole = logits_of(&[40], 0)?;
    for (cuts, beside) in [(&[1, 2, 17, 33, 34, 40][..], 0), (&[8, 16, 24, 32, 40], 3), (&[40], 30)] {
        let is_good = logits_of(cuts, beside)? == whole;
        report
            .check(is_good, format!("{name}: 40 rows cut at {cuts:?} beside {beside} others == all at once"));
    }
    Ok(())
}
