//! [`Compiler`]: compiles grammars to matchers, with limits on size and work.

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher as Parser, ParserFactory};
use serde_json::{Value, json};

use crate::document::{Grammar, GrammarKind};
use crate::{GrammarError, Matcher, Vocabulary};

/// Whitespace between two tokens of JSON. Without a bound a weak model could emit it forever.
const WHITESPACE: &str = r"[\x20\n\r\t]{1,20}";

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
        Self::with_slices(vocabulary, &SlicedBiasComputer::general_slices())
    }

    fn with_slices(vocabulary: &Vocabulary, slices: &[String]) -> Result<Self, GrammarError> {
        let capabilities = InferenceCapabilities::default();
        let mut factory = ParserFactory::new(vocabulary.env(), capabilities, slices).map_err(refused)?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits { verbose_errors: false, ..ParserLimits::default() };
        Ok(Self { factory, num_tokens: vocabulary.num_tokens() })
    }

    /// Compiles a grammar.
    pub fn compile(&self, grammar: &Grammar) -> Result<Matcher, GrammarError> {
        grammar.check_size()?;
        let parsed = match grammar.kind {
            GrammarKind::JsonSchema => TopLevelGrammar::from_json_schema(schema_of(&grammar.text)?),
            GrammarKind::Regex => TopLevelGrammar::from_regex(&grammar.text),
            GrammarKind::Lark => TopLevelGrammar::from_lark(grammar.text.clone()),
        };
        let parser = self.factory.create_parser(parsed).map_err(|error| refused(format!("{error:#}")))?;
        let parser = Parser::new(Ok(parser));
        match parser.get_error() {
            Some(reason) => Err(refused(reason)),
            None => Ok(Matcher::new(parser, self.num_tokens)),
        }
    }
}

impl Grammar {
    /// The right-hand side of a Lark rule that matches what [`GrammarKind::JsonSchema`] matches for this
    /// schema.
    pub fn lark_json(schema: &str) -> Result<String, GrammarError> {
        Ok(format!("%json {}", schema_of(schema)?))
    }
}

/// Checks that a grammar compiles, without a model's vocabulary.
pub fn check(grammar: &Grammar) -> Result<(), GrammarError> {
    Compiler::with_slices(&Vocabulary::of_bytes(), &[])?.compile(grammar).map(drop)
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

/// The parser's message in one line, without markup.
pub(crate) fn one_line(message: &str) -> String {
    let message = message.replace("<non-verbose/>", "");
    message.split('\n').map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}
