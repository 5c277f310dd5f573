//! [`Compiler`]: compiles grammars to matchers, with limits on size and work.

use std::panic::AssertUnwindSafe;
use std::sync::LazyLock;

use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::earley::lexerspec::LexerSpec;
use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher as Parser, ParserFactory};
use serde_json::{Value, json};

use crate::document::{Grammar, GrammarKind};
use crate::{GrammarError, Matcher, TimedCompiler, Vocabulary, expressions, limits};

/// Whitespace between two tokens of JSON. Without a bound a weak model could emit it forever.
const WHITESPACE: &str = r"[\x20\n\r\t]{1,20}";

/// Maximum parser items at one position. An optional property of an object takes four. The first mask takes
/// 1 ms at 2,000 items, 22 ms at 4,000 and 82 ms at 12,000 (debug build).
const ITEMS_MAX: usize = 5_000;

/// Maximum lines of the parser's message, and characters of a line; it may quote the grammar.
const LINES_MAX: usize = 20;
const LINE_CHARS_MAX: usize = 200;

/// Stack of a thread that compiles grammars or computes masks, in bytes. The parser is recursive. The deepest
/// grammar that passes the limits needs 2 MB (debug build).
pub const STACK_BYTES: usize = 256 << 20;

/// Compiles grammars for one vocabulary.
pub struct Compiler {
    factory: ParserFactory,
    num_tokens: usize,
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiler").field("num_tokens", &self.num_tokens).finish()
    }
}

impl Compiler {
    /// Prepares what all grammars of one vocabulary share; takes some tenths of a second for a large one.
    pub fn new(vocabulary: &Vocabulary) -> Result<Self, GrammarError> {
        let (capabilities, slices) = (InferenceCapabilities::default(), SlicedBiasComputer::general_slices());
        let mut factory = ParserFactory::new(vocabulary.env(), capabilities, &slices).map_err(refused)?;
        factory.quiet();
        *factory.limits_mut() =
            ParserLimits { verbose_errors: false, max_items_in_row: ITEMS_MAX, ..ParserLimits::default() };
        Ok(Self { factory, num_tokens: vocabulary.num_tokens() })
    }

    /// The limits of grammars that are compiled later.
    #[cfg(test)]
    pub(crate) fn limits_mut(&mut self) -> &mut ParserLimits {
        self.factory.limits_mut()
    }

    /// Compiles a grammar. Needs a thread with [`STACK_BYTES`] of stack.
    pub fn compile(&self, grammar: &Grammar) -> Result<Matcher, GrammarError> {
        grammar.check_size()?;
        limits::check(grammar)?;
        let parsed = parse(grammar)?;
        let (env, limits) = (Some(self.factory.tok_env().clone()), self.factory.limits().clone());
        let parsed = || GrammarInit::Serialized(parsed).to_internal(env, limits);
        let (rules, lexer) = catch_unwind(AssertUnwindSafe(parsed)).map_err(chain_refused)?;
        check_lexemes(&lexer)?;
        catch_unwind(AssertUnwindSafe(|| Ok(self.check_lexer(&lexer)))).map_err(chain_refused)??;
        let internal = GrammarInit::Internal(rules, lexer);
        let parser = self.factory.create_parser_from_init_default(internal).map_err(chain_refused)?;
        let parser = Parser::new(Ok(parser));
        match parser.get_error() {
            Some(reason) => Err(refused(reason)),
            None => Ok(Matcher::new(parser, self.num_tokens)),
        }
    }

    /// Checks that the automaton of all terminals can begin. The parser computes the same, but without a
    /// limit.
    fn check_lexer(&self, lexer: &LexerSpec) -> Result<(), GrammarError> {
        let mut lexer = lexer.clone();
        lexer.add_extra_lexemes(&self.factory.extra_lexemes());
        expressions::check(&lexer)?;
        let mut limits = self.factory.limits().clone();
        let mut automaton = lexer.to_regex_vec(&mut limits).map_err(refused)?;
        automaton.set_fuel(limits.initial_lexer_fuel.max(1));
        let start = automaton.initial_state(&lexer.all_lexemes());
        for byte in 0..=u8::MAX {
            automaton.transition(start, byte);
            if let Some(reason) = automaton.get_error() {
                return Err(GrammarError::Compile(format!(
                    "the terminals of the grammar take too long to combine: {reason}"
                )));
            }
        }
        Ok(())
    }
}

impl Grammar {
    /// The right-hand side of a Lark rule that matches what [`GrammarKind::JsonSchema`] matches for this
    /// schema.
    pub fn lark_json(schema: &str) -> Result<String, GrammarError> {
        Ok(format!("%json {}", schema_of(schema)?))
    }
}

/// Checks that a grammar compiles and allows an output, without a model's vocabulary. Compiles on another
/// thread for a limited time, and keeps the results: see [`TimedCompiler`].
pub fn check(grammar: &Grammar) -> Result<(), GrammarError> {
    static CHECKS: LazyLock<TimedCompiler<()>> = LazyLock::new(|| TimedCompiler::new(check_on_this_thread));
    CHECKS.compile(grammar)
}

/// [`check`] without a limit on time. Needs a thread with [`STACK_BYTES`] of stack.
pub fn check_on_this_thread(grammar: &Grammar) -> Result<(), GrammarError> {
    static COMPILER: LazyLock<Result<Compiler, GrammarError>> =
        LazyLock::new(|| Compiler::new(&Vocabulary::of_bytes()));
    COMPILER.as_ref().map_err(GrammarError::clone)?.compile(grammar)?.check_start()
}

fn parse(grammar: &Grammar) -> Result<TopLevelGrammar, GrammarError> {
    Ok(match grammar.kind {
        GrammarKind::JsonSchema => TopLevelGrammar::from_json_schema(schema_of(&grammar.text)?),
        GrammarKind::Regex => TopLevelGrammar::from_regex(&grammar.text),
        GrammarKind::Lark => TopLevelGrammar::from_lark(grammar.text.clone()),
    })
}

/// Parses the schema and replaces its whitespace rule by ours.
fn schema_of(text: &str) -> Result<Value, GrammarError> {
    let mut schema: Value =
        serde_json::from_str(text).map_err(|error| GrammarError::Compile(format!("not JSON: {error}")))?;
    if schema == Value::Bool(true) {
        schema = json!({});
    }
    let Some(fields) = schema.as_object_mut() else {
        return Err(GrammarError::Compile("a schema must be an object".to_owned()));
    };
    fields.insert("x-guidance".to_owned(), json!({ "whitespace_pattern": WHITESPACE }));
    Ok(schema)
}

fn refused(error: impl std::fmt::Display) -> GrammarError {
    GrammarError::Compile(one_line(&error.to_string()))
}

/// Refuses what is no property of the text, and what the parser cannot roll back: it would read the whole
/// output again after each rejected draft.
fn check_lexemes(lexer: &LexerSpec) -> Result<(), GrammarError> {
    if lexer.special_token_rx.is_some() {
        let reason = "tokens (<..>) are not supported: a grammar describes text";
        return Err(GrammarError::Compile(reason.to_owned()));
    }
    lexer.check_rollback().map_err(|_needs_replay| {
        GrammarError::Compile(
            "max_tokens and stop of rules are not supported: use suffix or a regex".to_owned(),
        )
    })
}

/// With all causes of an error.
fn chain_refused(error: impl std::fmt::Display) -> GrammarError {
    refused(format!("{error:#}"))
}

/// The parser's message in one line, without markup and what it quotes at length. A panic's stack is logged.
pub(crate) fn one_line(message: &str) -> String {
    let (message, stack) = message.split_once("<backtrace>").unwrap_or((message, ""));
    if !stack.is_empty() {
        tracing::warn!(reason = message.trim(), stack, "the grammar parser panicked");
    }
    let message = message.replace("<non-verbose/>", "");
    let lines = message.split('\n').map(str::trim).filter(|line| !line.is_empty());
    lines.take(LINES_MAX).map(shortened).collect::<Vec<_>>().join("; ")
}

/// The beginning and the end of a long line.
fn shortened(line: &str) -> String {
    let num_chars = line.chars().count();
    if num_chars <= LINE_CHARS_MAX {
        return line.to_owned();
    }
    let first: String = line.chars().take(LINE_CHARS_MAX / 2).collect();
    let last: String = line.chars().skip(num_chars - LINE_CHARS_MAX / 2).collect();
    format!("{first} .. {last}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_the_parser_is_one_line_without_its_stack() {
        let message =
            "panic: overflow\n<backtrace>\n   0: llguidance::f\n             at src/x.rs:1\n</backtrace>";
        assert_eq!(one_line(message), "panic: overflow");
        assert_eq!(one_line("a\n\n  b<non-verbose/>"), "a; b");
        assert_eq!(one_line(&"ä".repeat(5_000)).chars().count(), LINE_CHARS_MAX + 4);
    }

    /// The parser as it compiles without our checks.
    fn twin(compiler: &Compiler, grammar: &Grammar) -> Matcher {
        let parser = compiler.factory.create_parser(parse(grammar).unwrap());
        Matcher::new(Parser::new(parser), compiler.num_tokens)
    }

    #[test]
    fn the_checks_change_no_mask() {
        let compiler = Compiler::new(&Vocabulary::of_bytes()).unwrap();
        let schema = json!({ "type": "object", "properties": {
            "name": { "type": "string", "pattern": "^a.*b$" },
            "price": { "type": "number", "multipleOf": 0.25 },
            "next": { "$ref": "#" }
        }, "required": ["name"] });
        let lark = "start: item+\nitem: \"<\" A \">\"\nA: /[a-z]{1,4}/ & /.*b.*/";
        for (grammar, text) in [
            (Grammar::json_schema(&schema), r#"{"name": "axb", "price": 3.75, "next": {"name":"ab"}}"#),
            (Grammar::choice(&["yes", "yet", "no"]), "yet"),
            (Grammar { kind: GrammarKind::Lark, text: lark.to_owned() }, "<ab><b>"),
        ] {
            let mut matcher = compiler.compile(&grammar).unwrap();
            let mut twin = twin(&compiler, &grammar);
            let ids: Vec<u32> = text.bytes().map(u32::from).collect();
            for len in 0..=ids.len() {
                let masks = matcher.masks(&ids[..len], &[], &[0]).unwrap();
                assert_eq!(masks, twin.masks(&ids[..len], &[], &[0]).unwrap(), "{text:?} at {len}");
            }
        }
    }
}
