//! Translation between the bundled tokenizer and two derived from it: a byte-level one with different ids and
//! fewer tokens, and a sentencepiece-like one.

use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const BUNDLED: &str = include_str!("../../../models/demo/target/tokenizer.json");
const END: TokenId = 0;

/// The bundled tokenizer without every fifth longer token and with permuted ids.
pub(super) fn byte_level() -> Value {
    let mut json: Value = serde_json::from_str(BUNDLED).unwrap();
    let model = json["model"].as_object_mut().unwrap();
    let vocabulary = model["vocab"].as_object().unwrap().clone();
    let is_left_out = |token: &str| {
        let id = vocabulary[token].as_u64().unwrap();
        id > 260 && id.is_multiple_of(5)
    };
    let merges: Vec<Value> = model["merges"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|merge| {
            let [left, right] = [0, 1].map(|side| merge[side].as_str().unwrap());
            ![left, right, &format!("{left}{right}")].into_iter().any(is_left_out)
        })
        .cloned()
        .collect();
    let kept = vocabulary.iter().filter(|(token, _)| !is_left_out(token));
    // 7 and 4096 are coprime.
    let renumbered =
        kept.map(|(token, id)| (token.clone(), json!((id.as_u64().unwrap() * 7 + 5) % 4096))).collect();
    model.insert("vocab".to_owned(), Value::Object(renumbered));
    model.insert("merges".to_owned(), Value::Array(merges));
    for token in json["added_tokens"].as_array_mut().unwrap() {
        token["id"] = json!((token["id"].as_u64().unwrap() * 7 + 5) % 4096);
    }
    json
}

/// A tokenizer like Llama 2's: a space before every text, `<0x0A>` for bytes, BOS in front. Its words are
/// those of the bundled one.
pub(super) fn sentencepiece() -> Value {
    let bundled: Value = serde_json::from_str(BUNDLED).unwrap();
    let is_plain = |text: &str| text.chars().all(|c| c == 'Ġ' || c.is_ascii_alphabetic());
    let spelt = |text: &str| text.replace('Ġ', "\u{2581}");
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    tokens.extend((0..=u8::MAX).map(|byte| format!("<0x{byte:02X}>")));
    tokens.push("\u{2581}".to_owned());
    tokens.extend(('!'..='~').map(String::from));
    tokens.extend(["é", "ß"].map(str::to_owned));
    let mut merges = Vec::new();
    for merge in bundled["model"]["merges"].as_array().unwrap() {
        let [left, right] = [0, 1].map(|side| merge[side].as_str().unwrap());
        if is_plain(left) && is_plain(right) {
            merges.push(json!([spelt(left), spelt(right)]));
            tokens.push(spelt(&format!("{left}{right}")));
        }
    }
    let vocabulary: serde_json::Map<String, Value> =
        tokens.into_iter().enumerate().map(|(id, token)| (token, json!(id))).collect();
    let special = |id: usize, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u{2581}"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"},
        ]},
        "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocabulary, "merges": merges},
    })
}

fn translation(
    target: (&str, &[TokenId]),
    draft: (&str, &[TokenId]),
) -> Result<Translation, TranslationError> {
    let file = |(json, eos_token_ids): (&'static str, &'static [TokenId])| TokenizerFile {
        json: json.as_bytes(),
        eos_token_ids,
    };
    let leak = |(json, ends): (&str, &[TokenId])| -> (&'static str, &'static [TokenId]) {
        (json.to_owned().leak(), ends.to_vec().leak())
    };
    Translation::new(file(leak(target)), file(leak(draft)))
}

/// All useful pairs of the three tokenizers, those with the bundled target first.
static PAIRS: LazyLock<[Translation; 3]> = LazyLock::new(|| {
    let (byte_level, sentencepiece) = (byte_level().to_string(), sentencepiece().to_string());
    [
        translation((BUNDLED, &[END]), (&byte_level, &[5])).unwrap(),
        translation((BUNDLED, &[END]), (&sentencepiece, &[2])).unwrap(),
        translation((&sentencepiece, &[2]), (BUNDLED, &[END])).unwrap(),
    ]
});

/// The ids of a text as encoded by the target's tokenizer.
fn target_ids(pair: usize, text: &str) -> Vec<TokenId> {
    static TOKENIZERS: LazyLock<[Tokenizer; 2]> = LazyLock::new(|| {
        [BUNDLED.to_owned(), sentencepiece().to_string()]
            .map(|json| Tokenizer::from_bytes(json.as_bytes()).unwrap())
    });
    TOKENIZERS[usize::from(pair == 2)].encode_fast(text, false).unwrap().get_ids().to_vec()
}

/// Checks that every draft id has its bytes of the target's text, and that the whole text is covered.
fn check(translation: &Translation, sequence: &TranslatedSequence) {
    let mut text = Vec::new();
    let mut specials = Vec::new();
    for (at, &id) in sequence.target_ids().iter().enumerate() {
        match translation.unit(at, id) {
            Unit::Nothing => {}
            Unit::Text(bytes) => text.extend_from_slice(bytes),
            Unit::Special { len, draft_id } => {
                text.resize(text.len() + len, 0);
                specials.push((text.len(), draft_id));
            }
        }
    }
    let draft = translation.draft.vocabulary();
    let mut end = 0;
    let mut found = Vec::new();
    let (frame, rest) = match sequence.draft_ids().starts_with(translation.draft.frame()) {
        true => sequence.draft_ids().split_at(translation.draft.frame().len()),
        false => (&[][..], sequence.draft_ids()),
    };
    for (i, &id) in rest.iter().enumerate() {
        if draft.is_special(id) {
            let (special_end, _) = specials[found.len()];
            found.push((special_end, id));
            end = special_end;
        } else {
            let bytes = draft.bytes(id);
            assert_eq!(&text[end..end + bytes.len()], bytes, "draft id {i}");
            end += bytes.len();
        }
        let covered = sequence.num_covered(frame.len() + i + 1);
        let ends_at = |len: usize| {
            (0..len).map(|at| translation.unit(at, sequence.target_ids()[at]).len()).sum::<usize>()
        };
        assert!(
            ends_at(covered) <= end && (covered == sequence.target_ids().len() || ends_at(covered + 1) > end)
        );
    }
    assert_eq!(found, specials, "special tokens are translated one by one");
    assert_eq!(end, text.len(), "all of the text is covered");
}

#[derive(Debug, Clone)]
enum Step {
    /// A text, encoded as the target does.
    Text(String),
    /// Arbitrary ids, which may split characters.
    Ids(Vec<TokenId>),
    /// Ids appended one by one.
    OneByOne(Vec<TokenId>),
    /// A cut to this share of the ids.
    Cut(f64),
}

/// Pieces that texts are composed of.
const PIECES: [&str; 13] =
    ["the", " house", " is", "großes", "日本", "🙂", "\n\n", "  ", "12", "é", "<|end|>", "x_y(", "</s>"];

fn words() -> impl Strategy<Value = String> {
    prop::collection::vec(prop::sample::select(&PIECES[..]), 0..40).prop_map(|pieces| pieces.concat())
}

fn ids() -> impl Strategy<Value = Vec<TokenId>> {
    // Single bytes, special tokens and others; the lowest ids are special tokens and bytes in both
    // tokenizers.
    prop::collection::vec(prop_oneof![0_u32..270, 0_u32..1_500], 0..12)
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        words().prop_map(Step::Text),
        ids().prop_map(Step::Ids),
        ids().prop_map(Step::OneByOne),
        (0.0..1.0).prop_map(Step::Cut),
        (0.8..1.0).prop_map(Step::Cut),
    ];
    prop::collection::vec(step, 1..14)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn draft_ids_say_the_targets_text_after_every_step(pair in 0_usize..3, steps in steps()) {
        let translation = &PAIRS[pair];
        let mut sequence = TranslatedSequence::default();
        let mut expected: Vec<TokenId> = Vec::new();
        let extend = |sequence: &mut TranslatedSequence, ids: &[TokenId]| {
            let before = sequence.clone();
            let kept = sequence.extend(translation, ids);
            assert_eq!(sequence.draft_ids()[..kept], before.draft_ids()[..kept]);
            check(translation, sequence);
        };
        for step in steps {
            match step {
                Step::Text(text) => {
                    let ids = target_ids(pair, &text);
                    extend(&mut sequence, &ids);
                    expected.extend(ids);
                }
                Step::Ids(ids) => {
                    extend(&mut sequence, &ids);
                    expected.extend(ids);
                }
                Step::OneByOne(ids) => {
                    ids.iter().for_each(|&id| extend(&mut sequence, &[id]));
                    expected.extend(ids);
                }
                Step::Cut(share) => {
                    let len = (share * expected.len() as f64) as usize;
                    let before = sequence.clone();
                    sequence.truncate(len);
                    expected.truncate(len);
                    prop_assert!(before.draft_ids().starts_with(sequence.draft_ids()));
                    prop_assert!(sequence.num_covered(sequence.draft_ids().len()) <= len);
                    // Text uncovered by a cut is covered again with the next id.
                    extend(&mut sequence, &[END]);
                    expected.push(END);
                }
            }
            prop_assert_eq!(sequence.target_ids(), &expected);
        }
        // From an empty sequence the whole text is tokenized at once: always with the same result.
        sequence.truncate(0);
        prop_assert_eq!(&sequence, &TranslatedSequence::default());
        let mut fresh = TranslatedSequence::default();
        fresh.extend(translation, &expected);
        sequence.extend(translation, &expected);
        prop_assert_eq!(sequence, fresh);
    }
}

#[test]
fn a_prompt_is_tokenized_as_the_draft_would() {
    let text = "The quick brown fox jumps over the lazy dog. SELECT name FROM users WHERE id = 3; déjà vu";
    for (pair, draft_json) in
        [byte_level().to_string(), sentencepiece().to_string(), BUNDLED.to_owned()].iter().enumerate()
    {
        let tokenizer = Tokenizer::from_bytes(draft_json.as_bytes()).unwrap();
        // Sentencepiece puts a space before every text; here the target must do so.
        let text = if pair == 2 { format!(" {text}") } else { text.to_owned() };
        let mut natural = tokenizer.encode_fast(text.as_str(), true).unwrap().get_ids().to_vec();
        let mut sequence = TranslatedSequence::default();
        sequence.extend(&PAIRS[pair], &target_ids(pair, text.trim_start()));
        let mut found = sequence.draft_ids().to_vec();
        if pair == 1 {
            // The first word is encoded without the space, all others are equal.
            let word = |ids: &[TokenId]| ids[ids.len() - 20..].to_vec();
            (natural, found) = (word(&natural), word(&found));
        }
        assert_eq!(found, natural, "pair {pair}");
    }
}

#[test]
fn a_token_of_the_map_costs_one_row_and_another_one_a_bounded_number() {
    let translation = &PAIRS[0];
    let mut sequence = TranslatedSequence::default();
    let prompt = target_ids(0, &"The house is large and the garden is small. ".repeat(40));
    sequence.extend(translation, &prompt);
    let is_mapped = |id: &TokenId| translation.to_draft(*id).is_some();
    let text =
        target_ids(0, "Nobody expected that the committee would reconsider its unanimous recommendation");
    let mut unmapped = 0;
    for id in text {
        let before = sequence.draft_ids().len();
        let kept = sequence.extend(translation, &[id]);
        if is_mapped(&id) {
            assert_eq!((kept, sequence.draft_ids().len()), (before, before + 1));
        } else {
            unmapped += 1;
            assert!(before - kept <= 24, "{} draft ids were tokenized again", before - kept);
        }
    }
    assert!(unmapped > 0, "every token is in the map: this shows nothing");
}

#[test]
fn a_cut_forgets_no_more_than_it_must() {
    let translation = &PAIRS[0];
    let is_mapped = |id: &TokenId| translation.to_draft(*id).is_some();
    let ids: Vec<TokenId> = (300..400).filter(is_mapped).collect();
    let mut sequence = TranslatedSequence::default();
    ids.chunks(4)
        .for_each(|ids| assert_eq!(sequence.extend(translation, ids), sequence.draft_ids().len() - 4));
    let mapped = sequence.draft_ids()[4..].to_vec();
    for len in (4..ids.len()).rev() {
        sequence.truncate(len);
        assert_eq!(sequence.draft_ids()[4..], mapped[..len - 4]);
        assert!(sequence.is_covered());
    }
}

#[test]
fn the_map_pairs_equal_bytes_and_special_tokens_by_rule() {
    for translation in PAIRS.iter() {
        let (target, draft) = (&translation.target, translation.draft.vocabulary());
        let ends = if std::ptr::eq(translation, &PAIRS[2]) { (2, END) } else { (END, 2) };
        let mut num_paired = 0;
        for id in 0..target.len() as TokenId {
            let Some(draft_id) = translation.to_draft(id) else { continue };
            num_paired += 1;
            assert_eq!(target.is_special(id), draft.is_special(draft_id));
            assert!(
                target.bytes(id) == draft.bytes(draft_id) || (id, draft_id) == ends,
                "{id} and {draft_id}"
            );
        }
        let coverage = translation.coverage();
        assert!(coverage.shared <= num_paired && coverage.shared_of_two_bytes >= MIN_SHARED_TOKENS);
        assert!((0.2..1.0).contains(&coverage.target_share()), "{coverage:?}");
    }
    // All special tokens of the bundled tokenizer exist in the renumbered one; the other one only has its
    // EOS.
    assert_eq!([0, 1, 2, 3].map(|id| PAIRS[0].to_draft(id)), [5, 12, 19, 26].map(Some));
    assert_eq!([0, 1, 2, 3].map(|id| PAIRS[1].to_draft(id)), [Some(2), None, None, None]);
}

/// Checkpoints are often saved with an added token, such as one for padding, for which the model has no
/// embedding. Its missing logit would end the worker.
#[test]
fn a_token_without_an_embedding_is_not_used() {
    let mut draft: Value = serde_json::from_str(BUNDLED).unwrap();
    let num_embeddings = draft["model"]["vocab"].as_object().unwrap().len() as u32;
    for (id, content, special) in
        [(num_embeddings, "<unk>", true), (num_embeddings + 1, "the large house", false)]
    {
        let token = json!({"id": id, "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": special});
        draft["added_tokens"].as_array_mut().unwrap().push(token);
    }
    let (target, draft) = (sentencepiece().to_string(), draft.to_string());
    let ends = [num_embeddings + 1, END];
    let read = |num_embeddings| {
        let target = TokenizerFile { json: target.as_bytes(), eos_token_ids: &[2] };
        let draft = TokenizerFile { json: draft.as_bytes(), eos_token_ids: &ends };
        Translation::for_embeddings(target, draft, num_embeddings).unwrap()
    };
    let whole = read(u32::MAX);
    assert_eq!([0, 2].map(|id| whole.to_draft(id)), [num_embeddings, num_embeddings + 1].map(Some));
    let translation = read(num_embeddings);
    assert_eq!([0, 2].map(|id| translation.to_draft(id)), [None, Some(END)]);
    let mut row = vec![0.0; translation.num_target_ids()];
    translation.scatter(&vec![1.0; num_embeddings as usize], &mut row);
    let mut sequence = TranslatedSequence::default();
    sequence.extend(&translation, &target_ids(2, "in the large house"));
    assert!(sequence.is_covered() && sequence.draft_ids().iter().all(|&id| id < num_embeddings));
}

#[test]
fn scores_stand_at_the_targets_ids_and_nowhere_twice() {
    for translation in PAIRS.iter() {
        let draft_row: Vec<f32> = (0..translation.draft.vocabulary().len()).map(|id| id as f32).collect();
        let mut row = vec![7.0; translation.num_target_ids()];
        translation.scatter(&draft_row, &mut row);
        let mut seen: Vec<f32> = Vec::new();
        for (id, &score) in (0..).zip(&row) {
            match translation.to_draft(id) {
                // Of several ids with equal bytes only one has the logit.
                Some(draft_id) if score != f32::NEG_INFINITY => {
                    assert_eq!(score, draft_id as f32);
                    seen.push(score);
                }
                _ => assert_eq!(score, f32::NEG_INFINITY, "target id {id}"),
            }
        }
        assert_eq!(seen.len(), translation.coverage().shared);
        seen.sort_by(f32::total_cmp);
        seen.dedup();
        assert_eq!(seen.len(), translation.coverage().shared);
    }
}

#[test]
fn the_targets_frame_becomes_the_drafts() {
    // The target's BOS is not passed as text, and the bundled draft has none.
    let mut sequence = TranslatedSequence::default();
    sequence.extend(&PAIRS[2], &[1]);
    assert!(sequence.draft_ids().is_empty() && !sequence.is_covered());
    sequence.extend(&PAIRS[2], &target_ids(2, "hello"));
    assert!(sequence.is_covered());
    check(&PAIRS[2], &sequence);
    // In the other direction the draft's BOS comes first.
    let mut sequence = TranslatedSequence::default();
    sequence.extend(&PAIRS[1], &target_ids(1, "hello"));
    assert_eq!(sequence.draft_ids()[0], 1);
    sequence.truncate(0);
    assert!(sequence.draft_ids().is_empty(), "no KV is held for nothing");
}

#[test]
fn a_tokenizer_that_cannot_be_used_is_refused_with_a_reason() {
    let refusal =
        |draft: &Value| translation((BUNDLED, &[END]), (&draft.to_string(), &[5])).unwrap_err().to_string();
    let mut pieces = byte_level();
    pieces["decoder"] = json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
    assert!(
        refusal(&pieces).starts_with("the draft's tokenizer does not keep the bytes"),
        "{}",
        refusal(&pieces)
    );
    let mut bytes_missing = byte_level();
    let model = bytes_missing["model"].as_object_mut().unwrap();
    model["vocab"].as_object_mut().unwrap().remove("!");
    model["merges"].as_array_mut().unwrap().retain(|merge| !merge.to_string().contains('!'));
    assert!(refusal(&bytes_missing).contains("no token for byte 0x21"), "{}", refusal(&bytes_missing));
    let mut other = byte_level();
    let model = other["model"].as_object_mut().unwrap();
    model["vocab"]
        .as_object_mut()
        .unwrap()
        .retain(|token, _| token.chars().count() == 1 || token.starts_with("<|"));
    model["merges"] = json!([]);
    assert!(refusal(&other).starts_with("the tokenizers share "), "{}", refusal(&other));
    assert!(
        refusal(&json!({})).starts_with("the draft's tokenizer: tokenizer.json"),
        "{}",
        refusal(&json!({}))
    );
}
