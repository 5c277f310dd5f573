//! The target's part of a round: feeds missing context, requests verification, commits the span.

use super::*;
use crate::acceptance::finish_reason;
use crate::logits::is_allowed;
use crate::{RefusalCause, TokenLogprobs};

impl Sequence {
    /// Requests the round's verification, after feeding what the target lacks.
    pub(super) fn verify(&mut self, now: Duration, draft: Draft) {
        self.verifying = draft;
        self.send_to_target(now, self.config.target_deadline, 0);
    }

    /// Sends the next feed or verification step to the target.
    pub(super) fn send_to_target(&mut self, now: Duration, wait: Duration, resends: u32) {
        self.phase = Phase::Target;
        let len = self.committed.len();
        let scoring_only = self.is_scoring_only();
        let base = if scoring_only { self.target.cached_len } else { self.target.cached_len.min(len - 1) };
        let start = len.min(base + MAX_CONTEXT_IDS as u32);
        let work = if scoring_only || start < len {
            Work::Feed
        } else {
            Work::Verify { draft: self.verifying.clone() }
        };
        let step = self.make_step(Role::Target, base, start, work);
        self.target.in_flight = Some(InFlight {
            step_seq: step.step_seq,
            start,
            requested: None,
            deadline: now + wait,
            wait,
            resends,
        });
        self.actions.push(Action::Send(Role::Target, step));
    }

    /// Whether nothing is drawn and only the prompt's log probabilities are requested.
    fn is_scoring_only(&self) -> bool {
        self.spec.max_len <= self.committed.len()
    }

    /// Whether a step to the target requested no span.
    pub(super) fn is_feed(&self, step: &InFlight) -> bool {
        self.is_scoring_only() || step.start < self.committed.len()
    }

    pub(super) fn on_target_fed(
        &mut self,
        now: Duration,
        step: &InFlight,
        prompt_logprobs: Option<PromptLogprobs>,
    ) {
        if !self.has_due_scores(step.start, prompt_logprobs.as_ref()) {
            return self.on_protocol_violation(now, Role::Target);
        }
        let scoring = prompt_logprobs.is_some();
        self.score_prompt(prompt_logprobs);
        if self.is_scoring_only() && step.start == self.committed.len() {
            return self.finish(Some(FinishReason::Length));
        }
        // The id after a scored chunk is scored by the chunk's last row, so that row must run again with the
        // following ids.
        self.target.cached_len = if scoring { step.start - 1 } else { step.start };
        self.send_to_target(now, self.config.target_deadline, 0);
    }

    pub(super) fn on_span(&mut self, now: Duration, span: TokenSpan) {
        if !self.is_valid_span(&span) {
            return self.on_protocol_violation(now, Role::Target);
        }
        if !self.is_without_exclusions(&span.token_ids) {
            // A target of an earlier version, which is healthy: no client may open its breaker.
            let reason = "the target worker ignores allowed_token_ids and bad_words: update it".to_owned();
            let refusal = Refusal { cause: RefusalCause::Unsupported, reason };
            return self.drop_target(now, TargetFault::Refused(refusal));
        }
        let finish = span.finish;
        let len = span.token_ids.len() as u32;
        let mut drafted = std::mem::take(&mut self.verifying);
        if finish.is_some() {
            // Drafted ids after the end of the sequence were not verified.
            drafted.truncate(len, drafted.token_ids.len());
        }
        let num_draft_tokens = drafted.token_ids.len() as u32;
        let (accepted, drawn) = span.token_ids.split_at(span.num_accepted as usize);
        let draft_outcome = drafted.outcome(accepted, drawn.first().copied());
        self.score_prompt(span.prompt_logprobs);
        self.target.cached_len = span.start + span.num_accepted;
        self.committed.extend(&span.token_ids);
        self.counters.rounds += 1;
        self.counters.draft_tokens += u64::from(num_draft_tokens);
        self.counters.accepted_tokens += u64::from(span.num_accepted);
        self.actions.push(Action::Commit(Commit {
            start: span.start,
            token_ids: span.token_ids,
            num_draft_tokens,
            num_accepted: span.num_accepted,
            draft_outcome,
            logprobs: span.logprobs,
        }));
        let at_limit = (self.committed.len() >= self.spec.max_len).then_some(FinishReason::Length);
        match finish.or(at_limit) {
            Some(reason) => self.finish(Some(reason)),
            None => {
                self.phase = Phase::Ready;
                self.actions.push(Action::Ready);
            }
        }
    }

    /// Checks a span: it starts at the end of the sequence, accepts only what was drafted, ends the sequence
    /// only where the spec does, and is within all limits.
    fn is_valid_span(&self, span: &TokenSpan) -> bool {
        let accepted = span.num_accepted as usize;
        let drafted = &self.verifying;
        let len = span.token_ids.len();
        span.start == self.committed.len()
            && accepted <= len
            && (len == accepted + 1 || (len == accepted && len > 0 && span.finish.is_some()))
            && drafted.contains_path(&span.token_ids[..accepted])
            && span.token_ids.iter().all(|id| *id < self.config.vocab_size)
            && self.committed.len() + len as u32 <= self.spec.max_len
            && (span.logprobs.len() == if self.spec.logprobs.is_some() { len } else { 0 })
            && has_at_most(self.spec.logprobs, &span.logprobs)
            && self.has_due_scores(span.start, span.prompt_logprobs.as_ref())
            && self.ends_by_spec(span)
    }

    /// Whether none of the ids that continue the sequence is excluded. A target of a version without these
    /// fields would draw such ids.
    fn is_without_exclusions(&self, token_ids: &[TokenId]) -> bool {
        let sampling = &self.spec.sampling;
        if !sampling.has_exclusions() {
            return true;
        }
        let longest = sampling.bad_words.iter().map(Vec::len).max().unwrap_or(0);
        let output = self.committed.ids().get(self.spec.prompt_len as usize..).unwrap_or_default();
        let mut output = output[output.len().saturating_sub(longest)..].to_vec();
        token_ids.iter().all(|&id| {
            let is_allowed = is_allowed(sampling, &output, id);
            output.push(id);
            is_allowed
        })
    }

    /// Whether all prompt ids before `end`, where a step's context ended, have their scores once those of its
    /// reply are added. The target is not asked for them again, so a client would wait for them in vain.
    fn has_due_scores(&self, end: u32, scores: Option<&PromptLogprobs>) -> bool {
        if !self.wants_prompt_logprobs() {
            return true;
        }
        let continues = |scores: &&PromptLogprobs| scores.start <= self.prompt_scored;
        let scored = scores.filter(continues).map_or(0, end_of);
        let entries = scores.map_or(&[][..], |scores| scores.entries.as_slice());
        self.prompt_scored.max(scored) >= end.min(self.spec.prompt_len)
            && has_at_most(self.spec.prompt_logprobs, entries)
    }

    /// Whether a span that is valid otherwise ends the sequence exactly where the spec does. The reason may
    /// be left out at the maximum length.
    fn ends_by_spec(&self, span: &TokenSpan) -> bool {
        let Some((&last, before)) = span.token_ids.split_last() else { return false };
        let reason = finish_reason(&self.spec, span.start + before.len() as u32, last);
        let is_right =
            span.finish == reason || (span.finish.is_none() && reason == Some(FinishReason::Length));
        is_right && !before.iter().any(|id| self.spec.stop_token_ids.contains(id))
    }

    pub(super) fn resend_overdue(&mut self, now: Duration) {
        let Some(step) = self.target.in_flight.clone().filter(|step| now >= step.deadline) else { return };
        self.report_anomaly(Anomaly::TargetResend);
        if step.resends >= MAX_RESENDS {
            return self.drop_target(now, TargetFault::Unanswered);
        }
        self.target.spec_sent = false;
        self.send_to_target(now, step.wait * 2, step.resends + 1);
    }

    /// Passes prompt scores on, in order and without repeats, even if a failover scored some ids again.
    fn score_prompt(&mut self, scores: Option<PromptLogprobs>) {
        let Some(mut scores) = scores else { return };
        let is_new = scores.start <= self.prompt_scored && end_of(&scores) > self.prompt_scored;
        if !is_new || !self.wants_prompt_logprobs() {
            return;
        }
        scores.entries.drain(..(self.prompt_scored - scores.start) as usize);
        scores.start = self.prompt_scored;
        scores.entries.truncate(self.spec.prompt_len.saturating_sub(scores.start) as usize);
        self.prompt_scored += scores.entries.len() as u32;
        if !scores.entries.is_empty() {
            self.actions.push(Action::PromptLogprobs(scores));
        }
    }

    pub(super) fn wants_prompt_logprobs(&self) -> bool {
        self.spec.prompt_logprobs.is_some()
    }
}

/// The position after the last scored id.
fn end_of(scores: &PromptLogprobs) -> u32 {
    scores.start.saturating_add(scores.entries.len() as u32)
}

/// Whether no entry has more top tokens than requested.
fn has_at_most(requested: Option<u32>, entries: &[TokenLogprobs]) -> bool {
    entries.iter().all(|entry| entry.top.len() <= requested.unwrap_or(0) as usize)
}
