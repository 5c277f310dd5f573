//! Telemetry of a process: log lines on stderr, and spans to an OTLP collector.
//!
//! Set up once by `main`, after the configuration is known and before anything else starts. Traces are off
//! unless the standard variables name an endpoint (see `otlp.rs`). Trace context crosses processes in W3C
//! format (see `propagation.rs`). Telemetry must never fail or delay the work it describes: if the collector
//! is unreachable, spans are lost; if the log is not read, lines are dropped (see `writer.rs`); and the last
//! flush has a timeout. Panics are log lines too, so that they do not wait for a reader of stderr either.

mod http_client;
mod otlp;
mod propagation;
mod rate_limit;
mod writer;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt;
use std::io::IsTerminal as _;
use std::panic::PanicHookInfo;
use std::str::FromStr;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::ExporterBuildError;
use opentelemetry_sdk::trace::SdkTracerProvider;
use serde::{Deserialize, Serialize};
use tracing::{Level, Metadata};
use tracing_subscriber::filter::{EnvFilter, FilterExt as _, FilterFn, LevelFilter, filter_fn};
use tracing_subscriber::layer::{Filter, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{Layer, Registry, reload};

use self::rate_limit::RateLimit;
use self::writer::LogWriter;
use crate::shutdown::panic_text;
use crate::tls::TlsError;

pub use propagation::{set_parent, set_parent_from_headers, set_parent_in_trace};
pub use propagation::{span_id_of, trace_id_of, traceparent_of};

/// Timeout for sending the last spans when the process ends.
pub const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);

/// Libraries whose spans are not exported; exporting those of the exporter's own calls would even create
/// further spans.
const FOREIGN: [&str; 6] = ["h2", "hyper", "tonic", "tower", "opentelemetry", "reqwest"];

/// Settings of logs and traces.
#[derive(Clone, Debug)]
pub struct TelemetryConfig {
    /// The `service.name` of traces, unless `OTEL_SERVICE_NAME` or `OTEL_RESOURCE_ATTRIBUTES` set another.
    pub service_name: String,
    /// Format of log lines.
    pub log_format: LogFormat,
    /// Filter of log lines.
    pub log_filter: LogFilter,
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Text for humans.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// Log directives such as `info` or `warn,router=debug`, known to be well-formed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFilter(String);

/// Why telemetry could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The exporter refused its settings.
    #[error("cannot set up the otlp exporter, check the OTEL_EXPORTER_OTLP_* variables: {0}")]
    Exporter(#[from] ExporterBuildError),
    /// Unsupported protocol.
    #[error(
        "{variable}={value}: only the otlp protocols grpc and http/protobuf are supported; set it to one of them or unset it"
    )]
    Protocol {
        /// The variable that requests it.
        variable: &'static str,
        /// Its value.
        value: String,
    },
    /// A client certificate without its key, or the reverse.
    #[error(
        "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and OTEL_EXPORTER_OTLP_CLIENT_KEY need each other: set both or neither"
    )]
    HalfIdentity,
    /// A certificate or key named by a variable cannot be used.
    #[error(
        "cannot use a file that OTEL_EXPORTER_OTLP_CERTIFICATE, _CLIENT_CERTIFICATE or _CLIENT_KEY names: {0}"
    )]
    Tls(#[from] TlsError),
    /// The thread that writes log lines cannot start.
    #[error("cannot start the thread that writes the log: {0}")]
    LogThread(std::io::Error),
    /// The process already has a subscriber.
    #[error("telemetry is set up once in a process, by its main: {0}")]
    AlreadySetUp(#[from] tracing_subscriber::util::TryInitError),
}

impl TelemetryError {
    /// Whether an `OTEL_*` variable, or a file that one names, is the cause.
    pub fn is_of_configuration(&self) -> bool {
        match self {
            Self::Exporter(error) => matches!(error, ExporterBuildError::InvalidConfiguration(_)),
            Self::Protocol { .. } | Self::HalfIdentity | Self::Tls(_) => true,
            Self::LogThread(_) | Self::AlreadySetUp(_) => false,
        }
    }
}

/// The filter of the process's log; set by [`init`], as the process's subscriber is.
static FILTER: OnceLock<CurrentFilter> = OnceLock::new();

#[derive(Debug)]
struct CurrentFilter {
    directives: Mutex<LogFilter>,
    handle: reload::Handle<EnvFilter, Registry>,
}

/// Keeps the exporter alive. Dropping it flushes the last spans, blocking this thread for at most
/// [`FLUSH_TIMEOUT`].
#[derive(Debug)]
#[must_use = "dropping the guard ends the export of traces"]
pub struct TelemetryGuard {
    traces: Option<SdkTracerProvider>,
    log: LogWriter,
}

/// Sets up logs and, if the environment names a collector, traces. Traces need a Tokio runtime.
pub fn init(config: &TelemetryConfig) -> Result<TelemetryGuard, TelemetryError> {
    let traces = otlp::provider(&config.service_name)?;
    let tracer = traces.as_ref().map(|provider| provider.tracer("outrider"));
    let spans =
        tracer.map(|tracer| tracing_opentelemetry::layer().with_tracer(tracer).with_filter(exported_spans()));
    let log = LogWriter::start(std::io::stderr(), config.log_format).map_err(TelemetryError::LogThread)?;
    let log = log.with_colours(std::io::stderr().is_terminal());
    let (filter, handle) = reload::Layer::new(EnvFilter::new(&config.log_filter.0));
    let lines = logs(config.log_format, filter, &log);
    tracing_subscriber::registry().with(lines).with(spans).try_init()?;
    // It is not set yet: there is one subscriber in a process.
    drop(FILTER.set(CurrentFilter { directives: Mutex::new(config.log_filter.clone()), handle }));
    // The default hook writes to stderr itself: while nobody reads a full pipe, the thread would never end.
    let of_panics = log.clone();
    std::panic::set_hook(Box::new(move |panic| of_panics.panicked(&described(panic))));
    Ok(TelemetryGuard { traces, log })
}

/// What the default hook writes, with a backtrace if `RUST_BACKTRACE` requests one.
fn described(panic: &PanicHookInfo<'_>) -> String {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("(no name)");
    let place = panic.location().map(|place| format!(" at {place}")).unwrap_or_default();
    let text = format!("thread '{name}' panicked{place}: {}", panic_text(panic.payload()));
    let trace = Backtrace::capture();
    if trace.status() == BacktraceStatus::Captured { format!("{text}\n{trace}") } else { text }
}

/// The filter of this process's log; `None` without a log ([`init`]).
pub fn current_log_filter() -> Option<LogFilter> {
    FILTER.get().map(|filter| filter.directives.lock().unwrap_or_else(PoisonError::into_inner).clone())
}

/// Replaces the filter of this process's log, if there is one, until the process ends.
pub fn replace_log_filter(new: LogFilter) {
    let Some(CurrentFilter { directives, handle }) = FILTER.get() else { return };
    let mut directives = directives.lock().unwrap_or_else(PoisonError::into_inner);
    // It fails only if there is no log any more.
    if handle.reload(EnvFilter::new(&new.0)).is_ok() {
        *directives = new;
    }
}

fn logs(
    format: LogFormat,
    filter: reload::Layer<EnvFilter, Registry>,
    log: &LogWriter,
) -> Box<dyn Layer<Registry> + Send + Sync> {
    let lines = tracing_subscriber::fmt::layer().with_writer(log.clone());
    let filter = log_filter(filter, log);
    match format {
        LogFormat::Text => lines.with_ansi(log.has_colours()).with_filter(filter).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).with_filter(filter).boxed(),
    }
}

/// Filter of log events. It has a level hint, so events of libraries below that level cost next to nothing.
fn log_filter(filter: reload::Layer<EnvFilter, Registry>, log: &LogWriter) -> impl Filter<Registry> + use<> {
    filter.and(RateLimit::new(log.clone()))
}

fn exported_spans() -> FilterFn {
    filter_fn(is_exported as fn(&Metadata<'_>) -> bool).with_max_level_hint(LevelFilter::INFO)
}

/// Spans of level INFO and above are exported with their events, whatever the log filter is.
fn is_exported(metadata: &Metadata<'_>) -> bool {
    let library = metadata.target().split("::").next().unwrap_or_default();
    *metadata.level() <= Level::INFO && !FOREIGN.iter().any(|foreign| library.starts_with(foreign))
}

impl TelemetryGuard {
    /// Writes a line to stderr, after all log lines before it and without blocking.
    pub fn write_line(&self, text: &str) {
        self.log.line(text);
    }

    /// Flushes without blocking the runtime's threads, which the exporter needs. Preferable to dropping the
    /// guard; await it at the very end of `main`.
    pub async fn shut_down(self) {
        if tokio::task::spawn_blocking(move || drop(self)).await.is_err() {
            tracing::warn!("flushing the last spans panicked: they may be lost");
        }
    }
}

impl Drop for TelemetryGuard {
    fn drop(&mut self) {
        let flushed = self.traces.take().map_or(Ok(()), |traces| traces.shutdown_with_timeout(FLUSH_TIMEOUT));
        if let Err(error) = flushed {
            tracing::warn!(%error, "cannot send the last spans to the collector: they are lost");
        }
        self.log.flush();
    }
}

impl FromStr for LogFilter {
    type Err = tracing_subscriber::filter::ParseError;

    fn from_str(directives: &str) -> Result<Self, Self::Err> {
        EnvFilter::builder().parse(directives)?;
        Ok(Self(directives.to_owned()))
    }
}

impl fmt::Display for LogFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_hears_is_known_by_its_level() {
        let log = LogWriter::start(std::io::sink(), LogFormat::Text).unwrap();
        for (directives, most) in [("error", LevelFilter::ERROR), ("info,service=debug", LevelFilter::DEBUG)]
        {
            let (filter, _handle) = reload::Layer::new(EnvFilter::new(directives));
            let filter = log_filter(filter, &log);
            assert_eq!(filter.max_level_hint(), Some(most), "{directives}");
        }
        let exported: &dyn Filter<Registry> = &exported_spans();
        assert_eq!(exported.max_level_hint(), Some(LevelFilter::INFO));
    }

    #[test]
    fn a_filter_is_checked_before_it_is_used() {
        for good in ["info", "warn,router=debug", "service::discovery=trace,error"] {
            assert_eq!(good.parse::<LogFilter>().unwrap().to_string(), good);
        }
        for bad in ["router=loud", "info,a=b=c"] {
            assert!(bad.parse::<LogFilter>().is_err(), "{bad}");
        }
    }
}
