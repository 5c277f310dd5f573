//! The health state as a metric: a probe tells only the one who asks it, and alerts need the state of every
//! process.

use super::Health;
use crate::metrics::{EncodeLabelSet, GaugeName, LabelValues, Metrics, ReadGauge};

/// Names of all states, as of [`super::State::as_str`].
const STATES: [&str; 4] = ["not_ready", "ready", "draining", "failed"];

const STATE: GaugeName = GaugeName::new(
    "outrider_state",
    "1 for the state that /health/ready of this process shows, 0 for the others",
)
.with_labels(&[("state", LabelValues::Listed(|| STATES.to_vec()))]);

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    state: &'static str,
}

impl Health {
    /// Registers the state as a metric; call once per process.
    pub fn register(&self, metrics: &Metrics) {
        let series = STATES.map(|state| {
            let health = self.clone();
            let read: ReadGauge = Box::new(move || Some(i64::from(health.state.borrow().as_str() == state)));
            (StateLabels { state }, read)
        });
        metrics.scraped_gauges(&STATE, series.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Exposition;

    #[test]
    fn the_present_state_is_1_and_every_other_one_0() {
        type Change = fn(&Health);
        let (health, metrics) = (Health::new(), Metrics::new());
        health.register(&metrics);
        let changes: [(Change, &str); 4] = [
            (|_| (), "not_ready"),
            (|health| health.set_ready(), "ready"),
            (|health| health.set_draining("SIGTERM"), "draining"),
            (|health| health.set_failed("device thread died"), "failed"),
        ];
        for (change, present) in changes {
            change(&health);
            let page = metrics.encode(Exposition::Prometheus);
            for state in STATES {
                let line = format!("outrider_state{{state=\"{state}\"}} {}\n", u8::from(state == present));
                assert!(page.contains(&line), "{line} is missing from\n{page}");
            }
        }
    }
}
