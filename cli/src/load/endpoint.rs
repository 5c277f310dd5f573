//! An OpenAI endpoint: its address, the model that it serves, and whether it is an outrider router.
//!
//! All requests made here are sent between runs and never measured.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body_util::Full;
use serde_json::Value;
use tokio::net::TcpStream;

use super::connection::{Connection, Exchange, ExchangeEnd};
use super::counters::SpeculationCounters;
use super::error::LoadError;
use super::stamped::KernelTimestamps;
use super::tls::{Tls, Trust};

/// Timeout of requests that are not measured.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// What a URL must look like.
const URL_FORM: &str = "expected http://HOST:PORT or https://HOST";

/// Status of an answer to a request without a valid API key.
const UNAUTHORIZED: u16 = 401;

/// Timeout of a connection that only shows whether a server listens at an address.
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);

/// Access settings of an endpoint.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// Sent as a bearer token.
    pub api_key: Option<String>,
    /// The model to request if the endpoint serves several; by default the first that it lists.
    pub model: Option<String>,
    /// Trusted certificates, for `https` URLs.
    pub trust: Trust,
    /// Base URL of its metrics, if not that of its API; plain HTTP.
    pub metrics_url: Option<String>,
}

/// Request fields that an endpoint supports beyond OpenAI's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// Outrider: `task_type`, `speculation`, counts of drafted tokens in each chunk and in `usage`.
    Outrider,
    /// Only OpenAI's. Additional response fields of vLLM and llama.cpp are read if present.
    OpenAi,
}

/// A reachable server.
#[derive(Debug, Clone)]
pub struct Endpoint {
    /// URL without `/v1` and without a trailing slash.
    base: String,
    authority: String,
    path: String,
    address: SocketAddr,
    api_key: Option<String>,
    model: String,
    served_by: String,
    metrics_url: Option<String>,
    tls: Option<Tls>,
    /// Held from before the first request, so that every read has a timestamp.
    _kernel_timestamps: Option<Arc<KernelTimestamps>>,
}

impl Endpoint {
    /// An endpoint that receives no requests.
    #[cfg(test)]
    pub(super) fn for_tests(served_by: &str) -> Self {
        Self {
            base: "http://localhost".to_owned(),
            authority: "localhost".to_owned(),
            path: String::new(),
            address: ([127, 0, 0, 1], 1).into(),
            api_key: None,
            model: "m".to_owned(),
            served_by: served_by.to_owned(),
            metrics_url: None,
            tls: None,
            _kernel_timestamps: None,
        }
    }

    /// Connects to `url` (`http://HOST:PORT` or `https://HOST:PORT`, with or without `/v1`) and reads its
    /// model list.
    ///
    /// # Errors
    /// The URL is invalid, the server does not answer or its certificate is not trusted, or there is no
    /// model.
    pub async fn connect(url: &str, access: Access) -> Result<Self, LoadError> {
        let bad = |reason: &str| LoadError::Url { url: url.to_owned(), reason: reason.to_owned() };
        let base = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        let parsed = reqwest::Url::parse(&base).map_err(|error| bad(&format!("{error}: {URL_FORM}")))?;
        let host = parsed.host_str().ok_or_else(|| bad(&format!("it has no host: {URL_FORM}")))?;
        let bare_host = host.trim_matches(['[', ']']);
        let tls = match parsed.scheme() {
            "http" => None,
            "https" => Some(Tls::new(bare_host, &access.trust).map_err(|reason| bad(&reason))?),
            _ => return Err(bad("expected http:// or https://")),
        };
        let port = parsed.port_or_known_default().expect("both schemes have a port");
        let unreachable = |reason: String| LoadError::Unreachable { url: base.clone(), reason };
        let addresses = tokio::net::lookup_host((bare_host, port)).await;
        let addresses: Vec<SocketAddr> = addresses.map_err(|error| unreachable(error.to_string()))?.collect();
        let address = first_reachable(&addresses).await;
        let mut endpoint = Self {
            authority: format!("{host}:{port}"),
            path: parsed.path().trim_end_matches('/').to_owned(),
            address: address.ok_or_else(|| unreachable("the host has no address".to_owned()))?,
            api_key: access.api_key,
            model: String::new(),
            served_by: String::new(),
            metrics_url: access.metrics_url,
            tls,
            base,
            _kernel_timestamps: KernelTimestamps::begin().await.ok().map(Arc::new),
        };
        if endpoint.post("/").body(()).is_err() {
            return Err(bad("host, path or API key hold characters that no HTTP header may have"));
        }
        endpoint.fetch_model(access.model).await?;
        Ok(endpoint)
    }

    async fn fetch_model(&mut self, wanted: Option<String>) -> Result<(), LoadError> {
        let models = self.get("/v1/models").await?;
        let unreachable = |reason: &str| LoadError::Unreachable {
            url: format!("{}/v1/models", self.base),
            reason: reason.to_owned(),
        };
        let models: Value =
            serde_json::from_str(&models).map_err(|error| unreachable(&format!("not JSON: {error}")))?;
        let list = models["data"].as_array().filter(|list| !list.is_empty());
        let list = list.ok_or_else(|| unreachable("it lists no model"))?;
        let name = |model: &Value| model["id"].as_str().map(str::to_owned);
        let model = match &wanted {
            None => &list[0],
            Some(wanted) => list
                .iter()
                .find(|model| name(model).as_ref() == Some(wanted))
                .ok_or_else(|| unreachable(&format!("it lists no model `{wanted}`")))?,
        };
        self.model = name(model).ok_or_else(|| unreachable("a model without an id"))?;
        self.served_by = model["owned_by"].as_str().unwrap_or("unknown").to_owned();
        Ok(())
    }

    /// The URL, without `/v1`.
    pub fn url(&self) -> &str {
        &self.base
    }

    /// The model named in requests.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The server software, by the model's `owned_by`.
    pub fn served_by(&self) -> &str {
        &self.served_by
    }

    /// The request fields that it supports.
    pub fn dialect(&self) -> Dialect {
        match self.served_by.as_str() {
            "outrider" => Dialect::Outrider,
            _ => Dialect::OpenAi,
        }
    }

    /// Whether it supports vLLM's `cache_salt`: requests with different salts share no cached prefix.
    pub fn supports_cache_salt(&self) -> bool {
        self.dialect() == Dialect::Outrider || self.served_by == "vllm"
    }

    /// Its counters of drafted and accepted tokens under vLLM's names; `None` if it exposes none.
    pub async fn speculation_counters(&self) -> Option<SpeculationCounters> {
        let page = match &self.metrics_url {
            None => self.get("/metrics").await.ok()?,
            Some(url) => {
                let client = reqwest::Client::builder().timeout(ANSWER_TIMEOUT).no_proxy().build().ok()?;
                let url = format!("{}/metrics", url.trim_end_matches('/'));
                client.get(url).send().await.ok()?.error_for_status().ok()?.text().await.ok()?
            }
        };
        SpeculationCounters::parse(&page)
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn tls(&self) -> Option<&Tls> {
        self.tls.as_ref()
    }

    /// Builder of a POST request.
    pub(super) fn post(&self, path: &str) -> http::request::Builder {
        self.authorized(http::Request::post(format!("{}{path}", self.path)))
            .header(http::header::CONTENT_TYPE, "application/json")
            .header(http::header::ACCEPT, "text/event-stream")
    }

    fn authorized(&self, request: http::request::Builder) -> http::request::Builder {
        let request = request.header(http::header::HOST, &self.authority);
        match &self.api_key {
            Some(key) => request.header(http::header::AUTHORIZATION, format!("Bearer {key}")),
            None => request,
        }
    }

    async fn get(&self, path: &str) -> Result<String, LoadError> {
        let unreachable =
            |reason: String| LoadError::Unreachable { url: format!("{}{path}", self.base), reason };
        let asked = tokio::time::timeout(ANSWER_TIMEOUT, self.ask(path)).await;
        let answer = asked.unwrap_or_else(|_| Err(format!("no answer in {} s", ANSWER_TIMEOUT.as_secs())));
        let (status, text) = answer.map_err(&unreachable)?;
        let remedy = match status {
            UNAUTHORIZED => "; give a key with OPENAI_API_KEY or --api-key",
            _ => "",
        };
        match (200..300).contains(&status) {
            true => Ok(text),
            false => Err(unreachable(format!("{status}: {}{remedy}", text.trim()))),
        }
    }

    /// Status and body of a GET over a new connection.
    async fn ask(&self, path: &str) -> Result<(u16, String), String> {
        let request = self
            .authorized(http::Request::get(format!("{}{path}", self.path)))
            .body(Full::default())
            .map_err(|error| error.to_string())?;
        let mut exchange = Exchange::new(Instant::now());
        let opened = Connection::open(self).await.map_err(|reason| match self.tls {
            None => format!("{reason}; start a server there, such as `outrider up`, or check the URL"),
            Some(_) => reason,
        });
        opened?.exchange(request, &mut exchange).await;
        match (exchange.end, exchange.status) {
            (ExchangeEnd::Complete, Some(status)) => {
                Ok((status, String::from_utf8_lossy(&exchange.bytes).into_owned()))
            }
            (ExchangeEnd::Broken(reason), _) => Err(reason),
            (end, _) => Err(format!("{end:?}")),
        }
    }
}

/// The first address that accepts a connection, else the first one: `localhost` mostly is `::1` and
/// 127.0.0.1, and a server listens at one of them.
async fn first_reachable(addresses: &[SocketAddr]) -> Option<SocketAddr> {
    for address in addresses.iter().filter(|_| addresses.len() > 1) {
        let connected = tokio::time::timeout(PROBE_TIMEOUT, TcpStream::connect(address)).await;
        if matches!(connected, Ok(Ok(_))) {
            return Some(*address);
        }
    }
    addresses.first().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_name_with_several_addresses_is_reached_where_a_server_listens() {
        let listeners = [(); 2].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
        let [closed, open] = listeners.each_ref().map(|listener| listener.local_addr().unwrap());
        let [closed_listener, _open_listener] = listeners;
        drop(closed_listener);
        assert_eq!(first_reachable(&[closed, open]).await, Some(open));
        assert_eq!(first_reachable(&[open, closed]).await, Some(open));
        assert_eq!(first_reachable(&[closed]).await, Some(closed));
        assert_eq!(first_reachable(&[]).await, None);
    }
}
