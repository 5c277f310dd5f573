//! Sets the gauges of needed workers per pool, for autoscalers, from a report requested every few seconds.
//! Makes no decisions.

use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};

use crate::generation::GenerationService;
use crate::metrics::RouterMetrics;

/// Interval of the reports. Autoscalers poll every 15 to 30 s.
const UPDATE_INTERVAL: Duration = Duration::from_secs(5);

/// Never returns. If the driver is too busy to answer, the next tick asks again.
pub async fn run(generation: impl GenerationService, metrics: RouterMetrics) {
    let mut ticker = interval(UPDATE_INTERVAL);
    ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticker.tick().await;
        if let Ok(report) = generation.report().await {
            for pool in &report.pools {
                metrics.set_wanted_workers(
                    &pool.model,
                    pool.wanted_target_workers,
                    pool.wanted_draft_workers,
                );
            }
        }
    }
}
