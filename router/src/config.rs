//! The router's settings.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use scheduling::draft_length::Rules;
use scheduling::scheduler::SchedulerConfig;
use scheduling::scheduler::policy::{DraftTokens, LanePolicy, PolicyConfig};
use serde::{Deserialize, Serialize};
use service::accept::{ListenerConfig, ListenerFlags, RawListener, SECONDS_MAX};
use service::config::{Faults, RawConfig};
use service::process::{ProcessConfig, ProcessFlags, RawProcess};
use service::tls::{ServerTls, ServerTlsFlags};
use speculation::step::MAX_DRAFT_TOKENS;
use speculation::tree::MAX_TREE_TOKENS;

use crate::admission::AdmissionLimits;
use crate::api::cors::AllowedOrigins;
use crate::catalog::settings::ModelSettings;
use crate::lane_config::RawLane;
use crate::request::Auth;
use crate::request::check::{check_defaults, check_task_type};
use crate::request::gateway::Objectives;
use crate::workers::tls::{WorkerTls, WorkerTlsFlags};

/// Maximum of `lame_duck_seconds`; no load balancer needs more.
const LAME_DUCK_SECONDS_MAX: u64 = 600;

/// One tebibyte.
const REQUEST_LOG_MIB_MAX: u64 = 1 << 20;

const AFTER_HELP: &str = "\
Lanes, by task type, in the file, or all of them in one variable, as models and objectives
(OUTRIDER_LANES='{code={max_k=6}, sql={weight=2.0}}', OUTRIDER_MODELS, OUTRIDER_OBJECTIVES):
  [lanes.\"code\"]
  max_k = 6                          # maximum k, also if a request sets k; 0: no drafting
  min_acceptance = 0.3               # below this acceptance of first tokens: only probes draft
  max_batch_for_speculation = 64     # more sequences at the target: no drafting
  weight = 2.0                       # share of turns while sequences wait for capacity
  acceptance = \"coupled\"             # or rejection, typical; for requests that do not set it

Aliases of models and defaults of requests:
  [models.\"gpt-4o\"]
  serves = \"llama-3.3-70b\"           # name at its targets; absent: the model of this name
  temperature = 0.3                  # also top_p, top_k, min_p, repetition_penalty, max_tokens,
                                     # task_type

Priorities of a gateway's objectives (header x-llm-d-inference-objective); 0 to 255, lower is more
urgent:
  [objectives]
  \"batch\" = 200

The file of --api-keys lists keys, in plain text or as digests (printf %s KEY | sha256sum), with
their limits:
  sha256:DIGEST alice models=demo priority=1 max_concurrent_requests=8
  KEY bob task_type=code requests_per_minute=60 tokens_per_minute=100000
  KEY carol admin=true
admin=true: an operator's key, for orders (/admin/*), /debug/lanes and the console at --admin.

Decisions and their reasons: GET /debug/lanes. Metrics: GET /metrics. Both at --admin.
Clients set a deadline for the whole response with the header x-request-timeout-ms, over gRPC with
grpc-timeout.

Examples:
  outrider-router --discovery static:workers.toml
  outrider-router --http 0.0.0.0:8000 --api-keys keys.txt --config router.toml \\
      --discovery etcd://10.0.0.5:2379/outrider";

/// Serves clients over HTTP (OpenAI's and Anthropic's APIs) and gRPC; draft workers propose tokens and target
/// workers verify them.
///
/// Settings come from --config FILE (TOML), then OUTRIDER_* environment variables, then flags; later ones
/// win.
#[derive(Debug, Parser, Serialize)]
#[command(name = "outrider-router", version = service::release::version(), after_long_help = AFTER_HELP)]
pub struct Flags {
    /// Address of the HTTP API
    #[arg(long, value_name = "ADDR")]
    pub http: Option<SocketAddr>,
    /// Address of the gRPC API
    #[arg(long, value_name = "ADDR")]
    pub grpc: Option<SocketAddr>,
    /// Address for operators: the console, /metrics, /debug/lanes, drains and rollouts (/admin/*), and
    /// /health with reasons; the HTTP API has /health without reasons
    #[arg(long, value_name = "ADDR")]
    pub admin: Option<SocketAddr>,
    /// File of API keys and their limits, one per line, reread when it changes; without it only loopback
    /// addresses may be served
    #[arg(long, value_name = "FILE")]
    pub api_keys: Option<PathBuf>,
    /// Origins of web pages that may call the HTTP API from a browser (CORS), comma-separated, as
    /// `https://chat.example`; *: any page
    #[arg(long, value_name = "ORIGINS", value_delimiter = ',')]
    pub allowed_origins: Option<Vec<String>>,
    /// Number of tokens drafted per round, unless the request sets it; auto: each lane chooses by its
    /// measurements
    #[arg(long, value_name = "auto|K")]
    pub draft_tokens: Option<DraftTokens>,
    /// Maximum number of tokens drafted per round, also if a request, a lane or --draft-tokens asks for more;
    /// 0: no drafting
    #[arg(long, value_name = "K")]
    pub max_draft_tokens: Option<u32>,
    /// Number of tokens in a draft that is a tree of candidates, unless the request sets it; 0: chains only,
    /// auto: each lane chooses
    #[arg(long, value_name = "auto|N")]
    pub tree_tokens: Option<DraftTokens>,
    /// Whether the router looks up drafts in the sequences themselves when that promises more than the draft
    /// worker
    #[arg(long, value_name = "true|false")]
    pub suffix_drafts: Option<bool>,
    /// Maximum number of sequences running at once
    #[arg(long, value_name = "N")]
    pub max_sequences: Option<u32>,
    /// Maximum number of waiting requests; further ones, and those that waited 30 s, are answered 429;
    /// --queue-wait-seconds counts from the end of this wait
    #[arg(long, value_name = "N")]
    pub max_waiting_requests: Option<usize>,
    /// Number of tokenizer threads
    #[arg(long, value_name = "N")]
    pub tokenize_threads: Option<usize>,
    /// Longest time for one step of a target before it is sent again; shorter if the target's own step times
    /// allow
    #[arg(long, value_name = "SECONDS")]
    pub target_deadline_seconds: Option<u64>,
    /// How long a sequence that is new or has lost its target waits for a target of its model to appear
    #[arg(long, value_name = "SECONDS")]
    pub target_wait_seconds: Option<u64>,
    /// How long a request, once admitted, waits for its first target while all are full, before it is
    /// answered 429
    #[arg(long, value_name = "SECONDS")]
    pub queue_wait_seconds: Option<u64>,
    /// Tokens replayed per second, for each target of the model, for sequences that lost their target; 0:
    /// unlimited
    #[arg(long, value_name = "N")]
    pub replay_tokens_per_second: Option<u32>,
    /// Program that the console's page Pair may run, and its arguments, one flag for each
    /// (--pair-check=outrider --pair-check=check-pair --pair-check=--json ..); it must print what `outrider
    /// check-pair --json` prints
    #[arg(long, value_name = "ARG")]
    pub pair_check: Option<Vec<String>>,
    /// Time per output token that outrider_wanted_target_workers, the gauge for autoscalers, aims to stay
    /// below; 0: the gauge follows KV alone
    #[arg(long, value_name = "MS")]
    pub scaling_tpot_ms: Option<u64>,
    /// Share of the sequences, 0 to 1, used to score draft workers started with --shadow and candidates of a
    /// rollout
    #[arg(long, value_name = "SHARE")]
    pub shadow_share: Option<f64>,
    /// Write a line to the log for each request, with the client's address, its API key's name, model,
    /// status, tokens and times, and no text; --log must let router::access=info pass
    #[arg(long, value_name = "true|false")]
    pub access_log: Option<bool>,
    /// File to which finished requests are appended, prompt and answer, one line of JSON each, for distilling
    /// a draft: only of API keys with log_requests=true, or of all clients without --api-keys; never requests
    /// with `store: false`
    #[arg(long, value_name = "FILE")]
    pub request_log: Option<PathBuf>,
    /// Maximum size of the request log, in MiB: half for FILE, half for the previous file, FILE.1
    #[arg(long, value_name = "MIB")]
    pub request_log_mib: Option<u64>,
    /// After a signal to stop: how long all clients are still served while /health/ready fails and clients
    /// are asked to connect elsewhere
    #[arg(long, value_name = "SECONDS")]
    pub lame_duck_seconds: Option<u64>,
    /// Age of a connection over HTTP/2 or gRPC at which the client is asked to open another, so that routers
    /// added behind a load balancer get their share; up to 10% shorter, so that connections do not all end at
    /// once; answers in progress are finished; 0: never
    #[arg(long, value_name = "SECONDS")]
    pub max_connection_age_seconds: Option<u64>,
    #[command(flatten)]
    #[serde(flatten)]
    #[expect(missing_docs, reason = "clap would take a doc comment here for the help of every flag below")]
    pub listener: ListenerFlags,
    #[command(flatten)]
    #[serde(flatten)]
    #[expect(missing_docs, reason = "clap would take a doc comment here for the help of every flag below")]
    pub tls: ServerTlsFlags,
    #[command(flatten)]
    #[serde(flatten)]
    #[expect(missing_docs, reason = "clap would take a doc comment here for the help of every flag below")]
    pub worker_tls: WorkerTlsFlags,
    #[command(flatten)]
    #[serde(flatten)]
    #[expect(missing_docs, reason = "clap would take a doc comment here for the help of every flag below")]
    pub process: ProcessFlags,
}

/// Raw settings of the router.
#[derive(Debug, Serialize, Deserialize)]
pub struct RawRouter {
    http: SocketAddr,
    grpc: SocketAddr,
    admin: SocketAddr,
    api_keys: Option<PathBuf>,
    allowed_origins: Vec<String>,
    draft_tokens: DraftTokens,
    max_draft_tokens: u32,
    tree_tokens: DraftTokens,
    suffix_drafts: bool,
    max_sequences: u32,
    max_waiting_requests: usize,
    tokenize_threads: usize,
    target_deadline_seconds: u64,
    target_wait_seconds: u64,
    queue_wait_seconds: u64,
    replay_tokens_per_second: u32,
    pair_check: Vec<String>,
    scaling_tpot_ms: u64,
    shadow_share: f64,
    access_log: bool,
    request_log: Option<PathBuf>,
    request_log_mib: u64,
    lame_duck_seconds: u64,
    max_connection_age_seconds: u64,
    /// By task type: `[lanes."code"]`.
    lanes: BTreeMap<String, RawLane>,
    /// By the name used by clients: `[models."name"]`.
    models: BTreeMap<String, ModelSettings>,
    /// Priorities by the name of a gateway's objective: `[objectives]`.
    objectives: Objectives,
    #[serde(flatten)]
    listener: RawListener,
    #[serde(flatten)]
    tls: ServerTlsFlags,
    #[serde(flatten)]
    worker_tls: WorkerTlsFlags,
    #[serde(flatten)]
    process: RawProcess,
}

impl Default for RawRouter {
    fn default() -> Self {
        let admission = AdmissionLimits::default();
        Self {
            http: SocketAddr::from(([127, 0, 0, 1], 8000)),
            grpc: SocketAddr::from(([127, 0, 0, 1], 8001)),
            admin: SocketAddr::from(([127, 0, 0, 1], 8002)),
            api_keys: None,
            allowed_origins: Vec::new(),
            draft_tokens: DraftTokens::Auto,
            max_draft_tokens: 8,
            tree_tokens: DraftTokens::Auto,
            suffix_drafts: false,
            max_sequences: admission.max_sequences,
            max_waiting_requests: admission.max_waiting_requests,
            tokenize_threads: 1,
            target_deadline_seconds: 60,
            target_wait_seconds: 30,
            queue_wait_seconds: 30,
            replay_tokens_per_second: 65_536,
            pair_check: Vec::new(),
            scaling_tpot_ms: 0,
            shadow_share: 0.1,
            access_log: false,
            request_log: None,
            request_log_mib: 256,
            lame_duck_seconds: 0,
            max_connection_age_seconds: 0,
            lanes: BTreeMap::new(),
            models: BTreeMap::new(),
            objectives: Objectives::new(),
            listener: RawListener::default(),
            tls: ServerTlsFlags::default(),
            worker_tls: WorkerTlsFlags::default(),
            process: RawProcess::default(),
        }
    }
}

/// Settings of the request log.
#[derive(Debug, Clone)]
pub struct RequestLogConfig {
    /// The file.
    pub path: PathBuf,
    /// Maximum size of the file and the previous one together, in bytes.
    pub bytes_max: u64,
}

/// Checked settings of the router.
#[derive(Debug, Clone)]
pub struct RouterConfig {
    /// Address of the HTTP API.
    pub http: SocketAddr,
    /// Address of the gRPC API.
    pub grpc: SocketAddr,
    /// Address for operators: health, metrics and the state of the lanes.
    pub admin: SocketAddr,
    /// Limits on connections and their timeouts.
    pub listener: ListenerConfig,
    /// File of API keys; without it anyone may send requests.
    pub api_keys: Option<PathBuf>,
    /// Origins of web pages that may call the HTTP API.
    pub allowed_origins: AllowedOrigins,
    /// Limits on concurrent requests.
    pub admission: AdmissionLimits,
    /// Number of tokenizer threads.
    pub tokenize_threads: usize,
    /// Aliases and defaults of models, by the name used by clients.
    pub models: BTreeMap<String, ModelSettings>,
    /// Priorities of a gateway's objectives.
    pub objectives: Objectives,
    /// Draft lengths, lanes and deadlines.
    pub scheduler: SchedulerConfig,
    /// Command of the console's page *Pair*; empty: none.
    pub pair_check: Vec<String>,
    /// Whether the process's log has a line for each request.
    pub access_log: bool,
    /// Log of finished requests; `None` if disabled.
    pub request_log: Option<RequestLogConfig>,
    /// TLS settings for clients; `None`: plain text.
    pub tls: Option<ServerTls>,
    /// TLS settings for workers at `https://` addresses.
    pub worker_tls: Option<WorkerTls>,
    /// Settings common to all processes.
    pub process: ProcessConfig,
}

impl RawConfig for RawRouter {
    type Config = RouterConfig;

    fn validate(self, faults: &mut Faults) -> Option<RouterConfig> {
        for (field, address) in [("http", self.http), ("grpc", self.grpc)] {
            faults.check(field, self.api_keys.is_some() || address.ip().is_loopback(), || {
                format!("{address} is reachable by others: set --api-keys FILE, or listen on 127.0.0.1")
            });
        }
        if let Some(Err(error)) = self.api_keys.as_deref().map(Auth::from_file) {
            faults.add("api_keys", error);
        }
        faults.check_distinct(&[("http", self.http), ("grpc", self.grpc), ("admin", self.admin)]);
        self.validate_drafts(faults);
        self.validate_limits(faults);
        let allowed_origins = AllowedOrigins::parse(&self.allowed_origins).unwrap_or_else(|error| {
            faults.add("allowed_origins", error);
            AllowedOrigins::Listed(Vec::new())
        });
        let lanes = self.validate_lanes(faults);
        self.validate_models(faults);
        let lame_duck = Duration::from_secs(self.lame_duck_seconds);
        let max_age = self.max_connection_age_seconds;
        let max_age = (max_age > 0).then(|| Duration::from_secs(max_age));
        Some(RouterConfig {
            http: self.http,
            grpc: self.grpc,
            admin: self.admin,
            listener: self.listener.validate(faults).with_max_age(max_age),
            api_keys: self.api_keys,
            allowed_origins,
            admission: AdmissionLimits {
                max_sequences: self.max_sequences,
                max_waiting_requests: self.max_waiting_requests,
            },
            tokenize_threads: self.tokenize_threads,
            models: self.models,
            objectives: self.objectives,
            scheduler: SchedulerConfig {
                policy: PolicyConfig {
                    draft_tokens: self.draft_tokens,
                    max_draft_tokens: self.max_draft_tokens,
                    tree_tokens: self.tree_tokens,
                    suffix_drafts: self.suffix_drafts,
                    lanes,
                },
                target_deadline: Duration::from_secs(self.target_deadline_seconds),
                target_wait: Duration::from_secs(self.target_wait_seconds),
                queue_wait: Duration::from_secs(self.queue_wait_seconds),
                replay_ids_per_second: self.replay_tokens_per_second,
                tpot_objective: (self.scaling_tpot_ms > 0)
                    .then(|| Duration::from_millis(self.scaling_tpot_ms)),
                shadow_share: self.shadow_share,
                rules: Rules::default(),
            },
            pair_check: self.pair_check,
            access_log: self.access_log,
            request_log: self
                .request_log
                .map(|path| RequestLogConfig { path, bytes_max: self.request_log_mib << 20 }),
            tls: self.tls.validate(faults),
            worker_tls: self.worker_tls.validate(faults),
            process: ProcessConfig { lame_duck, ..self.process.validate(faults)? },
        })
    }
}

impl RawRouter {
    fn validate_drafts(&self, faults: &mut Faults) {
        let limit = MAX_DRAFT_TOKENS as u32;
        faults.check("max_draft_tokens", self.max_draft_tokens <= limit, || {
            format!("{} is over the limit of {limit}", self.max_draft_tokens)
        });
        if let DraftTokens::Fixed(k) = self.draft_tokens {
            faults.check("draft_tokens", k <= limit, || format!("{k} is over the limit of {limit}"));
        }
        if let DraftTokens::Fixed(tokens) = self.tree_tokens {
            faults.check("tree_tokens", tokens as usize <= MAX_TREE_TOKENS, || {
                format!("{tokens} is over the limit of {MAX_TREE_TOKENS}")
            });
        }
        faults.check_between("shadow_share", self.shadow_share, 0.0..=1.0);
    }

    fn validate_limits(&self, faults: &mut Faults) {
        faults.check_positive("max_sequences", self.max_sequences);
        faults.check_between("tokenize_threads", self.tokenize_threads, 1..=64);
        faults.check_positive("target_deadline_seconds", self.target_deadline_seconds);
        faults.check_positive("queue_wait_seconds", self.queue_wait_seconds);
        faults.check("lame_duck_seconds", self.lame_duck_seconds <= LAME_DUCK_SECONDS_MAX, || {
            format!("{} is over {LAME_DUCK_SECONDS_MAX}", self.lame_duck_seconds)
        });
        faults.check_between("max_connection_age_seconds", self.max_connection_age_seconds, 0..=SECONDS_MAX);
        faults.check_between("request_log_mib", self.request_log_mib, 1..=REQUEST_LOG_MIB_MAX);
    }

    fn validate_models(&self, faults: &mut Faults) {
        for (name, settings) in &self.models {
            let field = format!("models.{name}");
            faults.check(&field, !name.is_empty(), || "a model's name must not be empty".to_owned());
            if let Err(error) = check_defaults(&settings.defaults) {
                faults.add(&field, error);
            }
            let is_alias = |other: &String| {
                other != name && self.models.get(other).is_some_and(|settings| settings.serves.is_some())
            };
            if let Some(served) = settings.serves.as_ref().filter(|served| is_alias(served)) {
                faults.add(
                    &field,
                    format!("serves is `{served}`, which is an alias itself: use the name of its model"),
                );
            }
        }
    }

    fn validate_lanes(&self, faults: &mut Faults) -> BTreeMap<String, LanePolicy> {
        let mut lanes = BTreeMap::new();
        for (task_type, lane) in &self.lanes {
            if let Err(error) = check_task_type(task_type) {
                faults.add(&format!("lanes.{task_type}"), error);
            }
            lanes.insert(task_type.clone(), lane.validate(task_type, faults));
        }
        lanes
    }
}

#[cfg(test)]
mod tests;
