//! Polls a condition, with a deadline and an error that names it.

use std::time::Duration;

use anyhow::bail;
use tokio::time::{Instant, sleep};

/// Polling interval.
const INTERVAL: Duration = Duration::from_millis(10);

/// Upper limit for every wait in these tests, even on a busy machine.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Polls until `holds` returns true; after [`WAIT_TIMEOUT`] fails with an error that names `what`.
pub async fn until(what: &str, holds: impl AsyncFnMut() -> anyhow::Result<bool>) -> anyhow::Result<()> {
    if !holds_within(WAIT_TIMEOUT, holds).await? {
        bail!("not within {WAIT_TIMEOUT:?}: {what}");
    }
    Ok(())
}

/// Polls until `holds` returns true; returns whether it did within `timeout`.
pub async fn holds_within(
    timeout: Duration,
    mut holds: impl AsyncFnMut() -> anyhow::Result<bool>,
) -> anyhow::Result<bool> {
    let start = Instant::now();
    while !holds().await? {
        if start.elapsed() > timeout {
            return Ok(false);
        }
        sleep(INTERVAL).await;
    }
    Ok(true)
}
