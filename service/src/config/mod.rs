//! Configuration: a TOML file, then environment variables, then flags; later ones win.
//!
//! Two stages. A crate's *raw* configuration is plain data with one default per field (its `Default`). Its
//! [`RawConfig::validate`] turns it into a configuration whose type cannot hold a bad value, so that nothing past
//! startup checks a setting again. All faults, of types, of names and of values, are reported together, and the
//! process ends with [`EXIT_BAD_CONFIG`] before it has bound a port.
//!
//! This module reads files and the environment once, at startup. It must never be asked for a setting later.

mod faults;
mod help;
mod layers;
mod reference;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde::Serialize;
use serde::de::DeserializeOwned;

pub use crate::toml_file::TomlFault;
pub use faults::{Fault, Faults};
pub use reference::reference;

/// How a process says that its configuration is at fault: `EX_USAGE` of sysexits.h.
pub const EXIT_BAD_CONFIG: u8 = 64;

/// The prefix of Outrider's environment variables: `OUTRIDER_MAX_K` sets `max_k`, `OUTRIDER_LIMITS__QUEUE` sets
/// `queue` in `[limits]`. One environment may serve several processes, so names that a process does not have are
/// none of its business and no fault.
pub const ENV_PREFIX: &str = "OUTRIDER_";

/// Why a process cannot start with the configuration it was given.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file named by `--config` cannot be read.
    #[error("cannot read the configuration file {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("the configuration file {}, {fault}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What the parser said, and the line.
        fault: TomlFault,
    },
    /// Fields are at fault; all of them are here.
    #[error("{}", faults::list(.0))]
    Invalid(Vec<Fault>),
}

/// The first stage of a configuration: plain data, with one default per field.
///
/// Every field must appear when the default is serialized (no `skip_serializing_if`), because that is how the known
/// names are learned. An empty map means that its keys are free.
pub trait RawConfig: Default + Serialize + DeserializeOwned {
    /// The second stage: a type that cannot hold a bad value.
    type Config;

    /// Checks everything and adds each fault to `faults`; `None` if there was one.
    fn validate(self, faults: &mut Faults) -> Option<Self::Config>;
}

/// Loads a configuration: defaults, then `file`, then the environment, then `flags`.
///
/// `flags` is a struct of `Option`s, usually a `clap::Args`, with the field names of the raw configuration; what is
/// `None` or an empty list was not given. Fields that are no setting (`--config` itself) carry `#[serde(skip)]`.
pub fn load<R: RawConfig>(
    flags: &impl Serialize,
    file: Option<&Path>,
    env_prefix: &str,
) -> Result<R::Config, ConfigError> {
    let environment = std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()));
    resolve::<R>(flags, file, layers::Environment::new(env_prefix, environment))
}

/// [`load`] with the environment passed in.
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

/// Parses the command line, whose flags set fields of `R`. Help, which tells the defaults of `R`, and version are printed and end
/// with 0, a wrong flag with [`EXIT_BAD_CONFIG`]; either way the caller returns the exit code from `main`.
pub fn parse_flags<R: RawConfig, F: clap::Parser>() -> Result<F, ExitCode> {
    let given = help::with_defaults::<R>(F::command()).try_get_matches();
    given.and_then(|given| F::from_arg_matches(&given)).map_err(|error| {
        // A closed stdout or stderr leaves nobody to tell.
        drop(error.print());
        if error.use_stderr() { ExitCode::from(EXIT_BAD_CONFIG) } else { ExitCode::SUCCESS }
    })
}

/// The exit code of a process whose configuration is at fault.
pub fn exit_code(_error: &ConfigError) -> ExitCode {
    ExitCode::from(EXIT_BAD_CONFIG)
}

/// Writes the error to stderr, for it comes before telemetry is up, and gives the exit code to return.
pub fn report(error: &ConfigError) -> ExitCode {
    use std::io::Write as _;
    // A closed stderr leaves nobody to tell; the exit code still does.
    drop(writeln!(std::io::stderr(), "error: {error}"));
    exit_code(error)
}

/// One environment variable that is not ours, such as the standard `OTEL_*`; empty counts as not set.
pub fn env_var(name: &str) -> Option<String> {
    #[expect(clippy::disallowed_methods, reason = "this is the place that reads the environment")]
    std::env::var(name).ok().filter(|value| !value.is_empty())
}
