//! `--help` with every flag's default, read off the raw configuration, where it stands once.

use clap::{Arg, Command};
use serde_json::Value;

use super::RawConfig;

/// The same command, its help saying what each setting is where nobody sets it.
pub(super) fn with_defaults<R: RawConfig>(command: Command) -> Command {
    let defaults = serde_json::to_value(R::default()).expect("plain configuration data serializes");
    command.mut_args(|arg| with_default(arg, &defaults))
}

fn with_default(arg: Arg, defaults: &Value) -> Arg {
    let default = defaults.get(arg.get_id().as_str()).and_then(said);
    match (default, arg.get_help().map(ToString::to_string)) {
        (Some(default), Some(help)) if arg.get_action().takes_values() => {
            arg.help(format!("{help} [default: {default}]"))
        }
        _ => arg,
    }
}

/// A value as a flag would give it; `None` for what is set by being absent.
pub(super) fn said(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Bool(_) | Value::Number(_) => Some(value.to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}
