//! Decodes spans with the bundled tokenizer.

use std::path::PathBuf;
use std::sync::OnceLock;

use proptest::prelude::*;
use speculation::TokenLogprobs;
use text::{Framing, asset};
use tokenizers::Tokenizer;

use super::*;
use crate::generation::SpeculationUsage;

/// Path of the bundled target's tokenizer file.
fn demo_tokenizer() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/demo/target").join(asset::TOKENIZER)
}

/// The bundled target's tokenizer, without a chat template.
fn demo() -> Arc<ModelText> {
    static DEMO: OnceLock<Arc<ModelText>> = OnceLock::new();
    let load = || {
        let tokenizer = std::fs::read(demo_tokenizer()).unwrap();
        let fetch = |name: &str| (name == asset::TOKENIZER).then_some(tokenizer.as_slice());
        Arc::new(ModelText::from_assets(fetch).unwrap())
    };
    Arc::clone(DEMO.get_or_init(load))
}

/// Reference: the bundled tokenizer's own decoding, without special tokens.
fn demo_decode(ids: &[TokenId]) -> String {
    reference().decode(ids, true).unwrap()
}

fn reference() -> &'static Tokenizer {
    static DEMO: OnceLock<Tokenizer> = OnceLock::new();
    DEMO.get_or_init(|| Tokenizer::from_file(demo_tokenizer()).unwrap())
}

fn with_special_tokens() -> StopConditions {
    StopConditions { keep_special_tokens: true, ..StopConditions::default() }
}

fn span(token_ids: &[TokenId], num_drafted: u32) -> CommittedTokens {
    CommittedTokens {
        choice: 0,
        token_ids: token_ids.into(),
        num_drafted,
        logprobs: Vec::new(),
        usage: SpeculationUsage::default(),
    }
}

/// Feeds `ids` in spans of length `cut`; returns the text, whether a stop string ended it, and the number of
/// tokens.
fn run(conditions: &StopConditions, ids: &[TokenId], cut: usize) -> (String, bool, u32) {
    let mut choice = ChoiceText::new(demo(), conditions, 0);
    let mut text = String::new();
    for ids in ids.chunks(cut) {
        let out = choice.push(span(ids, 0));
        text.push_str(&out.text);
        if out.stopped {
            return (text, true, choice.num_tokens());
        }
    }
    let (rest, stopped) = choice.finish();
    (text + &rest, stopped, choice.num_tokens())
}

fn encode(text: &str) -> Vec<TokenId> {
    demo().encode(text, Framing::Add).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    /// The reference is the tokenizer's own decoder over the whole sequence.
    #[test]
    fn spans_of_any_ids_decode_like_the_whole_sequence(
        ids in prop::collection::vec(0u32..4096, 0..40),
        cut in 1usize..8,
    ) {
        let (text, stopped, num_tokens) = run(&StopConditions::default(), &ids, cut);
        prop_assert_eq!(&text, &demo_decode(&ids));
        prop_assert_eq!(&text, &decode(&demo(), &ids));
        prop_assert_eq!((stopped, num_tokens), (false, ids.len() as u32));
    }

    /// The first four ids are the special tokens.
    #[test]
    fn special_tokens_are_kept_as_by_the_whole_sequence(
        ids in prop::collection::vec(prop_oneof![0u32..4, 98u32..260, 0u32..4096], 0..40),
        cut in 1usize..8,
    ) {
        let (text, stopped, num_tokens) = run(&with_special_tokens(), &ids, cut);
        prop_assert_eq!(&text, &reference().decode(&ids, false).unwrap());
        prop_assert_eq!(&text, &decode_all(&demo(), &ids));
        prop_assert_eq!((stopped, num_tokens), (false, ids.len() as u32));
    }

    /// Single-byte tokens make invalid and incomplete characters likely.
    #[test]
    fn spans_of_byte_tokens_decode_like_the_whole_sequence(ids in prop::collection::vec(98u32..260, 0..40), cut in 1usize..8) {
        let (text, ..) = run(&StopConditions::default(), &ids, cut);
        prop_assert_eq!(text, demo_decode(&ids));
    }

    #[test]
    fn no_span_of_valid_text_contains_a_replacement_character(text in "\\PC{0,24}") {
        let ids = encode(&text);
        let mut choice = ChoiceText::new(demo(), &StopConditions::default(), 0);
        for id in ids {
            let piece = choice.push(span(&[id], 0)).text;
            prop_assert!(!piece.contains('\u{fffd}') || text.contains('\u{fffd}'), "{:?}", piece);
        }
    }

    #[test]
    fn the_stop_position_does_not_depend_on_span_lengths(
        text in "[a-d \u{20ac}\u{1f600}]{1,24}",
        stop in "[a-d \u{20ac}]{1,3}",
        min_tokens in 0u32..4,
        cut in 2usize..9,
    ) {
        let ids = encode(&text);
        let conditions = StopConditions { strings: vec![stop.clone()], min_tokens, ..StopConditions::default() };
        let one_by_one = run(&conditions, &ids, 1);
        prop_assert_eq!(&run(&conditions, &ids, cut), &one_by_one);
        if min_tokens == 0 {
            let expected = text.split(&stop).next().unwrap();
            prop_assert_eq!(one_by_one.0, expected);
        }
    }
}

#[test]
fn a_stop_token_is_counted_and_adds_no_text() {
    let hello = encode("hello");
    let world = encode(" world");
    let conditions = StopConditions { token_ids: vec![world[0]], ..StopConditions::default() };
    let ids = [hello.as_slice(), &world[..1]].concat();
    assert_eq!(run(&conditions, &ids, 8), ("hello".into(), false, ids.len() as u32));
    let included = StopConditions { included: true, ..conditions };
    let (text, ..) = run(&included, &ids, 8);
    assert!(text.len() > "hello".len() && "hello world".starts_with(&text), "{text}");
}

#[test]
fn stop_strings_match_special_tokens_that_are_kept() {
    let ids = encode("one<|user|>two<|end|>");
    let strings = vec!["r|>t".to_owned()];
    let stop = StopConditions { strings, ..with_special_tokens() };
    let (text, stopped, _) = run(&stop, &ids, 8);
    assert_eq!((text.as_str(), stopped), ("one<|use", true));
    let end = ids[ids.len() - 1];
    let ended = StopConditions { token_ids: vec![end], ..with_special_tokens() };
    assert_eq!(run(&ended, &ids, 8).0, "one<|user|>two");
    assert_eq!(run(&StopConditions { included: true, ..ended }, &ids, 8).0, "one<|user|>two<|end|>");
    assert_eq!(run(&StopConditions::default(), &ids, 8).0, "onetwo");
}

#[test]
fn tokens_after_a_stop_string_are_not_counted() {
    let conditions = StopConditions { strings: vec!["\n".into()], ..StopConditions::default() };
    let before = encode("one two");
    let newline = encode("\n");
    let after = encode("three four");
    let ids = [before.clone(), newline.clone(), after].concat();
    let mut choice = ChoiceText::new(demo(), &conditions, 0);
    let out = choice.push(span(&ids, ids.len() as u32 - 1));
    assert_eq!((out.text.as_str(), out.stopped), ("one two", true));
    let counted = before.len() + newline.len();
    assert_eq!(out.tokens.len(), counted);
    assert_eq!(
        out.num_drafted as usize, counted,
        "a drafted token that does not count is not counted as drafted"
    );
}

#[test]
fn an_incomplete_final_character_decodes_like_the_whole_sequence() {
    let euro = encode("\u{20ac}");
    assert!(euro.len() > 1, "the bundled tokenizer spells this character in bytes");
    let (text, ..) = run(&StopConditions::default(), &euro[..1], 1);
    assert_eq!(text, "\u{fffd}");
}

#[test]
fn offsets_point_to_the_first_character_of_a_token() {
    let ids = encode("a\u{20ac}b");
    let mut choice = ChoiceText::new(demo(), &StopConditions::default(), 10);
    let offsets: Vec<usize> =
        choice.push(span(&ids, 0)).tokens.iter().map(|token| token.text_offset).collect();
    assert_eq!(offsets.first(), Some(&10));
    assert_eq!(offsets.last(), Some(&12), "{offsets:?}");
    assert!(offsets[1..offsets.len() - 1].iter().all(|&offset| offset == 11), "{offsets:?}");
}

#[test]
fn the_first_prompt_token_has_no_log_probability() {
    let model = demo();
    let ids = encode("one two three");
    let scored = |logprob| TokenLogprobs { logprob, top: Vec::new() };
    let logprobs: Vec<TokenLogprobs> = (1..ids.len()).map(|position| scored(-(position as f32))).collect();
    let tokens = prompt_tokens(&model, &ids, logprobs);
    assert_eq!(tokens.len(), ids.len());
    assert!(tokens[0].logprobs.is_none());
    assert_eq!(tokens[1].logprobs, Some(scored(-1.0)));
    assert_eq!(tokens[0].text_offset, 0);
}

/// A model whose tokens are words and parts of words, with a decoder given as in tokenizer.json.
fn with_decoder(decoder: serde_json::Value) -> Arc<ModelText> {
    let words =
        ["<s>", "hello", "world", "##ly", "##s", "!", "a</w>", "b", "c</w>", "|", "<pad>", "\u{e9}t\u{e9}"];
    let vocab: serde_json::Map<String, serde_json::Value> =
        words.iter().enumerate().map(|(id, word)| ((*word).to_owned(), serde_json::json!(id))).collect();
    let tokenizer = serde_json::json!({
        "version": "1.0",
        "added_tokens": [
            { "id": 0, "content": "<s>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false }
        ],
        "pre_tokenizer": { "type": "WhitespaceSplit" },
        "decoder": decoder,
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "!" }
    });
    let assets = [(asset::TOKENIZER, tokenizer.to_string().into_bytes())];
    Arc::new(
        ModelText::from_assets(|name| {
            assets.iter().find(|(asset_name, _)| *asset_name == name).map(|(_, bytes)| bytes.as_slice())
        })
        .unwrap(),
    )
}

/// Feeds `ids` to a model in spans of length `cut`.
fn text_of(model: &Arc<ModelText>, conditions: &StopConditions, ids: &[TokenId], cut: usize) -> String {
    let mut choice = ChoiceText::new(Arc::clone(model), conditions, 0);
    let emitted: String = ids.chunks(cut).map(|ids| choice.push(span(ids, 0)).text).collect();
    emitted + &choice.finish().0
}

proptest! {
    /// For decoders where a token's text depends on its neighbors; again compared with decoding the whole
    /// sequence.
    #[test]
    fn other_decoders_match_the_library(
        decoder in prop::sample::select(vec![
            "null",
            r###"{ "type": "WordPiece", "prefix": "##", "cleanup": true }"###,
            r#"{ "type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true }"#,
            r#"{ "type": "BPEDecoder", "suffix": "</w>" }"#,
        ]),
        ids in prop::collection::vec(0u32..14, 0..30),
        cut in 1usize..8,
    ) {
        let model = with_decoder(serde_json::from_str(decoder).unwrap());
        let whole = model.decode(&ids);
        prop_assert_eq!(text_of(&model, &StopConditions::default(), &ids, cut), whole.as_str());
        let with_special = model.decode_all(&ids);
        prop_assert_eq!(text_of(&model, &with_special_tokens(), &ids, cut), with_special);
        prop_assert_eq!(decode(&model, &ids), whole.as_str());
        let echoed = prompt_tokens(&model, &ids, vec![TokenLogprobs::default(); ids.len().saturating_sub(1)]);
        prop_assert_eq!(echoed.len(), ids.len());
    }
}

/// With `ignore_eos` an output may be thousands of end tokens, and a prompt of ids as many as a body has.
#[test]
fn a_run_of_special_tokens_is_decoded_in_linear_time() {
    let model = with_decoder(serde_json::json!({ "type": "WordPiece", "prefix": "##", "cleanup": true }));
    let mut ids = vec![0; 1 << 20];
    ids[0] = 1;
    ids.extend([3, 2]);
    assert_eq!(decode(&model, &ids), "helloly world");
}

#[test]
fn word_pieces_are_decoded_incrementally() {
    let model = with_decoder(serde_json::json!({ "type": "WordPiece", "prefix": "##", "cleanup": true }));
    let mut choice = ChoiceText::new(Arc::clone(&model), &StopConditions::default(), 0);
    let emitted: Vec<String> = [1, 3, 2, 4, 5].iter().map(|&id| choice.push(span(&[id], 0)).text).collect();
    assert_eq!(emitted, ["hello", "ly", " world", "s", "!"]);
    let conditions = StopConditions { strings: vec!["lo wor".to_owned()], ..StopConditions::default() };
    let mut choice = ChoiceText::new(model, &conditions, 0);
    let out = choice.push(span(&[5, 1, 2, 1], 0));
    assert_eq!((out.text.as_str(), out.stopped, out.tokens.len()), ("! hel", true, 3), "across tokens");
}
