//! `--help` with the default of every flag, taken from the raw configuration, so that each default is defined
//! once.

use clap::{Arg, Command};
use serde_json::Value;

use super::RawConfig;

/// Adds to the help of each flag its default.
pub(super) fn with_defaults<R: RawConfig>(command: Command) -> Command {
    let defaults = serde_json::to_value(R::default()).expect("plain configuration data serializes");
    command.mut_args(|arg| with_default(arg, &defaults))
}

fn with_default(arg: Arg, defaults: &Value) -> Arg {
    let default = defaults.get(arg.get_id().as_str()).and_then(display_value);
    match (default, arg.get_help().map(ToString::to_string)) {
        (Some(default), Some(help)) if arg.get_action().takes_values() => {
            arg.help(format!("{help} [default: {default}]"))
        }
        _ => arg,
    }
}

/// Formats a value as for a flag; `None` for values that have no such form.
pub(super) fn display_value(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Bool(_) | Value::Number(_) => Some(value.to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}
