//! Limits on a JSON schema: nesting through `$ref`, and the size of what `allOf` and siblings merge.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value};

use super::check_nesting;
use super::graph::children_first;
use super::integers;
use super::multiple_of::MultipleOf;
use super::patterns::Repetitions;
use super::search::{SearchSteps, too_large};
use crate::{GrammarError, TEXT_BYTES_MAX};

/// Maximum subschemas, with references followed, in all merges of subschemas that have parts in common. Each
/// merge copies them.
const MERGED_MAX: u64 = 50_000;

/// Maximum alternatives in all merges of a schema with patterns: for each the parser looks for a match.
const MERGED_OPTIONS_MAX: u64 = 4_000;

/// Maximum `patternProperties` of one object. They are compared in pairs at a cost that grows with their
/// number: 100 take 0.3 seconds, 200 take 4 seconds (debug build).
const PATTERN_PROPERTIES_MAX: u64 = 100;

/// Maximum optional properties of one object. Time to compile grows with their square: 3,000 take 3 seconds
/// (debug build).
const OPTIONAL_PROPERTIES_MAX: u64 = 1_200;

/// Maximum subschemas of all subschemas, including those that references may mean. Without references a text
/// has fewer. The time of the checks is linear in their number.
const EDGES_MAX: usize = TEXT_BYTES_MAX;

/// Why a schema with too many of them is refused.
const MANY_TARGETS: &str = "its references may mean too many subschemas";

/// Keywords that hold one subschema or a list of them, at another position than the object's own.
const NESTED: [&str; 4] = ["items", "prefixItems", "additionalItems", "additionalProperties"];
/// Keywords that hold subschemas by name.
const NESTED_BY_NAME: [&str; 2] = ["properties", "patternProperties"];
/// Keywords that describe and do not constrain.
const ANNOTATIONS: [&str; 15] = [
    "$anchor",
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "contentEncoding",
    "contentMediaType",
    "default",
    "definitions",
    "description",
    "examples",
    "id",
    "readOnly",
    "title",
    "writeOnly",
];

/// Checks a schema; references that lead nowhere are the parser's to refuse.
pub(super) fn check(
    schema: &Value,
    repetitions: &mut Repetitions,
    steps: &mut SearchSteps,
) -> Result<(), GrammarError> {
    let schema = Schema::read(schema, steps)?;
    for node in &schema.nodes {
        let mut patterns = node.names("patternProperties").chain(node.text("pattern"));
        patterns.try_for_each(|pattern| repetitions.add(pattern))?;
        if let Some(keywords) = node.keywords {
            integers::check(keywords)?;
        }
    }
    let mut totals = Totals::default();
    let mut sizes = vec![Size::default(); schema.nodes.len()];
    let children = |node: usize| -> Box<dyn Iterator<Item = usize> + '_> {
        let node = &schema.nodes[node];
        Box::new(node.children())
    };
    for at in children_first(sizes.len(), [0], children) {
        let node = &schema.nodes[at];
        sizes[at] = Size::of(node, &sizes)?;
        check_nesting(sizes[at].depth, "subschemas")?;
        totals.add(&schema, node, &sizes[at], steps)?;
    }
    Ok(())
}

/// A subschema. A boolean one, and what is no schema, has no keywords.
struct Node<'a> {
    keywords: Option<&'a Map<String, Value>>,
    /// Subschemas for its own position: groups that are merged, each of alternatives.
    in_place: Vec<Vec<usize>>,
    /// Subschemas for parts of the value.
    nested: Vec<usize>,
}

impl<'a> Node<'a> {
    fn children(&self) -> impl Iterator<Item = usize> {
        self.in_place.iter().flatten().chain(&self.nested).copied()
    }

    /// Whether it constrains parts of the value that it does not name.
    fn has_unnamed_parts(&self) -> bool {
        let is_schema = |keyword: &&str| self.get(keyword).is_some_and(|value| !value.is_boolean());
        NESTED.iter().any(is_schema) || self.names("patternProperties").next().is_some()
    }

    fn get(&self, keyword: &str) -> Option<&'a Value> {
        self.keywords?.get(keyword)
    }

    fn text(&self, keyword: &str) -> Option<&'a str> {
        self.get(keyword)?.as_str()
    }

    fn names(&self, keyword: &str) -> impl Iterator<Item = &'a str> + use<'a> {
        let named = self.get(keyword).and_then(Value::as_object);
        named.into_iter().flat_map(Map::keys).map(String::as_str)
    }

    fn num(&self, keyword: &str) -> u64 {
        self.get(keyword).and_then(Value::as_array).map_or(0, Vec::len) as u64
    }

    /// Number of schemas that are merged for this one. If it is one, nothing is copied.
    fn num_merged(&self) -> u64 {
        let Some(keywords) = self.keywords else { return 0 };
        let single = ["const", "enum", "anyOf", "oneOf", "$ref"];
        let is_own = |keyword: &str| {
            !single.contains(&keyword) && keyword != "allOf" && !ANNOTATIONS.contains(&keyword)
        };
        let num_single = single.iter().filter(|keyword| keywords.contains_key(**keyword)).count() as u64;
        // Named properties are merged with patterns that match their names.
        let own = u64::from(keywords.keys().any(|keyword| is_own(keyword)))
            + u64::from(keywords.contains_key("patternProperties") && keywords.contains_key("properties"));
        num_single + self.num("allOf") + own
    }
}

/// All subschemas that the parser may reach; the first is the whole.
struct Schema<'a> {
    nodes: Vec<Node<'a>>,
}

impl<'a> Schema<'a> {
    fn read(root: &'a Value, steps: &mut SearchSteps) -> Result<Self, GrammarError> {
        let mut reader =
            Reader { root, ids: HashMap::new(), values: Vec::new(), embedded: Vec::new(), num_edges: 0 };
        reader.find_embedded();
        reader.id(root);
        let mut nodes = Vec::new();
        while let Some(&value) = reader.values.get(nodes.len()) {
            nodes.push(reader.node(value, steps)?);
        }
        Ok(Self { nodes })
    }

    /// Names of the properties that alternatives constrain, and whether they constrain others too.
    fn parts(
        &self,
        alternatives: &[usize],
        steps: &mut SearchSteps,
    ) -> Result<(HashSet<&'a str>, bool), GrammarError> {
        let many = "its merged subschemas have too many alternatives";
        steps.add(alternatives.len(), many)?;
        let (mut names, mut has_others) = (HashSet::new(), false);
        let (mut seen, mut left) = (HashSet::new(), alternatives.to_vec());
        while let Some(at) = left.pop() {
            let node = &self.nodes[at];
            let num_children: usize = node.in_place.iter().map(|group| 1 + group.len()).sum();
            steps.add(num_children + node.names("properties").count(), many)?;
            names.extend(node.names("properties"));
            has_others |= node.has_unnamed_parts();
            left.extend(node.in_place.iter().flatten().filter(|&&child| seen.insert(child)));
        }
        Ok((names, has_others))
    }

    /// Whether two of the schemas that are merged for this one constrain the same part of the value.
    fn has_common_parts(&self, node: &Node<'a>, steps: &mut SearchSteps) -> Result<bool, GrammarError> {
        let mut seen: HashSet<&str> = node.names("properties").collect();
        let mut has_others = node.has_unnamed_parts();
        for alternatives in &node.in_place {
            let (names, more) = self.parts(alternatives, steps)?;
            if (has_others && (more || !names.is_empty())) || (more && !seen.is_empty()) {
                return Ok(true);
            }
            has_others |= more;
            if names.into_iter().any(|name| !seen.insert(name)) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Finds the subschemas of a schema.
struct Reader<'a> {
    root: &'a Value,
    /// Index by address.
    ids: HashMap<*const Value, usize>,
    values: Vec<&'a Value>,
    /// Subschemas with an identifier of their own.
    embedded: Vec<(&'a str, &'a Value)>,
    num_edges: usize,
}

impl<'a> Reader<'a> {
    fn id(&mut self, value: &'a Value) -> usize {
        let id = *self.ids.entry(std::ptr::from_ref(value)).or_insert(self.values.len());
        if id == self.values.len() {
            self.values.push(value);
        }
        id
    }

    fn find_embedded(&mut self) {
        let mut left = vec![self.root];
        while let Some(value) = left.pop() {
            match value {
                Value::Array(items) => left.extend(items),
                Value::Object(fields) => {
                    let names = ["$id", "id", "$anchor", "$dynamicAnchor"].into_iter();
                    let names = names.filter_map(|name| fields.get(name)?.as_str());
                    self.embedded.extend(names.map(|name| (last_segment(name), value)));
                    left.extend(fields.values());
                }
                _ => {}
            }
        }
    }

    fn node(&mut self, value: &'a Value, steps: &mut SearchSteps) -> Result<Node<'a>, GrammarError> {
        let mut node = Node { keywords: value.as_object(), in_place: Vec::new(), nested: Vec::new() };
        let Some(keywords) = node.keywords else { return Ok(node) };
        for (keyword, value) in keywords {
            let (found, is_nested): (Vec<&Value>, bool) = match (keyword.as_str(), value) {
                ("$ref", Value::String(reference)) => {
                    // Each embedded one is searched for the path.
                    let num_segments = 1 + reference.matches('/').count();
                    steps.add(self.embedded.len().saturating_mul(num_segments), MANY_TARGETS)?;
                    (self.targets(reference), false)
                }
                ("anyOf" | "oneOf", Value::Array(list)) => (list.iter().collect(), false),
                ("allOf", Value::Array(list)) => {
                    node.in_place.extend(list.iter().map(|value| vec![self.id(value)]));
                    continue;
                }
                (name, Value::Array(list)) if NESTED.contains(&name) => (list.iter().collect(), true),
                (name, Value::Object(named)) if NESTED_BY_NAME.contains(&name) => {
                    (named.values().collect(), true)
                }
                (name, value) if NESTED.contains(&name) => (vec![value], true),
                _ => continue,
            };
            self.num_edges += found.len();
            if self.num_edges > EDGES_MAX {
                return Err(too_large(MANY_TARGETS));
            }
            let ids: Vec<usize> = found.into_iter().map(|value| self.id(value)).collect();
            if is_nested { node.nested.extend(ids) } else { node.in_place.push(ids) }
        }
        Ok(node)
    }

    /// The subschemas that a reference may mean: those at its path in the whole or in an embedded one, or
    /// those with its identifier.
    fn targets(&self, reference: &str) -> Vec<&'a Value> {
        let (document, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let fragment = percent_decoded(fragment);
        let is_path = fragment.is_empty() || fragment.starts_with('/');
        let named = |name: &str| -> Vec<&'a Value> {
            let embedded = self.embedded.iter().filter(|(id, _)| *id == last_segment(name));
            embedded.map(|&(_, value)| value).collect()
        };
        match (document, is_path) {
            (_, false) => named(&fragment),
            ("", true) => {
                let documents = self.embedded.iter().map(|&(_, value)| value);
                let documents = [self.root].into_iter().chain(documents);
                documents.filter_map(|value| value.pointer(&fragment)).collect()
            }
            (document, true) => {
                let documents = named(document).into_iter();
                documents.filter_map(|value| value.pointer(&fragment)).collect()
            }
        }
    }
}

fn last_segment(identifier: &str) -> &str {
    let identifier = identifier.trim_end_matches('#');
    identifier.rsplit(['/', '#', ':']).next().unwrap_or(identifier)
}

fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut left = text.as_bytes();
    while let Some((&byte, rest)) = left.split_first() {
        let code = (byte == b'%').then(|| std::str::from_utf8(rest.get(..2)?).ok()).flatten();
        match code.and_then(|code| u8::from_str_radix(code, 16).ok()) {
            Some(decoded) => {
                bytes.push(decoded);
                left = &rest[2..];
            }
            None => {
                bytes.push(byte);
                left = rest;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// What a subschema amounts to when all references are followed.
#[derive(Debug, Clone, Default)]
struct Size {
    depth: u64,
    nodes: u64,
    /// Number of `patternProperties`, and whether there is a pattern or format for strings.
    pattern_properties: u64,
    has_pattern: bool,
    /// Number of alternatives for its own position.
    options: u64,
    multiple_of: MultipleOf,
}

impl Size {
    fn of(node: &Node<'_>, sizes: &[Self]) -> Result<Self, GrammarError> {
        let below = || node.children().map(|child| &sizes[child]);
        let num_values = node.num("enum");
        let mut size = Self {
            depth: 1 + below().map(|child| child.depth).max().unwrap_or(0),
            nodes: below().fold(1 + num_values, |sum, child| sum.saturating_add(child.nodes)),
            pattern_properties: below().fold(node.names("patternProperties").count() as u64, |sum, child| {
                sum.saturating_add(child.pattern_properties)
            }),
            has_pattern: node.get("pattern").or(node.get("format")).is_some()
                || below().any(|child| child.has_pattern),
            options: num_values.max(1),
            multiple_of: MultipleOf::of(node.get("multipleOf"))?,
        };
        for alternatives in &node.in_place {
            let options = alternatives.iter().map(|&child| sizes[child].options);
            let options = options.fold(0, u64::saturating_add);
            size.options = size.options.saturating_mul(options.max(1));
        }
        below().for_each(|child| size.multiple_of.join(&child.multiple_of));
        Ok(size)
    }
}

/// Sums over all subschemas.
#[derive(Debug, Default)]
struct Totals {
    merged: u64,
    merged_options: u64,
    compared_patterns: u64,
    /// Sum of squares.
    optional_properties: u64,
}

impl Totals {
    fn add<'a>(
        &mut self,
        schema: &Schema<'a>,
        node: &Node<'a>,
        size: &Size,
        steps: &mut SearchSteps,
    ) -> Result<(), GrammarError> {
        let is_merged = node.num_merged() > 1;
        let patterns = match is_merged {
            true => size.pattern_properties,
            false => node.names("patternProperties").count() as u64,
        };
        self.compared_patterns = self.compared_patterns.saturating_add(patterns.saturating_pow(3));
        let optional = (node.names("properties").count() as u64).saturating_sub(node.num("required"));
        self.optional_properties = self.optional_properties.saturating_add(optional * optional);
        if is_merged {
            size.multiple_of.check_merged()?;
            if schema.has_common_parts(node, steps)? {
                self.merged = self.merged.saturating_add(size.nodes);
            }
            if size.has_pattern {
                self.merged_options = self.merged_options.saturating_add(size.options);
            }
        }
        if self.merged > MERGED_MAX {
            return Err(too_large(&format!(
                "allOf and keywords beside $ref merge more than {MERGED_MAX} subschemas"
            )));
        }
        if self.merged_options > MERGED_OPTIONS_MAX {
            return Err(too_large(&format!(
                "patterns are merged with more than {MERGED_OPTIONS_MAX} alternatives"
            )));
        }
        if self.optional_properties > OPTIONAL_PROPERTIES_MAX * OPTIONAL_PROPERTIES_MAX {
            return Err(too_large(&format!(
                "more than {OPTIONAL_PROPERTIES_MAX} optional properties of an object, or fewer of several"
            )));
        }
        if self.compared_patterns > PATTERN_PROPERTIES_MAX.pow(3) {
            return Err(too_large(&format!(
                "more than {PATTERN_PROPERTIES_MAX} patternProperties of an object or of several"
            )));
        }
        Ok(())
    }
}
