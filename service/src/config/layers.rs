//! The four layers of a configuration (defaults, file, environment, flags) and how they become one raw value.
//!
//! Deserializing stops at the first wrong type. To find them all, a wrong value is noted, replaced by its default,
//! and the rest is read again: the raw configuration that comes out is whole even where faults were found.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider};
use serde::Serialize;

use super::{ConfigError, Faults, RawConfig};
use crate::toml_file;

/// A key this close to a known one (Jaro-Winkler, 0 to 1) is offered as what was meant.
const SIMILAR: f64 = 0.75;

/// A configuration file that was read and is TOML.
pub(super) struct File {
    path: PathBuf,
    dict: Dict,
}

/// The environment variables under one prefix.
pub(super) struct Environment {
    /// In the order of their names.
    variables: Vec<Variable>,
}

struct Variable {
    name: String,
    /// The dotted path of the field it sets.
    path: String,
    text: String,
}

/// Values of one origin, as figment sees them.
struct Layer {
    /// How a fault names where its value came from; empty for defaults.
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

/// Merges the layers into a raw configuration. Wrong types and unknown names go into the faults, which come back
/// open so that validation can add its own.
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

/// Reads the raw configuration and notes every wrong type; `None` where no default could stand in for one.
fn read_all<R: RawConfig>(known: &Value, variables: &[Variable], faults: &mut Faults) -> Option<R> {
    let mut retried_as_text = BTreeSet::new();
    let mut replaced = BTreeSet::new();
    loop {
        let error = match faults.values.extract::<R>() {
            Ok(raw) => return Some(raw),
            Err(error) => error,
        };
        let place =
            if error.path.is_empty() { find_culprit::<R>(known, faults, &error)? } else { error.path };
        let path = nearest_known(known, &place);
        // `OUTRIDER_MODEL=7b` looks like text and `=7` like a number; only the field knows which it is.
        if let Some(variable) = variables.iter().find(|variable| variable.path == path)
            && faults.origin_of(&path).is_some_and(|origin| origin == variable.origin())
            && retried_as_text.insert(path.clone())
        {
            faults.merge(variable.origin(), nested(&path, Value::from(variable.text.as_str())));
            continue;
        }
        faults.add(&place.join("."), &error.kind);
        let default = known.find_ref(&path)?.clone();
        if path.is_empty() || !replaced.insert(path.clone()) {
            return None;
        }
        faults.merge("", nested(&path, default));
    }
}

/// The field that causes an error without a place, as errors inside `#[serde(flatten)]` are: the one that fails even
/// where all others have their defaults. A fault of the configuration as a whole where there is none such.
fn find_culprit<R: RawConfig>(
    known: &Value,
    faults: &mut Faults,
    error: &figment::Error,
) -> Option<Vec<String>> {
    let defaults = known.as_dict()?;
    for field in defaults.keys().filter(|field| faults.origin_of(field).is_some()) {
        let mut alone = defaults.clone();
        alone.insert(field.clone(), faults.values.find_value(field).ok()?);
        if Figment::from(Layer { origin: String::new(), dict: alone }).extract::<R>().is_err() {
            return Some(vec![field.clone()]);
        }
    }
    faults.add("configuration", &error.kind);
    None
}

/// The longest prefix of an error's path that is a field: an error may point into a list, where no default exists.
fn nearest_known(known: &Value, path: &[String]) -> String {
    let prefixes = (1..=path.len()).rev().map(|len| path[..len].join("."));
    prefixes.into_iter().find(|prefix| known.find_ref(prefix).is_some()).unwrap_or_default()
}

/// Adds a fault for each key of the file that is no field, naming the nearest one.
fn add_unknown_keys(known: &Value, dict: &Dict, file: &Path, faults: &mut Faults) {
    fn visit(known: &Dict, dict: &Dict, above: &str, found: &mut Vec<(String, Option<String>)>) {
        for (key, value) in dict {
            match (known.get(key), value) {
                (None, _) => found.push((format!("{above}{key}"), nearest(key, known.keys()))),
                // An empty map as a default means that its keys are free.
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

fn nearest<'a>(key: &str, known: impl Iterator<Item = &'a String>) -> Option<String> {
    let scored = known.map(|candidate| (strsim::jaro_winkler(key, candidate), candidate));
    let best = scored.max_by(|(one, _), (other, _)| one.total_cmp(other));
    best.filter(|(score, _)| *score >= SIMILAR).map(|(_, candidate)| candidate.clone())
}

/// Whether a flag was given: clap knows absence only as `None` and as an empty list.
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

    /// The text as the number, bool or list it looks like.
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
