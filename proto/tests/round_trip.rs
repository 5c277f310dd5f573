//! Domain values are unchanged by a round trip over the wire types. Values out of bounds are rejected, and
//! the error names the field.

use std::sync::Arc;

use proptest::collection::{btree_set, vec};
use proptest::option;
use proptest::prelude::*;

use proto::convert::{
    proposal_ahead_from_wire, proposal_ahead_to_wire, reply_from_wire, reply_to_wire, step_from_wire,
    step_to_wire,
};
use proto::sampling::{sampling_from_wire, spec_from_wire};
use proto::v1;
use speculation::step::PromptLogprobs;
use speculation::{
    AcceptanceMode, Draft, FinishReason, Proposal, ProposalAhead, Refusal, RefusalCause, Reply, ReplyBody,
    Role, SamplingParams, SequenceId, SequenceSpec, Step, TokenLogprobs, TokenSpan, Work,
};

fn sampling() -> impl Strategy<Value = SamplingParams> {
    let floats = (0.0f32..=2.0, 0.0f32..=1.0, 0.0f32..=1.0, 0.1f32..=2.0, -2.0f32..=2.0, -2.0f32..=2.0);
    let exclusions = (btree_set(any::<u32>(), 0..4), vec(vec(any::<u32>(), 1..4), 0..3));
    (floats, any::<u32>(), vec((any::<u32>(), -100.0f32..100.0), 0..4), any::<u32>(), exclusions).prop_map(
        |(
            (temperature, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty),
            top_k,
            logit_bias,
            min_tokens,
            (allowed_token_ids, bad_words),
        )| {
            SamplingParams {
                temperature,
                top_k,
                top_p,
                min_p,
                repetition_penalty,
                frequency_penalty,
                presence_penalty,
                logit_bias,
                min_tokens,
                allowed_token_ids: allowed_token_ids.into_iter().collect(),
                bad_words,
            }
        },
    )
}

fn spec() -> impl Strategy<Value = SequenceSpec> {
    let numbers = (any::<u64>(), any::<u32>(), any::<u32>(), any::<u32>(), any::<u8>(), any::<u64>());
    let modes = prop_oneof![
        Just(AcceptanceMode::Coupled),
        Just(AcceptanceMode::Rejection),
        Just(AcceptanceMode::Typical)
    ];
    let num_logprobs = (option::of(0u32..=20), option::of(0u32..=20));
    (numbers, sampling(), vec(any::<u32>(), 0..4), modes, num_logprobs, ".{0,20}").prop_map(
        |(
            (seed, choice, prompt_len, max_len, priority, isolation_key),
            sampling,
            stop_token_ids,
            acceptance,
            num_logprobs,
            traceparent,
        )| {
            SequenceSpec {
                seed,
                choice,
                prompt_len,
                sampling,
                stop_token_ids,
                max_len,
                acceptance,
                logprobs: num_logprobs.0,
                prompt_logprobs: num_logprobs.1,
                grammar: None,
                lane: choice,
                priority,
                isolation_key,
                traceparent,
            }
        },
    )
}

fn draft() -> impl Strategy<Value = Draft> {
    (vec(any::<u32>(), 0..8), any::<bool>(), vec(any::<u32>(), 0..8)).prop_map(
        |(token_ids, with_q, parents)| {
            let q = if with_q {
                token_ids.iter().map(|id| vec![(*id, 0.5), (1, 0.25)]).collect()
            } else {
                Vec::new()
            };
            Draft { token_ids, parents, q }
        },
    )
}

fn logprobs() -> impl Strategy<Value = TokenLogprobs> {
    (-20.0f32..0.0, vec((any::<u32>(), -20.0f32..0.0), 0..3))
        .prop_map(|(logprob, top)| TokenLogprobs { logprob, top })
}

fn prompt_logprobs() -> impl Strategy<Value = Option<PromptLogprobs>> {
    option::of(
        (any::<u32>(), vec(logprobs(), 0..3)).prop_map(|(start, entries)| PromptLogprobs { start, entries }),
    )
}

fn refusal() -> impl Strategy<Value = Refusal> {
    let cause = prop_oneof![
        Just(RefusalCause::Failure),
        Just(RefusalCause::Grammar),
        Just(RefusalCause::Capacity),
        Just(RefusalCause::Unsupported),
    ];
    (cause, ".{0,20}").prop_map(|(cause, reason)| Refusal { cause, reason })
}

fn body() -> impl Strategy<Value = ReplyBody> {
    let finish = prop_oneof![Just(None), Just(Some(FinishReason::Stop)), Just(Some(FinishReason::Length))];
    let span =
        (
            any::<u32>(),
            any::<u32>(),
            vec(any::<u32>(), 0..9),
            vec(logprobs(), 0..3),
            prompt_logprobs(),
            finish,
        )
            .prop_map(|(start, num_accepted, token_ids, logprobs, prompt_logprobs, finish)| {
                TokenSpan { start, num_accepted, token_ids, logprobs, prompt_logprobs, finish }
            });
    prop_oneof![
        (any::<u32>(), prompt_logprobs())
            .prop_map(|(cached_len, prompt_logprobs)| ReplyBody::Fed { cached_len, prompt_logprobs }),
        (any::<u32>(), any::<bool>())
            .prop_map(|(cached_len, has_spec)| ReplyBody::NeedContext { cached_len, has_spec }),
        refusal().prop_map(ReplyBody::Refused),
        (any::<u32>(), draft()).prop_map(|(start, draft)| ReplyBody::Proposal(Proposal { start, draft })),
        span.prop_map(ReplyBody::Span),
    ]
}

proptest! {
    #[test]
    fn steps_round_trip(
        numbers in any::<(u64, u32, u64, u32, u64)>(),
        spec in option::of(spec()),
        append_ids in vec(any::<u32>(), 0..20),
        draft in draft(),
        kind in 0..3u32,
        k in any::<u32>(),
    ) {
        let (sequence_id, epoch, step_seq, base_len, prefix_hash) = numbers;
        let (role, work) = match kind {
            0 => (Role::Target, Work::Feed),
            1 => (Role::Draft, Work::Propose { num_draft_tokens: k, num_tree_tokens: k / 3 }),
            _ => (Role::Target, Work::Verify { draft }),
        };
        let step = Step {
            sequence_id: SequenceId(sequence_id),
            epoch,
            step_seq,
            spec: spec.map(Arc::new),
            base_len,
            prefix_hash,
            append_ids,
            work,
        };
        prop_assert_eq!(step_from_wire(step_to_wire(step.clone()), role), Ok(step));
    }

    #[test]
    fn replies_round_trip(sequence_id in any::<u64>(), epoch in any::<u32>(), step_seq in any::<u64>(), body in body(), agreed in vec(any::<bool>(), 0..=64), num_cached in any::<u32>(), num_ahead in any::<u32>()) {
        let reply = Reply { sequence_id: SequenceId(sequence_id), epoch, step_seq, body, agreed, num_cached, num_ahead };
        prop_assert_eq!(reply_from_wire(reply_to_wire(&reply)), Ok(reply));
    }

    #[test]
    fn proposals_drafted_ahead_round_trip(
        sequence_id in any::<u64>(),
        epoch in any::<u32>(),
        step_seq in any::<u64>(),
        committed_ids in vec(any::<u32>(), 0..9),
        draft in draft(),
    ) {
        let (sequence_id, draft) = (SequenceId(sequence_id), Draft { q: Vec::new(), ..draft });
        let ahead = ProposalAhead { sequence_id, epoch, step_seq, committed_ids, draft };
        prop_assert_eq!(proposal_ahead_from_wire(proposal_ahead_to_wire(ahead.clone())), ahead);
    }
}

#[test]
fn errors_name_the_field_that_is_out_of_bounds() {
    let spec = |change: &dyn Fn(&mut v1::SequenceSpec)| {
        let mut wire = v1::SequenceSpec::default();
        change(&mut wire);
        spec_from_wire(wire).unwrap_err().to_string()
    };
    assert!(spec(&|s| s.priority = 256).starts_with("priority: 256"));
    assert!(spec(&|s| s.acceptance = 9).starts_with("acceptance: unknown"));
    assert!(spec(&|s| s.stop_token_ids = vec![0; 257]).starts_with("stop_token_ids: 257"));
    assert!(spec(&|s| s.logprobs = Some(65)).starts_with("logprobs: at most 64"));
    let sampling = |change: &dyn Fn(&mut v1::SamplingParams)| {
        let mut wire = v1::SamplingParams::default();
        change(&mut wire);
        sampling_from_wire(&wire).unwrap_err().to_string()
    };
    assert!(sampling(&|s| s.temperature = Some(-1.0)).starts_with("temperature: -1"));
    assert!(sampling(&|s| s.temperature = Some(f32::NAN)).starts_with("temperature: NaN"));
    assert!(sampling(&|s| s.top_p = Some(2.0)).starts_with("top_p: 2"));
    assert!(sampling(&|s| s.repetition_penalty = Some(0.0)).starts_with("repetition_penalty"));
    assert!(
        sampling(&|s| s.logit_bias = vec![v1::TokenBias { token_id: 3, bias: f32::NAN }]).contains("token 3")
    );
    assert!(sampling(&|s| s.allowed_token_ids = vec![0; 8_193]).starts_with("allowed_token_ids: 8193 ids"));
    assert!(sampling(&|s| s.allowed_token_ids = vec![4, 3]).starts_with("allowed_token_ids: the ids do not"));
    let words = |count, len| vec![v1::TokenSequence { token_ids: vec![1; len] }; count];
    assert!(sampling(&|s| s.bad_words = words(1_025, 1)).starts_with("bad_words: 1025 sequences"));
    assert!(sampling(&|s| s.bad_words = words(2, 16_385)).contains("of 32770 ids"));
    assert!(sampling(&|s| s.bad_words = words(1, 0)).starts_with("bad_words: a sequence is empty"));
    assert!(reply_from_wire(v1::Reply::default()).unwrap_err().to_string().starts_with("body"));
}
