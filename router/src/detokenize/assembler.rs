//! [`TextAssembler`]: tokens to text, one after the other, whatever the tokenizer's decoder is.

use speculation::TokenId;

use text::ModelText;

use super::utf8::Utf8Assembler;

/// The text of a list of tokens in the making.
#[derive(Debug)]
pub(super) enum TextAssembler {
    /// Each token stands for bytes of its own.
    Bytes(Utf8Assembler),
    /// What a token adds depends on its neighbours (WordPiece, CTC, no decoder, ...): the library's decoder says it.
    Window(DecodeWindow),
}

/// The last tokens, decoded together: those whose text was shown, for what they do to the next ones, and the next ones.
#[derive(Debug, Default)]
pub(super) struct DecodeWindow {
    ids: Vec<TokenId>,
    /// How many of `ids` are in the text already.
    num_shown: usize,
}

impl TextAssembler {
    pub(super) fn new(model: &ModelText) -> Self {
        match model.vocabulary().is_bytes() {
            true => Self::Bytes(Utf8Assembler::default()),
            false => Self::Window(DecodeWindow::default()),
        }
    }

    /// Appends the text that the token completes.
    pub(super) fn push(&mut self, model: &ModelText, id: TokenId, text: &mut String) {
        match self {
            Self::Bytes(utf8) => utf8.push(model.vocabulary().text_bytes(id), text),
            Self::Window(window) => window.push(model, id, text),
        }
    }

    /// Appends a special token as it is spelt.
    pub(super) fn push_spelt(&mut self, model: &ModelText, id: TokenId, text: &mut String) {
        match self {
            Self::Bytes(utf8) => utf8.push(model.vocabulary().bytes(id), text),
            Self::Window(window) => {
                text.push_str(&window.new_text(model));
                *window = DecodeWindow::default();
                text.push_str(&model.vocabulary().spell(id));
            }
        }
    }

    /// What was held back.
    pub(super) fn finish(&mut self, model: &ModelText) -> String {
        match self {
            Self::Bytes(utf8) => utf8.finish(),
            Self::Window(window) => window.new_text(model),
        }
    }
}

impl DecodeWindow {
    fn push(&mut self, model: &ModelText, id: TokenId, text: &mut String) {
        self.ids.push(id);
        let new = self.new_text(model);
        // A character in the making decodes to a replacement character.
        if new.is_empty() || new.ends_with(char::REPLACEMENT_CHARACTER) {
            return;
        }
        text.push_str(&new);
        self.ids.drain(..self.num_shown);
        self.num_shown = self.ids.len();
    }

    /// What the tokens that are not shown add to the text of those that are. A decoder may rewrite what stands before: that is
    /// shown already, and stays.
    fn new_text(&self, model: &ModelText) -> String {
        let (before, whole) = (model.decode(&self.ids[..self.num_shown]), model.decode(&self.ids));
        let same = before.chars().zip(whole.chars()).take_while(|(before, whole)| before == whole);
        let same: usize = same.map(|(character, _)| character.len_utf8()).sum();
        whole[same..].to_owned()
    }
}
