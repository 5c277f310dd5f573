//! Limits on a Lark text: nesting of brackets and of rules, and what its literals hold.

use std::collections::HashMap;

use serde_json::Value;

use super::graph::children_first;
use super::patterns::Repetitions;
use super::search::SearchSteps;
use super::{check_nesting, schema};
use crate::GrammarError;

/// Checks the text. A text that the parser's lexer would refuse may pass.
pub(super) fn check(text: &str) -> Result<(), GrammarError> {
    let mut rules = Rules::default();
    let (mut repetitions, mut steps) = (Repetitions::default(), SearchSteps::default());
    let mut scanner = Scanner { text, at: 0 };
    let mut brackets: u64 = 0;
    let mut starts_item = true;
    while let Some(token) = scanner.next_token() {
        let begins_item = matches!(token, Token::Newline | Token::Nested);
        match token {
            Token::Name(name) if starts_item => rules.begin(name),
            Token::Name(name) => rules.refer(name, 1 + brackets),
            Token::Open | Token::Nested => brackets += 1,
            Token::Close => brackets = brackets.saturating_sub(1),
            Token::Schema(value) => schema::check(&value, &mut repetitions, &mut steps)?,
            Token::Newline | Token::Other => {}
        }
        check_nesting(brackets, "brackets of the Lark grammar")?;
        starts_item = begins_item;
    }
    check_nesting(rules.depth(), "rules of the Lark grammar")
}

/// Rules and terminals, and which ones each refers to. Those of nested grammars are among them.
#[derive(Default)]
struct Rules<'a> {
    ids: HashMap<&'a str, usize>,
    /// The target, and the levels that it nests deeper.
    references: Vec<Vec<(usize, u64)>>,
    current: Option<usize>,
}

impl<'a> Rules<'a> {
    fn id(&mut self, name: &'a str) -> usize {
        let id = *self.ids.entry(name).or_insert(self.references.len());
        if id == self.references.len() {
            self.references.push(Vec::new());
        }
        id
    }

    fn begin(&mut self, name: &'a str) {
        self.current = Some(self.id(name));
    }

    fn refer(&mut self, name: &'a str, levels: u64) {
        let target = self.id(name);
        if let Some(current) = self.current {
            self.references[current].push((target, levels));
        }
    }

    fn depth(&self) -> u64 {
        let targets = |rule: usize| -> Box<dyn Iterator<Item = usize> + '_> {
            Box::new(self.references[rule].iter().map(|&(target, _)| target))
        };
        let mut depths = vec![0; self.references.len()];
        for rule in children_first(depths.len(), 0..depths.len(), targets) {
            let below = self.references[rule].iter().map(|&(target, levels)| levels + depths[target]);
            depths[rule] = below.max().unwrap_or(1);
        }
        depths.into_iter().max().unwrap_or(0)
    }
}

enum Token<'a> {
    Name(&'a str),
    Open,
    Close,
    Newline,
    /// The `{` of `%lark {`.
    Nested,
    /// The value of `%json`.
    Schema(Value),
    Other,
}

/// Splits a text as the parser's lexer does, as far as nesting depends on it.
struct Scanner<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Scanner<'a> {
    fn next_token(&mut self) -> Option<Token<'a>> {
        let rest = self.text[self.at..].trim_start_matches([' ', '\t', '\r']);
        self.at = self.text.len() - rest.len();
        let (len, token) = match rest.chars().next()? {
            '\n' => (1, Token::Newline),
            '#' => (line_len(rest), Token::Other),
            '/' if rest.starts_with("//") => (line_len(rest), Token::Other),
            '/' => (quoted_len(rest, '/'), Token::Other),
            '"' => (quoted_len(rest, '"'), Token::Other),
            '<' => (rest.find('>').map_or(1, |end| end + 1), Token::Other),
            '%' => return Some(self.directive(rest)),
            '(' | '[' | '{' => (1, Token::Open),
            ')' | ']' | '}' => (1, Token::Close),
            first if is_of_name(first) || matches!(first, '!' | '?') => {
                let len = 1 + rest[1..].find(|next| !is_of_name(next)).unwrap_or(rest.len() - 1);
                (len, Token::Name(rest[..len].trim_start_matches(['!', '?'])))
            }
            first => (first.len_utf8(), Token::Other),
        };
        self.at += len;
        Some(token)
    }

    /// A directive with the value or brace behind it.
    fn directive(&mut self, rest: &'a str) -> Token<'a> {
        for (name, is_schema) in [("%json", true), ("%regex", false), ("%llguidance", false)] {
            if let Some(value) = rest.strip_prefix(name) {
                let mut values = serde_json::Deserializer::from_str(value).into_iter::<Value>();
                let found = values.next();
                self.at += name.len() + values.byte_offset();
                return match found {
                    Some(Ok(value)) if is_schema => Token::Schema(value),
                    _ => Token::Other,
                };
            }
        }
        if let Some(behind) = rest.strip_prefix("%lark")
            && let Some(brace) = behind.find(|next: char| !matches!(next, ' ' | '\t' | '\r' | '\n'))
            && behind[brace..].starts_with('{')
        {
            self.at += "%lark".len() + brace + 1;
            return Token::Nested;
        }
        self.at += 1;
        Token::Other
    }
}

fn is_of_name(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '_' | '-')
}

fn line_len(rest: &str) -> usize {
    rest.find('\n').unwrap_or(rest.len())
}

/// Length of a literal with its quotes; one that does not end goes on to the end of the text.
fn quoted_len(rest: &str, quote: char) -> usize {
    let mut characters = rest.char_indices().skip(1);
    while let Some((at, character)) = characters.next() {
        match character {
            '\\' => drop(characters.next()),
            _ if character == quote => return at + 1,
            _ => {}
        }
    }
    rest.len()
}
