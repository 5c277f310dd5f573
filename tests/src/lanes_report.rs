//! A router's report on its lanes and workers at `/debug/lanes`.

use anyhow::Context as _;
use reqwest::Method;
use serde_json::Value;

use crate::http_client::{HttpAnswer, HttpClient};
use crate::wait::until;

/// Path of the report.
pub const DEBUG_LANES: &str = "/debug/lanes";

/// One report.
#[derive(Debug, Clone)]
pub struct LanesReport(pub Value);

impl LanesReport {
    /// Requests the report from the router with this admin URL.
    pub async fn of(admin_url: &str) -> anyhow::Result<Self> {
        let answer = HttpAnswer::of(HttpClient::new(admin_url)?.request(Method::GET, DEBUG_LANES)).await?;
        anyhow::ensure!(answer.status == 200, "{DEBUG_LANES} answered {}: {}", answer.status, answer.text);
        Ok(Self(answer.json()?))
    }

    /// The lanes of one task type.
    pub fn lanes(&self, task_type: &str) -> Vec<&Value> {
        let lanes = self.0["lanes"].as_array().map(Vec::as_slice).unwrap_or_default();
        lanes.iter().filter(|lane| lane["task_type"] == task_type).collect()
    }

    /// The router's state of the worker at this address.
    pub fn worker(&self, address: &str) -> anyhow::Result<&Value> {
        let workers = self.0["workers"].as_array().map(Vec::as_slice).unwrap_or_default();
        let found = workers.iter().find(|worker| worker["address"] == address);
        found.with_context(|| format!("no worker at {address} in {}", self.0))
    }
}

/// Waits until the router with this admin URL reports all these workers.
pub async fn wait_known(admin_url: &str, addresses: &[String]) -> anyhow::Result<()> {
    until(&format!("the router knows {addresses:?}"), async || {
        let report = LanesReport::of(admin_url).await?;
        Ok(addresses.iter().all(|address| report.worker(address).is_ok()))
    })
    .await
}
