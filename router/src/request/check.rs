//! Converts a [`RawRequest`] to a [`CheckedRequest`], checking the bounds of every field, those of prompts in
//! `prompts`. HTTP and gRPC both use [`RawRequest::check`]; values are checked nowhere else.

use std::collections::HashSet;

use proto::sampling::MAX_STOP_TOKEN_IDS;
use speculation::step::MAX_DRAFT_TOKENS;
use speculation::tree::MAX_TREE_TOKENS;
use speculation::{SamplingParams, TokenId};

use super::auth::Caller;
use super::bounds::{at_most, integer, number, token_id};
use super::checked::CheckedRequest;
use super::json_values::ValueCount;
use super::limits;
use super::raw::{NO_LIMIT, RawRequest, RawSampling, RawSpeculation};
use super::tools::output_format;
use crate::catalog::settings::RequestDefaults;
use crate::catalog::{Catalog, ModelEntry};
use crate::detokenize::StopConditions;
use crate::error::RouterError;
use crate::generation::SpeculationRequest;
use crate::lane_config::parse_acceptance_mode;
use crate::output::OutputFormat;
use crate::tokenize::Prompt;

impl RawRequest {
    /// Checks every field and applies the defaults of the model and the caller.
    pub fn check(mut self, catalog: &Catalog, caller: &Caller) -> Result<CheckedRequest, RouterError> {
        let model = self.model.as_deref().filter(|model| !model.is_empty());
        let model = model.ok_or_else(|| RouterError::invalid("model", "model is required"))?;
        let entry = caller.model(catalog, model)?;
        self.check_num_values()?;
        self.sampling.apply_defaults(&entry.defaults);
        let has_default_max_tokens = self.max_tokens.is_none();
        self.max_tokens = self.max_tokens.or(entry.defaults.max_tokens);
        let num_choices = integer("n", self.n, 1..=limits::CHOICES_MAX)?.unwrap_or(1) as u32;
        let prompts = self.checked_prompts(&entry, num_choices)?;
        let is_chat = prompts.iter().any(|prompt| matches!(prompt, Prompt::Chat { .. }));
        let max_tokens = self.checked_max_tokens(is_chat)?;
        let min_tokens_max = max_tokens.unwrap_or(entry.max_model_len);
        let min_tokens =
            integer("min_tokens", self.min_tokens, 0..=min_tokens_max.into())?.unwrap_or(0) as u32;
        let logprobs = integer(self.names.logprobs, self.logprobs, 0..=limits::TOP_LOGPROBS_MAX)?;
        let logprobs = logprobs.map(|count| count as u32);
        let speculation = self.speculation.check()?;
        let requested_priority = integer("priority", self.priority, 0..=u8::MAX.into())?.unwrap_or(0) as u8;
        self.check_prediction(num_choices)?;
        let output = self.check_output_format(&entry, is_chat)?;
        if let Some(task_type) = &self.task_type {
            check_task_type(task_type)?;
        }
        let truncate_prompt_tokens = self.checked_truncation(&entry)?;
        Ok(CheckedRequest {
            sampling: SamplingParams { min_tokens, ..self.sampling.check(&entry)? },
            stop: self.checked_stops(&entry, min_tokens, &output)?,
            client_stop_token_ids: self.client_stop_token_ids(&entry),
            output,
            seed: self.seed.filter(|seed| *seed != RANDOM_SEED).map_or_else(draw_seed, |seed| seed as u64),
            bad_words: self.sampling.checked_bad_words()?,
            prompt_logprobs: self.checked_prompt_logprobs(logprobs)?,
            logprobs,
            echo: self.echo,
            grammar: self.grammar,
            prediction: self.prediction.filter(|text| !text.is_empty()),
            task_type: self
                .task_type
                .or_else(|| caller.task_type.clone())
                .or_else(|| entry.defaults.task_type.clone()),
            priority: requested_priority.max(caller.priority),
            isolation_key: salted_isolation_key(caller, self.cache_salt.as_deref())?,
            truncate_prompt_tokens,
            drop_oldest_messages: self.drop_oldest_messages,
            may_be_logged: caller.may_be_logged && !self.exclude_from_log,
            names: self.names,
            entry,
            prompts,
            num_choices,
            max_tokens,
            has_default_max_tokens,
            speculation,
        })
    }

    /// Limits the JSON values of all fields together that may hold any JSON.
    fn check_num_values(&self) -> Result<(), RouterError> {
        let mut count = ValueCount::default();
        self.prompts.iter().try_for_each(|prompt| prompt.count_values(self.names.prompt, &mut count))?;
        self.tools.count_values(&mut count)
    }

    /// Checks the prompts, taking them out of the request.
    fn checked_prompts(&mut self, entry: &ModelEntry, num_choices: u32) -> Result<Vec<Prompt>, RouterError> {
        let (field, len) = (self.names.prompt, self.prompts.len());
        if len == 0 {
            return Err(RouterError::invalid(field, format!("{field} is required and must not be empty")));
        }
        at_most(field, len, "prompts", limits::PROMPTS_MAX)?;
        let num_sequences = len * num_choices as usize;
        if num_sequences > limits::SEQUENCES_MAX {
            let max = limits::SEQUENCES_MAX;
            let message =
                format!("prompts times n make {num_sequences} sequences, at most {max} are allowed");
            return Err(RouterError::invalid("n", message));
        }
        let path = |idx: usize| if len == 1 { field.to_owned() } else { format!("{field}[{idx}]") };
        let prompts = std::mem::take(&mut self.prompts).into_iter().enumerate();
        prompts.map(|(idx, prompt)| prompt.into_checked(&path(idx), entry)).collect()
    }

    fn checked_max_tokens(&self, is_chat: bool) -> Result<Option<u32>, RouterError> {
        if is_chat && self.echo {
            return Err(RouterError::invalid("echo", "echo is not supported for conversations"));
        }
        let field = self.names.max_tokens;
        if self.max_tokens == Some(NO_LIMIT) {
            return Ok(None);
        }
        if self.max_tokens == Some(0) && !self.echo {
            let or_zero = self.names.echo.map(|echo| format!(", or 0 together with {echo}"));
            let expected = format!("at least 1{}", or_zero.unwrap_or_default());
            return Err(RouterError::must_be(field, expected));
        }
        let may_be_zero = self.echo || self.names.echo.is_some();
        let max_tokens = integer(field, self.max_tokens, i64::from(!may_be_zero)..=i64::from(u32::MAX))?;
        let default = (!is_chat && !self.fill_context_window).then_some(limits::COMPLETION_TOKENS_DEFAULT);
        Ok(max_tokens.map(|tokens| tokens as u32).or(default))
    }

    /// Returns the number of top log probabilities per position of the prompt. A repeated prompt has as many as
    /// the output.
    fn checked_prompt_logprobs(&self, logprobs: Option<u32>) -> Result<Option<u32>, RouterError> {
        let field = "prompt_logprobs";
        let requested = integer(field, self.prompt_logprobs, 0..=limits::TOP_LOGPROBS_MAX)?;
        let requested = requested.map(|count| count as u32);
        match (requested, logprobs.filter(|_| self.echo)) {
            (Some(requested), Some(echoed)) if requested != echoed => {
                let message =
                    format!("{field} is {requested} but logprobs is {echoed}: with echo they must be equal");
                Err(RouterError::invalid(field, message))
            }
            (requested, echoed) => Ok(requested.or(echoed)),
        }
    }

    fn checked_truncation(&self, entry: &ModelEntry) -> Result<Option<u32>, RouterError> {
        let field = "truncate_prompt_tokens";
        let max = entry.max_model_len.saturating_sub(1);
        Ok(match integer(field, self.truncate_prompt_tokens, -1..=max.into())? {
            Some(0) => {
                return Err(RouterError::invalid(
                    field,
                    format!("{field} must not be 0: it would remove the whole prompt"),
                ));
            }
            Some(-1) => Some(max),
            kept => kept.map(|tokens| tokens as u32),
        })
    }

    /// A predicted text applies to a single choice. As in OpenAI's API, it cannot be combined with tools or
    /// log probabilities.
    fn check_prediction(&self, num_choices: u32) -> Result<(), RouterError> {
        let others = [
            ("n above 1", num_choices > 1),
            ("tools", !self.tools.tools.is_empty()),
            ("logprobs", self.logprobs.is_some()),
        ];
        match others.into_iter().find(|(_, is_sent)| *is_sent) {
            Some((other, _)) if self.prediction.is_some() => {
                let message =
                    format!("prediction is not supported together with {other}: leave one of them out");
                Err(RouterError::invalid("prediction", message))
            }
            _ => Ok(()),
        }
    }

    /// Returns the format of the output, given the grammar and the tools.
    fn check_output_format(
        &mut self,
        entry: &ModelEntry,
        is_chat: bool,
    ) -> Result<OutputFormat, RouterError> {
        self.tools.check()?;
        self.grammar = self.tools.grammar(self.grammar.take(), &entry.text)?;
        if let Some(grammar) = &self.grammar {
            grammar.check_compatible(self)?;
        }
        if !is_chat {
            return Ok(OutputFormat::default());
        }
        output_format(&self.tools, self.grammar.is_some(), &entry.text)
    }

    fn checked_stops(
        &self,
        entry: &ModelEntry,
        min_tokens: u32,
        output: &OutputFormat,
    ) -> Result<StopConditions, RouterError> {
        self.check_stop_strings()?;
        let token_ids = self.checked_stop_token_ids(entry)?;
        let visible = output.special_tokens().into_iter().filter_map(|token| entry.text.token_id(token));
        let visible_token_ids = visible.collect();
        Ok(StopConditions {
            strings: self.stop.clone(),
            token_ids,
            included: self.include_stop,
            keep_special_tokens: self.keep_special_tokens,
            visible_token_ids,
            min_tokens,
        })
    }

    fn check_stop_strings(&self) -> Result<(), RouterError> {
        let field = self.names.stop;
        at_most(field, self.stop.len(), "strings", limits::STOPS_MAX)?;
        for (idx, stop) in self.stop.iter().enumerate() {
            if stop.is_empty() || stop.len() > limits::STOP_BYTES_MAX {
                let message = format!(
                    "{field}[{idx}] has {} bytes, a stop string must have 1 to {}",
                    stop.len(),
                    limits::STOP_BYTES_MAX
                );
                return Err(RouterError::invalid(field, message));
            }
        }
        let len = self.stop.iter().map(String::len).sum();
        at_most(field, len, "bytes in all strings", limits::STOPS_BYTES_MAX)
    }

    /// Returns the stop tokens, including the model's own.
    fn checked_stop_token_ids(&self, entry: &ModelEntry) -> Result<Vec<TokenId>, RouterError> {
        let field = "stop_token_ids";
        at_most(field, self.stop_token_ids.len(), "ids", limits::STOP_TOKEN_IDS_MAX)?;
        let mut token_ids = if self.ignore_eos { Vec::new() } else { entry.eos_token_ids.clone() };
        for (idx, &id) in self.stop_token_ids.iter().enumerate() {
            let id = token_id(field, &format!("{field}[{idx}]"), id, entry)?;
            if !token_ids.contains(&id) {
                token_ids.push(id);
            }
        }
        at_most(field, token_ids.len(), "ids including the model's own", MAX_STOP_TOKEN_IDS)?;
        Ok(token_ids)
    }

    /// Returns the stop tokens that only the client asked for.
    fn client_stop_token_ids(&self, entry: &ModelEntry) -> Vec<TokenId> {
        let is_clients = |id: &TokenId| self.ignore_eos || !entry.eos_token_ids.contains(id);
        self.stop_token_ids.iter().filter_map(|&id| TokenId::try_from(id).ok()).filter(is_clients).collect()
    }
}

/// Returns the isolation key of a caller's requests with this salt.
fn salted_isolation_key(caller: &Caller, salt: Option<&str>) -> Result<u64, RouterError> {
    let Some(salt) = salt else { return Ok(caller.isolation_key) };
    let max = limits::CACHE_SALT_BYTES_MAX;
    if salt.is_empty() || salt.len() > max {
        let message = format!("cache_salt has {} bytes, it must have 1 to {max}", salt.len());
        return Err(RouterError::invalid("cache_salt", message));
    }
    Ok(caller.derived_key(salt))
}

/// Checks token ids sent by a client.
pub fn checked_token_ids(field: &str, ids: &[i64], entry: &ModelEntry) -> Result<Vec<TokenId>, RouterError> {
    let check = |(idx, &id)| token_id(field, &format!("{field}[{idx}]"), id, entry);
    ids.iter().enumerate().map(check).collect()
}

/// Checks that a model's defaults are valid values of a request.
pub fn check_defaults(defaults: &RequestDefaults) -> Result<(), RouterError> {
    let mut sampling = RawSampling::default();
    sampling.apply_defaults(defaults);
    sampling.check_numbers()?;
    integer("max_tokens", defaults.max_tokens, 1..=i64::from(u32::MAX))?;
    defaults.task_type.as_deref().map_or(Ok(()), check_task_type)
}

impl RawSampling {
    /// Fills absent values from the model's defaults.
    fn apply_defaults(&mut self, defaults: &RequestDefaults) {
        self.temperature = self.temperature.or(defaults.temperature);
        self.top_p = self.top_p.or(defaults.top_p);
        self.top_k = self.top_k.or(defaults.top_k);
        self.min_p = self.min_p.or(defaults.min_p);
        self.repetition_penalty = self.repetition_penalty.or(defaults.repetition_penalty);
    }

    fn check(&self, entry: &ModelEntry) -> Result<SamplingParams, RouterError> {
        Ok(SamplingParams {
            logit_bias: self.checked_bias(entry)?,
            allowed_token_ids: self.checked_allowed_token_ids(entry)?,
            bad_words: self.checked_bad_word_ids(entry)?,
            ..self.check_numbers()?
        })
    }

    /// Checks everything but token ids, which depend on the model's vocabulary.
    fn check_numbers(&self) -> Result<SamplingParams, RouterError> {
        // For "no limit" some clients send -1, others 0.
        let top_k = integer("top_k", self.top_k, -1..=i64::from(u32::MAX))?.unwrap_or(0).max(0) as u32;
        Ok(SamplingParams {
            temperature: number("temperature", self.temperature, 0.0..=2.0)?.unwrap_or(1.0),
            top_k,
            top_p: number("top_p", self.top_p, 0.0..=1.0)?.unwrap_or(1.0),
            min_p: number("min_p", self.min_p, 0.0..=1.0)?.unwrap_or(0.0),
            repetition_penalty: number("repetition_penalty", self.repetition_penalty, 0.01..=10.0)?
                .unwrap_or(1.0),
            frequency_penalty: number("frequency_penalty", self.frequency_penalty, -2.0..=2.0)?
                .unwrap_or(0.0),
            presence_penalty: number("presence_penalty", self.presence_penalty, -2.0..=2.0)?.unwrap_or(0.0),
            ..SamplingParams::default()
        })
    }

    fn checked_bias(&self, entry: &ModelEntry) -> Result<Vec<(TokenId, f32)>, RouterError> {
        let len = self.logit_bias.len();
        at_most("logit_bias", len, "entries", limits::LOGIT_BIAS_MAX)?;
        let mut seen = HashSet::with_capacity(len);
        let check = |&(id, bias): &(i64, f64)| {
            let path = format!("logit_bias[{id}]");
            let id = token_id("logit_bias", &path, id, entry)?;
            if !seen.insert(id) {
                return Err(RouterError::invalid("logit_bias", format!("{path} appears twice")));
            }
            let bias = number(&path, Some(bias), -100.0..=100.0)?.unwrap_or(0.0);
            Ok((id, bias))
        };
        self.logit_bias.iter().map(check).collect()
    }
}

impl RawSpeculation {
    fn check(&self) -> Result<SpeculationRequest, RouterError> {
        let field = "speculation.num_draft_tokens";
        let num_draft_tokens = integer(field, self.num_draft_tokens, 0..=MAX_DRAFT_TOKENS as i64)?;
        let field = "speculation.num_tree_tokens";
        let num_tree_tokens = integer(field, self.num_tree_tokens, 0..=MAX_TREE_TOKENS as i64)?;
        let acceptance = match self.acceptance.as_deref() {
            None => None,
            Some(name) => Some(parse_acceptance_mode(name).ok_or_else(|| {
                let known = ["coupled", "rejection", "typical"];
                RouterError::not_one_of("speculation.acceptance", &known, name)
            })?),
        };
        Ok(SpeculationRequest {
            enabled: self.enabled,
            num_draft_tokens: num_draft_tokens.map(|tokens| tokens as u32),
            num_tree_tokens: num_tree_tokens.map(|tokens| tokens as u32),
            acceptance,
        })
    }
}

/// The seed that asks for a random one, as vLLM and llama.cpp read it.
const RANDOM_SEED: i64 = -1;

/// Draws a seed that any client can send back: integers up to 2^53 survive JSON in every language.
fn draw_seed() -> u64 {
    rand::random::<u64>() >> 11
}

/// Checks a task type named by a client.
pub(crate) fn check_task_type(task_type: &str) -> Result<(), RouterError> {
    let max = limits::NAME_LEN_MAX;
    let is_lowercase = !task_type.contains(|c: char| c.is_ascii_uppercase());
    if is_name(task_type, max) && is_lowercase {
        return Ok(());
    }
    let message = format!("task_type must have 1 to {max} of the characters a-z 0-9 _ . -");
    Err(RouterError::invalid("task_type", message))
}

/// Whether a text may be the name of a task type, a participant or a tool.
pub(super) fn is_name(text: &str, len_max: usize) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    (1..=len_max).contains(&text.len()) && text.chars().all(allowed)
}
