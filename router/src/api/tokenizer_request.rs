//! Requests that use the tokenizer and no target: count, tokenize, detokenize, render.

use axum::extract::Request;
use serde::de::DeserializeOwned;

use super::incoming::{RequestHead, authenticate, read_head, read_object};
use crate::error::RouterError;
use crate::pipeline::AppState;
use crate::pipeline::deadline::Deadline;
use crate::request::key_limits::RunningRequest;
use crate::request::{Caller, CheckedRequest, RawRequest};
use crate::tokenize::tokenize;

/// A request that uses only the tokenizer. It counts against its key's limits until it is dropped.
pub(super) struct TokenizerRequest {
    pub(super) caller: Caller,
    deadline: Option<Deadline>,
    _running: Option<RunningRequest>,
}

impl TokenizerRequest {
    /// Reads a request with its body.
    pub(super) async fn read<T: DeserializeOwned>(
        state: &AppState,
        request: Request,
    ) -> Result<(Self, T), RouterError> {
        let (head, body) = request.into_parts();
        let caller = authenticate(state, &head.headers)?;
        let RequestHead { caller, deadline, .. } = read_head(state, caller, &head.headers)?;
        let memory = state.body_memory.reserve(caller.fair_queue_key());
        let body = read_object(memory, &head.headers, body, deadline).await?;
        let running = caller.usage.as_ref().map(|usage| usage.acquire()).transpose()?;
        Ok((Self { caller, deadline, _running: running }, body))
    }

    /// Runs a job on a tokenizer thread, in the caller's turn and until the deadline.
    pub(super) async fn tokenize<T: Send + 'static>(
        &self,
        state: &AppState,
        job: impl FnOnce() -> Result<T, RouterError> + Send + 'static,
    ) -> Result<T, RouterError> {
        self.until_deadline(state.tokenize.run(self.caller.fair_queue_key(), job)).await
    }

    /// Counts the tokens of a request's prompts. A conversation longer than the window is counted, too:
    /// clients shorten it by its count.
    pub(super) async fn count_tokens(
        &self,
        state: &AppState,
        raw_request: RawRequest,
    ) -> Result<usize, RouterError> {
        let CheckedRequest { entry, prompts, .. } = raw_request.check(&state.catalog, &self.caller)?;
        let count = move || {
            let tokens_of = |prompt| Ok(tokenize(&entry.text, prompt, entry.max_model_len)?.ids.len());
            prompts.into_iter().map(tokens_of).sum()
        };
        self.tokenize(state, count).await
    }

    /// Runs `work` until the deadline.
    pub(super) async fn until_deadline<T>(
        &self,
        work: impl Future<Output = Result<T, RouterError>>,
    ) -> Result<T, RouterError> {
        Deadline::enforce(self.deadline, work).await
    }
}
