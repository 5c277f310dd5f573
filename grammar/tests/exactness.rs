//! Tests of the whole without an engine: with a grammar the ids do not depend on the draft, and finished
//! outputs match. Logits are made up from the preceding ids; the draft worker's differ from the target's.

#![expect(clippy::unwrap_used, reason = "a test's harness fails by panicking")]

use grammar::{Compiler, Grammar, GrammarKind, Matcher, Vocabulary};
use serde_json::{Value, json};
use speculation::acceptance::{RawRows, guess, verify};
use speculation::logits::TokenCounts;
use speculation::noise::{Noise, Purpose};
use speculation::{AcceptanceMode, Draft, FinishReason, SamplingParams, SequenceSpec, TokenId};
use text::{ModelText, asset};

const STOP: TokenId = 0;
const MAX_LEN: u32 = 160;

fn vocabulary() -> Vocabulary {
    let tokenizer =
        std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/target/tokenizer.json")).unwrap();
    let text =
        ModelText::from_assets(|name| (name == asset::TOKENIZER).then_some(tokenizer.as_slice())).unwrap();
    Vocabulary::from_words(text.vocabulary().marked().unwrap())
}

/// A row that depends on the last three ids, as a model's would on all of them. The draft's row is the
/// target's with added noise.
fn logits(ids: &[TokenId], vocab_size: usize, is_draft: bool) -> Vec<f32> {
    let seed =
        ids.iter().rev().take(3).fold(17, |seed: u64, &id| seed.wrapping_mul(1_000_003) + u64::from(id));
    let (row, disturbance) = (Noise { seed, choice: 0 }, Noise { seed, choice: 1 });
    let gumbel = |noise: Noise, id| noise.gumbel(ids.len() as u32, id, Purpose::Draft) as f32;
    let value = |id| 2.0 * gumbel(row, id) + if is_draft { 0.4 * gumbel(disturbance, id) } else { 0.0 };
    (0..vocab_size as TokenId).map(value).collect()
}

/// Draft and target worker of one sequence, and the number of accepted ids.
struct Pair<'a> {
    spec: SequenceSpec,
    target: Matcher,
    draft: Matcher,
    vocabulary: &'a Vocabulary,
    accepted: u32,
}

impl Pair<'_> {
    fn propose(&mut self, output: &[TokenId], k: usize) -> Draft {
        let mut draft = Draft::default();
        while draft.token_ids.len() < k && draft.token_ids.last() != Some(&STOP) {
            let so_far = [output, &draft.token_ids].concat();
            let mut row = logits(&so_far, self.vocabulary.num_tokens(), true);
            self.draft.masks(&so_far, &[], &self.spec.stop_token_ids).unwrap()[0].apply(&mut row);
            let guessed = guess(&self.spec, &TokenCounts::new(0), so_far.len() as u32, &mut row).unwrap();
            draft.token_ids.push(guessed.token_id);
            if self.spec.acceptance == AcceptanceMode::Rejection && !self.spec.sampling.is_greedy() {
                draft.q.push(guessed.q);
            }
        }
        draft
    }

    /// The output for this k, and its finish reason. `spoil` replaces the third drafted id of each round by
    /// an arbitrary one.
    fn write(&mut self, k: usize, spoil: bool) -> (Vec<TokenId>, FinishReason) {
        let vocab_size = self.vocabulary.num_tokens();
        let mut output: Vec<TokenId> = Vec::new();
        loop {
            let mut draft = self.propose(&output, k);
            if spoil && let Some(id) = draft.token_ids.get_mut(2) {
                *id = (*id + 1) % vocab_size as TokenId;
            }
            let masks = self.target.masks(&output, &draft.token_ids, &self.spec.stop_token_ids).unwrap();
            let row = |i: usize| logits(&[&output, &draft.token_ids[..i]].concat(), vocab_size, false);
            let mut rows: Vec<f32> = (0..=draft.token_ids.len()).flat_map(row).collect();
            let rows = RawRows { logits: &mut rows, vocab_size, masks: &masks };
            let mut counts = TokenCounts::new(0);
            let start = output.len() as u32;
            let verdict = verify(&self.spec, &mut counts, start, &draft, rows).unwrap();
            self.accepted += verdict.num_accepted;
            output.extend(verdict.token_ids);
            if let Some(finish) = verdict.finish {
                return (output, finish);
            }
        }
    }
}

fn grammars() -> Vec<Grammar> {
    let object = |properties: Value, required: Value| json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false });
    let name = json!({ "type": "string", "maxLength": 8 });
    let count = json!({ "type": "integer", "minimum": -20, "maximum": 300 });
    vec![
        Grammar::json_schema(&object(json!({ "name": name, "count": count }), json!(["name", "count"]))),
        Grammar::json_schema(
            &json!({ "type": "array", "items": { "enum": ["gr\u{fc}n", 1, null] }, "minItems": 2, "maxItems": 4 }),
        ),
        Grammar { kind: GrammarKind::Regex, text: "([0-9]{1,3}\\.){3}[0-9]{1,3}".to_owned() },
        Grammar { kind: GrammarKind::Lark, text: "start: \"(\" start? \")\" | /[a-f]{1,6}/".to_owned() },
    ]
}

fn spec(temperature: f32, acceptance: AcceptanceMode, seed: u64) -> SequenceSpec {
    SequenceSpec {
        seed,
        sampling: SamplingParams { temperature, ..SamplingParams::default() },
        stop_token_ids: vec![STOP],
        max_len: MAX_LEN,
        acceptance,
        grammar: Some(String::new()),
        ..SequenceSpec::default()
    }
}

#[test]
fn drafts_change_no_id_under_a_grammar() {
    let vocabulary = vocabulary();
    let compiler = Compiler::new(&vocabulary).unwrap();
    let (mut ended, mut accepted) = (0, 0);
    for (i, grammar) in grammars().iter().enumerate() {
        let compiled = compiler.compile(grammar).unwrap();
        for (temperature, seed) in [(0.0, 1), (1.0, 2), (1.0, 3)] {
            let spec = spec(temperature, AcceptanceMode::Coupled, seed);
            let mut pair = Pair {
                spec,
                target: compiled.fork(),
                draft: compiled.fork(),
                vocabulary: &vocabulary,
                accepted: 0,
            };
            let plain = pair.write(0, false);
            // Reuse the same matchers, which have read a different run.
            for (k, spoil) in [(4, false), (8, false), (4, true)] {
                assert_eq!(pair.write(k, spoil), plain, "grammar {i}, T = {temperature}, k = {k}, {spoil}");
            }
            ended += usize::from(plain.1 == FinishReason::Stop);
            accepted += pair.accepted;
        }
    }
    assert!(ended >= 8, "only {ended} of 12 came to an end");
    assert!(accepted > 50, "only {accepted} drafted ids were accepted");
}

#[test]
fn output_matches_in_the_other_acceptance_modes() {
    let vocabulary = vocabulary();
    let compiled = Compiler::new(&vocabulary).unwrap().compile(&grammars()[0]).unwrap();
    let mut ended = 0;
    for acceptance in [AcceptanceMode::Rejection, AcceptanceMode::Typical] {
        for seed in 0..3 {
            let spec = spec(1.0, acceptance, seed);
            let mut pair = Pair {
                spec,
                target: compiled.fork(),
                draft: compiled.fork(),
                vocabulary: &vocabulary,
                accepted: 0,
            };
            let (output, finish) = pair.write(4, false);
            if finish == FinishReason::Stop {
                ended += 1;
                let ids = &output[..output.len() - 1];
                let text: Vec<u8> = ids.iter().flat_map(|&id| vocabulary.bytes(id).to_vec()).collect();
                let value: Value = serde_json::from_slice(&text).unwrap();
                assert!((-20..=300).contains(&value["count"].as_i64().unwrap()), "{value}");
                assert!(value["name"].as_str().unwrap().chars().count() <= 8, "{value}");
            }
        }
    }
    assert!(ended > 0, "none of the outputs came to an end");
}
