//! Log probabilities in OpenAI's two formats: for chat completions, and the older one for completions.

use serde::{Serialize, Serializer};
use speculation::TokenId;

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
        let scored = |id: TokenId, logprob: f32| ScoredToken {
            token: vocabulary.spell(id),
            logprob: logprob.max(MIN_LOGPROB),
            bytes: vocabulary.bytes(id).to_vec(),
        };
        let entry = |token: &OutputToken| {
            let logprobs = token.logprobs.as_ref()?;
            let top_logprobs = logprobs.top.iter().map(|&(id, logprob)| scored(id, logprob)).collect();
            Some(ChatToken { token: scored(token.id, logprobs.logprob), top_logprobs })
        };
        Self { content: tokens.iter().filter_map(entry).collect(), refusal: None }
    }
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
