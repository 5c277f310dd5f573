//! Writes the choice of a chunk as JSON. This happens for every event, and known field names need no
//! escaping, while serde would check each of them again. The values are written by serde.

use serde::Serialize;

use super::response::{ChatChunkChoice, ChunkSpeculation, CompletionChoice};
use crate::api::json::SERIALIZABLE;

/// Writes the same JSON as its [`Serialize`] implementation.
pub(super) trait ChunkChoice {
    /// Appends the JSON.
    fn append_to(&self, json: &mut Vec<u8>);
}

impl ChunkChoice for CompletionChoice<'_> {
    fn append_to(&self, json: &mut Vec<u8>) {
        append(b"{\"index\":", &self.index, json);
        append(b",\"text\":", &self.text, json);
        append(b",\"logprobs\":", &self.logprobs, json);
        append(b",\"finish_reason\":", &self.finish_reason, json);
        append(b",\"stop_reason\":", &self.stop_reason, json);
        append_if_set(b",\"token_ids\":", self.token_ids.as_ref(), json);
        append_if_set(b",\"prompt_token_ids\":", self.prompt_token_ids.as_ref(), json);
        append_if_set(b",\"prompt_logprobs\":", self.prompt_logprobs.as_ref(), json);
        append_end(self.speculation, json);
    }
}

impl ChunkChoice for ChatChunkChoice<'_> {
    fn append_to(&self, json: &mut Vec<u8>) {
        append(b"{\"index\":", &self.index, json);
        append(b",\"delta\":", &self.delta, json);
        append(b",\"logprobs\":", &self.logprobs, json);
        append(b",\"finish_reason\":", &self.finish_reason, json);
        append_if_set(b",\"stop_reason\":", self.stop_reason.as_ref(), json);
        append_if_set(b",\"token_ids\":", self.token_ids.as_ref(), json);
        append_end(self.speculation, json);
    }
}

fn append_end(speculation: Option<ChunkSpeculation>, json: &mut Vec<u8>) {
    if let Some(ChunkSpeculation { num_tokens, num_drafted }) = speculation {
        append(b",\"speculation\":{\"num_tokens\":", &num_tokens, json);
        append(b",\"num_drafted\":", &num_drafted, json);
        json.push(b'}');
    }
    json.push(b'}');
}

fn append_if_set<T: Serialize>(prefix: &[u8], value: Option<&T>, json: &mut Vec<u8>) {
    if let Some(value) = value {
        append(prefix, value, json);
    }
}

fn append<T: Serialize>(prefix: &[u8], value: &T, json: &mut Vec<u8>) {
    json.extend_from_slice(prefix);
    serde_json::to_writer(json, value).expect(SERIALIZABLE);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::openai::response::{ASSISTANT, ChatDelta};
    use crate::pipeline::text_delta::StopReason;

    fn check(choice: &(impl ChunkChoice + Serialize)) {
        let mut json = Vec::new();
        choice.append_to(&mut json);
        assert_eq!(String::from_utf8(json).unwrap(), serde_json::to_string(choice).unwrap());
    }

    #[test]
    fn a_choice_is_written_as_by_serde() {
        let counts = Some(ChunkSpeculation { num_tokens: 4, num_drafted: 3 });
        for (finish_reason, speculation) in
            [(None, None), (Some("stop"), counts), (None, counts), (Some("length"), None)]
        {
            let (token_ids, prompt_token_ids) = match finish_reason {
                Some(_) => (Some(vec![7, 8]), Some(&[0, 9][..])),
                None => (None, None),
            };
            let stop_reason = finish_reason.map(|_| StopReason::Text("a \"stop\""));
            let text = "a \"text\" \\ \u{1F600}\n".to_owned();
            for (role, content) in [(None, Some(text.clone())), (Some(ASSISTANT), None)] {
                let delta = ChatDelta { role, content, ..ChatDelta::default() };
                check(&ChatChunkChoice {
                    index: 7,
                    delta,
                    logprobs: None,
                    finish_reason,
                    stop_reason: finish_reason.map(|_| stop_reason),
                    token_ids: token_ids.clone(),
                    speculation,
                });
            }
            check(&CompletionChoice {
                index: 0,
                text,
                logprobs: None,
                finish_reason,
                stop_reason,
                token_ids,
                prompt_token_ids,
                prompt_logprobs: None,
                speculation,
            });
        }
    }
}
