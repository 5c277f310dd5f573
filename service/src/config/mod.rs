//! Configuration: a TOML file, then environment variables, then flags; later ones win.
//!
//! There are two stages. A crate's *raw* configuration is plain data with one default per field (its
//! `Default`). Its [`RawConfig::validate`] converts it to a configuration whose type cannot hold a bad value,
//! so that no setting is checked again after startup. All faults, of types, names and values, are reported
//! together, and the process ends with [`EXIT_BAD_CONFIG`] before it binds a port.
//!
//! This module reads files and the environment once, at startup. Settings must never be read from it later.

mod faults;
mod help;
mod layers;
mod reference;
#[cfg(test)]
mod tests;
mod unknown_variables;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde::Serialize;
use serde::de::DeserializeOwned;

pub use crate::toml_file::TomlFault;
pub use faults::{Fault, Faults};
pub use reference::reference;
pub use unknown_variables::settings;

/// Exit code for a bad configuration: `EX_USAGE` of sysexits.h.
pub const EXIT_BAD_CONFIG: u8 = 64;

/// Prefix of Outrider's environment variables: `OUTRIDER_MAX_K` sets `max_k`, `OUTRIDER_LIMITS__QUEUE` sets
/// `queue` in `[limits]`. Several processes may share an environment, so unknown names are not a fault, but
/// names that none of them knows are logged.
pub const ENV_PREFIX: &str = "OUTRIDER_";

/// Why a process cannot start with its configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file named by `--config` cannot be read.
    #[error("cannot read the configuration file {}: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("the configuration file {}, {fault}", path.display())]
    Syntax {
        /// Path of the file.
        path: PathBuf,
        /// The parser's message, with the line.
        fault: TomlFault,
    },
    /// Faulty fields, all of them.
    #[error("{}", faults::list(.0))]
    Invalid(Vec<Fault>),
}

/// First stage of a configuration: plain data, with one default per field.
///
/// Every field must be present when the default is serialized (no `skip_serializing_if`), because the known
/// names are taken from there. An empty map allows any keys.
pub trait RawConfig: Default + Serialize + DeserializeOwned {
    /// Second stage: a type that cannot hold a bad value.
    type Config;

    /// Checks all settings and adds each fault to `faults`; may return `None` only if there was one.
    fn validate(self, faults: &mut Faults) -> Option<Self::Config>;
}

/// Loads a configuration: defaults, then `file`, then the environment, then `flags`.
///
/// `flags` is a struct of `Option`s, usually a `clap::Args`, with the field names of the raw configuration;
/// `None` and empty lists mean that a flag was not given. Fields that are not settings (`--config` itself)
/// have `#[serde(skip)]`.
pub fn load<R: RawConfig>(
    flags: &impl Serialize,
    file: Option<&Path>,
    env_prefix: &str,
) -> Result<R::Config, ConfigError> {
    let environment = std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()));
    resolve::<R>(flags, file, layers::Environment::new(env_prefix, environment))
}

/// [`load`] with the environment as a parameter.
fn resolve<R: RawConfig>(
    flags: &impl Serialize,
    file: Option<&Path>,
    environment: layers::Environment,
) -> Result<R::Config, ConfigError> {
    let file = file.map(layers::read_file).transpose()?;
    let (raw, mut faults) = layers::merge::<R>(flags, file, environment)?;
    let config = raw.validate(&mut faults);
    faults.finish()?;
    Ok(config.expect("validate returns a configuration unless it found a fault"))
}

/// Parses the command line, whose flags set fields of `R`. Help (with the defaults of `R`) and version are
/// printed and end with 0, a wrong flag ends with [`EXIT_BAD_CONFIG`]; in both cases the caller returns the
/// exit code from `main`.
pub fn parse_flags<R: RawConfig, F: clap::Parser>() -> Result<F, ExitCode> {
    let given = help::with_defaults::<R>(F::command()).try_get_matches();
    given.and_then(|given| F::from_arg_matches(&given)).map_err(|error| {
        // Ignore a closed stdout or stderr.
        drop(error.print());
        if error.use_stderr() { ExitCode::from(EXIT_BAD_CONFIG) } else { ExitCode::SUCCESS }
    })
}

/// Writes the error to stderr, because telemetry is not set up yet, and returns the exit code.
pub fn report(error: &ConfigError) -> ExitCode {
    use std::io::Write as _;
    // If stderr is closed, the exit code still reports the failure.
    drop(writeln!(std::io::stderr(), "error: {error}"));
    ExitCode::from(EXIT_BAD_CONFIG)
}

/// Logs a warning for each environment variable with Outrider's prefix that no program of Outrider reads.
/// Needs telemetry.
pub fn warn_of_unknown_variables() {
    let names: Vec<String> = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).collect();
    for (variable, nearest) in unknown_variables::find(&names) {
        let hint = nearest.map_or_else(String::new, |nearest| format!("; did you mean {nearest}?"));
        tracing::warn!("the environment variable {variable} is no setting of any Outrider program{hint}");
    }
}

/// Reads an environment variable defined elsewhere, such as the standard `OTEL_*`; an empty one counts as not
/// set.
pub fn env_var(name: &str) -> Option<String> {
    #[expect(clippy::disallowed_methods, reason = "this is the place that reads the environment")]
    std::env::var(name).ok().filter(|value| !value.is_empty())
}
