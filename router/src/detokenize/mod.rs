//! Committed tokens to text: [`ChoiceText`] turns the token spans of one choice into text, finds its stop strings and
//! counts; [`crate::pipeline::text_stream`] does so for all choices of a request.
//!
//! Works token by token, so that the text, where it stops and what is counted do not depend on how many tokens one
//! verification committed.

mod assembler;
mod stop;
mod utf8;

use std::sync::Arc;

use speculation::{TokenId, TokenLogprobs};

use self::assembler::TextAssembler;
use self::stop::{Matched, StopMatcher};
use self::utf8::Utf8Assembler;
use crate::generation::CommittedTokens;
use text::ModelText;

/// One token of a response.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputToken {
    /// Which token.
    pub id: TokenId,
    /// How many characters of the choice's text, the echoed prompt included, stand before the one that this token
    /// begins or continues.
    pub text_offset: usize,
    /// Where asked for; the first token of a prompt has none.
    pub logprobs: Option<TokenLogprobs>,
}

/// What one span adds to its choice.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SpanText {
    /// Text that can be shown now: later by some tokens where a character or a stop string may be in the making.
    pub text: String,
    /// The tokens that count; those after the end of a stop string do not.
    pub tokens: Vec<OutputToken>,
    /// How many of `tokens` were drafted.
    pub num_drafted: u32,
    /// A stop string is complete: the choice ends here.
    pub stopped: bool,
}

/// What ends one choice's text, as the request has it.
#[derive(Debug, Clone, Default)]
pub struct StopRules {
    /// Stop strings; never shown.
    pub strings: Vec<String>,
    /// Ids that end the sequence; they add no text.
    pub token_ids: Vec<TokenId>,
    /// Special tokens whose spelling is text, for they are the marks of a format that is read.
    pub shown_token_ids: Vec<TokenId>,
    /// Stop strings are not looked for in the text of this many first tokens.
    pub min_tokens: u32,
}

/// The text of one choice in the making.
#[derive(Debug)]
pub struct ChoiceText {
    model: Arc<ModelText>,
    stop_token_ids: Vec<TokenId>,
    shown_token_ids: Vec<TokenId>,
    min_tokens: u32,
    text: TextAssembler,
    stops: StopMatcher,
    num_tokens: u32,
    num_chars: usize,
}

impl ChoiceText {
    /// An empty choice whose first character stands at `text_offset`.
    pub fn new(model: Arc<ModelText>, rules: &StopRules, text_offset: usize) -> Self {
        Self {
            text: TextAssembler::new(&model),
            model,
            stop_token_ids: rules.token_ids.clone(),
            shown_token_ids: rules.shown_token_ids.clone(),
            min_tokens: rules.min_tokens,
            stops: StopMatcher::new(rules.strings.clone()),
            num_tokens: 0,
            num_chars: text_offset,
        }
    }

    /// How many tokens count so far.
    pub fn num_tokens(&self) -> u32 {
        self.num_tokens
    }

    /// The stop string that ended it, if one did.
    pub fn stop_string(&self) -> Option<&str> {
        self.stops.found()
    }

    /// Appends a committed span. Not to be called again after `stopped`.
    pub fn push(&mut self, span: CommittedTokens) -> SpanText {
        let mut out = SpanText { tokens: Vec::with_capacity(span.token_ids.len()), ..SpanText::default() };
        let mut logprobs = span.logprobs.into_iter();
        for id in span.token_ids {
            out.tokens.push(OutputToken { id, text_offset: self.num_chars, logprobs: logprobs.next() });
            self.num_tokens += 1;
            let shown = out.text.len();
            if self.stop_token_ids.contains(&id) {
                // Ends the sequence and adds no text.
            } else if self.shown_token_ids.contains(&id) {
                self.text.push_spelt(&self.model, id, &mut out.text);
            } else {
                self.text.push(&self.model, id, &mut out.text);
            }
            if self.show(shown, &mut out.text) {
                out.stopped = true;
                break;
            }
        }
        out.num_drafted = span.num_drafted.min(out.tokens.len() as u32);
        out
    }

    /// What was held back, when the lane says that the choice is complete; and whether a stop string ended it even so.
    pub fn finish(&mut self) -> (String, bool) {
        let mut text = self.text.finish(&self.model);
        let stopped = self.show(0, &mut text);
        if !stopped {
            text.push_str(&self.stops.finish());
        }
        (text, stopped)
    }

    /// Takes back of the new text, which begins at `from`, what cannot be shown yet; whether a stop string is complete.
    fn show(&mut self, from: usize, text: &mut String) -> bool {
        self.num_chars += text[from..].chars().count();
        if self.num_tokens <= self.min_tokens || self.stops.are_none() {
            return false;
        }
        let (shown, is_complete) = match self.stops.push(&text[from..]) {
            Matched::Text(shown) => (shown, false),
            Matched::Stop(shown) => (shown, true),
        };
        text.truncate(from);
        text.push_str(&shown);
        is_complete
    }
}

/// A prompt's own text and tokens, for `echo`.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptEcho {
    /// The prompt as sent, or as its ids decode.
    pub text: String,
    /// With log probabilities, where asked for; else empty.
    pub tokens: Vec<OutputToken>,
}

/// The text of ids, special tokens left out.
pub fn decode(model: &ModelText, ids: &[TokenId]) -> String {
    let (mut assembler, mut text) = (TextAssembler::new(model), String::new());
    ids.iter().for_each(|&id| assembler.push(model, id, &mut text));
    text.push_str(&assembler.finish(model));
    text
}

/// The text of ids, special tokens as they are spelt.
pub fn decode_all(model: &ModelText, ids: &[TokenId]) -> String {
    if !model.vocabulary().is_bytes() {
        return model.decode_all(ids);
    }
    let (mut utf8, mut text) = (Utf8Assembler::default(), String::new());
    ids.iter().for_each(|&id| utf8.push(model.vocabulary().bytes(id), &mut text));
    text.push_str(&utf8.finish());
    text
}

/// Pairs prompt ids with their log probabilities, of which the first id has none.
pub fn prompt_tokens(model: &ModelText, ids: &[TokenId], logprobs: Vec<TokenLogprobs>) -> Vec<OutputToken> {
    let (mut assembler, mut piece) = (TextAssembler::new(model), String::new());
    let mut num_chars = 0;
    let logprobs = std::iter::once(None).chain(logprobs.into_iter().map(Some));
    ids.iter()
        .zip(logprobs)
        .map(|(&id, logprobs)| {
            let text_offset = num_chars;
            piece.clear();
            assembler.push(model, id, &mut piece);
            num_chars += piece.chars().count();
            OutputToken { id, text_offset, logprobs }
        })
        .collect()
}

#[cfg(test)]
mod tests;
