//! [`tokenize_newest`]: tokenizes as much of a conversation as fits, without its oldest messages.

use std::collections::HashMap;

use text::{ConversationMessage, ModelText};

use super::{Prompt, TokenizedPrompt, tokenize};
use crate::error::RouterError;

/// Lengths of prompts that leave room for the output, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptLimits {
    /// A longer conversation loses messages.
    pub max: u32,
    /// Length that it then has at most, or up to `max` if no part is as short. Not above `max`.
    pub shortened: u32,
}

/// Tokenizes a prompt. A conversation that is too long loses as few of its oldest messages as possible, never
/// those of the system at its beginning, and a call only together with its results. If no part fits, the
/// result is that of the whole conversation.
pub fn tokenize_newest(
    model: &ModelText,
    prompt: Prompt,
    max_model_len: u32,
    limits: PromptLimits,
) -> Result<TokenizedPrompt, RouterError> {
    let (messages, template_kwargs) = match prompt {
        Prompt::Chat { messages, template_kwargs } => (messages, template_kwargs),
        other => return tokenize(model, other, max_model_len),
    };
    let num_system = messages.iter().take_while(|message| message.role == "system").count();
    let (system, rest) = messages.split_at(num_system);
    let tokenize_from = |start: usize| {
        let messages = [system, &rest[start..]].concat();
        tokenize(model, Prompt::Chat { messages, template_kwargs: template_kwargs.clone() }, max_model_len)
    };
    let whole = tokenize_from(0);
    if fits(&whole, limits.max) != Some(false) {
        return whole;
    }
    let starts = starts(rest);
    let newest = |max_tokens: u32| match first_that_fits(&starts, max_tokens, tokenize_from) {
        // Some templates refuse conversations that do not begin with the user.
        Some(Err(_)) => {
            let of_user = starts.iter().copied().filter(|&start| rest[start].role == "user");
            first_that_fits(&of_user.collect::<Vec<_>>(), max_tokens, tokenize_from)
        }
        found => found,
    };
    let longer = || if limits.shortened < limits.max { newest(limits.max) } else { None };
    newest(limits.shortened).or_else(longer).unwrap_or(whole)
}

/// The messages after the first one from which the rest may stand alone: every result in it has its call.
fn starts(messages: &[ConversationMessage]) -> Vec<usize> {
    let mut latest_calls = HashMap::<&str, usize>::new();
    // For each message the first one that has to stay with it.
    let mut needed = Vec::with_capacity(messages.len());
    for (idx, message) in messages.iter().enumerate() {
        let call = message.tool_call_id.as_deref().and_then(|id| latest_calls.get(id));
        needed.push(call.copied().unwrap_or(idx));
        latest_calls.extend(message.tool_calls.iter().filter_map(|call| Some((call["id"].as_str()?, idx))));
    }
    let mut starts = Vec::new();
    let mut first_needed = messages.len();
    for idx in (1..messages.len()).rev() {
        first_needed = first_needed.min(needed[idx]);
        if first_needed == idx {
            starts.push(idx);
        }
    }
    starts.reverse();
    starts
}

/// Whether a prompt has at most `max_tokens` tokens; `None` for other errors than too many.
fn fits(result: &Result<TokenizedPrompt, RouterError>, max_tokens: u32) -> Option<bool> {
    match result {
        Ok(prompt) => Some(prompt.ids.len() <= max_tokens as usize),
        Err(RouterError::PromptTooLong { .. }) => Some(false),
        Err(_) => None,
    }
}

/// Searches the first of these starts from which the conversation fits, as every later one then does. Returns
/// its prompt, or an error of another start; `None` if none fits.
fn first_that_fits(
    starts: &[usize],
    max_tokens: u32,
    tokenize_from: impl Fn(usize) -> Result<TokenizedPrompt, RouterError>,
) -> Option<Result<TokenizedPrompt, RouterError>> {
    let mut first = None;
    let (mut low, mut high) = (0, starts.len());
    while low < high {
        let middle = low.midpoint(high);
        let result = tokenize_from(starts[middle]);
        match fits(&result, max_tokens) {
            Some(false) => low = middle + 1,
            Some(true) => {
                high = middle;
                first = Some(result);
            }
            None => return Some(result),
        }
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A prompt of the rest of 100 tokens.
    fn rest(start: usize) -> Result<TokenizedPrompt, RouterError> {
        Ok(TokenizedPrompt { ids: vec![0; 100 - start], text: String::new(), task_type: "other" })
    }

    #[test]
    fn no_result_is_without_its_call() {
        let message = |role: &str, calls: &[&str], result_of: Option<&str>| ConversationMessage {
            tool_calls: calls.iter().map(|id| serde_json::json!({ "id": id })).collect(),
            tool_call_id: result_of.map(str::to_owned),
            ..ConversationMessage::new(role, String::new())
        };
        let messages = [
            message("user", &[], None),
            message("assistant", &["1", "2"], None),
            message("tool", &[], Some("1")),
            message("user", &[], None),
            message("tool", &[], Some("2")),
            message("assistant", &[], None),
            message("user", &[], None),
            message("assistant", &["1"], None),
            message("tool", &[], Some("1")),
        ];
        assert_eq!(starts(&messages), [1, 5, 6, 7]);
        assert!(starts(&messages[..1]).is_empty() && starts(&[]).is_empty());
    }

    #[test]
    fn the_longest_rest_that_fits_is_found() {
        let starts: Vec<usize> = (1..100).filter(|start| start % 7 == 0).collect();
        for max_tokens in 0..=100 {
            let found = first_that_fits(&starts, max_tokens, rest).map(|result| result.unwrap().ids.len());
            let expected = starts.iter().map(|start| 100 - start).find(|len| *len <= max_tokens as usize);
            assert_eq!(found, expected, "{max_tokens}");
        }
        assert_eq!(first_that_fits(&[], 100, rest), None);
        let refused = |_| Err(RouterError::invalid("messages", "refused"));
        assert!(matches!(first_that_fits(&starts, 100, refused), Some(Err(_))));
    }
}
