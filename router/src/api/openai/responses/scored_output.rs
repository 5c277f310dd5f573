//! [`ScoredOutput`]: a response's output, with the tokens of each of its texts if their log probabilities are
//! requested. Tokens of reasoning, of calls and of the markers around them belong to no text. Works character
//! by character, so that the result does not depend on how the output was split.

use std::collections::VecDeque;

use text::Vocabulary;

use crate::api::openai::logprobs::TextScores;
use crate::api::parsed_output::{OutputPart, ParsedOutput, PartEvent};
use crate::detokenize::OutputToken;
use crate::pipeline::text_delta::ResponseInfo;

/// One output, parsed so far.
pub(super) struct ScoredOutput {
    output: ParsedOutput,
    /// `None` if no log probabilities are requested.
    scores: Option<PartTokens>,
}

/// The tokens of an output's parts.
#[derive(Default)]
struct PartTokens {
    /// Number of characters parsed so far.
    num_chars: usize,
    /// Tokens without a part: their text has not arrived, or the parser withholds it.
    waiting: VecDeque<OutputToken>,
    /// Tokens of each part; none of a part that is no text.
    by_part: Vec<Vec<OutputToken>>,
    /// Whether only deltas have their tokens.
    are_forgotten: bool,
}

/// A change of the parts.
pub(super) struct ScoredEvent {
    pub(super) event: PartEvent,
    /// Tokens of the text that a delta appends.
    pub(super) tokens: Vec<OutputToken>,
}

/// The parts of an output.
#[derive(Clone, Copy)]
pub(super) struct ScoredParts<'a> {
    pub(super) parts: &'a [OutputPart],
    tokens: &'a [Vec<OutputToken>],
    vocabulary: &'a Vocabulary,
}

/// A part of an output.
#[derive(Clone, Copy)]
pub(super) struct ScoredPart<'a> {
    pub(super) part: &'a OutputPart,
    pub(super) scores: TextScores<'a>,
}

impl<'a> ScoredParts<'a> {
    /// Returns the part at this index.
    pub(super) fn get(&self, idx: usize) -> ScoredPart<'a> {
        let tokens = self.tokens.get(idx).map(Vec::as_slice).unwrap_or_default();
        ScoredPart { part: &self.parts[idx], scores: TextScores::new(self.vocabulary, tokens) }
    }
}

impl ScoredOutput {
    /// Creates an empty output.
    pub(super) fn new(info: &ResponseInfo) -> Self {
        let scores = info.logprobs.then(PartTokens::default);
        Self { output: ParsedOutput::new(&info.output), scores }
    }

    /// Parses a complete output.
    pub(super) fn parse(info: &ResponseInfo, text: &str, tokens: Vec<OutputToken>) -> Self {
        let mut output = Self::new(info);
        output.push(text, tokens, true);
        output
    }

    /// Appends text and tokens and returns the changes. A token arrives no later than its text.
    pub(super) fn push(&mut self, text: &str, tokens: Vec<OutputToken>, is_end: bool) -> Vec<ScoredEvent> {
        let Some(scores) = &mut self.scores else {
            let with_tokens = |event| ScoredEvent { event, tokens: Vec::new() };
            return self.output.push(text, is_end).into_iter().map(with_tokens).collect();
        };
        scores.waiting.extend(tokens);
        let (mut events, mut buffer) = (Vec::new(), [0; 4]);
        for character in text.chars() {
            let part_events = self.output.push(character.encode_utf8(&mut buffer), false);
            scores.num_chars += 1;
            scores.add(part_events, self.output.parts(), &mut events);
        }
        if is_end {
            let part_events = self.output.push("", true);
            scores.add(part_events, self.output.parts(), &mut events);
            scores.add_rest(self.output.parts(), &mut events);
        }
        events
    }

    /// Forgets the tokens of all parts, now and from now on; deltas still have theirs.
    pub(super) fn forget_tokens(&mut self) {
        if let Some(scores) = &mut self.scores {
            scores.by_part = Vec::new();
            scores.are_forgotten = true;
        }
    }

    /// All parts so far.
    pub(super) fn parts<'a>(&'a self, vocabulary: &'a Vocabulary) -> ScoredParts<'a> {
        let tokens = self.scores.as_ref().map(|scores| scores.by_part.as_slice()).unwrap_or_default();
        ScoredParts { parts: self.output.parts(), tokens, vocabulary }
    }
}

impl PartTokens {
    /// Appends the changes made by the latest character, or by the end, and finds the tokens of the text that
    /// they add.
    fn add(&mut self, part_events: Vec<PartEvent>, parts: &[OutputPart], events: &mut Vec<ScoredEvent>) {
        let last_delta = part_events.iter().rev().find_map(|event| match event {
            PartEvent::Delta(idx, more) => Some((*idx, more.chars().count())),
            PartEvent::Started(_) | PartEvent::Done(_) => None,
        });
        let started = |idx: usize| part_events.contains(&PartEvent::Started(idx));
        // Markers may precede a part's first text, while all later text belongs to the part.
        let starts_at =
            last_delta.filter(|(idx, _)| started(*idx)).map(|(_, len)| self.num_chars.saturating_sub(len));
        for event in part_events {
            append(event, events);
        }
        let Some((idx, _)) = last_delta else { return };
        let num_chars = self.num_chars;
        let num_arrived = self.waiting.partition_point(|token| token.text_offset < num_chars);
        let mut tokens: Vec<OutputToken> = self.waiting.drain(..num_arrived).collect();
        if let Some(start) = starts_at {
            // The token with the first character, and those that begin there without text of their own.
            let first = tokens.iter().rev().find(|token| token.text_offset <= start);
            let first_offset = first.map_or(0, |token| token.text_offset);
            tokens.retain(|token| token.text_offset >= first_offset);
        }
        self.assign(idx, tokens, parts, events);
    }

    /// Assigns the tokens without text at the end, such as the stop token, to the last part. Its end is the
    /// last event.
    fn add_rest(&mut self, parts: &[OutputPart], events: &mut Vec<ScoredEvent>) {
        let rest: Vec<OutputToken> = self.waiting.drain(..).collect();
        let (Some(last), Some(end)) = (parts.len().checked_sub(1), events.pop()) else { return };
        if matches!(parts[last], OutputPart::Text(_)) && !rest.is_empty() {
            append(PartEvent::Delta(last, String::new()), events);
            self.assign(last, rest, parts, events);
        }
        events.push(end);
    }

    /// Adds tokens to a part, if it is a text, and to its latest delta.
    fn assign(
        &mut self,
        idx: usize,
        tokens: Vec<OutputToken>,
        parts: &[OutputPart],
        events: &mut [ScoredEvent],
    ) {
        if !matches!(parts[idx], OutputPart::Text(_)) {
            return;
        }
        if !self.are_forgotten {
            self.by_part.resize_with(parts.len(), Vec::new);
            self.by_part[idx].extend_from_slice(&tokens);
        }
        let is_delta =
            |change: &&mut ScoredEvent| matches!(change.event, PartEvent::Delta(at, _) if at == idx);
        if let Some(delta) = events.iter_mut().rev().find(is_delta) {
            delta.tokens.extend(tokens);
        }
    }
}

/// Appends a change; consecutive deltas of a part become one.
fn append(event: PartEvent, events: &mut Vec<ScoredEvent>) {
    if let PartEvent::Delta(idx, more) = &event
        && let Some(ScoredEvent { event: PartEvent::Delta(last_idx, text), .. }) = events.last_mut()
        && last_idx == idx
    {
        text.push_str(more);
        return;
    }
    events.push(ScoredEvent { event, tokens: Vec::new() });
}

#[cfg(test)]
mod tests {
    use speculation::TokenLogprobs;

    use super::*;
    use crate::output::{CallFormat, OutputFormat, ReasoningFormat, ReasoningSyntax, ToolSyntax};

    fn info() -> ResponseInfo {
        let calls = CallFormat::Auto { syntax: ToolSyntax::Hermes, tools: vec!["f".to_owned()] };
        let reasoning = ReasoningFormat::OpenedByPrompt(ReasoningSyntax::Tags);
        ResponseInfo {
            id: "resp_1".to_owned(),
            created: 1,
            model: "m".to_owned(),
            system_fingerprint: "n".to_owned(),
            seed: 7,
            num_choices: 1,
            logprobs: true,
            output: OutputFormat { calls, reasoning, single_call: false },
        }
    }

    /// Tokens with these texts; their ids are their positions.
    fn tokens(texts: &[&str]) -> Vec<OutputToken> {
        let mut text_offset = 0;
        let token = |(id, text): (usize, &&str)| {
            let logprobs = Some(TokenLogprobs { logprob: -1.0, top: Vec::new() });
            let token = OutputToken { id: id as u32, text_offset, logprobs };
            text_offset += text.chars().count();
            token
        };
        texts.iter().enumerate().map(token).collect()
    }

    fn ids(tokens: &[OutputToken]) -> Vec<u32> {
        tokens.iter().map(|token| token.id).collect()
    }

    /// Texts of tokens, and the ids of the tokens of each part.
    fn cases() -> Vec<(Vec<&'static str>, Vec<Vec<u32>>)> {
        let call = "<tool_call>{\"name\": \"f\"}</tool_call>";
        vec![
            (vec!["hm", "</think>", "", "I", " see", ""], vec![vec![], vec![2, 3, 4, 5]]),
            (vec!["hm</th", "ink>I", " s€", "", "e"], vec![vec![], vec![1, 2, 3, 4]]),
            (
                vec!["hm", "</think>", "a", "<", "b", call, "done", ""],
                vec![vec![], vec![2, 3, 4], vec![], vec![6, 7]],
            ),
            (vec!["hm", "</think>", call, ""], vec![vec![], vec![]]),
            (vec!["</think>", "<tool", "_call>", "{}", "</tool_call>", ""], vec![vec![1, 2, 3, 4, 5]]),
            (vec!["hm", ""], vec![vec![]]),
        ]
    }

    #[test]
    fn forgotten_tokens_are_in_deltas_only() {
        let (texts, forgets_at) = (["hm", "</think>", "I", " see", " it", ""], 4);
        let (tokens, mut output) = (tokens(&texts), ScoredOutput::new(&info()));
        let mut in_deltas = Vec::new();
        for (idx, text) in texts.iter().enumerate() {
            if idx == forgets_at {
                assert_eq!(ids(&output.scores.as_ref().unwrap().by_part[1]), [2, 3]);
                output.forget_tokens();
            }
            let is_end = idx + 1 == texts.len();
            let events = output.push(text, vec![tokens[idx].clone()], is_end);
            in_deltas.extend(events.iter().flat_map(|change| ids(&change.tokens)));
            assert!(idx < forgets_at || output.scores.as_ref().unwrap().by_part.is_empty());
        }
        assert_eq!(in_deltas, [2, 3, 4, 5]);
    }

    /// However an output is split, each token of a text is in one of its deltas.
    #[test]
    fn tokens_belong_to_the_texts_that_they_wrote() {
        for (texts, expected) in cases() {
            let (text, tokens) = (texts.concat(), tokens(&texts));
            for num_first in 0..=tokens.len() {
                // Text may arrive later than its tokens.
                let arrived = texts[..num_first].concat();
                for cut in (0..=arrived.len()).filter(|&cut| arrived.is_char_boundary(cut)) {
                    let mut output = ScoredOutput::new(&info());
                    let mut events = output.push(&text[..cut], tokens[..num_first].to_vec(), false);
                    events.extend(output.push(&text[cut..], tokens[num_first..].to_vec(), true));
                    let scores = output.scores.as_ref().unwrap();
                    let by_part = |idx: usize| scores.by_part.get(idx).map(|tokens| ids(tokens));
                    let found: Vec<_> = (0..output.output.parts().len())
                        .map(|idx| by_part(idx).unwrap_or_default())
                        .collect();
                    assert_eq!(found, expected, "{texts:?} {num_first} {cut}");
                    let mut in_deltas = vec![Vec::new(); expected.len()];
                    for ScoredEvent { event, tokens } in events {
                        match event {
                            PartEvent::Delta(idx, _) => in_deltas[idx].extend(ids(&tokens)),
                            PartEvent::Started(_) | PartEvent::Done(_) => assert!(tokens.is_empty()),
                        }
                    }
                    assert_eq!(in_deltas, expected, "{texts:?} {num_first} {cut}");
                }
            }
        }
    }
}
