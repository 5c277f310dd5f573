//! Settings that all processes have: discovery, logs, and how they stop.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::Faults;
use crate::discovery::{DiscoveryUri, EtcdUser, Source, check_static_file};
use crate::secret::Secret;
use crate::telemetry::{LogFilter, LogFormat};
use crate::tls::ClientFiles;

/// Flags common to all processes.
#[derive(Debug, Clone, Default, clap::Args, Serialize)]
#[command(next_help_heading = "Process")]
pub struct ProcessFlags {
    /// TOML file with any of these settings, named as the flags with underscores
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
    /// Source of the list of workers, the same for all routers and workers of a cluster: static:FILE or
    /// etcd://HOST:PORT,HOST:PORT/PREFIX; memory: within this process only, so nothing is found
    #[arg(long, value_name = "URI")]
    pub discovery: Option<String>,
    /// CA certificate for etcd, PEM; with it etcd is reached over TLS only
    #[arg(long, value_name = "FILE")]
    pub discovery_ca: Option<PathBuf>,
    /// Client certificate for etcd (its --client-cert-auth), PEM
    #[arg(long, value_name = "FILE")]
    pub discovery_cert: Option<PathBuf>,
    /// Private key of --discovery-cert, PEM
    #[arg(long, value_name = "FILE")]
    pub discovery_key: Option<PathBuf>,
    /// User name for etcd; the password is not a flag, because other users could see it: set
    /// OUTRIDER_DISCOVERY_PASSWORD, or `discovery_password` in the file
    #[arg(long, value_name = "NAME")]
    pub discovery_user: Option<String>,
    /// Log filter, for example `info` or `warn,router=debug`
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
    /// Format of log lines: text, or json with one object per line
    #[arg(long, value_enum, value_name = "FORMAT", hide_possible_values = true)]
    pub log_format: Option<LogFormat>,
    /// How long requests in flight may take to finish after a signal to stop
    #[arg(long, value_name = "SECONDS")]
    pub grace_seconds: Option<u64>,
    /// Stop when stdin closes, for a parent that must not leave processes behind
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub exit_on_stdin_close: bool,
}

/// Raw settings common to all processes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RawProcess {
    discovery: String,
    discovery_ca: Option<PathBuf>,
    discovery_cert: Option<PathBuf>,
    discovery_key: Option<PathBuf>,
    discovery_user: Option<String>,
    discovery_password: Option<Secret>,
    log: String,
    log_format: LogFormat,
    grace_seconds: u64,
    exit_on_stdin_close: bool,
}

impl Default for RawProcess {
    fn default() -> Self {
        Self {
            discovery: "memory".to_owned(),
            discovery_ca: None,
            discovery_cert: None,
            discovery_key: None,
            discovery_user: None,
            discovery_password: None,
            log: "info".to_owned(),
            log_format: LogFormat::Text,
            grace_seconds: 30,
            exit_on_stdin_close: false,
        }
    }
}

/// Checked settings common to all processes.
#[derive(Debug, Clone)]
pub struct ProcessConfig {
    /// Source of the list of workers.
    pub discovery: Source,
    /// Filter of log lines.
    pub log_filter: LogFilter,
    /// Format of log lines.
    pub log_format: LogFormat,
    /// How long the process keeps serving after a signal to stop, while it asks clients to connect elsewhere.
    pub lame_duck: Duration,
    /// Maximum duration of a drain.
    pub grace: Duration,
    /// Whether closing stdin stops the process.
    pub exit_on_stdin_close: bool,
}

impl RawProcess {
    /// Checks all settings.
    pub fn validate(&self, faults: &mut Faults) -> Option<ProcessConfig> {
        let discovery = self.source(faults);
        let log_filter = faults.parse("log", &self.log);
        faults.check("grace_seconds", self.grace_seconds <= 3_600, || {
            format!("{} is over an hour (3600)", self.grace_seconds)
        });
        Some(ProcessConfig {
            discovery: discovery?,
            log_filter: log_filter?,
            log_format: self.log_format,
            lame_duck: Duration::ZERO,
            grace: Duration::from_secs(self.grace_seconds),
            exit_on_stdin_close: self.exit_on_stdin_close,
        })
    }

    fn source(&self, faults: &mut Faults) -> Option<Source> {
        let [ca, cert, key] =
            [&self.discovery_ca, &self.discovery_cert, &self.discovery_key].map(Option::as_deref);
        let tls = ClientFiles { name: "discovery", ca, cert, key }.validate(faults);
        // Not `Faults::parse`, which repeats the text: it may hold a password.
        let uri: DiscoveryUri =
            self.discovery.parse().map_err(|error| faults.add("discovery", error)).ok()?;
        faults.check("discovery_ca", ca.is_none() || matches!(uri, DiscoveryUri::Etcd { .. }), || {
            format!("applies only to etcd, but --discovery is `{uri}`")
        });
        if let DiscoveryUri::Static(path) = &uri
            && let Err(error) = check_static_file(path)
        {
            faults.add("discovery", error);
        }
        let user = self.etcd_user(&uri, faults);
        Some(Source { uri, tls, user })
    }

    fn etcd_user(&self, uri: &DiscoveryUri, faults: &mut Faults) -> Option<EtcdUser> {
        let (name, password) = (self.discovery_user.as_ref(), self.discovery_password.as_ref());
        let is_etcd = matches!(uri, DiscoveryUri::Etcd { .. });
        faults.check("discovery_user", name.is_none() || is_etcd, || {
            format!("applies only to etcd, but --discovery is `{uri}`")
        });
        faults.check("discovery_user", name.is_none() || password.is_some(), || {
            "needs its password: set OUTRIDER_DISCOVERY_PASSWORD, or discovery_password in the file"
                .to_owned()
        });
        faults.check("discovery_password", password.is_none() || name.is_some(), || {
            "needs --discovery-user NAME as well".to_owned()
        });
        Some(EtcdUser { name: name?.clone(), password: password?.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the etcd user of these settings, or the fault.
    fn user(uri: &str, name: Option<&str>, password: Option<&str>) -> Result<Option<EtcdUser>, String> {
        let raw = RawProcess {
            discovery: uri.to_owned(),
            discovery_user: name.map(str::to_owned),
            discovery_password: password.map(Secret::new),
            ..RawProcess::default()
        };
        let mut faults = Faults::new();
        let config = raw.validate(&mut faults);
        faults.finish().map_err(|error| error.to_string())?;
        Ok(config.and_then(|config| config.discovery.user))
    }

    #[test]
    fn a_user_and_a_password_need_each_other_and_etcd() {
        let etcd = "etcd://127.0.0.1:2379/outrider";
        assert_eq!(user(etcd, None, None), Ok(None));
        let both = user(etcd, Some("workers"), Some("sesame")).unwrap().unwrap();
        assert_eq!((both.name.as_str(), both.password.expose()), ("workers", "sesame"));
        for (uri, name, password, expected) in [
            (etcd, Some("workers"), None, "OUTRIDER_DISCOVERY_PASSWORD"),
            (etcd, None, Some("sesame"), "--discovery-user"),
            ("memory", Some("workers"), Some("sesame"), "applies only to etcd"),
            ("etcd://workers:sesame@127.0.0.1:2379/outrider", None, None, "do not belong into the URI"),
        ] {
            let error = user(uri, name, password).unwrap_err();
            assert!(error.contains(expected) && !error.contains("sesame"), "{error}");
        }
    }
}
