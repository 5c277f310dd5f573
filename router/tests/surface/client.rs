//! A router in one process, and its clients.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, BodyDataStream, Bytes};
use http::{HeaderMap, Request, StatusCode};
use http_body_util::BodyExt as _;
use router::admission::{Admission, AdmissionLimits};
use router::api::admin::read_only;
use router::api::allowed_hosts::AllowedHosts;
use router::api::grpc::grpc_service;
use router::api::grpc_key::require_key;
use router::api::http::{admin_app, http_app};
use router::api::vllm_grpc::vllm_grpc_service;
use router::catalog::settings::{ModelSettings, RequestDefaults};
use router::catalog::{Catalog, ModelEntry};
use router::console::console_app;
use router::console::pair::PairCheck;
use router::metrics::RouterMetrics;
use router::pipeline::AppState;
use router::pipeline::body_memory::BodyMemory;
use router::pipeline::buffer_memory::BufferMemory;
use router::pipeline::response_store::ResponseStore;
use router::request::Auth;
use router::request_log::RequestLog;
use router::scheduler::timelines::Timelines;
use router::tokenize::TokenizePool;
use scheduling::scheduler::policy::{DraftTokens, LanePolicy, PolicyConfig};
use serde_json::Value;
use service::accept::{Connections, Listener, ListenerConfig, RawListener};
use service::config::Faults;
use service::health::Health;
use service::metrics::Metrics;
use service::shutdown::Lifetime;
use speculation::{AcceptanceMode, TokenId};
use text::{Framing, ModelText, asset};
use tokio::net::TcpListener;
use tonic::service::Routes;
use tower::ServiceExt as _;

use crate::fake_lanes::{FakeLanes, SPAN_LEN, Script, SharedLanes};
use crate::whole_and_streamed::{ROUTES, compare, other_mode};

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const COMPLETIONS: &str = "/v1/completions";
pub(crate) const RESPONSES: &str = "/v1/responses";
pub(crate) const MESSAGES: &str = "/v1/messages";

pub(crate) const MODEL: &str = "org/demo";
/// An alias of [`MODEL`] with defaults.
pub(crate) const ALIAS: &str = "short";
pub(crate) const MAX_MODEL_LEN: u32 = 2_048;
pub(crate) const END: TokenId = 0;

/// Keep-alive interval of these routers.
pub(crate) const KEEP_ALIVE: Duration = Duration::from_millis(40);

/// The bundled tokenizer and chat template.
pub(crate) fn demo_text() -> Arc<ModelText> {
    static DEMO: OnceLock<Arc<ModelText>> = OnceLock::new();
    Arc::clone(
        DEMO.get_or_init(|| {
            Arc::new(load(&[asset::TOKENIZER, asset::TOKENIZER_CONFIG, asset::CHAT_TEMPLATE]))
        }),
    )
}

/// A file of the bundled target.
pub(crate) fn model_file(name: &str) -> Vec<u8> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/demo/target");
    std::fs::read(dir.join(name)).unwrap()
}

fn load(names: &[&str]) -> ModelText {
    let assets: Vec<(&str, Vec<u8>)> = names.iter().map(|&name| (name, model_file(name))).collect();
    let fetch = |name: &str| {
        assets.iter().find(|(asset_name, _)| *asset_name == name).map(|(_, bytes)| bytes.as_slice())
    };
    ModelText::from_assets(fetch).unwrap()
}

pub(crate) fn demo_encode(text: &str) -> Vec<TokenId> {
    demo_text().encode(text, Framing::Add).unwrap()
}

pub(crate) fn entry(id: &str, text: Arc<ModelText>) -> Arc<ModelEntry> {
    Arc::new(ModelEntry {
        id: id.to_owned(),
        model: id.to_owned(),
        defaults: RequestDefaults::default(),
        created: 1_700_000_000,
        text,
        max_model_len: MAX_MODEL_LEN,
        vocab_size: 4_096,
        eos_token_ids: vec![END],
        numerics_id: "numerics-1".to_owned(),
    })
}

/// Typical acceptance for code, the default for other task types.
fn policy() -> PolicyConfig {
    let code = LanePolicy {
        max_k: 4,
        min_acceptance: 0.0,
        max_batch_for_speculation: None,
        weight: 1.0,
        acceptance: AcceptanceMode::Typical,
    };
    let lanes = BTreeMap::from([("code".to_owned(), code)]);
    PolicyConfig { lanes, ..PolicyConfig::new(DraftTokens::Auto, 8) }
}

/// A router with fake lanes.
pub(crate) struct TestRouter {
    pub(crate) lanes: Arc<FakeLanes>,
    pub(crate) state: AppState,
    pair: PairCheck,
    app: Router,
}

/// A response, read to its end.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl TestRouter {
    pub(crate) fn start() -> Self {
        Self::with(Auth::Open, AdmissionLimits::default())
    }

    pub(crate) fn with(auth: Auth, limits: AdmissionLimits) -> Self {
        let lifetime = Lifetime::new();
        let lanes = FakeLanes::new(&lifetime, SPAN_LEN);
        let alias = ModelSettings {
            serves: Some(MODEL.to_owned()),
            defaults: RequestDefaults {
                temperature: Some(0.25),
                max_tokens: Some(5),
                ..RequestDefaults::default()
            },
        };
        let catalog = Catalog::new([(ALIAS.to_owned(), alias)].into());
        catalog
            .publish([entry(MODEL, demo_text()), entry("no-template", Arc::new(load(&[asset::TOKENIZER])))]);
        let metrics_page = Metrics::new();
        let metrics = RouterMetrics::register(&metrics_page);
        let tokenize = TokenizePool::start(1, &lifetime, metrics.tokenize_queue()).unwrap();
        let state = AppState {
            generation: Arc::new(SharedLanes(Arc::clone(&lanes))),
            catalog,
            admission: Admission::new(limits),
            auth,
            health: Health::new(),
            metrics_page,
            metrics,
            policy: Arc::new(policy()),
            objectives: Arc::new([("batch".to_owned(), 200)].into()),
            tokenize,
            request_log: None,
            access_log: false,
            keep_alive: KEEP_ALIVE,
            response_memory: BufferMemory::default(),
            body_memory: BodyMemory::default(),
            responses: ResponseStore::default(),
            lifetime,
        };
        let pair = PairCheck::new(Vec::new(), state.lifetime.clone());
        Self { lanes, app: http_app(state.clone(), AllowedHosts::Any), pair, state }
    }

    /// A router that serves the holders of these API keys, one per line, and nobody else.
    pub(crate) fn with_keys(keys: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        std::fs::write(&path, keys).unwrap();
        Self::with(Auth::from_file(&path).unwrap(), AdmissionLimits::default())
    }

    /// Writes finished requests to this file.
    pub(crate) fn with_request_log(self, path: &Path) -> Self {
        let log = RequestLog::start(path, 1 << 20, &self.state.lifetime, self.state.metrics.request_log());
        let state = AppState { request_log: Some(log.unwrap()), ..self.state };
        Self { app: http_app(state.clone(), AllowedHosts::Any), state, ..self }
    }

    /// Writes a line to the log for each request.
    pub(crate) fn with_access_log(self) -> Self {
        let state = AppState { access_log: true, ..self.state };
        Self { app: http_app(state.clone(), AllowedHosts::Any), state, ..self }
    }

    /// Uses this program for the console's check of the pair.
    pub(crate) fn with_pair_check(self, command: [&str; 2]) -> Self {
        let pair = PairCheck::new(command.map(str::to_owned).to_vec(), self.state.lifetime.clone());
        Self { pair, ..self }
    }

    pub(crate) fn with_reply(self, text: &str) -> Self {
        self.lanes.set_script(Script::Reply(text.to_owned()));
        self
    }

    pub(crate) async fn send(&self, request: Request<Body>) -> Answer {
        Answer::of(self.app.clone().oneshot(request).await.unwrap()).await
    }

    pub(crate) async fn post(&self, path: &str, body: impl Into<Body>) -> Answer {
        self.send(post(path, body)).await
    }

    /// For routes that generate text, also sends the request to twin routers in the other mode (full or
    /// streamed) and with other span lengths, and compares the responses.
    pub(crate) async fn post_json(&self, path: &str, body: &Value) -> Answer {
        let answer = self.post(path, body.to_string()).await;
        let script = self.lanes.script();
        // Scores of prompts are refused in streams.
        let has_both_modes = ROUTES.contains(&path) && body["prompt_logprobs"].is_null();
        if answer.status == 200 && has_both_modes && matches!(script, Script::Reply(_)) {
            let other_mode = other_mode(path, body);
            for span_len in [SPAN_LEN, 1, 7] {
                let other = self.twin(script.clone(), span_len).post(path, other_mode.to_string()).await;
                compare((path, body), [&answer, &other], span_len == SPAN_LEN);
            }
        }
        answer
    }

    /// A router that serves and stores the same, with separate lanes, limits and counts.
    fn twin(&self, script: Script, span_len: usize) -> Self {
        let lanes = FakeLanes::new(&self.state.lifetime, span_len);
        lanes.set_script(script);
        let metrics_page = Metrics::new();
        let state = AppState {
            generation: Arc::new(SharedLanes(Arc::clone(&lanes))),
            admission: Admission::new(AdmissionLimits::default()),
            metrics: RouterMetrics::register(&metrics_page),
            metrics_page,
            ..self.state.clone()
        };
        let pair = PairCheck::new(Vec::new(), state.lifetime.clone());
        Self { lanes, app: http_app(state.clone(), AllowedHosts::Any), pair, state }
    }

    /// Sends a request that must be answered with 200 and JSON.
    pub(crate) async fn ok(&self, path: &str, body: &Value) -> Value {
        let answer = self.post_json(path, body).await;
        assert_eq!(answer.status, 200, "{body}: {}", answer.text());
        answer.json()
    }

    /// Sends a streamed request that must be answered with 200; returns the data of its events.
    pub(crate) async fn events(&self, path: &str, body: &Value) -> Vec<String> {
        let answer = self.post_json(path, body).await;
        assert_eq!(answer.status, 200, "{body}: {}", answer.text());
        assert_eq!(answer.headers["content-type"], "text/event-stream");
        assert_eq!(answer.headers["x-accel-buffering"], "no", "nginx passes each event on at once");
        answer.events()
    }

    /// Sends a streamed request that must be answered with 200; returns the body as a stream.
    pub(crate) async fn open(&self, path: &str, body: &Value) -> BodyDataStream {
        self.open_request(post(path, body.to_string())).await
    }

    /// Sends a request that must be answered with 200; returns the body as a stream.
    pub(crate) async fn open_request(&self, request: Request<Body>) -> BodyDataStream {
        let response = self.app.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), 200);
        response.into_body().into_data_stream()
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send(Request::get(path).body(Body::empty()).unwrap()).await
    }

    /// Sends a request to the operators' routes.
    pub(crate) async fn admin(&self, request: Request<Body>) -> Answer {
        Answer::of(admin_app(self.state.clone()).oneshot(request).await.unwrap()).await
    }

    /// Sends a request to the console at a loopback address.
    pub(crate) async fn console(&self, request: Request<Body>) -> Answer {
        Answer::of(self.console_app().oneshot(request).await.unwrap()).await
    }

    /// The console at a loopback address.
    pub(crate) fn console_app(&self) -> Router {
        console_app(self.state.clone(), Timelines::default(), self.pair.clone())
    }

    /// Sends a request to the console at an address reachable by others, of a router without keys.
    pub(crate) async fn console_at_public_address(&self, request: Request<Body>) -> Answer {
        Answer::of(read_only(self.console_app()).oneshot(request).await.unwrap()).await
    }

    /// Sends a request to the admin app at an address reachable by others, of a router without keys.
    pub(crate) async fn admin_at_public_address(&self, request: Request<Body>) -> Answer {
        Answer::of(read_only(admin_app(self.state.clone())).oneshot(request).await.unwrap()).await
    }

    pub(crate) async fn metrics(&self) -> String {
        self.admin(Request::get("/metrics").body(Body::empty()).unwrap()).await.text().to_owned()
    }

    /// Serves HTTP on a real socket, as the router does.
    pub(crate) async fn listen_http(&self) -> SocketAddr {
        self.listen_http_with(listener_config()).await
    }

    pub(crate) async fn listen_http_with(&self, config: ListenerConfig) -> SocketAddr {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let connections = Connections::new(config, &Metrics::new());
        Listener::new(socket, None, &connections).serve_http("http", self.app.clone(), &self.state.lifetime);
        address
    }

    /// Serves gRPC on a real socket, as the router does.
    pub(crate) async fn listen_grpc(&self) -> String {
        format!("http://{}", self.listen_grpc_with(listener_config()).await)
    }

    pub(crate) async fn listen_grpc_with(&self, config: ListenerConfig) -> SocketAddr {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let connections = Connections::new(config, &Metrics::new());
        let services =
            Routes::new(grpc_service(self.state.clone())).add_service(vllm_grpc_service(self.state.clone()));
        let services = require_key(self.state.clone(), services);
        Listener::new(socket, None, &connections).serve_grpc("grpc", services, &self.state.lifetime);
        address
    }
}

/// The body with these fields in addition or instead.
pub(crate) fn merged(mut body: Value, fields: &Value) -> Value {
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

/// Default settings.
pub(crate) fn listener_config() -> ListenerConfig {
    RawListener::default().validate(&mut Faults::new())
}

pub(crate) fn post(path: &str, body: impl Into<Body>) -> Request<Body> {
    Request::post(path).header("content-type", "application/json").body(body.into()).unwrap()
}

impl Answer {
    pub(crate) async fn of(response: http::Response<Body>) -> Self {
        let (head, body) = response.into_parts();
        Self { status: head.status, headers: head.headers, body: body.collect().await.unwrap().to_bytes() }
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    pub(crate) fn events(&self) -> Vec<String> {
        self.text()
            .split("\n\n")
            .filter_map(|event| event.strip_prefix("data: "))
            .map(str::to_owned)
            .collect()
    }
}

/// All chunks of a stream but the closing marker, which must be present.
pub(crate) fn chunks(events: &[String]) -> Vec<Value> {
    let (last, chunks) = events.split_last().unwrap();
    assert_eq!(last, "[DONE]");
    chunks.iter().map(|chunk| serde_json::from_str(chunk).unwrap()).collect()
}

/// The text of one choice of a stream.
pub(crate) fn streamed_text(chunks: &[Value], index: u64) -> String {
    let pieces = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
    let of_choice = pieces.filter(|choice| choice["index"] == index);
    of_choice.filter_map(|choice| choice["text"].as_str().or(choice["delta"]["content"].as_str())).collect()
}

/// Waits until `condition` holds, for effects of other tasks.
pub(crate) async fn eventually(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..500 {
        if condition() {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("{what} did not happen within 5 s");
}
