//! [`CheckedRequest`]: a request with every value checked, and the specs of its sequences.

use std::sync::Arc;

use speculation::{AcceptanceMode, SamplingParams, SequenceSpec, TokenId};

use super::raw::FieldNames;
use super::structure::RawGrammar;
use crate::catalog::ModelEntry;
use crate::detokenize::StopConditions;
use crate::error::{Excess, RouterError};
use crate::generation::SpeculationRequest;
use crate::output::OutputFormat;
use crate::tokenize::{Prompt, PromptLimits};

/// A request for an existing model, with every value within its bounds.
#[derive(Debug, Clone)]
pub struct CheckedRequest {
    /// The model.
    pub entry: Arc<ModelEntry>,
    /// At least one.
    pub prompts: Vec<Prompt>,
    /// Choices per prompt.
    pub num_choices: u32,
    /// Absent: the rest of the window.
    pub max_tokens: Option<u32>,
    /// The client sent no `max_tokens`.
    pub has_default_max_tokens: bool,
    /// Sampling parameters.
    pub sampling: SamplingParams,
    /// As requested, or drawn by the router.
    pub seed: u64,
    /// Stop conditions of a choice.
    pub stop: StopConditions,
    /// The stop tokens that only the client asked for; the others are the model's own.
    pub client_stop_token_ids: Vec<TokenId>,
    /// Words that the output must not contain, not tokenized yet.
    pub bad_words: Vec<String>,
    /// Number of top log probabilities to report per position.
    pub logprobs: Option<u32>,
    /// The same for the prompt.
    pub prompt_logprobs: Option<u32>,
    /// Repeat the prompt before the output.
    pub echo: bool,
    /// Grammar that the output must match; not compiled yet.
    pub grammar: Option<RawGrammar>,
    /// Format of the model's output: where reasoning and tool calls begin and end.
    pub output: OutputFormat,
    /// The request's own, else the caller's, else the model's default.
    pub task_type: Option<String>,
    /// Settings for speculation.
    pub speculation: SpeculationRequest,
    /// Text that the output is expected to repeat in part; never empty.
    pub prediction: Option<String>,
    /// Lower is more urgent.
    pub priority: u8,
    /// Keep only this many tokens at the end of a prompt.
    pub truncate_prompt_tokens: Option<u32>,
    /// Leave out the oldest messages of a conversation that does not fit the window.
    pub drop_oldest_messages: bool,
    /// See [`SequenceSpec::isolation_key`].
    pub isolation_key: u64,
    /// Both the caller and the request allow logging of the request.
    pub may_be_logged: bool,
    /// The protocol's names of fields, for messages about the window.
    pub names: FieldNames,
}

impl CheckedRequest {
    /// Number of sequences of the request.
    pub fn num_sequences(&self) -> u32 {
        self.prompts.len() as u32 * self.num_choices
    }

    /// Lengths of prompts that leave room for the output: as much as is requested, otherwise one token. A
    /// conversation that is shortened without such a request leaves a quarter of the window: otherwise this
    /// answer and all later ones would end after a few tokens.
    pub fn prompt_limits(&self) -> PromptLimits {
        let window = self.entry.max_model_len;
        let max = window.saturating_sub(self.max_tokens.unwrap_or(1).max(1));
        let shortened = if self.max_tokens.is_some() { max } else { max.min(window - window / 4) };
        PromptLimits { max, shortened }
    }

    /// Returns the spec of a prompt with this many tokens, if prompt and output fit the window. Drafts are
    /// verified by `lane_acceptance` unless the request names a mode.
    pub fn spec(
        &self,
        prompt_len: u32,
        lane_acceptance: AcceptanceMode,
    ) -> Result<SequenceSpec, RouterError> {
        let max_model_len = self.entry.max_model_len;
        let remaining = max_model_len.checked_sub(prompt_len);
        let too_long = |excess, param| RouterError::ContextLengthExceeded {
            max_model_len,
            prompt_tokens: prompt_len,
            excess,
            param,
        };
        let max_tokens = match (remaining, self.max_tokens) {
            (Some(remaining @ 1..), None) => remaining,
            (Some(remaining), Some(requested)) if requested <= remaining => requested,
            (Some(1..), Some(tokens)) => {
                let excess = if self.has_default_max_tokens {
                    Excess::DefaultOutput(tokens)
                } else {
                    Excess::Output(tokens)
                };
                return Err(too_long(excess, self.names.max_tokens));
            }
            // The prompt alone fills the window, or exceeds it.
            (None | Some(0), _) => return Err(too_long(Excess::Prompt, self.names.prompt)),
        };
        Ok(SequenceSpec {
            seed: self.seed,
            prompt_len,
            sampling: self.sampling.clone(),
            stop_token_ids: self.stop.token_ids.clone(),
            max_len: prompt_len + max_tokens,
            acceptance: self.speculation.acceptance.unwrap_or(lane_acceptance),
            logprobs: self.logprobs,
            prompt_logprobs: self.prompt_logprobs,
            grammar: self.grammar.as_ref().map(|raw| raw.grammar.to_wire()),
            priority: self.priority,
            isolation_key: self.isolation_key,
            ..SequenceSpec::default()
        })
    }
}
