//! The worker's end of the conversation (contract part A): what it holds of one sequence, and whether a step fits it.
//!
//! A [`Holding`] is a cache: every answer it gives lets the router rebuild it from ids. It never talks to the engine;
//! the worker keeps the KV of a sequence in step with [`Holding::len`].

use std::sync::Arc;

use crate::logits::TokenCounts;
use crate::prefix::Prefix;
use crate::step::{MAX_CONTEXT_IDS, MAX_DRAFT_TOKENS, Step, Work};
use crate::{Role, SequenceSpec, TokenId};

/// What a worker is able to hold and to do; steps beyond it are refused.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Whose steps these are.
    pub role: Role,
    /// Ids at and above this do not exist.
    pub vocab_size: u32,
    /// Prompt and output together.
    pub max_model_len: u32,
}

/// Whether a step may run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Admission {
    /// The holding was cut to `base_len` and the context appended; do the same to the KV, then the work.
    Run,
    /// Older than what was seen already: drop it without an answer.
    Stale,
    /// Does not fit what is held; nothing was touched.
    NeedContext {
        /// From where to resend.
        have_len: u32,
        /// Whether the spec is held.
        have_spec: bool,
    },
    /// Malformed, or more than this worker can do.
    Refused(String),
}

/// What a worker holds of one sequence. See the module's page.
#[derive(Debug, Default)]
pub struct Holding {
    generation: u32,
    highest_round: u64,
    spec: Option<Arc<SequenceSpec>>,
    prefix: Prefix,
    counts: TokenCounts,
}

impl Holding {
    /// Ids whose KV is held.
    pub fn ids(&self) -> &[TokenId] {
        self.prefix.ids()
    }

    /// How many ids are held.
    pub fn len(&self) -> u32 {
        self.prefix.len()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.prefix.is_empty()
    }

    /// The assignment that the holding belongs to.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// The sequence's spec, once a step brought it.
    pub fn spec(&self) -> Option<&Arc<SequenceSpec>> {
        self.spec.as_ref()
    }

    /// How often each id stands among those held; kept only for sequences with penalties.
    pub fn counts_mut(&mut self) -> &mut TokenCounts {
        &mut self.counts
    }

    /// Judges a step and, when it may run, cuts and appends.
    pub fn admit(&mut self, step: &Step, limits: &Limits) -> Admission {
        if step.generation < self.generation {
            return Admission::Stale;
        }
        if step.generation > self.generation {
            *self = Self { generation: step.generation, ..Self::default() };
        }
        if step.round <= self.highest_round {
            return Admission::Stale;
        }
        self.highest_round = step.round;
        if let Err(reason) = check(step, limits) {
            return Admission::Refused(reason);
        }
        let have_spec = self.spec.is_some();
        if step.base_len > self.len() {
            return Admission::NeedContext { have_len: self.len(), have_spec };
        }
        if step.base_len > 0 && self.prefix.hash_at(step.base_len) != Some(step.prefix_hash) {
            return Admission::NeedContext { have_len: 0, have_spec };
        }
        if let Some(spec) = &step.spec {
            if self.spec.as_ref() != Some(spec) {
                // Counts depend on the spec: rebuild them under the new one.
                let held = std::mem::take(&mut self.prefix);
                self.counts = TokenCounts::new(spec.prompt_len);
                self.spec = Some(Arc::clone(spec));
                self.append(held.ids());
            }
        } else if !have_spec {
            return Admission::NeedContext { have_len: self.len(), have_spec };
        }
        self.cut(step.base_len);
        self.append(&step.context);
        Admission::Run
    }

    /// Drops everything from `len` on; the worker cuts its KV alike.
    pub fn cut(&mut self, len: u32) {
        if self.counts_penalties() {
            for &id in self.prefix.ids().iter().skip(len as usize).rev() {
                self.counts.pop(id);
            }
        }
        self.prefix.truncate(len);
    }

    /// Adds ids whose KV is held now: accepted ones at a target, drafted ones at a draft worker.
    pub fn append(&mut self, ids: &[TokenId]) {
        if self.counts_penalties() {
            for &id in ids {
                self.counts.push(id);
            }
        }
        self.prefix.extend(ids);
    }

    fn counts_penalties(&self) -> bool {
        self.spec.as_ref().is_some_and(|spec| spec.sampling.has_penalties())
    }
}

fn check(step: &Step, limits: &Limits) -> Result<(), String> {
    if step.context.len() > MAX_CONTEXT_IDS {
        return Err(format!(
            "context has {} ids, at most {MAX_CONTEXT_IDS} fit one step",
            step.context.len()
        ));
    }
    let Some(start) = step.base_len.checked_add(step.context.len() as u32) else {
        return Err(format!("base_len {} overflows", step.base_len));
    };
    if start > limits.max_model_len {
        return Err(format!("{start} ids exceed the window of {}", limits.max_model_len));
    }
    let drafted: &[TokenId] = match &step.work {
        Work::Feed => &[],
        Work::Propose { num_draft_tokens } => {
            check_draw(step, limits, Role::Draft)?;
            if *num_draft_tokens as usize > MAX_DRAFT_TOKENS {
                return Err(format!("k is {num_draft_tokens}, at most {MAX_DRAFT_TOKENS}"));
            }
            &[]
        }
        Work::Verify { draft } => {
            check_draw(step, limits, Role::Target)?;
            if draft.token_ids.len() > MAX_DRAFT_TOKENS {
                return Err(format!("{} drafted ids, at most {MAX_DRAFT_TOKENS}", draft.token_ids.len()));
            }
            if !draft.q.is_empty() && draft.q.len() != draft.token_ids.len() {
                return Err(format!("{} distributions for {} ids", draft.q.len(), draft.token_ids.len()));
            }
            if start + draft.token_ids.len() as u32 > limits.max_model_len {
                return Err(format!("the draft reaches past the window of {}", limits.max_model_len));
            }
            &draft.token_ids
        }
    };
    if let Some(id) = step.context.iter().chain(drafted).find(|id| **id >= limits.vocab_size) {
        return Err(format!("id {id} is outside the vocabulary of {}", limits.vocab_size));
    }
    if step.spec.as_ref().is_some_and(|spec| spec.grammar.is_some()) {
        return Err("grammars are not supported by this worker".to_owned());
    }
    Ok(())
}

fn check_draw(step: &Step, limits: &Limits, role: Role) -> Result<(), String> {
    if limits.role != role {
        return Err(format!(
            "this is a {} worker, the step is for a {} worker",
            limits.role.as_str(),
            role.as_str()
        ));
    }
    if step.context.is_empty() {
        return Err("a drawing step needs at least one context id".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SequenceId;

    const LIMITS: Limits = Limits { role: Role::Draft, vocab_size: 100, max_model_len: 64 };

    fn step(generation: u32, round: u64, base: &[TokenId], context: &[TokenId]) -> Step {
        Step {
            sequence_id: SequenceId(1),
            generation,
            round,
            spec: (base.is_empty())
                .then(|| Arc::new(SequenceSpec { prompt_len: 2, ..SequenceSpec::default() })),
            base_len: base.len() as u32,
            prefix_hash: Prefix::new(base).hash_at(base.len() as u32).unwrap(),
            context: context.to_vec(),
            work: Work::Feed,
            expected_tokens: 1.0,
        }
    }

    #[test]
    fn cuts_and_appends_when_the_prefix_agrees() {
        let mut holding = Holding::default();
        assert_eq!(holding.admit(&step(1, 1, &[], &[5, 6, 7]), &LIMITS), Admission::Run);
        assert_eq!(holding.admit(&step(1, 2, &[5, 6], &[8]), &LIMITS), Admission::Run);
        assert_eq!(holding.ids(), &[5, 6, 8]);
    }

    #[test]
    fn asks_for_context_without_touching_anything() {
        let mut holding = Holding::default();
        let need = |have_len, have_spec| Admission::NeedContext { have_len, have_spec };
        assert_eq!(holding.admit(&step(1, 1, &[5], &[6]), &LIMITS), need(0, false));
        holding.admit(&step(1, 2, &[], &[5, 6, 7]), &LIMITS);
        assert_eq!(holding.admit(&step(1, 3, &[5, 6, 7, 8], &[9]), &LIMITS), need(3, true), "too short");
        assert_eq!(holding.admit(&step(1, 4, &[5, 9], &[9]), &LIMITS), need(0, true), "another hash");
        assert_eq!(holding.ids(), &[5, 6, 7]);
    }

    #[test]
    fn drops_stale_rounds_and_generations_and_resets_on_a_higher_one() {
        let mut holding = Holding::default();
        holding.admit(&step(2, 7, &[], &[5, 6]), &LIMITS);
        assert_eq!(holding.admit(&step(2, 7, &[5], &[6]), &LIMITS), Admission::Stale, "repeated");
        assert_eq!(holding.admit(&step(1, 9, &[5], &[6]), &LIMITS), Admission::Stale, "older assignment");
        assert_eq!(
            holding.admit(&step(3, 1, &[5], &[6]), &LIMITS),
            Admission::NeedContext { have_len: 0, have_spec: false },
            "a higher generation discards what was held"
        );
    }

    #[test]
    fn refuses_malformed_steps_naming_the_limit() {
        let mut round = 0;
        let mut refused = |change: &dyn Fn(&mut Step), words: &str| {
            round += 1;
            let mut step = step(1, round, &[], &[1]);
            change(&mut step);
            match Holding::default().admit(&step, &LIMITS) {
                Admission::Refused(reason) => assert!(reason.contains(words), "{reason} lacks {words}"),
                other => panic!("{other:?} for {words}"),
            }
        };
        refused(&|s| s.context = vec![1; MAX_CONTEXT_IDS + 1], "8192");
        refused(&|s| s.context = vec![1; 65], "window of 64");
        refused(&|s| s.context = vec![100], "id 100");
        refused(&|s| s.base_len = u32::MAX, "overflows");
        refused(&|s| s.work = Work::Propose { num_draft_tokens: 33 }, "at most 32");
        refused(&|s| s.work = Work::Verify { draft: Default::default() }, "draft worker");
        refused(
            &|s| {
                s.context.clear();
                s.work = Work::Propose { num_draft_tokens: 1 }
            },
            "at least one context id",
        );
    }
}
