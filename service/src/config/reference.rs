//! Documents all settings of a process, from the flags and the raw configuration.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use clap::{Arg, CommandFactory};
use serde_json::Value;

use super::{ENV_PREFIX, RawConfig, help};

/// Settings of one process in Markdown: a table for each group of flags, then the settings without a flag.
pub fn reference<R: RawConfig, F: CommandFactory>() -> String {
    let defaults = serde_json::to_value(R::default()).expect("plain configuration data serializes");
    let command = F::command();
    let mut page = format!("## {}\n", command.get_name());
    let flags: Vec<&Arg> = command.get_arguments().filter(|arg| !is_builtin(arg)).collect();
    let mut headings: Vec<&str> = Vec::new();
    for heading in flags.iter().map(|arg| heading_of(arg)) {
        if !headings.contains(&heading) {
            headings.push(heading);
        }
    }
    for heading in headings {
        write!(page, "\n### {heading}\n\n| flag | TOML key | default | |\n|---|---|---|---|\n")
            .expect(TO_STRING);
        for flag in flags.iter().filter(|arg| heading_of(arg) == heading) {
            page += &row(flag, &defaults);
        }
    }
    page + &without_flag(&flags, &defaults)
}

const TO_STRING: &str = "writing into a string cannot fail";

fn is_builtin(arg: &Arg) -> bool {
    matches!(arg.get_id().as_str(), "help" | "version")
}

fn heading_of(arg: &Arg) -> &str {
    arg.get_help_heading().unwrap_or("Options")
}

fn row(flag: &Arg, defaults: &Value) -> String {
    let name = flag.get_id().as_str();
    let value = value_of(flag).unwrap_or_default();
    let key = if defaults.get(name).is_some() { format!("`{name}`") } else { String::new() };
    let default = defaults.get(name).and_then(help::display_value).filter(|said| !said.is_empty());
    let default = default.map(|said| format!("`{said}`")).unwrap_or_default();
    let help = flag.get_long_help().or_else(|| flag.get_help()).map(ToString::to_string).unwrap_or_default();
    let cells = [format!("`--{}{value}`", name.replace('_', "-")), key, default, help];
    format!("| {} |\n", cells.map(|cell| cell.replace('|', "\\|").replace('\n', " ")).join(" | "))
}

/// The flag's value as on the command line, with what separates it from the name: ` N`, `=N`, or in brackets
/// if it may be left out.
fn value_of(flag: &Arg) -> Option<String> {
    let names = flag.get_value_names().filter(|_| flag.get_action().takes_values())?.join(" ");
    let separator = if flag.is_require_equals_set() { "=" } else { " " };
    let is_optional = flag.get_num_args().is_some_and(|num_args| num_args.min_values() == 0);
    Some(match is_optional {
        true => format!("[{separator}{names}]"),
        false => format!("{separator}{names}"),
    })
}

/// Lists the settings that only a file or a variable can set.
fn without_flag(flags: &[&Arg], defaults: &Value) -> String {
    let named: BTreeSet<&str> = flags.iter().map(|flag| flag.get_id().as_str()).collect();
    let others: Vec<String> = defaults
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(key, _)| !named.contains(key.as_str()))
        .map(|(key, default)| match help::display_value(default) {
            Some(said) => format!("`{key}` (`{said}`)"),
            None => format!("`{key}`"),
        })
        .collect();
    if others.is_empty() {
        return String::new();
    }
    format!(
        "\nWithout a flag, in the file only or by a variable (`{ENV_PREFIX}..`): {}.\n",
        others.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_written_as_the_command_line_takes_it() {
        let flag = |name: &'static str| Arg::new(name).long(name).value_name("V");
        assert_eq!(value_of(&flag("a")).as_deref(), Some(" V"));
        assert_eq!(value_of(&flag("a").require_equals(true)).as_deref(), Some("=V"));
        assert_eq!(value_of(&flag("a").num_args(0..=1)).as_deref(), Some("[ V]"));
        assert_eq!(value_of(&flag("a").num_args(0..=1).require_equals(true)).as_deref(), Some("[=V]"));
        assert_eq!(value_of(&flag("a").action(clap::ArgAction::SetTrue)), None);
    }
}
