//! Waiting for something to become true, with a deadline and a name for what did not.

use std::time::Duration;

use anyhow::bail;
use tokio::time::{Instant, sleep};

/// Between two looks.
const INTERVAL: Duration = Duration::from_millis(10);

/// Nothing in these tests takes longer, even on a machine that has other work.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Looks until `holds` says yes; past [`PATIENCE`] the error names `what`.
pub async fn until(what: &str, holds: impl AsyncFnMut() -> anyhow::Result<bool>) -> anyhow::Result<()> {
    if !holds_within(PATIENCE, holds).await? {
        bail!("not within {PATIENCE:?}: {what}");
    }
    Ok(())
}

/// Looks until `holds` says yes; whether it did so within `patience`.
pub async fn holds_within(
    patience: Duration,
    mut holds: impl AsyncFnMut() -> anyhow::Result<bool>,
) -> anyhow::Result<bool> {
    let began = Instant::now();
    while !holds().await? {
        if began.elapsed() > patience {
            return Ok(false);
        }
        sleep(INTERVAL).await;
    }
    Ok(true)
}
