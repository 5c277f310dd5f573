//! [`IncrementalDecoder`]: converts tokens to text one by one, for any decoder.

use speculation::TokenId;

use text::ModelText;

use super::utf8::Utf8Decoder;

/// Maximum tokens whose text is withheld because it is empty or incomplete. A character has at most 4 bytes,
/// so a longer run is no part of one; it would be decoded again with each further token.
const PENDING_MAX: usize = 8;

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
        let is_incomplete = new.is_empty() || new.ends_with(char::REPLACEMENT_CHARACTER);
        if is_incomplete && self.ids.len() - self.num_emitted <= PENDING_MAX {
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use text::asset;

    use super::*;

    /// A model whose tokens are these, without fixed bytes because of its decoder.
    fn model(tokens: &[&str], decoder: &Value) -> ModelText {
        let vocab: serde_json::Map<String, Value> =
            tokens.iter().zip(0..).map(|(token, id)| ((*token).to_owned(), json!(id))).collect();
        let tokenizer = json!({ "version": "1.0", "added_tokens": [], "decoder": decoder,
            "model": { "type": "WordLevel", "vocab": vocab, "unk_token": tokens[0] } });
        let tokenizer = tokenizer.to_string().into_bytes();
        ModelText::from_assets(|name| (name == asset::TOKENIZER).then_some(tokenizer.as_slice())).unwrap()
    }

    /// Pushes ids one by one; returns the text and the maximum number of ids in the window.
    fn decode(model: &ModelText, ids: impl IntoIterator<Item = TokenId>) -> (String, usize) {
        let mut decoder = IncrementalDecoder::new(model, false);
        let (mut text, mut max) = (String::new(), 0);
        for id in ids {
            decoder.push(model, id, &mut text);
            let Method::Window(window) = &decoder.method else { panic!("the tokens have fixed bytes") };
            max = max.max(window.ids.len());
        }
        text += &decoder.finish(model);
        (text, max)
    }

    /// A model with tokens of single bytes. With the last part of its decoder, which changes none of these
    /// texts, tokens have no fixed bytes.
    fn bytes_with(tokens: &[&str]) -> ModelText {
        let strip = json!({ "type": "Strip", "content": "$", "start": 0, "stop": 1 });
        let decoders = [json!({ "type": "ByteFallback" }), json!({ "type": "Fuse" }), strip];
        model(tokens, &json!({ "type": "Sequence", "decoders": decoders }))
    }

    #[test]
    fn a_long_run_without_whole_characters_is_not_withheld() {
        let (text, max) = decode(&bytes_with(&["<0x80>"]), vec![0; 10_000]);
        assert_eq!(text, "\u{fffd}".repeat(10_000));
        assert!(max <= 2 * (PENDING_MAX + 1), "{max}");
        let ctc =
            json!({ "type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true });
        let ctc = model(&["a", "<pad>", "b"], &ctc);
        let (text, max) = decode(&ctc, vec![0; 10_000]);
        assert_eq!(text, "a");
        assert!(max <= 2 * (PENDING_MAX + 1), "{max}");
        let ids = [vec![0; 50], vec![1; 50], vec![0, 0, 2]].concat();
        assert_eq!(decode(&ctc, ids).0, "aab");
    }

    #[test]
    fn characters_that_are_split_over_byte_tokens_come_out_whole() {
        let text = "\u{e9}\u{20ac}\u{1f642}".repeat(20);
        let tokens: Vec<String> = (0..=u8::MAX).map(|byte| format!("<0x{byte:02X}>")).collect();
        let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
        assert_eq!(decode(&bytes_with(&tokens), text.bytes().map(TokenId::from)).0, text);
    }
}
