//! Shows how many workers the pools want, for autoscalers: asks the driver every few seconds, and sets gauges. Decides nothing.

use std::time::Duration;

use service::shutdown::Lifetime;
use tokio::time::{MissedTickBehavior, interval};

use crate::generation::GenerationService;
use crate::metrics::RouterMetrics;

/// Autoscalers look every 15 to 30 s.
const EVERY: Duration = Duration::from_secs(5);

/// Until the lifetime ends. A driver that is too busy to answer is asked again at the next turn.
pub async fn show(generation: impl GenerationService, metrics: RouterMetrics, lifetime: Lifetime) {
    let mut turns = interval(EVERY);
    turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            // A router that stops has nothing to show.
            () = lifetime.cancelled() => return,
            _ = turns.tick() => {}
        }
        if let Ok(report) = generation.report().await {
            for pool in &report.pools {
                metrics.wanted_workers(&pool.model, pool.wanted_target_workers, pool.wanted_draft_workers);
            }
        }
    }
}
