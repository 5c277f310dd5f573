//! Layers, names, types and values: precedence, and the text of every fault.

use std::io::Write as _;
use std::path::PathBuf;

use clap::CommandFactory as _;
use serde::{Deserialize, Serialize};

use super::help::with_defaults;
use super::{ConfigError, Faults, RawConfig, layers::Environment, resolve};
use crate::process::RawProcess;

#[derive(Debug, Serialize, Deserialize)]
struct Raw {
    listen: String,
    model: Option<String>,
    max_k: u32,
    task_types: Vec<String>,
    limits: RawLimits,
}

#[derive(Debug, Serialize, Deserialize)]
struct RawLimits {
    queue: usize,
    wait_ms: u64,
}

#[derive(Debug, PartialEq)]
struct Config {
    listen: std::net::SocketAddr,
    model: String,
    max_k: u32,
    task_types: Vec<String>,
    queue: usize,
}

#[derive(Default, Serialize, clap::Parser)]
struct Flags {
    /// A file
    #[arg(long)]
    #[serde(skip)]
    _config: Option<PathBuf>,
    /// What to serve
    #[arg(long)]
    model: Option<String>,
    /// How far to draft
    #[arg(long)]
    max_k: Option<u32>,
    /// What it is for
    #[arg(long)]
    task_types: Vec<String>,
}

impl Default for Raw {
    fn default() -> Self {
        let limits = RawLimits { queue: 64, wait_ms: 500 };
        Self { listen: "127.0.0.1:0".to_owned(), model: None, max_k: 8, task_types: Vec::new(), limits }
    }
}

impl RawConfig for Raw {
    type Config = Config;

    fn validate(self, faults: &mut Faults) -> Option<Config> {
        let listen = faults.parse("listen", &self.listen);
        let model = faults.require("model", self.model);
        faults.check("max_k", self.max_k <= 16, || format!("{} is over the limit of 16", self.max_k));
        let (max_k, task_types, queue) = (self.max_k, self.task_types, self.limits.queue);
        faults.check_positive("limits.queue", queue);
        Some(Config { listen: listen?, model: model?, max_k, task_types, queue })
    }
}

/// Resolves a configuration from a file's text and environment variables.
fn check(file: &str, environment: &[(&str, &str)], flags: &Flags) -> Result<Config, String> {
    let mut on_disk = tempfile::NamedTempFile::new().unwrap();
    on_disk.write_all(file.as_bytes()).unwrap();
    let variables = environment.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
    let environment = Environment::new("TEST_", variables);
    resolve::<Raw>(flags, Some(on_disk.path()), environment)
        .map_err(|error| error.to_string().replace(&on_disk.path().display().to_string(), "FILE"))
}

#[test]
fn later_layers_win_and_defaults_fill_the_rest() {
    let file = "model = 'file'\nmax_k = 1\n[limits]\nqueue = 3\n";
    let environment =
        [("TEST_MAX_K", "2"), ("TEST_LIMITS__QUEUE", "4"), ("OTHER_MAX_K", "9"), ("TEST_UNKNOWN", "1")];
    let flags = Flags { model: Some("flag".to_owned()), ..Flags::default() };
    let config = check(file, &environment, &flags).unwrap();
    assert_eq!((config.model.as_str(), config.max_k, config.queue), ("flag", 2, 4));
    let flags = Flags { max_k: Some(5), task_types: vec!["code".to_owned()], ..flags };
    let config = check(file, &environment, &flags).unwrap();
    assert_eq!((config.max_k, config.task_types), (5, vec!["code".to_owned()]));
}

#[test]
fn a_variable_is_read_as_the_type_of_its_field() {
    let environment = [("TEST_MODEL", "7"), ("TEST_MAX_K", "7"), ("TEST_TASK_TYPES", "[code, sql]")];
    let config = check("", &environment, &Flags::default()).unwrap();
    assert_eq!((config.model.as_str(), config.max_k), ("7", 7));
    assert_eq!(config.task_types, ["code", "sql"]);
}

#[test]
fn every_fault_is_told_at_once_with_its_origin() {
    let file =
        "max_kk = 1\nlisten = 'nowhere'\nflavour = 1\n[limits]\nqueue = 0\nwait_ms = 'soon'\nqeue = 1\n";
    let error = check(file, &[("TEST_MAX_K", "many")], &Flags::default()).unwrap_err();
    let mut lines: Vec<&str> = error.lines().map(str::trim).collect();
    assert_eq!(lines.remove(0), "bad configuration, 8 faults:");
    lines.sort_unstable();
    assert_eq!(
        lines,
        [
            "flavour: unknown key in FILE",
            "limits.qeue: unknown key in FILE; did you mean `queue`?",
            "limits.queue (set in FILE): must be at least 1",
            "limits.wait_ms (set in FILE): invalid type: found string \"soon\", expected u64",
            "listen (set in FILE): `nowhere`: invalid socket address syntax",
            "max_k (set by TEST_MAX_K): invalid type: found string \"many\", expected u32",
            "max_kk: unknown key in FILE; did you mean `max_k`?",
            "model: is required: give --model, or set it in the file or the environment",
        ]
    );
}

#[test]
fn a_wrong_value_hides_what_only_follows_from_it() {
    let error = check("model = 3\n[limits]\nqueue = [1]\n", &[], &Flags::default()).unwrap_err();
    assert_eq!(error.lines().count(), 3, "{error}");
    assert!(error.contains("model (set in FILE): invalid type") && !error.contains("is required"), "{error}");
}

#[test]
fn one_fault_stands_on_the_line_itself() {
    let flags = Flags { model: Some("m".to_owned()), max_k: Some(17), ..Flags::default() };
    let error = check("", &[], &flags).unwrap_err();
    assert_eq!(error, "bad configuration: max_k (set by --max-k): 17 is over the limit of 16");
}

#[test]
fn a_list_element_of_the_wrong_type_names_its_place() {
    let error = check("model = 'm'\ntask_types = ['code', 3]\n", &[], &Flags::default()).unwrap_err();
    assert!(error.contains("task_types.1") && error.contains("expected a string"), "{error}");
}

#[test]
fn a_file_that_is_not_toml_names_its_line_and_a_missing_one_its_path() {
    let error = check("model = 'm'\n\nmax_k 3\n", &[], &Flags::default()).unwrap_err();
    assert!(error.starts_with("the configuration file FILE, line 3: "), "{error}");

    let missing = std::path::Path::new("/nonexistent/outrider.toml");
    let error =
        resolve::<Raw>(&Flags::default(), Some(missing), Environment::new("TEST_", std::iter::empty()));
    let error = error.unwrap_err();
    assert!(matches!(error, ConfigError::Read { .. }));
    assert!(
        error.to_string().starts_with("cannot read the configuration file /nonexistent/outrider.toml: "),
        "{error}"
    );
}

#[test]
fn flattened_parts_are_fields_like_the_others() {
    #[derive(Debug, Default, Serialize, Deserialize)]
    struct Whole {
        name: String,
        #[serde(flatten)]
        shared: Shared,
    }
    #[derive(Debug, Serialize, Deserialize)]
    struct Shared {
        log: String,
        grace_seconds: u64,
        port: u16,
    }
    impl Default for Shared {
        fn default() -> Self {
            Self { log: "info".to_owned(), grace_seconds: 30, port: 1 }
        }
    }
    impl RawConfig for Whole {
        type Config = Self;

        fn validate(self, _: &mut Faults) -> Option<Self> {
            Some(self)
        }
    }
    #[derive(Serialize)]
    struct WholeFlags {
        #[serde(flatten)]
        shared: SharedFlags,
    }
    #[derive(Serialize)]
    struct SharedFlags {
        port: Option<u16>,
    }
    let environment = |variables: &[(&str, &str)]| {
        let variables = variables.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
        Environment::new("TEST_", variables.collect::<Vec<_>>().into_iter())
    };
    let flags = WholeFlags { shared: SharedFlags { port: Some(3) } };

    let given = environment(&[("TEST_LOG", "7"), ("TEST_GRACE_SECONDS", "7"), ("TEST_PORT", "2")]);
    let whole = resolve::<Whole>(&flags, None, given).unwrap();
    assert_eq!((whole.shared.log.as_str(), whole.shared.grace_seconds, whole.shared.port), ("7", 7, 3));

    // `[a]` and `true` are valid for a text field; `soon` is never a number.
    let given =
        [("TEST_NAME", "[a]"), ("TEST_LOG", "true"), ("TEST_GRACE_SECONDS", "soon"), ("TEST_PORT", "soon")];
    let no_flags = WholeFlags { shared: SharedFlags { port: None } };
    let error = resolve::<Whole>(&no_flags, None, environment(&given)).unwrap_err().to_string();
    assert!(error.contains("grace_seconds (set by TEST_GRACE_SECONDS): invalid type"), "{error}");
    assert!(error.contains("port (set by TEST_PORT): invalid type"), "{error}");
    assert!(error.starts_with("bad configuration, 2 faults:"), "{error}");

    // Each fault shows its own value, in whatever order the fields are read.
    let given = [("TEST_GRACE_SECONDS", "soon"), ("TEST_PORT", "far")];
    let error = resolve::<Whole>(&no_flags, None, environment(&given)).unwrap_err().to_string();
    for (field, value) in [("grace_seconds", "soon"), ("port", "far")] {
        let is_told =
            |line: &str| line.contains(&format!("{field} (")) && line.contains(&format!("{value:?}"));
        assert!(error.lines().any(is_told), "{error}");
    }
}

/// A configuration with a map, whose entries may have any names.
#[derive(Debug, Serialize, Deserialize)]
struct WithMap {
    port: u16,
    lanes: std::collections::BTreeMap<String, RawLimits>,
}

impl Default for WithMap {
    fn default() -> Self {
        Self { port: 1, lanes: std::collections::BTreeMap::new() }
    }
}

impl RawConfig for WithMap {
    type Config = Self;

    fn validate(self, faults: &mut Faults) -> Option<Self> {
        for (name, lane) in &self.lanes {
            faults.check_positive(&format!("lanes.{name}.queue"), lane.queue);
        }
        Some(self)
    }
}

#[test]
fn a_fault_in_a_map_hides_no_other() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let text = "port = 'near'\n[lanes.a]\nqueue = 'x'\nwait_ms = 1\n[lanes.b]\nqueue = 1\nwait_ms = 'y'\n\
                [lanes.c]\nqueue = 0\nwait_ms = 1\n";
    file.write_all(text.as_bytes()).unwrap();
    let environment = Environment::new("TEST_", std::iter::empty());
    let error =
        resolve::<WithMap>(&Flags::default(), Some(file.path()), environment).unwrap_err().to_string();
    for expected in ["lanes.a.queue", "lanes.b.wait_ms", "lanes.c.queue", "port"] {
        assert!(
            error.lines().any(|line| line.trim().starts_with(expected)),
            "{expected} is missing: {error}"
        );
    }
    assert!(error.starts_with("bad configuration, 4 faults:"), "{error}");
}

#[test]
fn a_secret_without_quotes_is_not_repeated() {
    #[derive(Debug, Default, Serialize, Deserialize)]
    struct Whole {
        #[serde(flatten)]
        process: RawProcess,
    }
    impl RawConfig for Whole {
        type Config = Self;

        fn validate(self, _: &mut Faults) -> Option<Self> {
            Some(self)
        }
    }
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(b"discovery_password = 81549300\n").unwrap();
    let environment = Environment::new("TEST_", std::iter::empty());
    let error = resolve::<Whole>(&Flags::default(), Some(file.path()), environment).unwrap_err().to_string();
    assert!(error.contains("discovery_password (set in") && error.contains("put it in quotes"), "{error}");
    assert!(!error.contains("81549300"), "{error}");

    // A variable needs no quotes.
    let variables = [("TEST_DISCOVERY_PASSWORD".to_owned(), "81549300".to_owned())];
    let environment = Environment::new("TEST_", variables.into_iter());
    resolve::<Whole>(&Flags::default(), None, environment).unwrap();
}

#[test]
fn a_variable_sets_a_whole_map() {
    let text = "{code={queue=3, wait_ms=4}, sql={queue=5, wait_ms=6}}";
    let variables = [("TEST_LANES".to_owned(), text.to_owned())];
    let environment = Environment::new("TEST_", variables.into_iter());
    let config = resolve::<WithMap>(&Flags::default(), None, environment).unwrap();
    let queues: Vec<_> = config.lanes.iter().map(|(name, lane)| (name.as_str(), lane.queue)).collect();
    assert_eq!(queues, [("code", 3), ("sql", 5)]);
}

#[test]
fn two_listeners_cannot_share_an_address() {
    let faults_of = |addresses: [&str; 3]| {
        let mut faults = Faults::new();
        let [one, two, three] = addresses.map(|address| address.parse().unwrap());
        faults.check_distinct(&[("http", one), ("grpc", two), ("admin", three)]);
        faults.finish().err().map(|error| error.to_string())
    };
    assert_eq!(faults_of(["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]), None);
    assert_eq!(faults_of(["127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0"]), None, "a free port each");
    assert_eq!(faults_of(["127.0.0.1:1", "127.0.0.2:1", "127.0.0.3:1"]), None, "three addresses");
    let error = faults_of(["127.0.0.1:1", "127.0.0.1:2", "0.0.0.0:1"]).unwrap();
    assert!(error.contains("admin: 0.0.0.0:1 is also the address of --http"), "{error}");
}

#[test]
fn a_flag_without_a_field_is_told() {
    #[derive(Serialize)]
    struct Misspelt {
        max_q: Option<u32>,
    }
    let environment = Environment::new("TEST_", std::iter::empty());
    let error = resolve::<Raw>(&Misspelt { max_q: Some(1) }, None, environment).unwrap_err().to_string();
    assert!(error.contains("--max-q sets no known field"), "{error}");
}

#[test]
fn help_tells_the_defaults_that_there_are() {
    let help = with_defaults::<Raw>(Flags::command()).render_help().to_string();
    let told = |text: &str| help.lines().any(|line| line.trim_end().ends_with(text));
    assert!(told("How far to draft [default: 8]"), "{help}");
    assert!(told("What to serve") && told("What it is for") && told("A file"), "{help}");
}
