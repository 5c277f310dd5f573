//! [`IncrementalDecoder`]: converts tokens to text one by one, for any decoder.

use speculation::TokenId;

use text::ModelText;

use super::utf8::Utf8Decoder;

/// Incremental decoder for a sequence of tokens.
#[derive(Debug)]
pub(super) struct IncrementalDecoder {
    /// Whether special tokens add text.
    keeps_special: bool,
    method: Method,
}

#[derive(Debug)]
enum Method {
    /// Each token has fixed bytes.
    Bytes(Utf8Decoder),
    /// A token's text depends on its neighbors (WordPiece, CTC, no decoder, ...), so the library's decoder is
    /// used.
    Window(DecodeWindow),
}

/// The last tokens, decoded together: those already emitted, which affect the next ones, and those not yet
/// emitted.
#[derive(Debug, Default)]
struct DecodeWindow {
    /// Only tokens that add text.
    ids: Vec<TokenId>,
    /// Number of `ids` whose text was already emitted.
    num_emitted: usize,
}

impl IncrementalDecoder {
    pub(super) fn new(model: &ModelText, keeps_special: bool) -> Self {
        let method = match model.vocabulary().is_bytes() {
            true => Method::Bytes(Utf8Decoder::default()),
            false => Method::Window(DecodeWindow::default()),
        };
        Self { keeps_special, method }
    }

    /// Appends the text that this token completes.
    pub(super) fn push(&mut self, model: &ModelText, id: TokenId, text: &mut String) {
        let vocabulary = model.vocabulary();
        let bytes = if self.keeps_special { vocabulary.bytes(id) } else { vocabulary.text_bytes(id) };
        match &mut self.method {
            Method::Bytes(utf8) => utf8.push(bytes, text),
            // A run of tokens without text would fill the window.
            Method::Window(_) if bytes.is_empty() => {}
            Method::Window(window) => window.push(model, id, text),
        }
    }

    /// Appends the spelling of a special token.
    pub(super) fn push_special(&mut self, model: &ModelText, id: TokenId, text: &mut String) {
        match &mut self.method {
            Method::Bytes(utf8) => utf8.push(model.vocabulary().bytes(id), text),
            Method::Window(window) => {
                text.push_str(&window.new_text(model));
                *window = DecodeWindow::default();
                text.push_str(&model.vocabulary().spell(id));
            }
        }
    }

    /// Returns the withheld text.
    pub(super) fn finish(&mut self, model: &ModelText) -> String {
        match &mut self.method {
            Method::Bytes(utf8) => utf8.finish(),
            Method::Window(window) => window.new_text(model),
        }
    }
}

impl DecodeWindow {
    fn push(&mut self, model: &ModelText, id: TokenId, text: &mut String) {
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
        let (emitted, whole) = (model.decode_all(&self.ids[..self.num_emitted]), model.decode_all(&self.ids));
        let common = emitted.chars().zip(whole.chars()).take_while(|(emitted, whole)| emitted == whole);
        let common_len: usize = common.map(|(character, _)| character.len_utf8()).sum();
        whole[common_len..].to_owned()
    }
}
