//! Contract B1 to B4 in their simplest form: everything is counted, sorted and scored from scratch. The
//! reference for the other tests.

use speculation::math::{exp, ln};
use speculation::noise::{Noise, Purpose};
use speculation::{SamplingParams, SequenceSpec, TokenId};

/// B1 from the ids themselves.
pub(crate) fn process(logits: &mut [f32], spec: &SequenceSpec, ids: &[TokenId]) {
    let sampling = &spec.sampling;
    let (prompt, output) = ids.split_at(spec.prompt_len as usize);
    for (id, logit) in (0..).zip(logits.iter_mut()) {
        let continued = [output, &[id]].concat();
        let is_listed = sampling.allowed_token_ids.is_empty() || sampling.allowed_token_ids.contains(&id);
        if !is_listed || sampling.bad_words.iter().any(|word| continued.ends_with(word)) {
            *logit = f32::NEG_INFINITY;
        }
        if output.len() < sampling.min_tokens as usize && spec.stop_token_ids.contains(&id) {
            *logit = f32::NEG_INFINITY;
        }
        for (_, bias) in sampling.logit_bias.iter().filter(|(biased, _)| *biased == id) {
            *logit += bias;
        }
        let in_output = output.iter().filter(|&&other| other == id).count();
        if in_output > 0 || prompt.contains(&id) {
            let repetition = sampling.repetition_penalty;
            *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
        }
        if in_output > 0 {
            *logit -= sampling.frequency_penalty * in_output as f32;
            *logit -= sampling.presence_penalty;
        }
    }
}

/// B2 with one full sort.
pub(crate) fn apply_filters(logits: &[f32], sampling: &SamplingParams) -> Vec<(TokenId, f64)> {
    let temperature = if sampling.is_greedy() { 1.0 } else { f64::from(sampling.temperature) };
    let x_of = |&logit: &f32| f64::from(logit) / temperature;
    let mut tokens: Vec<(TokenId, f64)> = (0..).zip(logits.iter().map(x_of)).collect();
    tokens.retain(|&(_, x)| x > f64::NEG_INFINITY);
    tokens.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
    let max = tokens[0].1;
    if sampling.is_greedy() {
        tokens.truncate(1);
        return tokens;
    }
    if sampling.min_p > 0.0 {
        tokens.retain(|&(_, x)| x >= max + ln(f64::from(sampling.min_p)));
    }
    if sampling.top_k > 0 {
        tokens.truncate(sampling.top_k as usize);
    }
    if sampling.top_p < 1.0 {
        let total: f64 = tokens.iter().map(|&(_, x)| exp(x - max)).sum();
        let mut running = 0.0;
        let mut kept = 0;
        while kept == 0 || running < f64::from(sampling.top_p) * total {
            running += exp(tokens[kept].1 - max);
            kept += 1;
        }
        tokens.truncate(kept);
    }
    tokens.sort_by_key(|&(id, _)| id);
    tokens
}

/// B4 for the position after `ids`, from a raw row.
pub(crate) fn draw(row: &[f32], spec: &SequenceSpec, ids: &[TokenId]) -> TokenId {
    let mut logits = row.to_vec();
    process(&mut logits, spec, ids);
    let noise = Noise { seed: spec.seed, choice: spec.choice };
    let mut best = (0, f64::NEG_INFINITY);
    for (id, x) in apply_filters(&logits, &spec.sampling) {
        let score = x + noise.gumbel(ids.len() as u32, id, Purpose::Draw);
        if score > best.1 {
            best = (id, score);
        }
    }
    best.0
}
