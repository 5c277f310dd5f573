//! The HTTP client of the tests: sends any request and returns the unmodified response.

use std::time::Duration;

use anyhow::Context as _;
use reqwest::header::HeaderMap;
use reqwest::{Client, Method, RequestBuilder, Response};
use serde_json::Value;

use crate::wait::WAIT_TIMEOUT;

/// Path of completions.
pub const COMPLETIONS: &str = "/v1/completions";

/// Path of chat completions.
pub const CHAT: &str = "/v1/chat/completions";

/// A client of one router.
#[derive(Debug, Clone)]
pub struct HttpClient {
    url: String,
    client: Client,
}

/// A complete response.
#[derive(Debug, Clone)]
pub struct HttpAnswer {
    /// The status code.
    pub status: u16,
    /// The headers.
    pub headers: HeaderMap,
    /// The body.
    pub text: String,
}

impl HttpClient {
    /// A client of the router at `url`.
    pub fn new(url: impl Into<String>) -> anyhow::Result<Self> {
        let client = Client::builder()
            .timeout(WAIT_TIMEOUT)
            .connect_timeout(Duration::from_secs(5))
            .no_proxy()
            .build()?;
        Ok(Self { url: url.into(), client })
    }

    /// Builder of a request.
    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.client.request(method, format!("{}{path}", self.url))
    }

    /// Sends JSON and reads the complete response.
    pub async fn post(&self, path: &str, body: &Value) -> anyhow::Result<HttpAnswer> {
        HttpAnswer::of(self.request(Method::POST, path).json(body)).await
    }

    /// Sends JSON and returns when the response begins.
    pub async fn open(&self, path: &str, body: &Value) -> anyhow::Result<Response> {
        let response = self.request(Method::POST, path).json(body).send().await;
        Ok(response.with_context(|| format!("{path} did not answer"))?.error_for_status()?)
    }

    /// Sends JSON, requires status 200, and parses the response as JSON.
    pub async fn ask(&self, path: &str, body: &Value) -> anyhow::Result<Value> {
        let answer = self.post(path, body).await?;
        anyhow::ensure!(answer.status == 200, "{path} answered {}: {}", answer.status, answer.text);
        answer.json()
    }
}

impl HttpAnswer {
    /// Sends a request and reads the complete response.
    pub async fn of(request: RequestBuilder) -> anyhow::Result<Self> {
        let response = request.send().await.context("no answer came")?;
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        Ok(Self { status, headers, text: response.text().await.context("the answer broke off")? })
    }

    /// Parses the body as JSON.
    pub fn json(&self) -> anyhow::Result<Value> {
        serde_json::from_str(&self.text).with_context(|| format!("not JSON: {}", self.text))
    }
}

/// The text of the first choice of a complete response.
pub fn completion_text(answer: &Value) -> anyhow::Result<&str> {
    answer["choices"][0]["text"].as_str().with_context(|| format!("no text in {answer}"))
}

/// The text of the only choice of a streamed response.
pub fn streamed_text(events: &str) -> anyhow::Result<String> {
    let mut text = String::new();
    for data in events.lines().filter_map(|line| line.strip_prefix("data: ")) {
        if data == "[DONE]" {
            return Ok(text);
        }
        let chunk: Value = serde_json::from_str(data).with_context(|| format!("not JSON: {data}"))?;
        anyhow::ensure!(chunk.get("error").is_none(), "the stream failed: {data}");
        text.push_str(chunk["choices"][0]["text"].as_str().unwrap_or_default());
    }
    anyhow::bail!("the stream ended without [DONE] after {text:?}")
}
