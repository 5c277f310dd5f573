//! The time of day, for the fields of answers, logs and metrics that state it. Durations and deadlines use
//! [`std::time::Instant`], which never goes back.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Time since 1 January 1970 (UTC); zero on a host whose clock shows an earlier date.
pub fn since_unix_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
