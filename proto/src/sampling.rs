//! Conversion of sampling parameters, modes and finish reasons, which the client and worker protocols share.

use speculation::{AcceptanceMode, FinishReason, SamplingParams, SequenceSpec, TokenLogprobs};

use crate::{WireError, v1};

/// Maximum number of entries of a logit bias.
pub const MAX_LOGIT_BIAS: usize = 4_096;

/// Maximum number of allowed token ids, where not all are.
pub const MAX_ALLOWED_TOKEN_IDS: usize = 8_192;

/// Maximum number of bad words.
pub const MAX_BAD_WORDS: usize = 1_024;

/// Maximum number of token ids of all bad words together.
pub const MAX_BAD_WORD_IDS: usize = 32_768;

/// Maximum number of top log probabilities per position.
pub const MAX_LOGPROBS: u32 = 64;

/// Maximum number of stop token ids of one sequence, including the model's end-of-sequence ids.
pub const MAX_STOP_TOKEN_IDS: usize = 256;

/// Converts to the wire; every field is set.
pub fn sampling_to_wire(sampling: &SamplingParams) -> v1::SamplingParams {
    v1::SamplingParams {
        temperature: Some(sampling.temperature),
        top_k: Some(sampling.top_k),
        top_p: Some(sampling.top_p),
        min_p: Some(sampling.min_p),
        repetition_penalty: Some(sampling.repetition_penalty),
        frequency_penalty: Some(sampling.frequency_penalty),
        presence_penalty: Some(sampling.presence_penalty),
        logit_bias: sampling
            .logit_bias
            .iter()
            .map(|&(token_id, bias)| v1::TokenBias { token_id, bias })
            .collect(),
        min_tokens: Some(sampling.min_tokens),
        allowed_token_ids: sampling.allowed_token_ids.clone(),
        bad_words: sampling
            .bad_words
            .iter()
            .map(|word| v1::TokenSequence { token_ids: word.clone() })
            .collect(),
    }
}

/// Converts from the wire; absent fields take their default.
pub fn sampling_from_wire(wire: &v1::SamplingParams) -> Result<SamplingParams, WireError> {
    let default = SamplingParams::default();
    let float = |field, value: Option<f32>, default: f32, range: std::ops::RangeInclusive<f32>| {
        let value = value.unwrap_or(default);
        // NaN is in no range.
        if range.contains(&value) {
            return Ok(value);
        }
        Err(WireError::new(field, format!("{value} is not between {} and {}", range.start(), range.end())))
    };
    if wire.logit_bias.len() > MAX_LOGIT_BIAS {
        let problem = format!("{} entries, at most {MAX_LOGIT_BIAS}", wire.logit_bias.len());
        return Err(WireError::new("logit_bias", problem));
    }
    if let Some(entry) = wire.logit_bias.iter().find(|entry| !entry.bias.is_finite()) {
        return Err(WireError::new(
            "logit_bias",
            format!("the bias of token {} is not finite", entry.token_id),
        ));
    }
    check_exclusions(wire)?;
    Ok(SamplingParams {
        temperature: float("temperature", wire.temperature, default.temperature, 0.0..=100.0)?,
        top_k: wire.top_k.unwrap_or(default.top_k),
        top_p: float("top_p", wire.top_p, default.top_p, 0.0..=1.0)?,
        min_p: float("min_p", wire.min_p, default.min_p, 0.0..=1.0)?,
        repetition_penalty: float(
            "repetition_penalty",
            wire.repetition_penalty,
            default.repetition_penalty,
            f32::MIN_POSITIVE..=100.0,
        )?,
        frequency_penalty: float("frequency_penalty", wire.frequency_penalty, 0.0, -100.0..=100.0)?,
        presence_penalty: float("presence_penalty", wire.presence_penalty, 0.0, -100.0..=100.0)?,
        logit_bias: wire.logit_bias.iter().map(|entry| (entry.token_id, entry.bias)).collect(),
        min_tokens: wire.min_tokens.unwrap_or(default.min_tokens),
        allowed_token_ids: wire.allowed_token_ids.clone(),
        bad_words: wire.bad_words.iter().map(|word| word.token_ids.clone()).collect(),
    })
}

fn check_exclusions(wire: &v1::SamplingParams) -> Result<(), WireError> {
    let (allowed, bad_words) = (&wire.allowed_token_ids, &wire.bad_words);
    if allowed.len() > MAX_ALLOWED_TOKEN_IDS {
        let problem = format!("{} ids, at most {MAX_ALLOWED_TOKEN_IDS}", allowed.len());
        return Err(WireError::new("allowed_token_ids", problem));
    }
    if !allowed.is_sorted() {
        return Err(WireError::new("allowed_token_ids", "the ids do not ascend"));
    }
    let num_ids: usize = bad_words.iter().map(|word| word.token_ids.len()).sum();
    if bad_words.len() > MAX_BAD_WORDS || num_ids > MAX_BAD_WORD_IDS {
        let problem = format!(
            "{} sequences of {num_ids} ids, at most {MAX_BAD_WORDS} of {MAX_BAD_WORD_IDS}",
            bad_words.len()
        );
        return Err(WireError::new("bad_words", problem));
    }
    if bad_words.iter().any(|word| word.token_ids.is_empty()) {
        return Err(WireError::new("bad_words", "a sequence is empty"));
    }
    Ok(())
}

/// Converts to the wire.
pub fn acceptance_to_wire(mode: AcceptanceMode) -> v1::AcceptanceMode {
    match mode {
        AcceptanceMode::Coupled => v1::AcceptanceMode::Coupled,
        AcceptanceMode::Rejection => v1::AcceptanceMode::Rejection,
        AcceptanceMode::Typical => v1::AcceptanceMode::Typical,
    }
}

/// Converts from the wire; unspecified means coupled.
pub fn acceptance_from_wire(wire: i32) -> Result<AcceptanceMode, WireError> {
    match v1::AcceptanceMode::try_from(wire) {
        Ok(v1::AcceptanceMode::Unspecified | v1::AcceptanceMode::Coupled) => Ok(AcceptanceMode::Coupled),
        Ok(v1::AcceptanceMode::Rejection) => Ok(AcceptanceMode::Rejection),
        Ok(v1::AcceptanceMode::Typical) => Ok(AcceptanceMode::Typical),
        Err(_) => Err(WireError::new("acceptance", format!("unknown acceptance mode {wire}"))),
    }
}

/// Converts to the wire.
pub fn finish_to_wire(finish: Option<FinishReason>) -> v1::FinishReason {
    match finish {
        None => v1::FinishReason::Unspecified,
        Some(FinishReason::Stop) => v1::FinishReason::Stop,
        Some(FinishReason::Length) => v1::FinishReason::Length,
    }
}

/// Converts from the wire.
pub fn finish_from_wire(wire: i32) -> Result<Option<FinishReason>, WireError> {
    match v1::FinishReason::try_from(wire) {
        Ok(v1::FinishReason::Unspecified) => Ok(None),
        Ok(v1::FinishReason::Stop) => Ok(Some(FinishReason::Stop)),
        Ok(v1::FinishReason::Length) => Ok(Some(FinishReason::Length)),
        Err(_) => Err(WireError::new("finish", format!("unknown finish reason {wire}"))),
    }
}

/// Converts to the wire.
pub fn logprobs_to_wire(logprobs: &TokenLogprobs) -> v1::TokenLogprobs {
    let top = logprobs.top.iter().map(|&(token_id, value)| v1::TokenProb { token_id, value }).collect();
    v1::TokenLogprobs { logprob: logprobs.logprob, top }
}

/// Converts from the wire.
pub fn logprobs_from_wire(wire: v1::TokenLogprobs) -> TokenLogprobs {
    let top = wire.top.into_iter().map(|entry| (entry.token_id, entry.value)).collect();
    TokenLogprobs { logprob: wire.logprob, top }
}

/// Converts to the wire.
pub fn spec_to_wire(spec: &SequenceSpec) -> v1::SequenceSpec {
    v1::SequenceSpec {
        seed: spec.seed,
        choice: spec.choice,
        prompt_len: spec.prompt_len,
        sampling: Some(sampling_to_wire(&spec.sampling)),
        stop_token_ids: spec.stop_token_ids.clone(),
        max_len: spec.max_len,
        acceptance: acceptance_to_wire(spec.acceptance).into(),
        logprobs: spec.logprobs,
        prompt_logprobs: spec.prompt_logprobs,
        grammar: spec.grammar.clone(),
        lane: spec.lane,
        priority: spec.priority.into(),
        isolation_key: spec.isolation_key,
        traceparent: spec.traceparent.clone(),
    }
}

/// Converts from the wire.
pub fn spec_from_wire(wire: v1::SequenceSpec) -> Result<SequenceSpec, WireError> {
    if wire.stop_token_ids.len() > MAX_STOP_TOKEN_IDS {
        let problem = format!("{} ids, at most {MAX_STOP_TOKEN_IDS}", wire.stop_token_ids.len());
        return Err(WireError::new("stop_token_ids", problem));
    }
    for (field, value) in [("logprobs", wire.logprobs), ("prompt_logprobs", wire.prompt_logprobs)] {
        if value.is_some_and(|value| value > MAX_LOGPROBS) {
            return Err(WireError::new(field, format!("at most {MAX_LOGPROBS}")));
        }
    }
    let priority = u8::try_from(wire.priority)
        .map_err(|_| WireError::new("priority", format!("{} exceeds the maximum of 255", wire.priority)))?;
    Ok(SequenceSpec {
        seed: wire.seed,
        choice: wire.choice,
        prompt_len: wire.prompt_len,
        sampling: sampling_from_wire(&wire.sampling.unwrap_or_default())?,
        stop_token_ids: wire.stop_token_ids,
        max_len: wire.max_len,
        acceptance: acceptance_from_wire(wire.acceptance)?,
        logprobs: wire.logprobs,
        prompt_logprobs: wire.prompt_logprobs,
        grammar: wire.grammar,
        lane: wire.lane,
        priority,
        isolation_key: wire.isolation_key,
        traceparent: wire.traceparent,
    })
}
