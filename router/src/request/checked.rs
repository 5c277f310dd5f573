//! [`CheckedRequest`]: one request whose every value is within its bounds, and the sequences that it asks for.

use std::sync::Arc;

use speculation::{AcceptanceMode, SamplingParams, SequenceSpec};

use super::sent::FieldNames;
use super::structure::SentGrammar;
use crate::catalog::ModelEntry;
use crate::detokenize::StopRules;
use crate::error::RouterError;
use crate::generation::SpeculationRequest;
use crate::output::OutputFormat;
use crate::tokenize::Prompt;

/// A request whose every value is within its bounds, for a model that exists.
#[derive(Debug, Clone)]
pub struct CheckedRequest {
    /// The model.
    pub entry: Arc<ModelEntry>,
    /// At least one.
    pub prompts: Vec<Prompt>,
    /// Of each prompt.
    pub num_choices: u32,
    /// Absent: whatever the window leaves.
    pub max_tokens: Option<u32>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// As asked for, or drawn.
    pub seed: u64,
    /// What ends a choice.
    pub stop: StopRules,
    /// How many likeliest tokens to report at each position.
    pub logprobs: Option<u32>,
    /// Repeat the prompt before the output.
    pub echo: bool,
    /// What the output must match; whether it compiles is not known yet.
    pub grammar: Option<SentGrammar>,
    /// The format of the model's answer to a conversation: where it has reasoning and tool calls.
    pub output: OutputFormat,
    /// The request's own, else its caller's.
    pub task_type: Option<String>,
    /// What is asked of speculation.
    pub speculation: SpeculationRequest,
    /// What the output is expected to repeat in part; not empty.
    pub prediction: Option<String>,
    /// Lower is more urgent.
    pub priority: u8,
    /// Only this many tokens at the end of a prompt are kept.
    pub truncate_prompt_tokens: Option<u32>,
    /// See [`SequenceSpec::isolation_key`].
    pub isolation_key: u64,
    /// The caller agrees that the request is written to a log of requests, and so does the request.
    pub may_be_logged: bool,
    /// For messages about the window.
    pub names: FieldNames,
}

impl CheckedRequest {
    /// How many sequences the request makes.
    pub fn num_sequences(&self) -> u32 {
        self.prompts.len() as u32 * self.num_choices
    }

    /// Whether the prompt's own log probabilities are wanted.
    pub fn wants_prompt_logprobs(&self) -> bool {
        self.echo && self.logprobs.is_some()
    }

    /// The spec of a prompt of this many tokens, if prompt and output fit the window. Drafts are judged as `lane_acceptance` says where the
    /// request does not.
    pub fn spec(
        &self,
        prompt_len: u32,
        lane_acceptance: AcceptanceMode,
    ) -> Result<SequenceSpec, RouterError> {
        let max_model_len = self.entry.max_model_len;
        let room = max_model_len.checked_sub(prompt_len);
        let too_long = |param| RouterError::ContextLengthExceeded {
            max_model_len,
            prompt_tokens: prompt_len,
            max_tokens: self.max_tokens.unwrap_or(1),
            param,
        };
        let max_tokens = match (room, self.max_tokens) {
            (None, _) | (Some(0), None) => return Err(too_long(self.names.prompt)),
            (Some(room), None) => room,
            (Some(room), Some(wanted)) if wanted <= room => wanted,
            // A prompt that leaves room for nothing is to blame itself.
            (Some(0), Some(_)) => return Err(too_long(self.names.prompt)),
            (Some(_), Some(_)) => return Err(too_long(self.names.max_tokens)),
        };
        Ok(SequenceSpec {
            seed: self.seed,
            prompt_len,
            sampling: self.sampling.clone(),
            stop_token_ids: self.stop.token_ids.clone(),
            max_len: prompt_len + max_tokens,
            acceptance: self.speculation.acceptance.unwrap_or(lane_acceptance),
            logprobs: self.logprobs,
            prompt_logprobs: if self.echo { self.logprobs } else { None },
            grammar: self.grammar.as_ref().map(|sent| sent.grammar.to_wire()),
            priority: self.priority,
            isolation_key: self.isolation_key,
            ..SequenceSpec::default()
        })
    }
}
