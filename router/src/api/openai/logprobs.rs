//! Log probabilities in OpenAI's two formats: for chat completions and responses, and the older one for
//! completions. Those of a prompt are in vLLM's format.

use serde::{Serialize, Serializer};
use speculation::{TokenId, TokenLogprobs};

use crate::detokenize::OutputToken;
use text::Vocabulary;

/// Stands for minus infinity, which JSON does not have; the same value as in vLLM.
const MIN_LOGPROB: f32 = -9999.0;

/// Log probabilities of a chat completion's choice.
#[derive(Debug, Default, Serialize)]
pub struct ChatLogprobs {
    content: Vec<ChatToken>,
    refusal: Option<()>,
}

#[derive(Debug, Serialize)]
struct ChatToken {
    #[serde(flatten)]
    token: ScoredToken,
    top_logprobs: Vec<ScoredToken>,
}

#[derive(Debug, Serialize)]
struct ScoredToken {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    /// One entry per token, including the stop token.
    pub fn new(vocabulary: &Vocabulary, tokens: &[OutputToken]) -> Self {
        let entry = |token: &OutputToken| ChatToken::new(vocabulary, token);
        Self { content: tokens.iter().filter_map(entry).collect(), refusal: None }
    }
}

impl ChatToken {
    /// `None` for a token without log probabilities.
    fn new(vocabulary: &Vocabulary, token: &OutputToken) -> Option<Self> {
        let scored = |id: TokenId, logprob: f32| ScoredToken {
            token: vocabulary.spell(id),
            logprob: logprob.max(MIN_LOGPROB),
            bytes: vocabulary.bytes(id).to_vec(),
        };
        let logprobs = token.logprobs.as_ref()?;
        let top_logprobs = logprobs.top.iter().map(|&(id, logprob)| scored(id, logprob)).collect();
        Some(Self { token: scored(token.id, logprobs.logprob), top_logprobs })
    }
}

/// Log probabilities of a text of a response: the list that a chat completion has as `content`. Tokens are
/// spelled while they are written.
#[derive(Debug, Clone, Copy)]
pub struct TextScores<'a> {
    vocabulary: &'a Vocabulary,
    tokens: &'a [OutputToken],
}

impl<'a> TextScores<'a> {
    /// One entry per token.
    pub fn new(vocabulary: &'a Vocabulary, tokens: &'a [OutputToken]) -> Self {
        Self { vocabulary, tokens }
    }

    /// The same for a text without tokens.
    pub fn without_tokens(self) -> Self {
        Self { tokens: &[], ..self }
    }
}

impl Serialize for TextScores<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.tokens.iter().filter_map(|token| ChatToken::new(self.vocabulary, token)))
    }
}

/// Approximate JSON size of one token, without top log probabilities, and of each of those.
const TOKEN_BYTES: usize = 96;
const TOP_TOKEN_BYTES: usize = 80;

/// Approximate JSON size of these tokens' log probabilities.
pub fn json_bytes(tokens: &[OutputToken]) -> usize {
    tokens.iter().map(|token| TOKEN_BYTES + TOP_TOKEN_BYTES * num_top(token)).sum()
}

/// Number of a token's top log probabilities.
pub fn num_top(token: &OutputToken) -> usize {
    token.logprobs.as_ref().map_or(0, |logprobs| logprobs.top.len())
}

/// Log probabilities of a completion's choice, as parallel lists.
#[derive(Debug, Default, Serialize)]
pub struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<TopTokens>>,
    text_offset: Vec<usize>,
}

impl CompletionLogprobs {
    /// One entry per token, including the stop token. The first token of an echoed prompt has no
    /// probabilities.
    pub fn new(vocabulary: &Vocabulary, tokens: &[OutputToken]) -> Self {
        let mut lists = Self::default();
        for token in tokens {
            let logprobs = token.logprobs.as_ref();
            lists.tokens.push(vocabulary.spell(token.id));
            lists.text_offset.push(token.text_offset);
            lists.token_logprobs.push(logprobs.map(|logprobs| logprobs.logprob.max(MIN_LOGPROB)));
            // The drawn token is always listed, likely or not.
            lists.top_logprobs.push(logprobs.map(|logprobs| {
                let sampled = (token.id, logprobs.logprob);
                let all = logprobs.top.iter().chain(std::iter::once(&sampled));
                all.map(|&(id, logprob)| (vocabulary.spell(id), logprob.max(MIN_LOGPROB))).collect()
            }));
        }
        lists
    }
}

/// vLLM's log probabilities of a prompt. Tokens are spelled while they are written: all of them at once would
/// take as much memory as their JSON, which alone is reserved.
#[derive(Debug)]
pub struct PromptScores<'a> {
    vocabulary: &'a Vocabulary,
    tokens: Vec<OutputToken>,
}

impl<'a> PromptScores<'a> {
    /// One entry per token of the prompt; null for the first one, which has no probabilities.
    pub fn new(vocabulary: &'a Vocabulary, tokens: Vec<OutputToken>) -> Self {
        Self { vocabulary, tokens }
    }
}

impl Serialize for PromptScores<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let entries = self.tokens.iter().map(|token| {
            let logprobs = token.logprobs.as_ref()?;
            Some(RankedTokens { vocabulary: self.vocabulary, id: token.id, logprobs })
        });
        serializer.collect_seq(entries)
    }
}

/// An object of tokens by id: the prompt's own first, then the top tokens.
struct RankedTokens<'a> {
    vocabulary: &'a Vocabulary,
    /// The prompt's own.
    id: TokenId,
    logprobs: &'a TokenLogprobs,
}

#[derive(Serialize)]
struct RankedToken {
    logprob: f32,
    /// From 1; only known of the top tokens.
    rank: Option<u32>,
    decoded_token: String,
}

impl Serialize for RankedTokens<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let ranked = |id: TokenId, logprob: f32, rank: Option<u32>| {
            let decoded_token = self.vocabulary.spell(id);
            (id, RankedToken { logprob: logprob.max(MIN_LOGPROB), rank, decoded_token })
        };
        let top = || (1..).zip(&self.logprobs.top);
        let own_rank = top().find(|(_, (id, _))| *id == self.id).map(|(rank, _)| rank);
        let own = ranked(self.id, self.logprobs.logprob, own_rank);
        let others = top().filter(|(_, (id, _))| *id != self.id);
        let others = others.map(|(rank, &(id, logprob))| ranked(id, logprob, Some(rank)));
        serializer.collect_map(std::iter::once(own).chain(others))
    }
}

/// An object of log probabilities by token. Not a `serde_json` object: its numbers are `f64`, so a token's
/// `f32` would be formatted differently than in `token_logprobs`.
#[derive(Debug, Default)]
struct TopTokens(Vec<(String, f32)>);

impl FromIterator<(String, f32)> for TopTokens {
    /// Keeps the first entry of each token.
    fn from_iter<I: IntoIterator<Item = (String, f32)>>(scored: I) -> Self {
        let mut tokens: Vec<(String, f32)> = Vec::new();
        for (token, logprob) in scored {
            if tokens.iter().all(|(seen, _)| *seen != token) {
                tokens.push((token, logprob));
            }
        }
        Self(tokens)
    }
}

impl Serialize for TopTokens {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, logprob)| (token, logprob)))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use text::ModelText;

    use super::*;

    #[test]
    fn a_prompt_token_comes_first_with_its_rank_if_it_has_one() {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/target/");
        let tokenizer = std::fs::read(format!("{dir}{}", text::asset::TOKENIZER)).unwrap();
        let model =
            ModelText::from_assets(|name| (name == text::asset::TOKENIZER).then_some(&*tokenizer)).unwrap();
        let vocabulary = model.vocabulary();
        let token = |id, logprobs| OutputToken { id, text_offset: 0, logprobs };
        let scored = |logprob, top: &[(TokenId, f32)]| Some(TokenLogprobs { logprob, top: top.to_vec() });
        let tokens = vec![
            token(70, None),
            token(71, scored(-0.5, &[(72, -0.25), (71, -0.5)])),
            token(73, scored(f32::NEG_INFINITY, &[(72, -0.25)])),
            token(74, scored(-2.5, &[])),
        ];
        let entry = |id, logprob: f64, rank: Option<u32>| json!({ "logprob": logprob, "rank": rank, "decoded_token": vocabulary.spell(id) });
        let expected = json!([
            null,
            { "71": entry(71, -0.5, Some(2)), "72": entry(72, -0.25, Some(1)) },
            { "73": entry(73, -9999.0, None), "72": entry(72, -0.25, Some(1)) },
            { "74": entry(74, -2.5, None) },
        ]);
        let scores = PromptScores::new(vocabulary, tokens);
        assert_eq!(serde_json::to_value(&scores).unwrap(), expected);
        let text = serde_json::to_string(&scores).unwrap();
        assert!(text.starts_with(r#"[null,{"71":{"logprob":-0.5,"rank":2,"decoded_token":"#), "{text}");
    }
}
