//! A response as one JSON object, sent once every choice is complete.

use axum::response::Response;
use serde::Serialize;
use speculation::{FinishReason, TokenId};

use super::body::CompletionOptions;
use super::logprobs::{ChatLogprobs, CompletionLogprobs, PromptScores, json_bytes, num_top};
use super::response::{AssistantMessage, ChatChoice, CompletionChoice, Envelope};
use crate::api::buffered_response::buffered_response;
use crate::api::functions::call_id;
use crate::api::handler::unfinished;
use crate::api::json::to_json;
use crate::api::parsed_output::ParsedOutput;
use crate::detokenize::OutputToken;
use crate::error::RouterError;
use crate::pipeline::buffer_memory::MemoryReservation;
use crate::pipeline::text_delta::Part;
use crate::pipeline::text_stream::TextStream;
use crate::request::Operation;

/// One complete choice.
#[derive(Debug, Default)]
struct CompletedChoice {
    text: String,
    /// Kept only if log probabilities are requested.
    tokens: Vec<OutputToken>,
    /// Tokens of the prompt; kept only if their log probabilities are requested.
    prompt_tokens: Vec<OutputToken>,
    /// Ids of the output; kept only if requested.
    token_ids: Option<Vec<TokenId>>,
    finish: Option<FinishReason>,
}

/// Approximate JSON size of each token, and of each of its top tokens, in a prompt's log probabilities.
const RANKED_TOKEN_BYTES: usize = 112;

/// Maximum JSON size of one token id in a list.
const ID_BYTES: usize = "4294967295,".len();

pub(super) async fn respond(
    mut text: TextStream,
    (operation, options): (Operation, CompletionOptions),
    mut reservation: MemoryReservation,
) -> Result<Response, RouterError> {
    let mut choices: Vec<CompletedChoice> = Vec::new();
    choices.resize_with(text.info().num_choices as usize, || CompletedChoice {
        token_ids: options.token_ids.then(Vec::new),
        ..CompletedChoice::default()
    });
    reservation.grow(prompt_ids_bytes(&text, operation, options)).inspect_err(|error| text.fail(error))?;
    let keeps_tokens = text.info().logprobs;
    while let Some(delta) = text.next().await {
        let delta = delta?;
        let is_prompt = delta.part == Part::Prompt;
        let keeps_tokens = keeps_tokens && (options.echo || !is_prompt);
        // A chat completion has the prompt's once.
        let keeps_scores =
            options.prompt_logprobs && is_prompt && (operation == Operation::Completion || delta.choice == 0);
        let token_bytes = if keeps_tokens { json_bytes(&delta.tokens) } else { 0 };
        let prompt_bytes = if keeps_scores { prompt_scores_bytes(&delta.tokens) } else { 0 };
        let ids_bytes = if options.token_ids { ID_BYTES * delta.tokens.len() } else { 0 };
        let num_bytes = delta.text.len() + token_bytes + prompt_bytes + ids_bytes;
        reservation.grow(num_bytes).inspect_err(|error| text.fail(error))?;
        let choice = &mut choices[delta.choice as usize];
        choice.text.push_str(&delta.text);
        if let Some(ids) = choice.token_ids.as_mut().filter(|_| !is_prompt) {
            ids.extend(delta.tokens.iter().map(|token| token.id));
        }
        if keeps_scores {
            choice.prompt_tokens.extend_from_slice(&delta.tokens);
        }
        if keeps_tokens {
            choice.tokens.extend(delta.tokens);
        }
        choice.finish = choice.finish.or(delta.finish);
    }
    let json = match operation {
        Operation::Chat => chat(&text, choices, options)?,
        Operation::Completion => completion(&text, choices, options)?,
    };
    Ok(buffered_response(json, reservation))
}

/// Size of the prompts' ids in the answer: a chat completion has them once, a completion in every choice.
fn prompt_ids_bytes(text: &TextStream, operation: Operation, options: CompletionOptions) -> usize {
    let num_copies = match operation {
        _ if !options.token_ids => 0,
        Operation::Chat => 1,
        Operation::Completion => text.info().num_choices as usize,
    };
    (0..num_copies).map(|choice| ID_BYTES * text.prompt_token_ids(choice).len()).sum()
}

fn prompt_scores_bytes(tokens: &[OutputToken]) -> usize {
    tokens.iter().map(|token| RANKED_TOKEN_BYTES * (1 + num_top(token))).sum()
}

fn chat(
    text: &TextStream,
    mut choices: Vec<CompletedChoice>,
    options: CompletionOptions,
) -> Result<String, RouterError> {
    let (info, vocabulary) = (text.info(), text.model().vocabulary());
    let first = choices.first_mut().filter(|_| options.prompt_logprobs);
    let prompt_tokens = first.map(|first| std::mem::take(&mut first.prompt_tokens));
    let prompt_logprobs = prompt_tokens.map(|tokens| PromptScores::new(vocabulary, tokens));
    let choice = |(index, choice): (usize, CompletedChoice)| {
        let (index, finish) = (index as u32, choice.finish.ok_or_else(unfinished)?);
        let output = ParsedOutput::parse(&info.output, &choice.text);
        let id_of = |call| call_id("call_", &info.id, index, call);
        Ok(ChatChoice {
            index,
            logprobs: info.logprobs.then(|| ChatLogprobs::new(vocabulary, &choice.tokens)),
            finish_reason: options.call_field.finish_reason(finish, output.has_calls()),
            stop_reason: text.stop_reason(index as usize),
            token_ids: choice.token_ids,
            message: AssistantMessage::new(output.into_parts(), options.call_field, id_of),
        })
    };
    let choices: Result<Vec<_>, RouterError> = choices.into_iter().enumerate().map(choice).collect();
    let mut envelope = Envelope::new(info, "chat.completion", choices?).with_prompt_logprobs(prompt_logprobs);
    if options.token_ids {
        envelope = envelope.with_prompt_token_ids(text.prompt_token_ids(0));
    }
    Ok(to_json(&with_totals(envelope, text, options)))
}

fn completion(
    text: &TextStream,
    choices: Vec<CompletedChoice>,
    options: CompletionOptions,
) -> Result<String, RouterError> {
    let (info, vocabulary) = (text.info(), text.model().vocabulary());
    let choice = |(index, choice): (usize, CompletedChoice)| {
        Ok(CompletionChoice {
            index: index as u32,
            logprobs: info.logprobs.then(|| CompletionLogprobs::new(vocabulary, &choice.tokens)),
            finish_reason: Some(choice.finish.ok_or_else(unfinished)?.as_str()),
            stop_reason: text.stop_reason(index),
            token_ids: choice.token_ids,
            prompt_token_ids: options.token_ids.then(|| text.prompt_token_ids(index)),
            prompt_logprobs: options
                .prompt_logprobs
                .then(|| PromptScores::new(vocabulary, choice.prompt_tokens)),
            text: choice.text,
            speculation: None,
        })
    };
    let choices: Result<Vec<_>, RouterError> = choices.into_iter().enumerate().map(choice).collect();
    Ok(to_json(&with_totals(Envelope::new(info, "text_completion", choices?), text, options)))
}

fn with_totals<'a, C: Serialize>(
    envelope: Envelope<'a, C>,
    text: &TextStream,
    options: CompletionOptions,
) -> Envelope<'a, C> {
    let usage = text.usage();
    let envelope = envelope.with_usage(Some(&usage));
    if options.timings { envelope.with_timings(&usage, text.timings()) } else { envelope }
}
