//! Fields that are refused by name: unsupported ones that would change the answer, and those of the other
//! endpoint.

use serde_json::Value;

use super::Body;
use crate::api::disabled::{is_disabled, refuse_fields};
use crate::error::RouterError;
use crate::request::Operation;

impl Body {
    /// Refuses unsupported fields that would change the answer.
    pub(super) fn refuse_unsupported(&self) -> Result<(), RouterError> {
        let fields = [
            ("suffix", &self.suffix),
            ("modalities", &self.modalities),
            ("audio", &self.audio),
            ("verbosity", &self.verbosity),
            ("web_search_options", &self.web_search_options),
            ("moderation", &self.moderation),
            ("include_reasoning", &self.include_reasoning),
            ("chat_template", &self.chat_template),
            ("documents", &self.documents),
            ("use_beam_search", &self.use_beam_search),
            ("length_penalty", &self.length_penalty),
            ("logits_processors", &self.logits_processors),
            ("return_tokens_as_token_ids", &self.return_tokens_as_token_ids),
            ("mm_processor_kwargs", &self.mm_processor_kwargs),
            ("kv_transfer_params", &self.kv_transfer_params),
        ];
        refuse_fields("", &fields, |field, value| match field {
            "include_reasoning" => is_enabled(value),
            "length_penalty" => value.is_null() || value.as_f64() == Some(1.0),
            _ => is_disabled(field, value),
        })?;
        let n = self.n.unwrap_or(1);
        match self.best_of {
            Some(best_of) if best_of != n => {
                let message = format!(
                    "best_of must equal n ({n}), not {best_of}: choosing the best of more candidates is not supported"
                );
                Err(RouterError::invalid("best_of", message))
            }
            _ => Ok(()),
        }
    }

    /// Refuses fields of the other endpoint.
    pub(super) fn refuse_other_endpoint(&self, operation: Operation) -> Result<(), RouterError> {
        let (fields, endpoint) = match operation {
            Operation::Chat => (
                vec![
                    ("prompt", self.prompt.is_some()),
                    ("echo", self.echo == Some(true)),
                    // The chat template adds its own.
                    ("add_special_tokens", self.add_special_tokens == Some(true)),
                ],
                "/v1/completions",
            ),
            Operation::Completion => {
                let fields = vec![
                    ("messages", self.messages.is_some()),
                    ("top_logprobs", self.top_logprobs.is_some()),
                    ("chat_template_kwargs", self.chat_template_kwargs.is_some()),
                    ("add_generation_prompt", self.add_generation_prompt == Some(false)),
                    ("continue_final_message", self.continue_final_message == Some(true)),
                    (
                        "reasoning_effort",
                        self.reasoning_effort.as_ref().is_some_and(|effort| !effort.is_empty()),
                    ),
                    ("tools", self.tools.as_ref().is_some_and(|tools| !tools.is_empty())),
                    ("functions", self.functions.as_ref().is_some_and(|functions| !functions.is_empty())),
                    (
                        "function_call",
                        self.function_call
                            .as_ref()
                            .is_some_and(|choice| !is_disabled("function_call", choice)),
                    ),
                    ("prediction", self.prediction.is_some()),
                ];
                (fields, "/v1/chat/completions")
            }
        };
        match fields.into_iter().find(|(_, present)| *present) {
            Some((field, _)) => Err(RouterError::invalid(
                field,
                format!("{field} is a field of {endpoint}, not of this endpoint"),
            )),
            None => Ok(()),
        }
    }
}

/// Whether a field that is on by default stays on.
fn is_enabled(value: &Value) -> bool {
    matches!(value, Value::Null | Value::Bool(true))
}
