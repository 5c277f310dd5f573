//! The oracle of the tests: computes the target's own text for a request, in the slowest and simplest way.
//!
//! One sequence, no cache, no batch, no draft: `engine::Oracle` for the logits, and part B of the contract
//! one token at a time. It shares with the serving path the tensors and the pure rules of
//! `speculation::logits`; the draw is a separate loop over the noise.

use anyhow::ensure;
use engine::{Oracle, WeightFormat};
use proto::sampling::logprobs_to_wire;
use speculation::logits::{TokenCounts, apply_filters, process, score};
use speculation::noise::{Noise, Purpose};
use speculation::{SequenceSpec, TokenId, TokenLogprobs};

use crate::case::Case;
use crate::client::Answer;
use crate::pair;

/// Computes the expected answer to any request.
#[derive(Debug)]
pub struct OracleCheck {
    oracle: Oracle,
    vocab_size: usize,
}

impl OracleCheck {
    /// Loads the oracle of the bundled pair's target.
    pub fn load() -> anyhow::Result<Self> {
        let dir = pair::target_dir();
        Ok(Self {
            oracle: Oracle::load(&dir, WeightFormat::AsStored)?,
            vocab_size: pair::PairText::load()?.vocab_size(),
        })
    }

    /// The complete answer, with a full forward over all ids for each token.
    pub fn write(&self, case: &Case) -> anyhow::Result<Vec<TokenId>> {
        let spec = case.spec();
        let mut ids = case.prompt_ids.clone();
        while (ids.len() as u32) < spec.max_len {
            let mut row = self.oracle.logits(&ids);
            let id = self.draw(&spec, &ids, &mut row)?;
            ids.push(id);
            if spec.stop_token_ids.contains(&id) {
                break;
            }
        }
        Ok(ids.split_off(case.prompt_ids.len()))
    }

    /// Checks that an answer is what [`Self::write`] would generate, and that its log probabilities are the
    /// target's. One forward over all ids suffices: a row depends only on the ids before it, so the first
    /// wrong id is found regardless of what follows.
    pub fn check(&self, case: &Case, answer: &Answer) -> anyhow::Result<()> {
        let name = &case.name;
        let spec = case.spec();
        let given = &answer.token_ids;
        ensure!(!given.is_empty(), "{name}: no token came");
        let ids = [case.prompt_ids.as_slice(), given].concat();
        let mut rows = self.oracle.logits_at_every_position(&ids[..ids.len() - 1]);
        for (i, &id) in given.iter().enumerate() {
            let position = case.prompt_ids.len() + i;
            let row = &mut rows[position - 1];
            let scored = case.logprobs.map(|top_n| score(row, id, top_n));
            let drawn = self.draw(&spec, &ids[..position], row)?;
            ensure!(id == drawn, "{name}: token {i} is {id}, the target's own is {drawn}");
            self.check_score(name, i, scored.as_ref(), answer)?;
            let is_last = i + 1 == given.len();
            let ends = spec.stop_token_ids.contains(&id) || position as u32 + 1 == spec.max_len;
            ensure!(
                is_last == ends,
                "{name}: token {i} of {} {}",
                given.len(),
                if ends { "ends it" } else { "does not end it" }
            );
        }
        Ok(())
    }

    fn check_score(
        &self,
        name: &str,
        i: usize,
        expected: Option<&TokenLogprobs>,
        answer: &Answer,
    ) -> anyhow::Result<()> {
        let expected = expected.map(logprobs_to_wire);
        let given = answer.logprobs.get(i);
        ensure!(
            given == expected.as_ref(),
            "{name}: token {i} is scored {given:?}, the target's own score is {expected:?}"
        );
        Ok(())
    }

    /// Draws the token after `ids` (contract B1, B2, B4).
    fn draw(&self, spec: &SequenceSpec, ids: &[TokenId], row: &mut [f32]) -> anyhow::Result<TokenId> {
        let position = ids.len() as u32;
        row[self.vocab_size..].fill(f32::NEG_INFINITY);
        let mut counts = TokenCounts::new(spec.prompt_len);
        for &id in ids {
            counts.push(id);
        }
        process(row, spec, &counts, position);
        let noise = Noise { seed: spec.seed, choice: spec.choice };
        let mut best = (TokenId::MAX, f64::NEG_INFINITY);
        for (id, x) in apply_filters(row, &spec.sampling, position)?.tokens {
            let noise =
                if spec.sampling.is_greedy() { 0.0 } else { noise.gumbel(position, id, Purpose::Draw) };
            // Ids ascend: among equal values the lowest id wins.
            if x + noise > best.1 {
                best = (id, x + noise);
            }
        }
        Ok(best.0)
    }
}
