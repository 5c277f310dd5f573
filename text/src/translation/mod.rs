//! [`Translation`]: translates between the ids of a target and those of a draft with a different tokenizer,
//! by the bytes of tokens.
//!
//! It has two uses. Committed target ids are converted to the draft's ids ([`sequence`]), and the draft's
//! logits are converted to logits of target ids ([`Translation::scatter`]). Both use one map ([`map`]) of
//! tokens with equal bytes; text that the map does not cover is tokenized by the draft's tokenizer
//! ([`draft_text`]). Pure: no model, no files.

mod draft_text;
mod map;
mod sequence;
#[cfg(test)]
mod tests;

use speculation::TokenId;
use tokenizers::Tokenizer;

use self::draft_text::DraftText;
use self::map::TokenMap;
use crate::vocabulary::Vocabulary;
use crate::{ModelTextError, asset};

pub use map::Coverage;
pub use sequence::TranslatedSequence;

/// Minimum number of shared tokens of at least two bytes. Single bytes do not count, because most tokenizers
/// share all of them.
pub const MIN_SHARED_TOKENS: usize = 300;

/// One of the two tokenizers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The target's.
    Target,
    /// The draft's.
    Draft,
}

/// Why a draft cannot be used with this target tokenizer.
#[derive(Debug, thiserror::Error)]
pub enum TranslationError {
    /// A tokenizer cannot be read.
    #[error("the {side}'s tokenizer: {source}")]
    Unreadable {
        /// The tokenizer.
        side: Side,
        /// The error.
        source: ModelTextError,
    },
    /// A text does not equal the bytes of its tokens (WordPiece and similar).
    #[error(
        "the {side}'s tokenizer does not keep the bytes of a text (its decoder is neither byte-level nor sentencepiece's): use a model \
         with a byte-level BPE or sentencepiece tokenizer"
    )]
    NotBytes {
        /// The tokenizer.
        side: Side,
    },
    /// The draft cannot encode every text.
    #[error(
        "the draft's tokenizer has no token for byte {byte:#04x}: use a draft whose tokenizer has every byte"
    )]
    MissingByte {
        /// The lowest missing byte.
        byte: u8,
    },
    /// Too few of the draft's tokens can be translated.
    #[error(
        "the tokenizers share {shared} tokens of two bytes and more, at least {MIN_SHARED_TOKENS} are needed: check that the target \
         tokenizer is the target's, or use another draft"
    )]
    TooFewShared {
        /// Number of tokens of at least two bytes with equal bytes.
        shared: usize,
    },
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Target => "target",
            Self::Draft => "draft",
        })
    }
}

/// One model's tokenizer and EOS ids.
#[derive(Debug, Clone, Copy)]
pub struct TokenizerFile<'a> {
    /// Content of tokenizer.json.
    pub json: &'a [u8],
    /// EOS ids; may be empty.
    pub eos_token_ids: &'a [TokenId],
}

/// Both tokenizers and the map between them.
#[derive(Debug)]
pub struct Translation {
    target: Vocabulary,
    /// Ids that the target's tokenizer puts before a text (BOS); replaced by the draft's own.
    target_frame: Vec<TokenId>,
    draft: DraftText,
    map: TokenMap,
}

impl Translation {
    /// Reads both tokenizers and builds the map. Takes up to a second for large vocabularies.
    pub fn new(target: TokenizerFile<'_>, draft: TokenizerFile<'_>) -> Result<Self, TranslationError> {
        Self::for_embeddings(target, draft, u32::MAX)
    }

    /// Like [`Self::new`], for a draft model with this number of embeddings. A tokenizer may have added
    /// tokens beyond them: the model can neither read nor draw these, so they are not used.
    pub fn for_embeddings(
        target: TokenizerFile<'_>,
        draft: TokenizerFile<'_>,
        num_embeddings: u32,
    ) -> Result<Self, TranslationError> {
        let (target_tokenizer, target_vocabulary) = read(Side::Target, target.json)?;
        let (mut draft_tokenizer, mut draft_vocabulary) = read(Side::Draft, draft.json)?;
        draft_vocabulary.truncate(num_embeddings as usize);
        let frame_of = |tokenizer: &Tokenizer| draft_text::frame(tokenizer);
        let (target_frame, mut draft_frame) = (frame_of(&target_tokenizer), frame_of(&draft_tokenizer));
        draft_frame.retain(|&id| id < num_embeddings);
        // Special tokens are translated by the map; text that spells one remains text.
        draft_tokenizer.set_encode_special_tokens(true);
        let ends = (target.eos_token_ids, draft.eos_token_ids);
        let map = TokenMap::new((&target_vocabulary, &draft_vocabulary), ends);
        let draft = DraftText::new(draft_tokenizer, draft_vocabulary, draft_frame);
        if let Some(byte) = draft.missing_byte() {
            return Err(TranslationError::MissingByte { byte });
        }
        let coverage = map.coverage(&target_vocabulary, draft.vocabulary());
        if coverage.shared_of_two_bytes < MIN_SHARED_TOKENS {
            return Err(TranslationError::TooFewShared { shared: coverage.shared_of_two_bytes });
        }
        Ok(Self { target: target_vocabulary, target_frame, draft, map })
    }

    /// Coverage of both vocabularies by the map.
    pub fn coverage(&self) -> Coverage {
        self.map.coverage(&self.target, self.draft.vocabulary())
    }

    /// Number of ids of the target's tokenizer: its highest id plus one.
    pub fn num_target_ids(&self) -> usize {
        self.target.len()
    }

    /// The draft id of a target id, by equal bytes or by the rules for special tokens.
    pub fn to_draft(&self, target_id: TokenId) -> Option<TokenId> {
        self.map.to_draft(target_id)
    }

    /// Converts a row of the draft's logits to logits of target ids; ids outside the map get -inf.
    ///
    /// `draft_row`: at least one logit per draft id. `target_row`: one per target id.
    pub fn scatter(&self, draft_row: &[f32], target_row: &mut [f32]) {
        target_row.fill(f32::NEG_INFINITY);
        for &(target_id, draft_id) in self.map.guessed() {
            target_row[target_id as usize] = draft_row[draft_id as usize];
        }
    }

    /// The text that the target id at `position` adds, and its kind for the draft.
    fn unit(&self, position: usize, target_id: TokenId) -> Unit<'_> {
        if self.target_frame.get(position) == Some(&target_id) {
            return Unit::Nothing;
        }
        let is_special = self.target.is_special(target_id);
        match (self.target.bytes(target_id), self.map.to_draft(target_id)) {
            ([], _) => Unit::Nothing,
            (bytes, Some(draft_id)) if is_special => Unit::Special { len: bytes.len(), draft_id },
            // A special token that the draft does not have is passed as its spelling.
            (bytes, _) => Unit::Text(bytes),
        }
    }
}

/// One id of a target's sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unit<'a> {
    /// Not passed to the draft: the target's frame, and ids without bytes.
    Nothing,
    /// Text.
    Text(&'a [u8]),
    /// A special token that the draft has too.
    Special {
        /// Number of bytes that it counts in the target's text.
        len: usize,
        /// The draft's id.
        draft_id: TokenId,
    },
}

impl Unit<'_> {
    /// Number of bytes that it adds.
    fn len(self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Text(bytes) => bytes.len(),
            Self::Special { len, .. } => len,
        }
    }
}

fn read(side: Side, json: &[u8]) -> Result<(Tokenizer, Vocabulary), TranslationError> {
    let unreadable = |source| TranslationError::Unreadable { side, source };
    let mut tokenizer = Tokenizer::from_bytes(json).map_err(|error| {
        unreadable(ModelTextError::Tokenizer { reason: format!("{}: {error}", asset::TOKENIZER) })
    })?;
    let cannot = |error: tokenizers::Error| ModelTextError::Tokenizer { reason: error.to_string() };
    tokenizer.with_truncation(None).map_err(|error| unreadable(cannot(error)))?.with_padding(None);
    let vocabulary = Vocabulary::of(&tokenizer).map_err(unreadable)?;
    if !vocabulary.is_bytes() {
        return Err(TranslationError::NotBytes { side });
    }
    Ok((tokenizer, vocabulary))
}
