//! [`TextStream`]: all choices of one request as one stream of text, for every protocol. It reads the
//! generations' events, keeps one [`ChoiceText`] per choice, cancels a choice once its stop string is found,
//! and records usage. Dropping it cancels all running generations.

use std::fmt;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use service::accept::ResponseHandle;
use service::on_wake::OnWake;
use service::shutdown::Lifetime;
use speculation::step::PromptLogprobs;
use speculation::{FinishReason, TokenId};
use tokio::time::Instant;

use super::buffer_memory::MemoryReservation;
use super::deadline::{Deadline, DeadlineTimer};
use super::echo::{DeltaQueue, Echo, PendingEcho};
use super::response_log::ResponseLog;
use super::text_delta::{Part, ResponseInfo, StopReason, TextDelta, Timings};
use crate::detokenize::{ChoiceText, StopConditions, prompt_tokens};
use crate::error::RouterError;
use crate::generation::{CommittedTokens, GenerationEvent, GenerationStream, SpeculationUsage};
use crate::request::record::RequestRecord;
use crate::request::{AcceptanceCounts, Usage};
use text::ModelText;

/// One prompt of a request, submitted to the scheduler.
#[derive(Debug)]
pub struct StartedPrompt {
    /// Events of its generation; `None` if there is nothing to compute.
    pub stream: Option<GenerationStream>,
    /// Token ids of the prompt.
    pub ids: Vec<TokenId>,
    /// What `echo` repeats.
    pub echo: Echo,
    /// Task type of the prompt.
    pub task_type: String,
}

/// Parts of a [`TextStream`].
#[derive(Debug)]
pub struct TextStreamParts {
    /// Fields repeated by every chunk.
    pub info: ResponseInfo,
    /// Detokenizes the output.
    pub model: Arc<ModelText>,
    /// Stop conditions of a choice.
    pub stop: StopConditions,
    /// The stop tokens that are reported if they end a choice.
    pub client_stop_token_ids: Vec<TokenId>,
    /// At least one.
    pub prompts: Vec<StartedPrompt>,
    /// Memory of the echoed prompts.
    pub echo_memory: MemoryReservation,
    /// At least 1.
    pub choices_per_prompt: u32,
    /// Collects the request's metrics and trace.
    pub record: RequestRecord,
    /// Latest end of the response.
    pub deadline: Option<Deadline>,
    /// Closes the connection when its client does not read.
    pub response: Option<ResponseHandle>,
    /// Ends the stream when cancelled.
    pub lifetime: Lifetime,
    /// Log of the choices; `None` if they are not logged.
    pub log: Option<ResponseLog>,
}

/// All choices of one request, as a stream.
#[derive(Debug)]
pub struct TextStream {
    info: ResponseInfo,
    model: Arc<ModelText>,
    prompts: Vec<PromptState>,
    choices: Vec<ChoiceState>,
    choices_per_prompt: usize,
    client_stop_token_ids: Vec<TokenId>,
    ready: DeltaQueue,
    record: RequestRecord,
    deadline: DeadlineTimer,
    response: Option<ResponseHandle>,
    shutdown: ShutdownSignal,
    /// Index of the prompt polled first; rotates for fairness.
    next_prompt: usize,
    failed: bool,
    started_at: Instant,
    /// Times of the first and the last token.
    token_times: Option<(Instant, Instant)>,
    log: Option<ResponseLog>,
    /// Memory of the echoed prompts and of the events that wait for them.
    echo_memory: MemoryReservation,
}

/// Resolves when the grace period of a drain is over and the stream has to end.
struct ShutdownSignal(OnWake<Pin<Box<dyn Future<Output = ()> + Send>>>);

impl fmt::Debug for ShutdownSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ShutdownSignal")
    }
}

#[derive(Debug)]
struct PromptState {
    stream: Option<GenerationStream>,
    ids: Vec<TokenId>,
    /// The echo, until its log probabilities are complete.
    pending_echo: Option<PendingEcho>,
}

#[derive(Debug)]
struct ChoiceState {
    text: ChoiceText,
    usage: SpeculationUsage,
    accepted: AcceptanceCounts,
    last_token: Option<TokenId>,
    finish: Option<FinishReason>,
}

impl ChoiceState {
    fn is_finished(&self) -> bool {
        self.finish.is_some()
    }
}

impl TextStream {
    /// Starts reading the generations' events.
    pub fn new(parts: TextStreamParts) -> Self {
        let TextStreamParts { info, model, stop, prompts, choices_per_prompt, mut record, .. } = parts;
        let choices_per_prompt = choices_per_prompt as usize;
        let prompt_tokens = prompts.iter().map(|prompt| prompt.ids.len() as u64).sum();
        record.running(prompts.len() * choices_per_prompt, prompt_tokens);
        let mut stream = Self {
            info,
            prompts: Vec::with_capacity(prompts.len()),
            choices: Vec::with_capacity(prompts.len() * choices_per_prompt),
            model,
            choices_per_prompt,
            client_stop_token_ids: parts.client_stop_token_ids,
            ready: DeltaQueue::default(),
            record,
            deadline: DeadlineTimer::new(parts.deadline),
            response: parts.response,
            shutdown: ShutdownSignal(OnWake::new(Box::pin(parts.lifetime.cancelled()))),
            next_prompt: 0,
            failed: false,
            started_at: Instant::now(),
            token_times: None,
            log: parts.log,
            echo_memory: parts.echo_memory,
        };
        for prompt in prompts {
            stream.add_prompt(prompt, &stop);
        }
        stream
    }

    /// Fields repeated by every chunk of the response.
    pub fn info(&self) -> &ResponseInfo {
        &self.info
    }

    /// Used to spell tokens.
    pub fn model(&self) -> &ModelText {
        &self.model
    }

    /// The request's span.
    pub fn span(&self) -> &tracing::Span {
        self.record.span()
    }

    /// Ends the generations with `error`, which keeps the caller from reading on.
    pub fn fail(&mut self, error: &RouterError) {
        self.failed = true;
        self.prompts.iter_mut().for_each(|prompt| prompt.stream = None);
        self.record.failed(error);
    }

    /// Usage so far.
    pub fn usage(&self) -> Usage {
        let mut usage = Usage {
            prompt_tokens: self.prompts.iter().map(|prompt| prompt.ids.len() as u64).sum(),
            ..Usage::default()
        };
        for choices in self.choices.chunks(self.choices_per_prompt) {
            // Other choices of the prompt find what the first one computed, so only the minimum was cached.
            usage.cached_tokens += choices.iter().map(|choice| choice.usage.cached_tokens).min().unwrap_or(0);
        }
        for choice in &self.choices {
            usage.accepted.add(&choice.accepted);
            usage.completion_tokens += u64::from(choice.text.num_tokens());
            usage.speculation.rounds += choice.usage.rounds;
            usage.speculation.draft_tokens += choice.usage.draft_tokens;
            usage.speculation.accepted_tokens += choice.usage.accepted_tokens;
            usage.speculation.accepted_prediction_tokens += choice.usage.accepted_prediction_tokens;
            usage.speculation.rejected_prediction_tokens += choice.usage.rejected_prediction_tokens;
            usage.speculation.disabled_reason =
                choice.usage.disabled_reason.or(usage.speculation.disabled_reason);
        }
        usage
    }

    /// Times so far.
    pub fn timings(&self) -> Timings {
        let timings = |(first, last): (Instant, Instant)| Timings {
            prompt: first - self.started_at,
            predicted: last - first,
        };
        self.token_times.map(timings).unwrap_or_default()
    }

    /// Time of the last token; `None` before the first.
    pub fn last_token_at(&self) -> Option<Instant> {
        self.token_times.map(|(_, last)| last)
    }

    /// The stop string that ended the choice, if any.
    pub fn stop_string(&self, choice: usize) -> Option<&str> {
        self.choices.get(choice).and_then(|choice| choice.text.stop_string())
    }

    /// What the client asked to end the choice, and did. The model's own end is not reported.
    pub fn stop_reason(&self, choice: usize) -> Option<StopReason<'_>> {
        let state = self.choices.get(choice).filter(|state| state.finish == Some(FinishReason::Stop))?;
        let is_reported = |id: &TokenId| self.client_stop_token_ids.contains(id);
        let token = || state.last_token.filter(is_reported).map(StopReason::Token);
        state.text.stop_string().map(StopReason::Text).or_else(token)
    }

    /// Token ids of the prompt that the choice continues.
    pub fn prompt_token_ids(&self, choice: usize) -> &[TokenId] {
        let prompt = self.prompts.get(choice / self.choices_per_prompt);
        prompt.map(|prompt| prompt.ids.as_slice()).unwrap_or_default()
    }

    /// Returns the next delta; `None` once every choice is complete, and after an error.
    ///
    /// Cancel safety: no delta is lost when the future is dropped.
    pub async fn next(&mut self) -> Option<Result<TextDelta, RouterError>> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// [`Self::next`] as a poll function, for writing all ready deltas at once.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<TextDelta, RouterError>>> {
        loop {
            if let Some(delta) = self.ready.pop() {
                return Poll::Ready(Some(Ok(delta)));
            }
            if self.failed || self.choices.iter().all(ChoiceState::is_finished) {
                return Poll::Ready(None);
            }
            let handled = match ready!(self.poll_event(context)) {
                Ok((prompt_idx, event)) => self.handle_event(prompt_idx, event),
                Err(error) => Err(error),
            };
            if let Err(error) = handled {
                self.fail(&error);
                return Poll::Ready(Some(Err(error)));
            }
        }
    }

    fn add_prompt(&mut self, prompt: StartedPrompt, stop: &StopConditions) {
        let StartedPrompt { stream, ids, echo, .. } = prompt;
        let (echoed, pending_echo) = match echo {
            Echo::Off => (None, None),
            Echo::Text(text) => (Some(text), None),
            Echo::Logprobs(text) => (None, Some(PendingEcho::new(text))),
        };
        let echoed_text = echoed.as_ref().or(pending_echo.as_ref().map(|pending| &pending.text));
        let text_offset = echoed_text.map_or(0, |text| text.chars().count());
        let first_choice = self.choices.len();
        for _ in 0..self.choices_per_prompt {
            let text = ChoiceText::new(Arc::clone(&self.model), stop, text_offset);
            self.choices.push(ChoiceState {
                text,
                usage: SpeculationUsage::default(),
                accepted: AcceptanceCounts::default(),
                last_token: None,
                finish: None,
            });
        }
        let has_work = stream.is_some();
        let prompt_idx = self.prompts.len();
        if let (Some(stream), Some(response)) = (&stream, self.response.clone()) {
            // This stream is not polled while the client does not read, so close the connection from here.
            stream.on_overflow(move || response.cut());
        }
        self.prompts.push(PromptState { stream, ids, pending_echo });
        if let Some(text) = echoed {
            self.ready.push_prompt(self.choices_of(prompt_idx), text, Vec::new());
        }
        // A prompt of one token needs no scores. Nothing is held yet: no event has been read.
        self.emit_scored_prompt(prompt_idx);
        if !has_work {
            for choice in first_choice..self.choices.len() {
                self.finish(choice, FinishReason::Length);
            }
        }
    }

    /// Polls the prompts in turn for their next event. Fails once the deadline has passed or the process has
    /// to end.
    fn poll_event(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<(usize, GenerationEvent), RouterError>> {
        if let Poll::Ready(error) = self.deadline.poll_expired(context) {
            return Poll::Ready(Err(error));
        }
        let num_prompts = self.prompts.len();
        for offset in 0..num_prompts {
            let prompt_idx = (self.next_prompt + offset) % num_prompts;
            let Some(stream) = &mut self.prompts[prompt_idx].stream else { continue };
            if let Poll::Ready(event) = stream.poll_next(context) {
                self.next_prompt = prompt_idx + 1;
                if let Some(event) = event {
                    return Poll::Ready(Ok((prompt_idx, event)));
                }
                // The scheduler drops its sinks when the process ends, which may be seen here first.
                let ended_early = RouterError::Internal("the scheduler closed the stream early".into());
                let is_draining = self.poll_shutdown(context).is_ready();
                return Poll::Ready(Err(if is_draining { RouterError::Draining } else { ended_early }));
            }
        }
        // Checked last, so that ready events are still delivered when the process ends.
        self.poll_shutdown(context).map(|()| Err(RouterError::Draining))
    }

    fn poll_shutdown(&mut self, context: &mut Context<'_>) -> Poll<()> {
        Pin::new(&mut self.shutdown.0).poll(context)
    }

    fn handle_event(&mut self, prompt_idx: usize, event: GenerationEvent) -> Result<(), RouterError> {
        let is_output = matches!(event, GenerationEvent::Tokens(_) | GenerationEvent::Finished { .. });
        if let Some(pending) = self.prompts[prompt_idx].pending_echo.as_mut().filter(|_| is_output) {
            // Once read, an event no longer counts as unread.
            self.echo_memory.grow(event.num_bytes())?;
            pending.held.push(event);
            return Ok(());
        }
        match event {
            GenerationEvent::PromptLogprobs(part) => self.add_prompt_logprobs(prompt_idx, part),
            GenerationEvent::Tokens(tokens) => self.append_tokens(prompt_idx, tokens),
            GenerationEvent::Finished { choice, reason, usage } => {
                let choice = self.choice_idx(prompt_idx, choice)?;
                if !self.choices[choice].is_finished() {
                    self.choices[choice].usage = usage;
                    self.finish(choice, reason);
                }
                Ok(())
            }
            GenerationEvent::Failed(error) => Err(error),
        }
    }

    fn choice_idx(&self, prompt_idx: usize, choice: u32) -> Result<usize, RouterError> {
        let choice = choice as usize;
        if choice >= self.choices_per_prompt {
            return Err(RouterError::Internal(format!(
                "the scheduler sent an event for choice {choice} of {}",
                self.choices_per_prompt
            )));
        }
        Ok(prompt_idx * self.choices_per_prompt + choice)
    }

    fn append_tokens(&mut self, prompt_idx: usize, tokens: CommittedTokens) -> Result<(), RouterError> {
        let choice_in_prompt = tokens.choice;
        let choice = self.choice_idx(prompt_idx, choice_in_prompt)?;
        let state = &mut self.choices[choice];
        // Tokens that were in flight when the stop string was found.
        if state.is_finished() {
            return Ok(());
        }
        let (previous, now) = (std::mem::replace(&mut state.usage, tokens.usage), Instant::now());
        let drafted = state.usage.draft_tokens.saturating_sub(previous.draft_tokens);
        if drafted > 0 {
            let accepted = state.usage.accepted_tokens.saturating_sub(previous.accepted_tokens);
            state.accepted.observe(drafted, accepted);
        }
        self.token_times = Some((self.token_times.map_or(now, |(first, _)| first), now));
        let span = state.text.push(tokens);
        state.last_token = span.tokens.last().map(|token| token.id).or(state.last_token);
        self.record.tokens(choice, span.tokens.len() as u64, now);
        if let Some(log) = &mut self.log {
            log.tokens(choice, &span.tokens);
        }
        self.ready.push(TextDelta {
            choice: choice as u32,
            part: Part::Output,
            text: span.text,
            tokens: span.tokens,
            num_drafted: span.num_drafted,
            finish: span.stopped.then_some(FinishReason::Stop),
        });
        if span.stopped {
            if let Some(stream) = &self.prompts[prompt_idx].stream {
                stream.stop_choice(choice_in_prompt);
            }
            self.close_choice(choice, FinishReason::Stop);
        }
        Ok(())
    }

    /// Finishes a choice that the scheduler reported complete, and emits its withheld text.
    fn finish(&mut self, choice: usize, reason: FinishReason) {
        let (text, stopped) = self.choices[choice].text.finish();
        let reason = if stopped { FinishReason::Stop } else { reason };
        self.ready.push(TextDelta {
            choice: choice as u32,
            part: Part::Output,
            text,
            tokens: Vec::new(),
            num_drafted: 0,
            finish: Some(reason),
        });
        self.close_choice(choice, reason);
    }

    fn close_choice(&mut self, choice: usize, reason: FinishReason) {
        self.choices[choice].finish = Some(reason);
        self.record.choice_finished(choice, reason);
        if let Some(log) = &mut self.log {
            log.finished(choice, reason);
        }
        let prompt_idx = choice / self.choices_per_prompt;
        if self.choices[self.choices_of(prompt_idx)].iter().all(ChoiceState::is_finished) {
            self.prompts[prompt_idx].stream = None;
        }
        let all_added = self.choices.len() == self.info.num_choices as usize;
        if all_added && self.choices.iter().all(ChoiceState::is_finished) {
            let usage = self.usage();
            self.record.answered(&usage);
        }
    }

    /// Appends part of a prompt's log probabilities. Once they are complete, emits the echo and then the
    /// events that were held for it.
    fn add_prompt_logprobs(&mut self, prompt_idx: usize, part: PromptLogprobs) -> Result<(), RouterError> {
        let prompt = &mut self.prompts[prompt_idx];
        let Some(pending) = &mut prompt.pending_echo else { return Ok(()) };
        pending.append(part, prompt.ids.len())?;
        for event in self.emit_scored_prompt(prompt_idx) {
            self.handle_event(prompt_idx, event)?;
        }
        Ok(())
    }

    /// Emits the echoed prompt if it has just got all log probabilities. Returns the events held for it.
    fn emit_scored_prompt(&mut self, prompt_idx: usize) -> Vec<GenerationEvent> {
        let prompt = &mut self.prompts[prompt_idx];
        let prompt_len = prompt.ids.len();
        let Some(echo) = prompt.pending_echo.take_if(|pending| pending.is_complete(prompt_len)) else {
            return Vec::new();
        };
        let tokens = prompt_tokens(&self.model, &prompt.ids, echo.scored);
        self.ready.push_prompt(self.choices_of(prompt_idx), echo.text, tokens);
        echo.held
    }

    /// Indices of the prompt's choices.
    fn choices_of(&self, prompt_idx: usize) -> Range<usize> {
        prompt_idx * self.choices_per_prompt..(prompt_idx + 1) * self.choices_per_prompt
    }
}

impl Drop for TextStream {
    fn drop(&mut self) {
        // A response closed by the router is recorded as a slow client, not as a disconnected one.
        if self.response.as_ref().is_some_and(ResponseHandle::was_cut) {
            self.record.failed(&RouterError::SlowClient);
        }
    }
}
