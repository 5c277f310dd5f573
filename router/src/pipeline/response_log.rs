//! [`ResponseLog`]: collects the token ids of one response and passes each complete choice to the request
//! log.

use std::sync::Arc;

use speculation::{FinishReason, TokenId};
use text::ModelText;

use super::text_stream::StartedPrompt;
use crate::catalog::ModelEntry;
use crate::detokenize::OutputToken;
use crate::request_log::{LoggedChoice, RequestLog};

/// A response in progress.
#[derive(Debug)]
pub struct ResponseLog {
    log: RequestLog,
    request_id: String,
    model: String,
    text: Arc<ModelText>,
    /// Token ids and task type of each prompt.
    prompts: Vec<(Arc<[TokenId]>, String)>,
    choices_per_prompt: usize,
    /// Output ids, by choice.
    completions: Vec<Vec<TokenId>>,
}

impl ResponseLog {
    /// Starts a response to these prompts.
    pub fn new(
        log: RequestLog,
        request_id: &str,
        entry: &ModelEntry,
        prompts: &[StartedPrompt],
        choices_per_prompt: u32,
    ) -> Self {
        let choices_per_prompt = choices_per_prompt as usize;
        Self {
            log,
            request_id: request_id.to_owned(),
            model: entry.model.clone(),
            text: Arc::clone(&entry.text),
            prompts: prompts
                .iter()
                .map(|prompt| (prompt.ids.as_slice().into(), prompt.task_type.clone()))
                .collect(),
            choices_per_prompt,
            completions: vec![Vec::new(); prompts.len() * choices_per_prompt],
        }
    }

    /// Appends tokens to a choice.
    pub fn tokens(&mut self, choice: usize, tokens: &[OutputToken]) {
        self.completions[choice].extend(tokens.iter().map(|token| token.id));
    }

    /// Logs a complete choice. A choice without tokens is not logged.
    pub fn finished(&mut self, choice: usize, finish: FinishReason) {
        let completion_ids = std::mem::take(&mut self.completions[choice]);
        if completion_ids.is_empty() {
            return;
        }
        let (prompt_ids, task_type) = &self.prompts[choice / self.choices_per_prompt];
        self.log.offer(LoggedChoice {
            request_id: self.request_id.clone(),
            model: self.model.clone(),
            text: Arc::clone(&self.text),
            task_type: task_type.clone(),
            prompt_ids: Arc::clone(prompt_ids),
            completion_ids,
            finish,
        });
    }
}
