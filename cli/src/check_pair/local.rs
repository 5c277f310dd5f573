//! Runs a pair in this process: the router's rules for a sequence ([`speculation::sequence`]) with two
//! engines in place of workers, one sequence at a time. At the same seeds and k it accepts the same tokens as
//! a cluster, except that no step is ever late here.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use engine::{Engine, EngineInfo, Logits, SequenceRows, SlotId};
use speculation::acceptance::{RawRows, effective_mode, ends_draft, guess, verify};
use speculation::logits::TokenCounts;
use speculation::sequence::{Action, Event, Sequence, SequenceConfig};
use speculation::{
    AcceptanceMode, Draft, Proposal, Reply, ReplyBody, Role, SequenceId, SequenceSpec, Step, TokenId,
    TokenSpan, Work,
};

use super::error::CheckPairError;

/// Steps have no deadline here.
const NO_DEADLINE: Duration = Duration::from_secs(1 << 30);

/// Result of one round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VerifiedRound {
    /// Drafted ids that were verified.
    pub drafted: u32,
    /// Accepted of these.
    pub accepted: u32,
}

/// The output of a sequence, from its prompt to its end.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Decoded {
    /// The generated ids.
    pub token_ids: Vec<TokenId>,
    /// One verdict per round.
    pub verified_rounds: Vec<VerifiedRound>,
}

/// One model and the KV cache of the current sequence.
pub struct LocalModel {
    engine: Engine,
    /// Rows of the model beyond the tokenizer's ids are padding and are never drawn.
    vocab_size: u32,
}

/// A target and a draft.
pub struct LocalPair<'a> {
    /// Verifies and draws tokens.
    pub target: &'a mut LocalModel,
    /// Proposes draft tokens.
    pub draft: &'a mut LocalModel,
}

impl LocalModel {
    /// `num_ids` is the number of ids of the tokenizer.
    pub fn new(engine: Engine, num_ids: u32) -> Self {
        let vocab_size = num_ids.min(engine.info().vocab_size);
        Self { engine, vocab_size }
    }

    /// The engine, for measurements.
    pub fn engine(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// Description of the loaded model.
    pub fn info(&self) -> &EngineInfo {
        self.engine.info()
    }

    /// Number of ids that may be drawn.
    pub fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    /// Appends ids and returns the logits of the last `num_logits` of them.
    pub fn append(
        &mut self,
        slot: SlotId,
        token_ids: &[TokenId],
        num_logits: usize,
    ) -> Result<Logits, CheckPairError> {
        let mut logits = self.engine.forward(&[SequenceRows { slot, token_ids, num_logits }])?;
        let vocab_size = self.vocab_size as usize;
        for row in 0..logits.rows() {
            logits.row_mut(row)[vocab_size..].fill(f32::NEG_INFINITY);
        }
        Ok(logits)
    }

    /// Returns the logits of the last `num_logits` positions of a text, in a separate slot.
    pub fn score(&mut self, token_ids: &[TokenId], num_logits: usize) -> Result<Logits, CheckPairError> {
        let slot = self.engine.open();
        let logits = self.append(slot, token_ids, num_logits);
        self.engine.close(slot);
        logits
    }
}

/// The rounds of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct DecodeOptions {
    /// Tokens that are drafted in each.
    pub num_draft_tokens: u32,
    /// Rounds of the target before the draft worker is done with the prompt: those are plain ones.
    pub plain_rounds: u32,
}

impl LocalPair<'_> {
    /// The longest sequence that both models accept.
    pub fn window(&self) -> u32 {
        self.target.info().max_model_len.min(self.draft.info().max_model_len)
    }

    /// Decodes one sequence with `k` drafted tokens per round.
    pub fn decode(
        &mut self,
        spec: SequenceSpec,
        prompt: &[TokenId],
        k: u32,
    ) -> Result<Decoded, CheckPairError> {
        self.decode_with_late_draft_prefill(
            spec,
            prompt,
            DecodeOptions { num_draft_tokens: k, plain_rounds: 0 },
        )
    }

    /// Like [`Self::decode`], but the draft worker finishes the prompt's prefill only after `plain_rounds`
    /// rounds of the target. In a cluster both prefill at the same time, and either may finish first. Until
    /// then rounds are plain.
    pub fn decode_with_late_draft_prefill(
        &mut self,
        spec: SequenceSpec,
        prompt: &[TokenId],
        options: DecodeOptions,
    ) -> Result<Decoded, CheckPairError> {
        let spec = Arc::new(spec);
        let limits = SequenceConfig { vocab_size: self.target.vocab_size, target_deadline: NO_DEADLINE };
        let mut sequence = Sequence::new(SequenceId(0), Arc::clone(&spec), prompt, limits);
        let slots = (self.target.engine.open(), self.draft.engine.open());
        let decoded = self.drive(&mut sequence, &spec, slots, options);
        self.target.engine.close(slots.0);
        self.draft.engine.close(slots.1);
        let verified_rounds = decoded?;
        Ok(Decoded { token_ids: sequence.ids()[prompt.len()..].to_vec(), verified_rounds })
    }

    fn drive(
        &mut self,
        sequence: &mut Sequence,
        spec: &SequenceSpec,
        (target, draft): (SlotId, SlotId),
        options: DecodeOptions,
    ) -> Result<Vec<VerifiedRound>, CheckPairError> {
        let DecodeOptions { num_draft_tokens, plain_rounds } = options;
        let mut verified_rounds: Vec<VerifiedRound> = Vec::new();
        // The draft worker's `Fed` reply, held back until `plain_rounds` rounds are done.
        let mut delayed_fed_reply: Option<Event> = None;
        let mut actions: VecDeque<Action> =
            sequence.step(Duration::ZERO, Event::Assigned(Role::Draft)).into();
        actions.extend(sequence.step(Duration::ZERO, Event::Assigned(Role::Target)));
        while let Some(action) = actions.pop_front() {
            let event = match action {
                Action::Ready => {
                    let feed_draft = sequence.due_feed(Duration::ZERO, true).is_some();
                    let draft_wait = NO_DEADLINE;
                    Event::BeginRound { num_draft_tokens, num_tree_tokens: 0, draft_wait, feed_draft }
                }
                Action::Send(Role::Target, step) => {
                    let body = self.target.verify(target, spec, &step)?;
                    Event::Reply(Role::Target, Reply::to(&step, body))
                }
                Action::Send(Role::Draft, step) => {
                    let body = self.draft.propose(draft, spec, &step)?;
                    let fed = matches!(body, ReplyBody::Fed { .. });
                    let event = Event::Reply(Role::Draft, Reply::to(&step, body));
                    if fed && (verified_rounds.len() as u32) < plain_rounds {
                        delayed_fed_reply = Some(event);
                        continue;
                    }
                    event
                }
                Action::Commit(commit) => {
                    verified_rounds.push(VerifiedRound {
                        drafted: commit.num_draft_tokens,
                        accepted: commit.num_accepted,
                    });
                    match delayed_fed_reply.take_if(|_| verified_rounds.len() as u32 >= plain_rounds) {
                        Some(event) => event,
                        None => continue,
                    }
                }
                Action::TargetFault(fault) => return Err(CheckPairError::Sequence(fault.to_string())),
                Action::Anomaly(why) => return Err(CheckPairError::Sequence(format!("{why:?}"))),
                Action::Finished(_)
                | Action::Assign(_)
                | Action::Close(..)
                | Action::PromptLogprobs(_)
                | Action::UsedProposalAhead => continue,
            };
            actions.extend(sequence.step(Duration::ZERO, event));
        }
        Ok(verified_rounds)
    }
}

impl LocalModel {
    /// Executes the target worker's part of a step.
    fn verify(
        &mut self,
        slot: SlotId,
        spec: &SequenceSpec,
        step: &Step,
    ) -> Result<ReplyBody, CheckPairError> {
        self.engine.truncate(slot, step.base_len);
        let Work::Verify { draft } = &step.work else { return self.feed(slot, step) };
        let (start, num_rows) = (step.start(), draft.token_ids.len() + 1);
        let rows = [step.append_ids.as_slice(), &draft.token_ids].concat();
        let mut logits = self.append(slot, &rows, num_rows)?;
        let vocab_size = logits.vocab_size();
        // No sequence here has penalties, so nothing is counted.
        let mut counts = TokenCounts::new(spec.prompt_len);
        let verdict =
            verify(spec, &mut counts, start, draft, RawRows::new(logits.rows_mut(0..num_rows), vocab_size))?;
        self.engine.truncate(slot, start + verdict.num_accepted);
        Ok(ReplyBody::Span(TokenSpan {
            start,
            num_accepted: verdict.num_accepted,
            token_ids: verdict.token_ids,
            finish: verdict.finish,
            ..TokenSpan::default()
        }))
    }

    /// Executes the draft worker's part of a step.
    fn propose(
        &mut self,
        slot: SlotId,
        spec: &SequenceSpec,
        step: &Step,
    ) -> Result<ReplyBody, CheckPairError> {
        self.engine.truncate(slot, step.base_len);
        let Work::Propose { num_draft_tokens, .. } = step.work else { return self.feed(slot, step) };
        let start = step.start();
        let mut draft = Draft::default();
        let mut rows = step.append_ids.clone();
        let counts = TokenCounts::new(spec.prompt_len);
        loop {
            let mut logits = self.append(slot, &rows, 1)?;
            let position = start + draft.token_ids.len() as u32;
            let guessed = guess(spec, &counts, position, logits.row_mut(0))?;
            rows = vec![guessed.token_id];
            draft.token_ids.push(guessed.token_id);
            if effective_mode(spec) == AcceptanceMode::Rejection {
                draft.q.push(guessed.q);
            }
            let num_guessed = draft.token_ids.len() as u32;
            let stopped = ends_draft(spec, guessed.token_id);
            if num_guessed >= num_draft_tokens || stopped || start + num_guessed >= spec.max_len {
                return Ok(ReplyBody::Proposal(Proposal { start, draft }));
            }
        }
    }

    fn feed(&mut self, slot: SlotId, step: &Step) -> Result<ReplyBody, CheckPairError> {
        self.append(slot, &step.append_ids, 0)?;
        Ok(ReplyBody::Fed { cached_len: step.start(), prompt_logprobs: None })
    }
}
