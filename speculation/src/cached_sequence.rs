//! The worker's end of the protocol (contract part A): its cached state of one sequence, and whether a step
//! matches it.
//!
//! A [`CachedSequence`] is a cache: every reply lets the router rebuild it from ids. It does not call the
//! engine; the worker keeps the KV of a sequence in sync with [`CachedSequence::len`].

use std::sync::Arc;

use crate::logits::TokenCounts;
use crate::prefix::Prefix;
use crate::step::{MAX_CONTEXT_IDS, MAX_DRAFT_TOKENS, Step, Work};
use crate::tree::MAX_TREE_TOKENS;
use crate::{Draft, Refusal, RefusalCause, Role, SequenceSpec, TokenId};

/// Capabilities of a worker; steps beyond them are refused.
#[derive(Debug, Clone, Copy)]
pub struct WorkerLimits {
    /// Role of the worker.
    pub role: Role,
    /// Ids at or above this are invalid.
    pub vocab_size: u32,
    /// Maximum length, prompt plus output.
    pub max_model_len: u32,
    /// Maximum ids of a tree to verify; 0: chains only.
    pub max_tree_tokens: u32,
    /// Whether sequences may have a grammar.
    pub grammars: bool,
}

/// The result of checking a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Admission {
    /// The cached sequence was cut to `base_len` and the context appended. Do the same to the KV, then run
    /// the work.
    Run,
    /// Older than a step already seen: drop it without a reply.
    Stale,
    /// Does not match the cached state, which is unchanged.
    NeedContext {
        /// Position to resend from.
        cached_len: u32,
        /// Whether the spec is cached.
        has_spec: bool,
    },
    /// Malformed, or beyond this worker's limits.
    Refused(Refusal),
}

/// A worker's cached state of one sequence. See the module documentation.
#[derive(Debug, Clone, Default)]
pub struct CachedSequence {
    epoch: u32,
    highest_step_seq: u64,
    spec: Option<Arc<SequenceSpec>>,
    prefix: Prefix,
    counts: TokenCounts,
}

impl CachedSequence {
    /// Ids whose KV is cached.
    pub fn ids(&self) -> &[TokenId] {
        self.prefix.ids()
    }

    /// Number of cached ids.
    pub fn len(&self) -> u32 {
        self.prefix.len()
    }

    /// Whether no ids are cached.
    pub fn is_empty(&self) -> bool {
        self.prefix.is_empty()
    }

    /// The epoch that the cached sequence belongs to.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// The sequence's spec, once a step contained it.
    pub fn spec(&self) -> Option<&Arc<SequenceSpec>> {
        self.spec.as_ref()
    }

    /// Describes the cached ids; kept only for sequences whose draws depend on them.
    pub fn counts_mut(&mut self) -> &mut TokenCounts {
        &mut self.counts
    }

    /// Checks a step and, if it may run, cuts and appends.
    pub fn admit(&mut self, step: &Step, limits: &WorkerLimits) -> Admission {
        if step.epoch < self.epoch {
            return Admission::Stale;
        }
        if step.epoch > self.epoch {
            *self = Self { epoch: step.epoch, ..Self::default() };
        }
        if step.step_seq <= self.highest_step_seq {
            return Admission::Stale;
        }
        self.highest_step_seq = step.step_seq;
        if let Err(refusal) = check(step, limits) {
            return Admission::Refused(refusal);
        }
        let has_spec = self.spec.is_some();
        if step.base_len > self.len() {
            return Admission::NeedContext { cached_len: self.len(), has_spec };
        }
        if step.base_len > 0 && self.prefix.hash_at(step.base_len) != Some(step.prefix_hash) {
            return Admission::NeedContext { cached_len: 0, has_spec };
        }
        if let Some(spec) = &step.spec {
            if self.spec.as_ref() != Some(spec) {
                // Counts depend on the spec: rebuild them with the new one.
                let held = std::mem::take(&mut self.prefix);
                self.counts = TokenCounts::new(spec.prompt_len);
                self.spec = Some(Arc::clone(spec));
                self.append(held.ids());
            }
        } else if !has_spec {
            return Admission::NeedContext { cached_len: self.len(), has_spec };
        }
        self.truncate(step.base_len);
        self.append(&step.append_ids);
        Admission::Run
    }

    /// Drops everything from `len` on; the worker must cut its KV as well.
    pub fn truncate(&mut self, len: u32) {
        if self.counts_ids() {
            for &id in self.prefix.ids().iter().skip(len as usize).rev() {
                self.counts.pop(id);
            }
        }
        self.prefix.truncate(len);
    }

    /// Appends ids whose KV is now cached: accepted ones at a target, drafted ones at a draft worker.
    pub fn append(&mut self, ids: &[TokenId]) {
        if self.counts_ids() {
            for &id in ids {
                self.counts.push(id);
            }
        }
        self.prefix.extend(ids);
    }

    fn counts_ids(&self) -> bool {
        self.spec.as_ref().is_some_and(|spec| spec.sampling.depends_on_context())
    }
}

fn check(step: &Step, limits: &WorkerLimits) -> Result<(), Refusal> {
    check_form(step, limits).map_err(Refusal::failure)?;
    let too_long = |reason| Refusal { cause: RefusalCause::Capacity, reason };
    check_window(step, limits.max_model_len).map_err(too_long)?;
    if !limits.grammars && step.spec.as_ref().is_some_and(|spec| spec.grammar.is_some()) {
        let reason = "this worker cannot apply grammars: send none".to_owned();
        return Err(Refusal { cause: RefusalCause::Grammar, reason });
    }
    Ok(())
}

/// Checks that a worker of this role could run the step, however long the sequence is.
fn check_form(step: &Step, limits: &WorkerLimits) -> Result<(), String> {
    if step.append_ids.len() > MAX_CONTEXT_IDS {
        return Err(format!(
            "context has {} ids, at most {MAX_CONTEXT_IDS} fit one step",
            step.append_ids.len()
        ));
    }
    if step.base_len.checked_add(step.append_ids.len() as u32).is_none() {
        return Err(format!("base_len {} overflows", step.base_len));
    }
    match &step.work {
        Work::Feed => {}
        Work::Propose { num_draft_tokens, num_tree_tokens } => {
            check_draw(step, limits, Role::Draft)?;
            if *num_draft_tokens as usize > MAX_DRAFT_TOKENS {
                return Err(format!("k is {num_draft_tokens}, at most {MAX_DRAFT_TOKENS}"));
            }
            if *num_tree_tokens as usize > MAX_TREE_TOKENS {
                return Err(format!(
                    "a tree of {num_tree_tokens} ids is requested, at most {MAX_TREE_TOKENS} are allowed"
                ));
            }
        }
        Work::Verify { draft } => {
            check_draw(step, limits, Role::Target)?;
            check_shape(draft, limits)?;
            if !draft.q.is_empty() && draft.q.len() != draft.token_ids.len() {
                return Err(format!("{} distributions for {} ids", draft.q.len(), draft.token_ids.len()));
            }
        }
    }
    let mut ids = step.append_ids.iter().chain(drafted(step));
    if let Some(id) = ids.find(|id| **id >= limits.vocab_size) {
        return Err(format!("id {id} is outside the vocabulary of {}", limits.vocab_size));
    }
    Ok(())
}

/// Checks that the sequence has at most `window` ids, drafted ones included.
fn check_window(step: &Step, window: u32) -> Result<(), String> {
    let start = step.start();
    if start > window {
        return Err(format!("{start} ids exceed the window of {window}"));
    }
    if drafted(step).len() as u32 > window - start {
        return Err(format!("the draft reaches past the window of {window}"));
    }
    Ok(())
}

/// The ids to verify.
fn drafted(step: &Step) -> &[TokenId] {
    match &step.work {
        Work::Verify { draft } => &draft.token_ids,
        Work::Feed | Work::Propose { .. } => &[],
    }
}

fn check_shape(draft: &Draft, limits: &WorkerLimits) -> Result<(), String> {
    let (len, most) = (draft.token_ids.len(), limits.max_tree_tokens);
    if draft.is_tree() && len > most as usize {
        return Err(format!("a tree of {len} ids, at most {most} (0: this worker verifies chains only)"));
    }
    draft.check_shape()?;
    match draft.depth() as usize {
        depth if depth > MAX_DRAFT_TOKENS => Err(format!("{depth} drafted ids, at most {MAX_DRAFT_TOKENS}")),
        _ => Ok(()),
    }
}

fn check_draw(step: &Step, limits: &WorkerLimits, role: Role) -> Result<(), String> {
    if limits.role != role {
        return Err(format!(
            "this is a {} worker, the step is for a {} worker",
            limits.role.as_str(),
            role.as_str()
        ));
    }
    if step.append_ids.is_empty() {
        return Err("a drawing step needs at least one context id".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SamplingParams, SequenceId};

    const LIMITS: WorkerLimits = WorkerLimits {
        role: Role::Draft,
        vocab_size: 100,
        max_model_len: 64,
        max_tree_tokens: 0,
        grammars: false,
    };

    fn step(epoch: u32, step_seq: u64, base: &[TokenId], append_ids: &[TokenId]) -> Step {
        Step {
            sequence_id: SequenceId(1),
            epoch,
            step_seq,
            spec: (base.is_empty())
                .then(|| Arc::new(SequenceSpec { prompt_len: 2, ..SequenceSpec::default() })),
            base_len: base.len() as u32,
            prefix_hash: Prefix::new(base).hash_at(base.len() as u32).unwrap(),
            append_ids: append_ids.to_vec(),
            work: Work::Feed,
        }
    }

    #[test]
    fn cuts_and_appends_when_the_prefix_agrees() {
        let mut cached = CachedSequence::default();
        assert_eq!(cached.admit(&step(1, 1, &[], &[5, 6, 7]), &LIMITS), Admission::Run);
        assert_eq!(cached.admit(&step(1, 2, &[5, 6], &[8]), &LIMITS), Admission::Run);
        assert_eq!(cached.ids(), &[5, 6, 8]);
    }

    /// Penalties and bad words depend on them, so they must not show how the ids came to be cached.
    #[test]
    fn counts_are_those_of_the_cached_ids() {
        check_counts(&SamplingParams { presence_penalty: 0.5, ..SamplingParams::default() });
        check_counts(&SamplingParams { bad_words: vec![vec![7, 5]], ..SamplingParams::default() });
    }

    fn check_counts(sampling: &SamplingParams) {
        let spec = |prompt_len| {
            let sampling = sampling.clone();
            Some(Arc::new(SequenceSpec { prompt_len, sampling, ..SequenceSpec::default() }))
        };
        let check = |cached: &mut CachedSequence, (ids, prompt_len): (&[TokenId], u32)| {
            let mut expected = TokenCounts::new(prompt_len);
            ids.iter().for_each(|&id| expected.push(id));
            assert_eq!((cached.ids().to_vec(), cached.counts_mut().clone()), (ids.to_vec(), expected));
        };
        let mut cached = CachedSequence::default();
        let first = Step { spec: spec(2), ..step(1, 1, &[], &[5, 6, 7, 5]) };
        assert_eq!(cached.admit(&first, &LIMITS), Admission::Run);
        check(&mut cached, (&[5, 6, 7, 5], 2));
        // Ids that a round adds are cut by later steps, once even with a part of the prompt.
        cached.append(&[5, 8, 8]);
        check(&mut cached, (&[5, 6, 7, 5, 5, 8, 8], 2));
        assert_eq!(cached.admit(&step(1, 2, &[5, 6, 7, 5, 5], &[9]), &LIMITS), Admission::Run);
        check(&mut cached, (&[5, 6, 7, 5, 5, 9], 2));
        assert_eq!(cached.admit(&step(1, 3, &[5], &[5, 9]), &LIMITS), Admission::Run);
        check(&mut cached, (&[5, 5, 9], 2));
        // The same spec again, another one, and the text again in a new epoch.
        let again = Step { spec: spec(2), ..step(1, 4, &[5, 5], &[7]) };
        assert_eq!(cached.admit(&again, &LIMITS), Admission::Run);
        check(&mut cached, (&[5, 5, 7], 2));
        let other = Step { spec: spec(1), ..step(1, 5, &[5, 5, 7], &[8]) };
        assert_eq!(cached.admit(&other, &LIMITS), Admission::Run);
        check(&mut cached, (&[5, 5, 7, 8], 1));
        let replayed = Step { spec: spec(2), ..step(2, 6, &[], &[5, 5, 7, 8, 9]) };
        assert_eq!(cached.admit(&replayed, &LIMITS), Admission::Run);
        check(&mut cached, (&[5, 5, 7, 8, 9], 2));
    }

    #[test]
    fn asks_for_context_without_touching_anything() {
        let mut cached = CachedSequence::default();
        let need = |cached_len, has_spec| Admission::NeedContext { cached_len, has_spec };
        assert_eq!(cached.admit(&step(1, 1, &[5], &[6]), &LIMITS), need(0, false));
        cached.admit(&step(1, 2, &[], &[5, 6, 7]), &LIMITS);
        assert_eq!(cached.admit(&step(1, 3, &[5, 6, 7, 8], &[9]), &LIMITS), need(3, true), "too short");
        assert_eq!(cached.admit(&step(1, 4, &[5, 9], &[9]), &LIMITS), need(0, true), "another hash");
        assert_eq!(cached.ids(), &[5, 6, 7]);
    }

    #[test]
    fn drops_stale_rounds_and_generations_and_resets_on_a_higher_one() {
        let mut cached = CachedSequence::default();
        cached.admit(&step(2, 7, &[], &[5, 6]), &LIMITS);
        assert_eq!(cached.admit(&step(2, 7, &[5], &[6]), &LIMITS), Admission::Stale, "repeated");
        assert_eq!(cached.admit(&step(1, 9, &[5], &[6]), &LIMITS), Admission::Stale, "older assignment");
        assert_eq!(
            cached.admit(&step(3, 1, &[5], &[6]), &LIMITS),
            Admission::NeedContext { cached_len: 0, has_spec: false },
            "a higher epoch discards what was held"
        );
    }

    #[test]
    fn refuses_trees_that_it_cannot_verify() {
        let judged = |parents: &[u32], max_tree_tokens| {
            let mut step = step(1, 1, &[], &[1]);
            let token_ids = (10..).take(parents.len()).collect();
            step.work = Work::Verify { draft: Draft { token_ids, parents: parents.to_vec(), q: vec![] } };
            let limits = WorkerLimits { role: Role::Target, max_tree_tokens, ..LIMITS };
            CachedSequence::default().admit(&step, &limits)
        };
        assert_eq!(judged(&[0, 0, 1], 3), Admission::Run);
        for (parents, most, words) in [
            (&[0, 0, 1][..], 2, "a tree of 3 ids"),
            (&[0, 0], 0, "chains only"),
            (&[0, 2], 9, "is row 2, which comes after it"),
        ] {
            let Admission::Refused(refusal) = judged(parents, most) else { panic!("{parents:?} was taken") };
            let Refusal { cause, reason } = refusal;
            assert_eq!(cause, RefusalCause::Failure, "{reason}");
            assert!(reason.contains(words), "{reason} lacks {words}");
        }
    }

    fn refused(limits: &WorkerLimits, change: impl FnOnce(&mut Step)) -> Refusal {
        let mut step = step(1, 1, &[], &[1]);
        change(&mut step);
        match CachedSequence::default().admit(&step, limits) {
            Admission::Refused(refusal) => refusal,
            other => panic!("{other:?} for {step:?}"),
        }
    }

    #[test]
    fn refuses_malformed_steps_naming_the_limit() {
        let check = |words: &str, change: &dyn Fn(&mut Step)| {
            let Refusal { cause, reason } = refused(&LIMITS, change);
            assert_eq!(cause, RefusalCause::Failure, "{reason}");
            assert!(reason.contains(words), "{reason} lacks {words}");
        };
        check("8192", &|s| s.append_ids = vec![1; MAX_CONTEXT_IDS + 1]);
        check("id 100", &|s| s.append_ids = vec![100]);
        check("overflows", &|s| s.base_len = u32::MAX);
        check("at most 32", &|s| s.work = Work::Propose { num_draft_tokens: 33, num_tree_tokens: 0 });
        check("at most 64", &|s| s.work = Work::Propose { num_draft_tokens: 1, num_tree_tokens: 65 });
        check("draft worker", &|s| s.work = Work::Verify { draft: Draft::default() });
        check("at least one context id", &|s| {
            s.append_ids.clear();
            s.work = Work::Propose { num_draft_tokens: 1, num_tree_tokens: 0 };
        });
    }

    /// Three failures in a row open a target's circuit breaker. Any client could open it with grammars and
    /// long sequences.
    #[test]
    fn a_grammar_and_a_long_sequence_are_no_failures_of_the_worker() {
        let limits = WorkerLimits { role: Role::Target, ..LIMITS };
        let check = |cause: RefusalCause, words: &str, change: &dyn Fn(&mut Step)| {
            let refusal = refused(&limits, change);
            assert_eq!(refusal.cause, cause, "{}", refusal.reason);
            assert!(refusal.reason.contains(words), "{} lacks {words}", refusal.reason);
        };
        check(RefusalCause::Grammar, "grammars", &|s| {
            let grammar = Some("{}".to_owned());
            s.spec = Some(Arc::new(SequenceSpec { grammar, ..SequenceSpec::default() }));
        });
        check(RefusalCause::Capacity, "65 ids exceed the window of 64", &|s| s.append_ids = vec![1; 65]);
        check(RefusalCause::Capacity, "past the window of 64", &|s| {
            s.append_ids = vec![1; 63];
            s.work = Work::Verify { draft: Draft::chain(vec![1, 2]) };
        });
    }
}
