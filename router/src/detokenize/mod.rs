//! Converts committed tokens to text: [`ChoiceText`] converts the token spans of one choice, finds stop
//! strings and counts; [`crate::pipeline::text_stream`] does so for all choices of a request.
//!
//! Works token by token, so that the text, its end and the counts do not depend on the number of tokens per
//! verification.

mod incremental;
mod stop;
mod utf8;

use std::sync::Arc;

use speculation::{TokenId, TokenLogprobs};

use self::incremental::IncrementalDecoder;
use self::stop::{StopMatch, StopMatcher};
use self::utf8::Utf8Decoder;
use crate::generation::CommittedTokens;
use text::ModelText;

/// One token of a response.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputToken {
    /// The token id.
    pub id: TokenId,
    /// Offset, in characters, within the choice's text (including the echoed prompt) of the character that
    /// this token begins or continues.
    pub text_offset: usize,
    /// If requested; the first token of a prompt has none.
    pub logprobs: Option<TokenLogprobs>,
}

/// Text and tokens that one span adds to its choice.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SpanText {
    /// Text that can be emitted now. Delayed by some tokens while a character or a stop string may be
    /// incomplete.
    pub text: String,
    /// Tokens that count; those after the end of a stop string do not.
    pub tokens: Vec<OutputToken>,
    /// Number of `tokens` that were drafted.
    pub num_drafted: u32,
    /// A stop string was found: the choice ends here.
    pub stopped: bool,
}

/// Stop conditions of a request.
#[derive(Debug, Clone, Default)]
pub struct StopConditions {
    /// Stop strings.
    pub strings: Vec<String>,
    /// Ids that end the sequence.
    pub token_ids: Vec<TokenId>,
    /// Emit the stop string that was found, and the text of stop tokens.
    pub included: bool,
    /// Emit special tokens as text, spelled as in the vocabulary. Otherwise they have no text.
    pub keep_special_tokens: bool,
    /// Special tokens that are emitted as text, because they are markers of the parsed output format.
    pub visible_token_ids: Vec<TokenId>,
    /// Stop strings are not matched within this many first tokens.
    pub min_tokens: u32,
}

/// Text of a choice in progress.
#[derive(Debug)]
pub struct ChoiceText {
    model: Arc<ModelText>,
    /// Those that add no text.
    stop_token_ids: Vec<TokenId>,
    visible_token_ids: Vec<TokenId>,
    min_tokens: u32,
    text: IncrementalDecoder,
    stops: StopMatcher,
    num_tokens: u32,
    num_chars: usize,
}

impl ChoiceText {
    /// An empty choice whose text begins at `text_offset`.
    pub fn new(model: Arc<ModelText>, conditions: &StopConditions, text_offset: usize) -> Self {
        Self {
            text: IncrementalDecoder::new(&model, conditions.keep_special_tokens),
            model,
            stop_token_ids: if conditions.included { Vec::new() } else { conditions.token_ids.clone() },
            visible_token_ids: conditions.visible_token_ids.clone(),
            min_tokens: conditions.min_tokens,
            stops: StopMatcher::new(conditions.strings.clone(), conditions.included),
            num_tokens: 0,
            num_chars: text_offset,
        }
    }

    /// Number of tokens that count so far.
    pub fn num_tokens(&self) -> u32 {
        self.num_tokens
    }

    /// The stop string that ended the choice, if any.
    pub fn stop_string(&self) -> Option<&str> {
        self.stops.found()
    }

    /// Appends a committed span. Must not be called after `stopped`.
    pub fn push(&mut self, span: CommittedTokens) -> SpanText {
        let mut out = SpanText { tokens: Vec::with_capacity(span.token_ids.len()), ..SpanText::default() };
        let mut logprobs = span.logprobs.into_iter();
        for id in span.token_ids {
            out.tokens.push(OutputToken { id, text_offset: self.num_chars, logprobs: logprobs.next() });
            self.num_tokens += 1;
            let start = out.text.len();
            if self.stop_token_ids.contains(&id) {
                // Ends the sequence and adds no text.
            } else if self.visible_token_ids.contains(&id) {
                self.text.push_special(&self.model, id, &mut out.text);
            } else {
                self.text.push(&self.model, id, &mut out.text);
            }
            if self.emit(start, &mut out.text) {
                out.stopped = true;
                break;
            }
        }
        out.num_drafted = span.num_drafted.min(out.tokens.len() as u32);
        out
    }

    /// Returns the withheld text of a complete choice, and whether that text contains a stop string.
    pub fn finish(&mut self) -> (String, bool) {
        let mut text = self.text.finish(&self.model);
        let stopped = self.emit(0, &mut text);
        if !stopped {
            text.push_str(&self.stops.finish());
        }
        (text, stopped)
    }

    /// Withholds the part of the new text (from `from` on) that may still become part of a stop string.
    /// Returns whether a stop string is complete.
    fn emit(&mut self, from: usize, text: &mut String) -> bool {
        self.num_chars += text[from..].chars().count();
        if self.num_tokens <= self.min_tokens || self.stops.is_empty() {
            return false;
        }
        let (emitted, is_complete) = match self.stops.push(&text[from..]) {
            StopMatch::Text(emitted) => (emitted, false),
            StopMatch::Stop(emitted) => (emitted, true),
        };
        text.truncate(from);
        text.push_str(&emitted);
        is_complete
    }
}

/// Decodes ids without special tokens.
pub fn decode(model: &ModelText, ids: &[TokenId]) -> String {
    let (mut decoder, mut text) = (IncrementalDecoder::new(model, false), String::new());
    ids.iter().for_each(|&id| decoder.push(model, id, &mut text));
    text.push_str(&decoder.finish(model));
    text
}

/// Decodes ids, spelling out special tokens.
pub fn decode_all(model: &ModelText, ids: &[TokenId]) -> String {
    if !model.vocabulary().is_bytes() {
        return model.decode_all(ids);
    }
    let (mut utf8, mut text) = (Utf8Decoder::default(), String::new());
    ids.iter().for_each(|&id| utf8.push(model.vocabulary().bytes(id), &mut text));
    text.push_str(&utf8.finish());
    text
}

/// Pairs prompt ids with their log probabilities; the first id has none.
pub fn prompt_tokens(model: &ModelText, ids: &[TokenId], logprobs: Vec<TokenLogprobs>) -> Vec<OutputToken> {
    let (mut decoder, mut piece) = (IncrementalDecoder::new(model, false), String::new());
    let mut num_chars = 0;
    let logprobs = std::iter::once(None).chain(logprobs.into_iter().map(Some));
    ids.iter()
        .zip(logprobs)
        .map(|(&id, logprobs)| {
            let text_offset = num_chars;
            piece.clear();
            decoder.push(model, id, &mut piece);
            num_chars += piece.chars().count();
            OutputToken { id, text_offset, logprobs }
        })
        .collect()
}

#[cfg(test)]
mod tests;
