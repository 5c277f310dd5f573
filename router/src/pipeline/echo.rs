//! Echoed prompts: the wait for a prompt's log probabilities, and the queue of deltas, in which the choices
//! of a prompt share its echo.

use std::collections::VecDeque;
use std::sync::Arc;

use speculation::step::PromptLogprobs;
use speculation::{TokenId, TokenLogprobs};

use super::text_delta::{Part, TextDelta};
use crate::detokenize::OutputToken;
use crate::error::RouterError;
use crate::generation::GenerationEvent;

/// Most tokens of an echo in one delta. With 20 alternatives each these are some 200 kB of JSON. Between deltas
/// other streams have their turn, and a client that does not read is noticed.
const ECHOED_TOKENS_PER_DELTA: usize = 256;

/// Size of an echoed prompt of this many tokens while its choices wait for it or share it.
pub(super) fn scored_bytes(num_tokens: usize, num_top: u32) -> usize {
    num_tokens * (size_of::<OutputToken>() + num_top as usize * size_of::<(TokenId, f32)>())
}

/// How a prompt is echoed.
#[derive(Debug)]
pub enum Echo {
    /// No echo.
    Off,
    /// The text of the prompt.
    Text(String),
    /// The text of the prompt, with its tokens and their log probabilities; empty if only these are
    /// requested.
    Logprobs(String),
}

/// An echo whose log probabilities are not complete. The prompt is scored for its first choice only, so other
/// choices may be ahead of it.
#[derive(Debug)]
pub(super) struct PendingEcho {
    pub(super) text: String,
    /// Log probabilities received so far, from position 1 on: position 0 has none.
    pub(super) scored: Vec<TokenLogprobs>,
    /// Events of the prompt's choices that arrived too early, in order. They follow the echo.
    pub(super) held: Vec<GenerationEvent>,
}

impl PendingEcho {
    pub(super) fn new(text: String) -> Self {
        Self { text, scored: Vec::new(), held: Vec::new() }
    }

    /// Whether all positions of a prompt of this length have their log probabilities.
    pub(super) fn is_complete(&self, prompt_len: usize) -> bool {
        self.scored.len() + 1 >= prompt_len
    }

    /// Appends a part. It may overlap earlier ones where the target was replaced during prefill; a gap is an
    /// error.
    pub(super) fn append(&mut self, part: PromptLogprobs, prompt_len: usize) -> Result<(), RouterError> {
        let next = self.scored.len() + 1;
        let start = part.start as usize;
        if start > next {
            return Err(RouterError::Internal(format!(
                "gap in the prompt's log probabilities: expected position {next}, got {start}"
            )));
        }
        self.scored.extend(part.entries.into_iter().skip(next - start));
        self.scored.truncate(prompt_len - 1);
        Ok(())
    }
}

/// Deltas that are ready, in order.
#[derive(Debug, Default)]
pub(super) struct DeltaQueue(VecDeque<QueuedDelta>);

#[derive(Debug)]
enum QueuedDelta {
    Output(TextDelta),
    /// The rest of the echo of a choice, from this token on. With log probabilities an echo may have
    /// megabytes, so the choices share it, and it is copied piece by piece as the client takes it.
    Prompt {
        choice: u32,
        from: usize,
        echo: Arc<EchoedPrompt>,
    },
}

#[derive(Debug)]
struct EchoedPrompt {
    text: String,
    tokens: Vec<OutputToken>,
}

impl DeltaQueue {
    pub(super) fn push(&mut self, delta: TextDelta) {
        self.0.push_back(QueuedDelta::Output(delta));
    }

    /// Appends the echo of each of these choices.
    pub(super) fn push_prompt(
        &mut self,
        choices: std::ops::Range<usize>,
        text: String,
        tokens: Vec<OutputToken>,
    ) {
        let echo = Arc::new(EchoedPrompt { text, tokens });
        let queued = |choice| QueuedDelta::Prompt { choice: choice as u32, from: 0, echo: Arc::clone(&echo) };
        self.0.extend(choices.map(queued));
    }

    pub(super) fn pop(&mut self) -> Option<TextDelta> {
        Some(match self.0.pop_front()? {
            QueuedDelta::Output(delta) => delta,
            QueuedDelta::Prompt { choice, from, echo } => {
                let to = echo.tokens.len().min(from + ECHOED_TOKENS_PER_DELTA);
                let text = if from == 0 { echo.text.clone() } else { String::new() };
                let tokens = echo.tokens[from..to].to_vec();
                if to < echo.tokens.len() {
                    self.0.push_front(QueuedDelta::Prompt { choice, from: to, echo });
                }
                TextDelta { choice, part: Part::Prompt, text, tokens, num_drafted: 0, finish: None }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt_token(text_offset: usize) -> OutputToken {
        OutputToken { id: 7, text_offset, logprobs: None }
    }

    /// The echo at the head of the queue.
    fn next_echo(queue: &DeltaQueue) -> &Arc<EchoedPrompt> {
        let Some(QueuedDelta::Prompt { echo, .. }) = queue.0.front() else { panic!("{queue:?}") };
        echo
    }

    fn output(choice: u32) -> TextDelta {
        TextDelta {
            choice,
            part: Part::Output,
            text: " and its continuation".to_owned(),
            tokens: Vec::new(),
            num_drafted: 0,
            finish: None,
        }
    }

    #[test]
    fn the_choices_of_a_prompt_share_its_echo_until_they_are_taken() {
        let mut queue = DeltaQueue::default();
        let tokens: Vec<OutputToken> = (0..100).map(prompt_token).collect();
        let at = tokens.as_ptr();
        queue.push_prompt(3..131, "a prompt".to_owned(), tokens);
        queue.push(output(3));
        for choice in 3..131 {
            let echo = next_echo(&queue);
            assert_eq!((echo.tokens.as_ptr(), Arc::strong_count(echo)), (at, 131 - choice as usize));
            let delta = queue.pop().unwrap();
            assert_eq!((delta.choice, delta.part, delta.text.as_str()), (choice, Part::Prompt, "a prompt"));
            assert_eq!((delta.tokens.len(), &delta.tokens[99]), (100, &prompt_token(99)));
        }
        assert_eq!((queue.pop(), queue.pop()), (Some(output(3)), None));
    }

    #[test]
    fn a_long_echo_comes_in_pieces() {
        let mut queue = DeltaQueue::default();
        let tokens: Vec<OutputToken> = (0..600).map(prompt_token).collect();
        queue.push_prompt(0..2, "a prompt".to_owned(), tokens.clone());
        queue.push(output(0));
        for choice in 0..2 {
            let pieces: Vec<TextDelta> = (0..3).map(|_| queue.pop().unwrap()).collect();
            assert!(pieces.iter().all(|piece| (piece.choice, piece.part) == (choice, Part::Prompt)));
            assert_eq!(pieces.iter().map(|piece| piece.text.as_str()).collect::<String>(), "a prompt");
            assert_eq!(pieces.iter().map(|piece| piece.tokens.len()).collect::<Vec<_>>(), [256, 256, 88]);
            assert_eq!(pieces.into_iter().flat_map(|piece| piece.tokens).collect::<Vec<_>>(), tokens);
        }
        assert_eq!((queue.pop(), queue.pop()), (Some(output(0)), None));
    }

    #[test]
    fn parts_may_overlap_but_leave_no_gap() {
        let scored = |from: usize, to: usize| PromptLogprobs {
            start: from as u32,
            entries: (from..to).map(|at| TokenLogprobs { logprob: -(at as f32), top: Vec::new() }).collect(),
        };
        let mut echo = PendingEcho::new(String::new());
        assert!(echo.append(scored(2, 4), 6).is_err());
        for (part, is_complete) in [(scored(1, 3), false), (scored(1, 5), false), (scored(3, 8), true)] {
            echo.append(part, 6).unwrap();
            assert_eq!(echo.is_complete(6), is_complete);
        }
        let values: Vec<f32> = echo.scored.iter().map(|scored| scored.logprob).collect();
        assert_eq!(values, [-1.0, -2.0, -3.0, -4.0, -5.0]);
    }
}
