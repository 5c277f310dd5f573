//! Grammars of hostile clients: each is refused with a reason or compiles, on a thread with the production
//! stack, and none ends the process.

#![expect(clippy::unwrap_used, reason = "a test's harness fails by panicking")]

use std::time::{Duration, Instant};

use grammar::{Grammar, GrammarKind, STACK_BYTES, TEXT_BYTES_MAX};
use serde_json::{Value, json};

/// Checks grammars on a thread with the stack of the router's and the workers', divided by `part`.
fn check_all(grammars: Vec<(String, Grammar)>, part: usize) -> Vec<(String, Result<(), String>)> {
    let check = move || {
        let results = grammars.into_iter().map(|(name, grammar)| {
            let result = grammar::check_on_this_thread(&grammar).map_err(|error| error.to_string());
            (name, result)
        });
        results.collect()
    };
    std::thread::Builder::new().stack_size(STACK_BYTES / part).spawn(check).unwrap().join().unwrap()
}

fn json_schema(schema: &Value) -> Grammar {
    Grammar::json_schema(schema)
}

fn regex(text: impl Into<String>) -> Grammar {
    Grammar { kind: GrammarKind::Regex, text: text.into() }
}

fn lark(text: impl Into<String>) -> Grammar {
    Grammar { kind: GrammarKind::Lark, text: text.into() }
}

/// A schema of `len` definitions of which each holds the next one.
fn chain(len: usize, link: impl Fn(Value) -> Value) -> Value {
    let mut definitions = serde_json::Map::new();
    for i in 0..len {
        definitions.insert(format!("d{i}"), link(json!({ "$ref": format!("#/$defs/d{}", i + 1) })));
    }
    definitions.insert(format!("d{len}"), json!({ "type": "integer" }));
    json!({ "$defs": definitions, "$ref": "#/$defs/d0" })
}

fn properties(count: usize) -> Value {
    let named = (0..count).map(|i| (format!("p{i}"), json!({ "type": "string" })));
    Value::Object(named.collect())
}

/// Rules of which each holds the next one.
fn rules(len: usize, rule: impl Fn(usize) -> String) -> String {
    (0..len).map(|i| rule(i) + "\n").collect()
}

#[track_caller]
fn assert_refused(grammars: Vec<(&str, Grammar, &str)>) {
    let named = grammars.iter().map(|(name, grammar, _)| ((*name).to_owned(), grammar.clone()));
    let results = check_all(named.collect(), 16);
    for ((name, result), (.., words)) in results.iter().zip(&grammars) {
        let error = result.as_ref().expect_err(name);
        assert!(error.contains(words) && !error.contains('\n'), "{name}: {error}");
    }
}

#[track_caller]
fn assert_accepted(grammars: Vec<(&str, Grammar)>) {
    let named = grammars.into_iter().map(|(name, grammar)| (name.to_owned(), grammar));
    for (name, result) in check_all(named.collect(), 16) {
        assert_eq!(result, Ok(()), "{name}");
    }
}

#[test]
fn what_nests_deeply_through_references_is_refused() {
    let array = |next| json!({ "type": "array", "items": next });
    let object = |next| json!({ "type": "object", "required": ["a"], "properties": { "a": next } });
    let lark_json = format!("start: %json {}", chain(300, array));
    assert_refused(vec![
        ("arrays", json_schema(&chain(237, array)), "subschemas nest"),
        ("objects", json_schema(&chain(300, object)), "subschemas nest"),
        (
            "allOf",
            json_schema(&chain(1_000, |next| json!({ "allOf": [next, { "type": "integer" }] }))),
            "nest",
        ),
        (
            "anyOf",
            json_schema(&chain(1_000, |next| json!({ "anyOf": [next, { "type": "string" }] }))),
            "nest",
        ),
        ("$ref", json_schema(&chain(2_500, |next| next)), "subschemas nest"),
        (
            "escaped $ref",
            json_schema(&json!({ "$defs": { "a b/c": chain(900, array) }, "$ref": "#/$defs/a%20b~1c" })),
            "",
        ),
        ("%json", lark(lark_json), "subschemas nest"),
        (
            "rules",
            lark(format!(
                "start: r0\n{}r1000: \"b\"",
                rules(1_000, |i| format!("r{i}: r{0} r{0} | \"a\"", i + 1))
            )),
            "rules of the Lark grammar nest",
        ),
        (
            "terminals",
            lark(format!(
                "start: R0\n{}R4000: \"b\"",
                rules(4_000, |i| format!("R{i}: R{0} | \"a\"", i + 1))
            )),
            "rules of the Lark grammar nest",
        ),
        ("parentheses", lark(format!("start: {}\"a\"{}", "(".repeat(3_000), ")".repeat(3_000))), "nest"),
        (
            "templates",
            lark(format!("start: {}\"a\"{}\na: \"x\"", "a{".repeat(9_000), "}".repeat(9_000))),
            "nest",
        ),
        ("conditions", lark(format!("start: \"x\" %if {}true", "not(".repeat(20_000))), "nest"),
        ("groups", regex(format!("{}a{}", "(".repeat(5_000), ")".repeat(5_000))), "nest"),
        ("classes", regex(format!("{}a{}", "[".repeat(3_000), "]".repeat(3_000))), "nest"),
        ("pattern", json_schema(&json!({ "type": "string", "pattern": "(".repeat(20_000) })), ""),
    ]);
}

#[test]
fn recursive_and_moderately_nested_grammars_compile() {
    let tree = json!({
        "$defs": { "node": { "type": "object", "properties": {
            "value": { "type": "integer" },
            "children": { "type": "array", "items": { "$ref": "#/$defs/node" } },
            "next": { "anyOf": [{ "$ref": "#/$defs/node" }, { "type": "null" }] }
        }, "required": ["value"], "additionalProperties": false } },
        "$ref": "#/$defs/node"
    });
    let mut ring = chain(50, |next| json!({ "type": "array", "items": next }));
    ring["$defs"]["d50"] = json!({ "anyOf": [{ "$ref": "#/$defs/d0" }, { "type": "integer" }] });
    let document = json!({ "type": "object", "properties": { "child": { "$ref": "#" } } });
    // The schemas of several tools.
    let whole = |name: &str| {
        json!({ "type": "object", "properties": { "child": { "$ref": format!("#/$defs/{name}") } },
            "$defs": { "a": { "type": "integer" } } })
    };
    let documents = json!({
        "$defs": { "tool0": whole("tool0"), "tool1": whole("tool1/$defs/a") },
        "type": "array",
        "items": { "anyOf": [{ "$ref": "#/$defs/tool0" }, { "$ref": "#/$defs/tool1" }] }
    });
    let inherits = json!({
        "$defs": {
            "base": { "type": "object", "properties": { "id": { "type": "integer" } } }
        },
        "allOf": [{ "$ref": "#/$defs/base" }, { "required": ["id"] }]
    });
    assert_accepted(vec![
        ("a tree", json_schema(&tree)),
        ("a ring", json_schema(&ring)),
        ("the document itself", json_schema(&document)),
        ("documents among the definitions", json_schema(&documents)),
        ("a base", json_schema(&inherits)),
        ("the deepest chain", json_schema(&chain(198, |next| json!({ "type": "array", "items": next })))),
        (
            "the deepest rules",
            lark(format!("start: r0\n{}r390: \"b\"", rules(390, |i| format!("r{i}: r{} | \"a\"", i + 1)))),
        ),
        ("recursive rules", lark("start: a\na: \"(\" b \")\" | \"x\"\nb: a | \"[\" a \"]\"")),
        ("brackets in literals", lark(format!("start: \"{0}\" /[{0}]/ // {0}", "(".repeat(900)))),
    ]);
}

#[test]
fn what_takes_long_to_compile_is_refused() {
    let multiple_of = |value: f64| json_schema(&json!({ "type": "number", "multipleOf": value }));
    let integers = |values: std::ops::Range<u32>| -> Vec<Value> {
        values.map(|value| json!({ "type": "integer", "multipleOf": value })).collect()
    };
    let pair = |next: Value| {
        json!({ "allOf": [
            { "type": "array", "prefixItems": [next, next] },
            { "type": "array", "prefixItems": [{ "type": ["array", "integer"] }, {}] }
        ] })
    };
    let patterns: serde_json::Map<String, Value> =
        (0..200).map(|i| (format!("^k{i}x[ab]*$"), json!({ "type": "integer" }))).collect();
    let repeated = |part: &str, count| part.repeat(count);
    // The lengths of the loops have no common factor.
    let loops = [2, 3, 5, 7, 11, 13, 17, 19, 23].map(|len| format!("/(a{{{len}}})*b/")).join(" & ");
    assert_refused(vec![
        ("a large multipleOf", multiple_of(99_999_989.0), "at most 10000"),
        ("a long multipleOf", multiple_of(1e-10), "multipleOf 0.0000000001"),
        ("multipleOf in allOf", json_schema(&json!({ "allOf": integers(9_965..9_969) })), "multipleOf"),
        ("multipleOf in anyOf", json_schema(&json!({ "anyOf": integers(900..930) })), "too long"),
        ("merges that double", json_schema(&chain(30, pair)), "too large"),
        (
            "optional properties",
            json_schema(&json!({ "type": "object", "properties": properties(2_000) })),
            "optional properties",
        ),
        (
            "many patterns",
            json_schema(&json!({ "type": "object", "patternProperties": patterns })),
            "patternProperties",
        ),
        ("optional parts", regex(repeated("a?", 20_000)), "optional parts"),
        (
            "an optional pattern",
            json_schema(&json!({ "type": "string", "pattern": repeated("a?", 20_000) })),
            "repetitions",
        ),
        (
            "optional terminals",
            lark(format!("start: A\nA: {}", repeated("\"a\"? ", 10_000))),
            "optional parts",
        ),
        ("products of loops", lark(format!("start: A\nA: \"z\" | ({loops})")), ""),
    ]);
}

/// `#` may mean the whole or any part with an identifier.
#[test]
fn references_with_too_many_meanings_are_refused() {
    let parts = |count| vec![json!({ "id": "" }); count];
    let merged = |count| vec![json!({ "$ref": "#", "x": 1 }); count];
    // Few meanings, which are searched for each reference.
    let searched = |count| json!({ "allOf": merged(count), "y": parts(4) });
    let several = vec![format!("%json {}", searched(750)); 8].join(" | ");
    // No meanings, which are searched for in each part.
    let path = |i| json!({ "$ref": format!("#{}{i}", "/a".repeat(150)) });
    let paths: Vec<Value> = (0..200).map(path).collect();
    let (targets, merges) = (
        "too large: its references may mean too many subschemas",
        "too large: its merged subschemas have too many alternatives",
    );
    assert_refused(vec![
        ("parts", json_schema(&json!({ "anyOf": merged(4_500), "y": parts(4_300) })), targets),
        ("paths", json_schema(&json!({ "anyOf": paths, "y": parts(4_500) })), targets),
        ("merges", json_schema(&searched(3_000)), merges),
        ("merges of several schemas", lark(format!("start: {several}")), merges),
    ]);
    let definitions = (0..20).map(|i| {
        let properties = json!({ "a": { "type": "integer" }, "next": { "$ref": "#" } });
        let definition = json!({ "$id": format!("d{i}"), "type": "object", "properties": properties });
        (format!("d{i}"), definition)
    });
    let definitions: serde_json::Map<String, Value> = definitions.collect();
    let references: Vec<Value> = (0..20).map(|i| json!({ "$ref": format!("#/$defs/d{i}") })).collect();
    assert_accepted(vec![(
        "twenty parts with identifiers",
        json_schema(&json!({ "$defs": definitions, "anyOf": references })),
    )]);
}

#[test]
fn what_no_output_matches_is_refused() {
    let integer = json!({ "$ref": "#" });
    assert_refused(vec![
        ("an empty class", regex(r"[^\s\S]"), "no output"),
        ("only itself", json_schema(&integer), "no output"),
        ("itself in allOf", json_schema(&json!({ "allOf": [integer] })), "no output"),
        ("an endless rule", lark("start: start"), "no output"),
    ]);
    assert_accepted(vec![("an empty output", regex("a?")), ("only the empty output", lark("start: \"\""))]);
}

/// The parser computes with 64-bit floats, which do not hold every integer beyond 2^53.
#[test]
fn integers_that_the_parser_would_change_are_refused() {
    let largest_safe = (1_i64 << 53) - 1;
    let beyond = largest_safe + 2;
    let bounded = |keyword: &str, bound: i64| json_schema(&json!({ "type": "integer", keyword: bound }));
    assert_refused(vec![
        ("const", json_schema(&json!({ "const": beyond })), "const 9007199254740993: "),
        ("enum", json_schema(&json!({ "enum": ["a", { "ids": [-beyond] }] })), "enum -9007199254740993: "),
        ("unsigned", json_schema(&json!({ "const": u64::MAX })), "const 18446744073709551615: "),
        ("minimum", bounded("minimum", beyond), "minimum 9007199254740993: "),
        ("exclusiveMaximum", bounded("exclusiveMaximum", beyond), "exclusiveMaximum 9007199254740993: "),
    ]);
    assert_accepted(vec![
        ("constants", json_schema(&json!({ "enum": [beyond - 1, i64::MAX, -largest_safe, 1.5, "a"] }))),
        (
            "JavaScript's integers",
            json_schema(&json!({ "type": "integer", "minimum": -largest_safe, "maximum": largest_safe })),
        ),
        ("unsigned", json_schema(&json!({ "type": "integer", "minimum": 0, "maximum": u64::MAX }))),
    ]);
}

#[test]
fn large_and_ordinary_grammars_compile() {
    let choices: Vec<String> = (0..9_000).map(|i| format!("v{i}")).collect();
    assert_accepted(vec![
        ("optional properties", json_schema(&json!({ "type": "object", "properties": properties(1_000) }))),
        ("an enum", json_schema(&json!({ "enum": choices }))),
        ("choices", Grammar::choice(&choices)),
        ("lengths", json_schema(&json!({ "type": "string", "minLength": 100_000, "maxLength": 10_000_000 }))),
        (
            "items",
            json_schema(
                &json!({ "type": "array", "items": {}, "minItems": 100_000, "maxItems": 1_000_000_000 }),
            ),
        ),
        ("multipleOf", json_schema(&json!({ "type": "number", "multipleOf": 0.01 }))),
        (
            "multipleOf in allOf",
            json_schema(&json!({ "allOf": [
            { "type": "integer", "multipleOf": 4 }, { "type": "integer", "multipleOf": 6 }] })),
        ),
        ("a long literal", regex("a".repeat(TEXT_BYTES_MAX))),
        ("repetitions", regex("(a{1000}){1000}[a-z]{0,5000}")),
    ]);
}

/// Reproducible pseudo-random numbers.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }

    fn pick<'a>(&mut self, from: &[&'a str]) -> &'a str {
        from[self.below(from.len())]
    }

    fn schema(&mut self, depth: usize) -> Value {
        let reference = format!("#/$defs/d{}", self.below(8));
        let below = |dice: &mut Self| {
            let levels = 1 + dice.below(3);
            dice.schema(depth.saturating_sub(levels))
        };
        match if depth == 0 { self.below(5) } else { self.below(12) } {
            0 => json!({ "type": "integer", "multipleOf": 1 + self.below(60), "minimum": -5 }),
            1 => json!({ "type": "string", "pattern": self.regex(3), "maxLength": self.below(900) }),
            2 => json!({ "$ref": reference }),
            3 => json!({ "enum": [1, "a", null, [true], { "b": 2.5 }] }),
            4 => json!({}),
            5 => json!({ "$ref": reference, "type": "object", "properties": { "a": below(self) } }),
            6 => json!({ "allOf": [below(self), below(self), { "$ref": reference }] }),
            7 => json!({ "anyOf": [below(self), below(self)], "minLength": self.below(3) }),
            8 => {
                json!({ "type": "array", "items": below(self), "prefixItems": [below(self)], "minItems": self.below(99_999) })
            }
            9 => {
                json!({ "type": "object", "properties": { "a": below(self), "b": below(self) }, "required": ["a"] })
            }
            10 => {
                json!({ "type": "object", "patternProperties": { self.regex(2): below(self) }, "properties": { "ab": below(self) } })
            }
            _ => json!({ "type": "object", "additionalProperties": below(self), "minProperties": 1 }),
        }
    }

    fn regex(&mut self, depth: usize) -> String {
        if depth == 0 {
            return self.pick(&["a", "[ab]", r"\w", ".", r"\p{L}", "", "[^a]"]).to_owned();
        }
        let parts = 1 + self.below(4);
        let joined: Vec<String> = (0..parts)
            .map(|_| self.below(depth))
            .collect::<Vec<_>>()
            .into_iter()
            .map(|depth| self.regex(depth))
            .collect();
        let joined = joined.join(self.pick(&["", "|", "b"]));
        let suffix = self.pick(&["", "*", "+", "?", "{0,900}", "{3}", "{2,}"]);
        format!("({joined}){suffix}")
    }

    fn lark(&mut self) -> String {
        let mut text = "start: r0\n".to_owned();
        for i in 0..8 {
            let alternatives: Vec<String> = (0..1 + self.below(4)).map(|_| self.lark_sequence(i)).collect();
            text += &format!("r{i}: {}\n", alternatives.join(" | "));
            let (inner, next) = (self.regex(2), 1 + i + self.below(3));
            let operator = self.pick(&["&", "|", ""]);
            text += &format!(
                "T{i}: {}/a{inner}/ {operator} {}\n",
                self.pick(&["", "~"]),
                match next {
                    8.. => "\"z\"".to_owned(),
                    next => format!("T{next}{}", self.pick(&["", "*", "?", "{0,9}"])),
                }
            );
        }
        text
    }

    fn lark_sequence(&mut self, rule: usize) -> String {
        let parts = (0..1 + self.below(4)).map(|_| match self.below(6) {
            0 => format!("r{}", self.below(8)),
            1 => format!("T{}", rule.max(self.below(8))),
            2 => format!(
                "(\"x\" r{} | T{}){}",
                self.below(8),
                self.below(8),
                self.pick(&["", "*", "+", "?", "{1,400}"])
            ),
            3 => "\"y\"".to_owned(),
            4 => format!("%json {}", self.schema(1).to_string().replace("#/$defs/", "#/none/")),
            _ => "\"\"".to_owned(),
        });
        parts.collect::<Vec<_>>().join(" ")
    }
}

/// Random grammars of each kind.
const CASES: u64 = 150;

#[test]
fn random_grammars_end_in_a_result() {
    let mut accepted = 0;
    for seed in 0..CASES {
        let mut dice = Dice(seed * 7 + 1);
        let mut schema = dice.schema(6);
        let definitions = (0..8).map(|i| (format!("d{i}"), dice.schema(4)));
        let definitions = Value::Object(definitions.collect());
        if let Some(fields) = schema.as_object_mut() {
            fields.insert("$defs".to_owned(), definitions);
        }
        let grammars = [json_schema(&schema), regex(dice.regex(5)), lark(dice.lark())];
        for grammar in grammars {
            let name = format!("seed {seed}: {:?} {}", grammar.kind, grammar.text);
            let began = Instant::now();
            let results = check_all(vec![(name, grammar)], 16);
            let (name, result) = &results[0];
            assert!(began.elapsed() < Duration::from_secs(60), "{name}");
            assert!(result.as_ref().err().is_none_or(|error| !error.contains('\n')), "{name}: {result:?}");
            accepted += usize::from(result.is_ok());
        }
    }
    assert!(accepted as u64 > CASES / 2, "only {accepted} of {} were accepted", 3 * CASES);
}
