//! End-to-end speedup of speculation: text by the target alone, and by draft and target in turns, with the
//! draft on the same GPU and on the host's CPU. Ids are compared with the target's own with `==` every time.
//!
//! The bundled pair runs with its own acceptance rate. Models of real sizes have random weights here, and
//! drafts with random weights are never accepted: their guesses are computed at full cost, and then a given
//! share of them is replaced by the right ids.

use std::path::PathBuf;
use std::time::Instant;

use speculation::noise::{Noise, Purpose};
use speculation::{SamplingParams, SequenceSpec, TokenId};

use super::decode::{LLAMA_1B, LLAMA_8B, TINY, write_config};
use super::text::{Sequence, prompt_of};
use super::{CheckTarget, Report};
use crate::cuda::whole_model::options;
use crate::{Engine, EngineError, WeightFormat};

/// Ids of the prompt, ids drawn after it, and drafted ids per round.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) prompt: usize,
    pub(super) drawn: usize,
    pub(super) drafted: usize,
}

pub(super) const PAIR: Sizes = Sizes { prompt: 100, drawn: 200, drafted: 4 };
const LARGE: Sizes = Sizes { prompt: 64, drawn: 96, drafted: 4 };
pub(super) const DRY: Sizes = Sizes { prompt: 6, drawn: 7, drafted: 2 };
/// Shares of guesses that are replaced by the right ids, for drafts with random weights.
const ACCEPTANCE_RATES: [f64; 3] = [0.6, 0.8, 0.9];

/// See the module documentation.
pub(super) fn speculation(target: &CheckTarget, report: &mut Report<'_>) -> Result<(), EngineError> {
    bundled(target, report)?;
    large(target, report)
}

/// The bundled pair, with its own acceptance rate.
fn bundled(target: &CheckTarget, report: &mut Report<'_>) -> Result<(), EngineError> {
    let options = |dir: &PathBuf| options(dir.clone(), WeightFormat::Bf16);
    let mut target_engine = Engine::load(&options(&target.pair.1).on_gpus(target.gpus()))?;
    let name = "the bundled pair, bf16";
    let text = Text::alone(name, &mut target_engine, if target.is_dry { DRY } else { PAIR })?;
    report.say(format!("{name}: {:.3} ms an id by the target alone", text.ms_per_token));
    let engine = &mut Engine::load(&options(&target.pair.0).on_gpus(target.gpus()))?;
    text.compare_drafted(Draft { engine, place: "on the gpu", share: None }, &mut target_engine, report)?;
    let engine = &mut Engine::load(&options(&target.pair.0))?;
    text.compare_drafted(Draft { engine, place: "on the host", share: None }, &mut target_engine, report)
}

/// Models of real sizes, with a given share of right guesses.
fn large(target: &CheckTarget, report: &mut Report<'_>) -> Result<(), EngineError> {
    let (sizes, shapes, shares) = match target.is_dry {
        true => (DRY, (TINY, TINY), &ACCEPTANCE_RATES[1..2]),
        false => (LARGE, (LLAMA_8B, LLAMA_1B), &ACCEPTANCE_RATES[..]),
    };
    let files = (write_config(shapes.0, "target")?, write_config(shapes.1, "draft")?);
    let on_gpu =
        |file: &PathBuf| Engine::random(&options(file.clone(), WeightFormat::Bf16).on_gpus(target.gpus()), 1);
    let mut target_engine = on_gpu(&files.0)?;
    let name = if target.is_dry { "tiny shapes" } else { "8B and 1B, random bf16" };
    let text = Text::alone(name, &mut target_engine, sizes)?;
    report.say(format!("{name}: {:.3} ms an id by the target alone", text.ms_per_token));
    let mut judged = |engine: &mut Engine, place| {
        let mut of_share = |&share| {
            let draft = Draft { engine: &mut *engine, place, share: Some(share) };
            text.compare_drafted(draft, &mut target_engine, report)
        };
        shares.iter().try_for_each(&mut of_share)
    };
    judged(&mut on_gpu(&files.1)?, "on the gpu")?;
    judged(&mut Engine::random(&options(files.1.clone(), WeightFormat::Int8), 1)?, "on the host, int8")?;
    [files.0, files.1]
        .into_iter()
        .try_for_each(|path| std::fs::remove_file(&path).map_err(|source| EngineError::Io { path, source }))
}

/// The engine that drafts.
struct Draft<'a> {
    engine: &'a mut Engine,
    /// Where it runs, for the report.
    place: &'static str,
    /// If given, this share of its guesses is replaced by the right ids and the others by wrong ones.
    share: Option<f64>,
}

/// A text by the target alone.
struct Text {
    /// Name of the models, for the report.
    name: &'static str,
    spec: SequenceSpec,
    sizes: Sizes,
    /// The prompt and the ids after it.
    ids: Vec<TokenId>,
    /// Mean over all ids but the first, whose step also prefills the prompt.
    ms_per_token: f64,
}

impl Text {
    fn alone(name: &'static str, target_engine: &mut Engine, sizes: Sizes) -> Result<Self, EngineError> {
        let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let (prompt_len, max_len) = (sizes.prompt as u32, u32::MAX);
        let spec = SequenceSpec { prompt_len, sampling, max_len, ..SequenceSpec::default() };
        let vocab = target_engine.info().vocab_size;
        let mut ids = prompt_of(sizes.prompt, vocab);
        let mut sequence = Sequence::open(target_engine, &spec, vocab);
        ids.push(sequence.draw(&ids, &[])?[0]);
        let start = Instant::now();
        for _ in 1..sizes.drawn {
            ids.push(sequence.draw(&ids, &[])?[0]);
        }
        let ms_per_token = start.elapsed().as_secs_f64() * 1e3 / (sizes.drawn - 1) as f64;
        drop(sequence);
        Ok(Self { name, spec, sizes, ids, ms_per_token })
    }

    /// Generates the same text with a draft.
    fn compare_drafted(
        &self,
        draft: Draft<'_>,
        target_engine: &mut Engine,
        report: &mut Report<'_>,
    ) -> Result<(), EngineError> {
        let (Self { name, spec, sizes, .. }, Draft { engine, place, share }) = (self, draft);
        let vocab = target_engine.info().vocab_size;
        let mut ids = self.ids[..=sizes.prompt].to_vec();
        let mut draft_sequence = Sequence::open(engine, spec, vocab);
        let mut target_sequence = Sequence::open(target_engine, spec, vocab);
        for sequence in [&mut draft_sequence, &mut target_sequence] {
            sequence.draw(&ids, &[])?;
            sequence.cut(sizes.prompt as u32);
        }
        let (mut rounds, mut accepted) = (0, 0);
        let start = Instant::now();
        while ids.len() < self.ids.len() {
            let first = ids.len();
            let mut guesses = ids.clone();
            for _ in 0..sizes.drafted {
                let guess = draft_sequence.draw(&guesses, &[])?[0];
                guesses.push(share.map_or(guess, |share| self.guess_at_rate(guesses.len(), share)));
            }
            let drawn = target_sequence.draw(&ids, &guesses[first..])?;
            let right =
                drawn.iter().zip(&guesses[first..]).take_while(|(drawn, guess)| drawn == guess).count();
            ids.extend_from_slice(&drawn[..=right]);
            (rounds, accepted) = (rounds + 1, accepted + right);
            draft_sequence.cut((first + right) as u32);
            target_sequence.cut((first + right) as u32);
        }
        let made = ids.len() - self.ids[..=sizes.prompt].len();
        let ms_per_token = start.elapsed().as_secs_f64() * 1e3 / made as f64;
        ids.truncate(self.ids.len());
        let found = accepted as f64 / (rounds * sizes.drafted) as f64;
        let share = share.map_or(String::new(), |share| format!(", {share:.1} of the guesses made right"));
        report.check(
            ids == self.ids,
            format!(
                "{name}, draft {place}{share}: ids == the target's own; {} a round, {found:.2} accepted, {ms_per_token:.3} ms an id, \
                 {:.2} times as fast",
                sizes.drafted,
                self.ms_per_token / ms_per_token
            ),
        );
        Ok(())
    }

    /// A guess of the id at `position`: right with this probability, independent of all others.
    fn guess_at_rate(&self, position: usize, share: f64) -> TokenId {
        let right = self.ids.get(position).copied().unwrap_or(0);
        let is_right = Noise { seed: 9, choice: 0 }.uniform(position as u32, 0, Purpose::Accept) < share;
        if is_right { right } else { u32::from(right == 0) }
    }
}
