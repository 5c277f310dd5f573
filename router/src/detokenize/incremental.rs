//! [`IncrementalDecoder`]: converts tokens to text one by one, for any decoder.

use speculation::TokenId;

use text::ModelText;

use super::utf8::Utf8Decoder;

/// Incremental decoder for a sequence of tokens.
#[derive(Debug)]
pub(super) enum IncrementalDecoder {
    /// Each token has fixed bytes.
    Bytes(Utf8Decoder),
    /// A token's text depends on its neighbors (WordPiece, CTC, no decoder, ...), so the library's decoder is
    /// used.
    Window(DecodeWindow),
}

/// The last tokens, decoded together: those already emitted, which affect the next ones, and those not yet
/// emitted.
#[derive(Debug, Default)]
pub(super) struct DecodeWindow {
    ids: Vec<TokenId>,
    /// Number of `ids` whose text was already emitted.
    num_emitted: usize,
}

impl IncrementalDecoder {
    pub(super) fn new(model: &ModelText) -> Self {
        match model.vocabulary().is_bytes() {
            true => Self::Bytes(Utf8Decoder::default()),
            false => Self::Window(DecodeWindow::default()),
        }
    }

    /// Appends the text that this token completes.
    pub(super) fn push(&mut self, model: &ModelText, id: TokenId, text: &mut String) {
        match self {
            Self::Bytes(utf8) => utf8.push(model.vocabulary().text_bytes(id), text),
            Self::Window(window) => window.push(model, id, text),
        }
    }

    /// Appends the spelling of a special token.
    pub(super) fn push_special(&mut self, model: &ModelText, id: TokenId, text: &mut String) {
        match self {
            Self::Bytes(utf8) => utf8.push(model.vocabulary().bytes(id), text),
            Self::Window(window) => {
                text.push_str(&window.new_text(model));
                *window = DecodeWindow::default();
                text.push_str(&model.vocabulary().spell(id));
            }
        }
    }

    /// Returns the withheld text.
    pub(super) fn finish(&mut self, model: &ModelText) -> String {
        match self {
            Self::Bytes(utf8) => utf8.finish(),
            Self::Window(window) => window.new_text(model),
        }
    }
}

impl DecodeWindow {
    fn push(&mut self, model: &ModelText, id: TokenId, text: &mut String) {
        // The decoder does not get it, and a run of such tokens would fill the window.
        if model.vocabulary().text_bytes(id).is_empty() {
            return;
        }
        self.ids.push(id);
        let new = self.new_text(model);
        // An incomplete character decodes to a replacement character.
        if new.is_empty() || new.ends_with(char::REPLACEMENT_CHARACTER) {
            return;
        }
        text.push_str(&new);
        self.ids.drain(..self.num_emitted);
        self.num_emitted = self.ids.len();
    }

    /// Returns the text that the new tokens add after the emitted ones. A decoder may rewrite earlier text,
    /// but that was already emitted and stays.
    fn new_text(&self, model: &ModelText) -> String {
        let (emitted, whole) = (model.decode(&self.ids[..self.num_emitted]), model.decode(&self.ids));
        let common = emitted.chars().zip(whole.chars()).take_while(|(emitted, whole)| emitted == whole);
        let common_len: usize = common.map(|(character, _)| character.len_utf8()).sum();
        whole[common_len..].to_owned()
    }
}
