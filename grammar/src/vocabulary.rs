//! [`Vocabulary`]: the bytes of each token, in the parser's format.

use std::sync::Arc;

use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

/// The tokenizer data that the parser needs. Clones share one table.
#[derive(Clone)]
pub struct Vocabulary {
    env: TokEnv,
    num_tokens: usize,
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary").field("num_tokens", &self.num_tokens).finish()
    }
}

impl Vocabulary {
    /// The tokens with these bytes, by id. Those of a special token begin with 0xFF, those of an unused id are
    /// empty.
    ///
    /// The parser gets one extra token that stands for the end of the text, so that the spec alone determines
    /// which ids end a sequence. Every token is allowed by its bytes: a text has many tokenizations and the
    /// model chooses one. Forcing one of them would depend on how the text was cut.
    pub fn from_words(mut words: Vec<Vec<u8>>) -> Self {
        let num_tokens = words.len();
        words.push([&[TokTrie::SPECIAL_TOKEN_MARKER], b"<end>".as_slice()].concat());
        let info = TokRxInfo::new(words.len() as u32, num_tokens as u32);
        let env = Arc::new(ApproximateTokEnv::new(TokTrie::from(&info, &words)));
        Self { env, num_tokens }
    }

    /// One token per byte: enough to check a grammar without a model.
    pub(crate) fn of_bytes() -> Self {
        Self::from_words((0..=u8::MAX).map(|byte| vec![byte]).collect())
    }

    /// Number of token ids.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// The bytes of the token; those of a special token begin with 0xFF, which does not occur in text.
    pub fn bytes(&self, id: u32) -> &[u8] {
        self.env.tok_trie().token(id)
    }

    pub(crate) fn env(&self) -> &TokEnv {
        &self.env
    }
}
