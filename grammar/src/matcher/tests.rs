//! Tests of the matcher against a naive twin, with the bundled tokenizer, and of invalid grammars.

use std::iter;

use serde_json::{Value, json};
use text::{ModelText, asset};

use super::*;
use crate::{Compiler, Grammar, GrammarKind, Vocabulary, check};

/// The bundled pair's vocabulary; its EOS is id 0.
fn vocabulary() -> Vocabulary {
    let tokenizer =
        std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/target/tokenizer.json")).unwrap();
    let text =
        ModelText::from_assets(|name| (name == asset::TOKENIZER).then_some(tokenizer.as_slice())).unwrap();
    Vocabulary::from_words(text.vocabulary().marked().unwrap())
}

const STOP: [TokenId; 1] = [0];

/// Reproducible pseudo-random numbers below `n`.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

fn allowed(mask: &TokenMask, num_tokens: usize) -> Vec<TokenId> {
    (0..num_tokens as TokenId).filter(|&id| mask.allows(id)).collect()
}

/// Draws tokens uniformly from the allowed ones, until a stop token or `len` tokens.
fn write(matcher: &mut Matcher, vocabulary: &Vocabulary, (dice, len): (&mut Dice, usize)) -> Vec<TokenId> {
    let mut output = Vec::new();
    while output.len() < len {
        let masks = matcher.masks(&output, &[], &STOP).unwrap();
        let choices = allowed(&masks[0], vocabulary.num_tokens());
        let id = choices[dice.below(choices.len())];
        output.push(id);
        if STOP.contains(&id) {
            break;
        }
    }
    output
}

fn text(vocabulary: &Vocabulary, ids: &[TokenId]) -> String {
    let ids = ids.iter().filter(|id| !STOP.contains(id));
    String::from_utf8(ids.flat_map(|&id| vocabulary.bytes(id).to_vec()).collect()).unwrap()
}

fn grammars() -> Vec<Grammar> {
    let schema = json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "maxLength": 6 },
            "kind": { "enum": ["a", "bc", 3, null] },
            "list": { "type": "array", "items": { "type": "integer", "minimum": 0, "maximum": 99 }, "maxItems": 3 }
        },
        "required": ["name", "kind", "list"],
        "additionalProperties": false
    });
    vec![
        Grammar::json_schema(&schema),
        Grammar { kind: GrammarKind::Regex, text: r"\d{3}-\d{4}|(foo|bar)+".to_owned() },
        Grammar::choice(&["yes", "no", "may be (perhaps) [x] \"q\" \\ / ☃"]),
        Grammar { kind: GrammarKind::Lark, text: "start: item+\nitem: \"<\" /[a-z]{1,4}/ \">\"".to_owned() },
        same_quote_in_two_rules(),
    ]
}

/// Behind `a` and behind `b` the lexer is in one state, but the parser is not: other ids may follow.
fn same_quote_in_two_rules() -> Grammar {
    let text = "start: \"a\" Q \")\" | \"b\" Q \",\"\nQ: \"\\\"\"".to_owned();
    Grammar { kind: GrammarKind::Lark, text }
}

#[test]
fn what_is_written_under_a_mask_matches() {
    let vocabulary = vocabulary();
    let compiler = Compiler::new(&vocabulary).unwrap();
    let mut dice = Dice(7);
    let mut finished = 0;
    for _ in 0..20 {
        let mut matcher = compiler.compile(&grammars()[0]).unwrap();
        let ids = write(&mut matcher, &vocabulary, (&mut dice, 600));
        if ids.last() == Some(&0) {
            finished += 1;
            let value: Value = serde_json::from_str(&text(&vocabulary, &ids)).unwrap();
            assert!(value["name"].as_str().unwrap().chars().count() <= 6, "{value}");
            assert!([json!("a"), json!("bc"), json!(3), json!(null)].contains(&value["kind"]), "{value}");
            let list = value["list"].as_array().unwrap();
            assert!(list.len() <= 3 && list.iter().all(|item| item.as_u64().unwrap() <= 99), "{value}");
        }
    }
    assert!(finished > 10, "{finished} of 20 came to an end");
    let choices = ["yes", "no", "may be (perhaps) [x] \"q\" \\ / ☃"];
    let mut seen = std::collections::HashSet::new();
    for _ in 0..40 {
        let mut matcher = compiler.compile(&Grammar::choice(&choices)).unwrap();
        let ids = write(&mut matcher, &vocabulary, (&mut dice, 100));
        assert!(choices.contains(&text(&vocabulary, &ids).as_str()), "{}", text(&vocabulary, &ids));
        seen.insert(text(&vocabulary, &ids));
    }
    assert_eq!(seen.len(), 3, "each choice can be written");
}

/// The naive twin reads every output from its start.
#[test]
fn a_mask_depends_on_the_ids_alone_however_the_matcher_got_there() {
    let vocabulary = vocabulary();
    let compiler = Compiler::new(&vocabulary).unwrap();
    let mut num_cut = 0;
    for grammar in grammars() {
        let compiled = compiler.compile(&grammar).unwrap();
        let (mut asked, mut dice) = (compiled.fork(), Dice(1));
        let texts: Vec<Vec<TokenId>> =
            (0..4).map(|_| write(&mut compiled.fork(), &vocabulary, (&mut dice, 40))).collect();
        for _ in 0..60 {
            let text = &texts[dice.below(texts.len())];
            let at = dice.below(text.len());
            let (output, rest) = text.split_at(at);
            // Correct so far, then wrong: ids that are not allowed, or a stop token in the middle.
            let mut drafted = rest[..dice.below(rest.len() + 1).min(8)].to_vec();
            let wrong = dice.below(vocabulary.num_tokens()) as TokenId;
            drafted.extend([wrong, 0, 5].iter().take(dice.below(4)));
            let masks = asked.masks(output, &drafted, &STOP).unwrap();
            for (i, mask) in masks.iter().enumerate() {
                let behind = [output, &drafted[..i]].concat();
                let twin = compiled.fork().masks(&behind, &[], &STOP).unwrap();
                assert_eq!(*mask, twin[0], "{:?} behind {behind:?}", grammar.text);
            }
            // Rows without a mask cannot be reached.
            if let Some(&id) = drafted.get(masks.len() - 1) {
                assert!(!masks[masks.len() - 1].allows(id) || STOP.contains(&id));
                num_cut += 1;
            }
        }
    }
    assert!(num_cut > 40, "{num_cut} of 240 drafts were cut");
}

/// The parser keeps its last mask, and returned it behind `b` for that behind `a`.
#[test]
fn a_rejected_draft_leaves_no_mask_behind() {
    let vocabulary = vocabulary();
    let [a, b, quote_paren, quote_comma] = [68, 69, 1197, 1375];
    for (id, bytes) in [(a, "a"), (b, "b"), (quote_paren, "\")"), (quote_comma, "\",")] {
        assert_eq!(vocabulary.bytes(id), bytes.as_bytes());
    }
    let compiled = Compiler::new(&vocabulary).unwrap().compile(&same_quote_in_two_rules()).unwrap();
    let mut asked = compiled.fork();
    let drafted = asked.masks(&[], &[a], &STOP).unwrap();
    assert!(drafted[1].allows(quote_paren) && !drafted[1].allows(quote_comma));
    let committed = asked.masks(&[b], &[], &STOP).unwrap();
    assert_eq!(committed, compiled.fork().masks(&[b], &[], &STOP).unwrap());
    assert!(committed[0].allows(quote_comma) && !committed[0].allows(quote_paren));
}

/// The naive twin's masks: each from a matcher of its own, as far as there is one.
fn twin_masks(
    compiled: &Matcher,
    output: &[TokenId],
    drafted: &[TokenId],
) -> Result<Vec<TokenMask>, GrammarError> {
    let mut rows = (0..=drafted.len())
        .map(|i| Ok(compiled.fork().masks(&[output, &drafted[..i]].concat(), &[], &STOP)?.swap_remove(0)));
    rows.next()
        .expect("the range is not empty")
        .map(|first| iter::once(first).chain(rows.map_while(Result::ok)).collect())
}

/// The parser's limit on lexer states includes those that drafts and earlier positions left behind.
#[test]
fn an_error_depends_on_the_ids_alone_however_the_matcher_got_there() {
    let mut compiler = Compiler::new(&Vocabulary::of_bytes()).unwrap();
    let mut dice = Dice(3);
    let text: Vec<TokenId> = (0..60).map(|_| TokenId::from(b"ab"[dice.below(2)])).collect();
    // The lexer's state holds the last nine letters, so other letters lead to other states.
    let grammar = Grammar { kind: GrammarKind::Regex, text: "[ab]*a[ab]{8}".to_owned() };
    let mut num_masks = [0; 6];
    for max_lexer_states in (40..100).step_by(5) {
        compiler.limits_mut().max_lexer_states = max_lexer_states;
        let compiled = compiler.compile(&grammar).unwrap();
        let mut asked = compiled.fork();
        for at in 0..text.len() - 4 {
            let (output, rest) = text.split_at(at);
            let wrong = rest[..4].iter().map(|id| TokenId::from(b'a' + b'b') - id).collect();
            for drafted in [wrong, rest[..4].to_vec()] {
                let masks = asked.masks(output, &drafted, &STOP);
                assert_eq!(masks, twin_masks(&compiled, output, &drafted), "{max_lexer_states} at {at}");
                num_masks[masks.map_or(0, |masks| masks.len())] += 1;
            }
        }
    }
    assert!(num_masks.iter().all(|num| *num > 5), "{num_masks:?}");
}

#[test]
fn only_stop_tokens_end_a_text_and_special_tokens_are_never_text() {
    let vocabulary = vocabulary();
    let compiler = Compiler::new(&vocabulary).unwrap();
    let mut matcher = compiler.compile(&Grammar::choice(&["a"])).unwrap();
    let start = matcher.masks(&[], &[], &[0, 3]).unwrap();
    assert!(!start[0].allows(0) && !start[0].allows(3));
    let first = allowed(&start[0], vocabulary.num_tokens());
    assert!(first.iter().all(|&id| vocabulary.bytes(id) == b"a"), "{first:?}");
    let end = matcher.masks(&first[..1], &[], &[0, 3]).unwrap();
    assert_eq!(allowed(&end[0], vocabulary.num_tokens()), [0, 3]);
    // A draft in rejection mode goes on behind the end.
    let behind = matcher.masks(&[first[0], 3, 70], &[], &[0, 3]).unwrap();
    assert_eq!(allowed(&behind[0], vocabulary.num_tokens() + 9).len(), vocabulary.num_tokens());
    // A text that does not match is an error; the matcher remains usable.
    assert!(matches!(matcher.masks(&[5], &[], &STOP), Err(GrammarError::Match { position: 0, .. })));
    assert_eq!(matcher.masks(&first[..1], &[], &[0, 3]).unwrap(), end);
}

#[test]
fn what_does_not_compile_is_refused_with_a_reason() {
    for (kind, text, words) in [
        (GrammarKind::JsonSchema, "{", "not JSON"),
        (GrammarKind::JsonSchema, "[]", "object"),
        (GrammarKind::JsonSchema, r#"{"type":"strong"}"#, "strong"),
        (GrammarKind::JsonSchema, r#"{"type":"object","if":{}}"#, "if"),
        (GrammarKind::JsonSchema, "false", "object"),
        (GrammarKind::Regex, "(", "unclosed"),
        (GrammarKind::Lark, "start: missing", "missing"),
        (GrammarKind::Lark, "", ""),
        (GrammarKind::Lark, "start: <[*]> \"abc\"", "tokens (<..>)"),
        (GrammarKind::Lark, "start: <[^1]>", "tokens (<..>)"),
        (GrammarKind::Lark, "start: <[5]>", "tokens (<..>)"),
        (GrammarKind::Lark, "start: \"a\" <end> \"b\"", "tokens (<..>)"),
        (GrammarKind::Lark, "start: w\nw[max_tokens=4]: /[a-z]+/", "max_tokens"),
        (GrammarKind::Lark, "start: w\nw[stop=\"x\"]: /[a-z]+/", "stop"),
    ] {
        let grammar = Grammar { kind, text: text.to_owned() };
        let error = check(&grammar).expect_err(text).to_string();
        assert!(error.contains(words) && !error.contains('\n'), "{text:?}: {error}");
    }
    let suffix = "start: w\nw[suffix=\"x\"]: /[a-z]+/".to_owned();
    for grammar in grammars().into_iter().chain([Grammar { kind: GrammarKind::Lark, text: suffix }]) {
        check(&grammar).unwrap();
    }
}
