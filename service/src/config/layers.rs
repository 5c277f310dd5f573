//! The four layers of a configuration (defaults, file, environment, flags), merged into one raw value.
//!
//! Deserialization stops at the first wrong type. To find all of them, a wrong value is recorded and replaced
//! by its default, and deserialization is repeated: the resulting raw configuration is complete even if there
//! are faults.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use figment::error::Kind;
use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider};
use serde::Serialize;

use super::{ConfigError, Faults, RawConfig};
use crate::toml_file;

/// Minimum similarity (Jaro-Winkler, 0 to 1) of a known key suggested for an unknown one.
const SIMILAR: f64 = 0.75;

/// A parsed configuration file.
pub(super) struct File {
    path: PathBuf,
    dict: Dict,
}

/// The environment variables with one prefix.
pub(super) struct Environment {
    /// Sorted by name.
    variables: Vec<Variable>,
}

struct Variable {
    name: String,
    /// Dotted path of the field it sets.
    path: String,
    text: String,
}

/// Values of one origin, as figment represents them.
struct Layer {
    /// Origin as named in faults; empty for defaults.
    origin: String,
    dict: Dict,
}

/// Reads and parses a configuration file.
pub(super) fn read_file(path: &Path) -> Result<File, ConfigError> {
    let path = path.to_owned();
    match std::fs::read_to_string(&path) {
        Err(source) => Err(ConfigError::Read { path, source }),
        Ok(text) => match toml_file::parse(&text) {
            Err(fault) => Err(ConfigError::Syntax { path, fault }),
            Ok(dict) => Ok(File { path, dict }),
        },
    }
}

/// Merges the layers into a raw configuration. Wrong types and unknown names are added to the faults, which
/// are returned so that validation can add its own.
pub(super) fn merge<R: RawConfig>(
    flags: &impl Serialize,
    file: Option<File>,
    environment: Environment,
) -> Result<(R, Faults), ConfigError> {
    let known = Value::from(dict_of(&R::default()));
    let mut faults = Faults::new();
    faults.merge("", known.as_dict().expect("made from a dict").clone());
    if let Some(File { path, dict }) = file {
        let origin = format!("set in {}", path.display());
        add_unknown_keys(&known, &dict, &path, &mut faults);
        faults.merge(origin, dict);
    }
    let variables: Vec<Variable> = environment
        .variables
        .into_iter()
        .filter(|variable| known.find_ref(&variable.path).is_some())
        .collect();
    for variable in &variables {
        faults.merge(variable.origin(), nested(&variable.path, variable.guess()));
    }
    for (field, value) in dict_of(flags).into_iter().filter(|(_, value)| is_given(value)) {
        let flag = field.replace('_', "-");
        if known.find_ref(&field).is_none() {
            faults.add(&field, format_args!("--{flag} sets no known field"));
        }
        faults.merge(format!("set by --{flag}"), Dict::from([(field, value)]));
    }
    match read_all(&known, &variables, &mut faults) {
        Some(raw) => Ok((raw, faults)),
        None => Err(faults.finish().expect_err("a raw value is missing only after a fault")),
    }
}

/// Deserializes the raw configuration and records every wrong type; `None` if a wrong value has no default to
/// replace it.
fn read_all<R: RawConfig>(known: &Value, variables: &[Variable], faults: &mut Faults) -> Option<R> {
    let mut retried_as_text = BTreeSet::new();
    let mut replaced = BTreeSet::new();
    loop {
        let error = match faults.values.extract::<R>() {
            Ok(raw) => return Some(raw),
            Err(error) => error,
        };
        // An error inside `#[serde(flatten)]` has no path.
        let (place, kind) = match error.path.is_empty() {
            true => find_culprit::<R>(known, faults, &error)?,
            false => (error.path, error.kind),
        };
        let path = nearest_known(known, &place);
        // The variable `OUTRIDER_MODEL=7b` looks like text and `=7` like a number; only the field's type
        // decides.
        if let Some(variable) = variables.iter().find(|variable| variable.path == path)
            && faults.origin_of(&path).is_some_and(|origin| origin == variable.origin())
            && retried_as_text.insert(path.clone())
        {
            faults.merge(variable.origin(), nested(&path, Value::from(variable.text.as_str())));
            continue;
        }
        faults.add(&place.join("."), &kind);
        if remove_entry(&path, &place, faults) {
            continue;
        }
        let default = known.find_ref(&path)?.clone();
        if path.is_empty() || !replaced.insert(path.clone()) {
            return None;
        }
        faults.merge("", nested(&path, default));
    }
}

/// Removes the entry of the map at `path` that contains `place`, so that faults of other entries are found as
/// well; returns whether there was one.
fn remove_entry(path: &str, place: &[String], faults: &mut Faults) -> bool {
    let Some(entry) = place.get(path.split('.').count()) else { return false };
    let Ok(Value::Dict(_, mut map)) = faults.values.find_value(path) else { return false };
    let is_removed = map.remove(entry).is_some();
    if is_removed {
        let origin = faults.origin_of(path).unwrap_or_default();
        // Maps are merged by their entries; a value between the two replaces the first one.
        faults.merge("", nested(path, Value::from(false)));
        faults.merge(origin, nested(path, Value::from(map)));
    }
    is_removed
}

/// Finds the field that causes an error without a path, as errors inside `#[serde(flatten)]` are, and what is
/// wrong with it: the one that fails even if all others have their defaults. If there is none, adds a fault
/// of the whole configuration.
fn find_culprit<R: RawConfig>(
    known: &Value,
    faults: &mut Faults,
    error: &figment::Error,
) -> Option<(Vec<String>, Kind)> {
    let defaults = known.as_dict()?;
    for field in defaults.keys().filter(|field| faults.origin_of(field).is_some()) {
        let mut alone = defaults.clone();
        alone.insert(field.clone(), faults.values.find_value(field).ok()?);
        if let Err(own) = Figment::from(Layer { origin: String::new(), dict: alone }).extract::<R>() {
            return Some((vec![field.clone()], own.kind));
        }
    }
    faults.add("configuration", &error.kind);
    None
}

/// Longest prefix of an error's path that is a field: an error may point into a list, which has no defaults.
fn nearest_known(known: &Value, path: &[String]) -> String {
    let prefixes = (1..=path.len()).rev().map(|len| path[..len].join("."));
    prefixes.into_iter().find(|prefix| known.find_ref(prefix).is_some()).unwrap_or_default()
}

/// Adds a fault for each unknown key of the file, suggesting the most similar one.
fn add_unknown_keys(known: &Value, dict: &Dict, file: &Path, faults: &mut Faults) {
    fn visit(known: &Dict, dict: &Dict, above: &str, found: &mut Vec<(String, Option<String>)>) {
        for (key, value) in dict {
            match (known.get(key), value) {
                (None, _) => {
                    let nearest = nearest(key, known.keys().map(String::as_str));
                    found.push((format!("{above}{key}"), nearest));
                }
                // An empty map as a default allows any keys.
                (Some(Value::Dict(_, known)), Value::Dict(_, dict)) if !known.is_empty() => {
                    visit(known, dict, &format!("{above}{key}."), found);
                }
                _ => {}
            }
        }
    }
    let mut found = Vec::new();
    visit(known.as_dict().expect("made from a dict"), dict, "", &mut found);
    for (key, nearest) in found {
        let hint = nearest.map_or_else(String::new, |nearest| format!("; did you mean `{nearest}`?"));
        faults.add(&key, format_args!("unknown key in {}{hint}", file.display()));
    }
}

/// The most similar of the known names, if it is similar.
pub(super) fn nearest<'a>(key: &str, known: impl Iterator<Item = &'a str>) -> Option<String> {
    let scored = known.map(|candidate| (strsim::jaro_winkler(key, candidate), candidate));
    let best = scored.max_by(|(one, _), (other, _)| one.total_cmp(other));
    best.filter(|(score, _)| *score >= SIMILAR).map(|(_, candidate)| candidate.to_owned())
}

/// Whether a flag was given: clap represents an absent one as `None` or an empty list.
fn is_given(value: &Value) -> bool {
    match value {
        Value::Empty(..) => false,
        Value::Array(_, items) => !items.is_empty(),
        _ => true,
    }
}

fn nested(path: &str, value: Value) -> Dict {
    figment::util::nest(path, value).into_dict().expect("a path of at least one key nests into a dict")
}

fn dict_of(value: &impl Serialize) -> Dict {
    let value = Value::serialize(value).expect("plain configuration data serializes");
    value.into_dict().expect("a configuration is a struct with named fields")
}

impl Environment {
    pub(super) fn new(prefix: &str, variables: impl Iterator<Item = (String, String)>) -> Self {
        let variables = variables.filter_map(|(name, text)| {
            let path = name.strip_prefix(prefix)?.to_lowercase().replace("__", ".");
            Some(Variable { name, path, text })
        });
        let mut variables: Vec<Variable> = variables.collect();
        variables.sort_by(|one, other| one.name.cmp(&other.name));
        Self { variables }
    }
}

impl Variable {
    fn origin(&self) -> String {
        format!("set by {}", self.name)
    }

    /// Parses the text as a number, bool or list if it looks like one.
    fn guess(&self) -> Value {
        let Ok(value) = self.text.parse();
        value
    }
}

impl Faults {
    fn merge(&mut self, origin: impl Into<String>, dict: Dict) {
        let values = std::mem::replace(&mut self.values, Figment::new());
        self.values = values.merge(Layer { origin: origin.into(), dict });
    }
}

impl Provider for Layer {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.origin.clone())
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        Ok(Profile::Default.collect(self.dict.clone()))
    }
}
