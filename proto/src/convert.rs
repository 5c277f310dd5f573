//! Conversion of steps and replies between wire and domain types.

use std::sync::Arc;

use speculation::step::{DraftDistribution, MAX_COMPARED_IDS, PromptLogprobs};
use speculation::{
    Draft, Proposal, ProposalAhead, Refusal, RefusalCause, Reply, ReplyBody, Role, SequenceId, Step,
    TokenLogprobs, TokenSpan, Work,
};

use crate::sampling::{
    finish_from_wire, finish_to_wire, logprobs_from_wire, logprobs_to_wire, spec_from_wire, spec_to_wire,
};
use crate::{WireError, v1};

/// Converts a step to the wire.
pub fn step_to_wire(step: Step) -> v1::Step {
    let mut wire = v1::Step {
        sequence_id: step.sequence_id.0,
        epoch: step.epoch,
        step_seq: step.step_seq,
        spec: step.spec.as_deref().map(spec_to_wire).map(Box::new),
        base_len: step.base_len,
        prefix_hash: step.prefix_hash,
        append_ids: step.append_ids,
        ..v1::Step::default()
    };
    match step.work {
        Work::Feed => {}
        Work::Propose { num_draft_tokens, num_tree_tokens } => {
            wire.draw = true;
            wire.num_draft_tokens = num_draft_tokens;
            wire.num_tree_tokens = num_tree_tokens;
        }
        Work::Verify { draft } => {
            wire.draw = true;
            wire.q = draft.q.iter().map(distribution_to_wire).collect();
            wire.draft_token_ids = draft.token_ids;
            wire.parents = draft.parents;
        }
    }
    wire
}

/// Converts a step from the wire, as read by a worker of `role`.
pub fn step_from_wire(wire: v1::Step, role: Role) -> Result<Step, WireError> {
    let work = match (wire.draw, role) {
        (false, _) => Work::Feed,
        (true, Role::Draft) => {
            Work::Propose { num_draft_tokens: wire.num_draft_tokens, num_tree_tokens: wire.num_tree_tokens }
        }
        (true, Role::Target) => Work::Verify {
            draft: Draft {
                token_ids: wire.draft_token_ids,
                parents: wire.parents,
                q: wire.q.into_iter().map(distribution_from_wire).collect::<Result<_, _>>()?,
            },
        },
    };
    Ok(Step {
        sequence_id: SequenceId(wire.sequence_id),
        epoch: wire.epoch,
        step_seq: wire.step_seq,
        spec: wire.spec.map(|spec| spec_from_wire(*spec)).transpose()?.map(Arc::new),
        base_len: wire.base_len,
        prefix_hash: wire.prefix_hash,
        append_ids: wire.append_ids,
        work,
    })
}

/// Converts a reply to the wire.
pub fn reply_to_wire(reply: &Reply) -> v1::Reply {
    use v1::reply::Body;
    let body = match &reply.body {
        ReplyBody::Fed { cached_len, prompt_logprobs } => Body::Fed(v1::Fed {
            cached_len: *cached_len,
            prompt_logprobs: prompt_logprobs.as_ref().map(prompt_logprobs_to_wire),
        }),
        ReplyBody::NeedContext { cached_len, has_spec } => {
            Body::NeedContext(v1::NeedContext { cached_len: *cached_len, has_spec: *has_spec })
        }
        ReplyBody::Refused(refusal) => Body::Refused(v1::Refused {
            reason: refusal.reason.clone(),
            cause: refusal_cause_to_wire(refusal.cause).into(),
        }),
        ReplyBody::Proposal(proposal) => Body::Proposal(v1::Proposal {
            start: proposal.start,
            draft_token_ids: proposal.draft.token_ids.clone(),
            parents: proposal.draft.parents.clone(),
            confidence: Vec::new(),
            q: proposal.draft.q.iter().map(distribution_to_wire).collect(),
        }),
        ReplyBody::Span(span) => Body::Span(span_to_wire(span)),
    };
    v1::Reply {
        sequence_id: reply.sequence_id.0,
        epoch: reply.epoch,
        step_seq: reply.step_seq,
        body: Some(body),
        num_compared: reply.agreed.len() as u32,
        agreed: reply.agreed.iter().rev().fold(0, |bits, agreed| bits << 1 | u64::from(*agreed)),
        num_cached: reply.num_cached,
        num_ahead: reply.num_ahead,
    }
}

/// Converts a reply from the wire.
pub fn reply_from_wire(wire: v1::Reply) -> Result<Reply, WireError> {
    use v1::reply::Body;
    let body = match wire.body.ok_or_else(|| WireError::new("body", "is missing"))? {
        Body::Fed(fed) => ReplyBody::Fed {
            cached_len: fed.cached_len,
            prompt_logprobs: fed.prompt_logprobs.map(prompt_logprobs_from_wire),
        },
        Body::NeedContext(reply) => {
            ReplyBody::NeedContext { cached_len: reply.cached_len, has_spec: reply.has_spec }
        }
        Body::Refused(refused) => {
            let cause = refusal_cause_from_wire(refused.cause());
            ReplyBody::Refused(Refusal { cause, reason: refused.reason })
        }
        Body::Proposal(proposal) => ReplyBody::Proposal(Proposal {
            start: proposal.start,
            draft: Draft {
                token_ids: proposal.draft_token_ids,
                parents: proposal.parents,
                q: proposal.q.into_iter().map(distribution_from_wire).collect::<Result<_, _>>()?,
            },
        }),
        Body::Span(span) => ReplyBody::Span(span_from_wire(span)?),
    };
    let sequence_id = SequenceId(wire.sequence_id);
    if wire.num_compared as usize > MAX_COMPARED_IDS {
        return Err(WireError::new(
            "num_compared",
            format!("{} exceeds the maximum of {MAX_COMPARED_IDS}", wire.num_compared),
        ));
    }
    let agreed = (0..wire.num_compared).map(|i| wire.agreed >> i & 1 == 1).collect();
    let (epoch, step_seq) = (wire.epoch, wire.step_seq);
    let (num_cached, num_ahead) = (wire.num_cached, wire.num_ahead);
    Ok(Reply { sequence_id, epoch, step_seq, body, agreed, num_cached, num_ahead })
}

/// Converts a proposal that was drafted ahead to the wire.
pub fn proposal_ahead_to_wire(ahead: ProposalAhead) -> v1::ProposalAhead {
    v1::ProposalAhead {
        sequence_id: ahead.sequence_id.0,
        epoch: ahead.epoch,
        step_seq: ahead.step_seq,
        committed_ids: ahead.committed_ids,
        draft_token_ids: ahead.draft.token_ids,
        parents: ahead.draft.parents,
    }
}

/// Converts a proposal that was drafted ahead from the wire.
pub fn proposal_ahead_from_wire(wire: v1::ProposalAhead) -> ProposalAhead {
    ProposalAhead {
        sequence_id: SequenceId(wire.sequence_id),
        epoch: wire.epoch,
        step_seq: wire.step_seq,
        committed_ids: wire.committed_ids,
        draft: Draft { token_ids: wire.draft_token_ids, parents: wire.parents, q: Vec::new() },
    }
}

fn span_to_wire(span: &TokenSpan) -> v1::TokenSpan {
    v1::TokenSpan {
        start: span.start,
        num_accepted: span.num_accepted,
        token_ids: span.token_ids.clone(),
        logprobs: span.logprobs.iter().map(logprobs_to_wire).collect(),
        prompt_logprobs: span.prompt_logprobs.as_ref().map(prompt_logprobs_to_wire),
        finish: finish_to_wire(span.finish).into(),
    }
}

fn span_from_wire(wire: v1::TokenSpan) -> Result<TokenSpan, WireError> {
    Ok(TokenSpan {
        start: wire.start,
        num_accepted: wire.num_accepted,
        token_ids: wire.token_ids,
        logprobs: token_logprobs_from_wire(wire.logprobs),
        prompt_logprobs: wire.prompt_logprobs.map(prompt_logprobs_from_wire),
        finish: finish_from_wire(wire.finish)?,
    })
}

fn prompt_logprobs_to_wire(prompt: &PromptLogprobs) -> v1::PromptLogprobs {
    v1::PromptLogprobs { start: prompt.start, entries: prompt.entries.iter().map(logprobs_to_wire).collect() }
}

fn prompt_logprobs_from_wire(wire: v1::PromptLogprobs) -> PromptLogprobs {
    PromptLogprobs { start: wire.start, entries: token_logprobs_from_wire(wire.entries) }
}

fn token_logprobs_from_wire(wire: Vec<v1::TokenLogprobs>) -> Vec<TokenLogprobs> {
    wire.into_iter().map(logprobs_from_wire).collect()
}

fn refusal_cause_to_wire(cause: RefusalCause) -> v1::RefusalCause {
    match cause {
        RefusalCause::Failure => v1::RefusalCause::Unspecified,
        RefusalCause::Grammar => v1::RefusalCause::Grammar,
        RefusalCause::Capacity => v1::RefusalCause::Capacity,
        RefusalCause::Unsupported => v1::RefusalCause::Unsupported,
    }
}

/// Causes that this version does not know count as failures.
fn refusal_cause_from_wire(cause: v1::RefusalCause) -> RefusalCause {
    match cause {
        v1::RefusalCause::Unspecified => RefusalCause::Failure,
        v1::RefusalCause::Grammar => RefusalCause::Grammar,
        v1::RefusalCause::Capacity => RefusalCause::Capacity,
        v1::RefusalCause::Unsupported => RefusalCause::Unsupported,
    }
}

fn distribution_to_wire(q: &DraftDistribution) -> v1::DraftDistribution {
    let (token_ids, weights) = q.iter().copied().unzip();
    v1::DraftDistribution { token_ids, weights }
}

fn distribution_from_wire(wire: v1::DraftDistribution) -> Result<DraftDistribution, WireError> {
    if wire.token_ids.len() != wire.weights.len() {
        let problem = format!("{} ids but {} weights", wire.token_ids.len(), wire.weights.len());
        return Err(WireError::new("q", problem));
    }
    Ok(wire.token_ids.into_iter().zip(wire.weights).collect())
}
