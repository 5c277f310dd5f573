//! Headers that a gateway adds to a request, named as in the Gateway API Inference Extension and llm-d:
//! fairness id, objective (priority) and latency objectives. All are optional: a request without them must
//! never be refused.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Caller;
use super::bounds::header_id;
use crate::error::RouterError;

/// Identifies the user among the requests of one key.
const FAIRNESS_ID: [&str; 2] = ["x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"];
/// Name of an objective in the router's configuration.
const OBJECTIVE: [&str; 2] = ["x-llm-d-inference-objective", "x-gateway-inference-objective"];
const SLO_TTFT: &str = "x-llm-d-slo-ttft-ms";
const SLO_TPOT: &str = "x-llm-d-slo-tpot-ms";

/// Largest latency objective: one day.
const SLO_MS_MAX: f64 = 86_400_000.0;

/// Priorities of objectives, by name: `[objectives]` of the router's configuration.
pub type Objectives = BTreeMap<String, u8>;

/// Values of one request's gateway headers.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GatewayHeaders {
    /// Identifier for fair queueing.
    pub fairness_id: Option<String>,
    /// Name of the objective, which sets the priority.
    pub objective: Option<String>,
    /// Latency objectives.
    pub slo: Slo,
}

/// Latency objectives of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Slo {
    /// From arrival to the first token of each choice.
    pub ttft: Option<Duration>,
    /// Mean time per output token of a choice after its first span.
    pub tpot: Option<Duration>,
}

impl GatewayHeaders {
    /// Reads the headers; `header` returns the value of a header or of gRPC metadata.
    pub fn read<'a>(header: impl Fn(&'static str) -> Option<&'a [u8]>) -> Result<Self, RouterError> {
        let either = |names: [&'static str; 2]| {
            names.into_iter().find_map(|name| header(name).map(|value| (name, value)))
        };
        let text_header =
            |names| either(names).map(|(name, value)| header_id(name, value).map(str::to_owned)).transpose();
        let duration_header = |name| header(name).map(|value| milliseconds(name, value)).transpose();
        Ok(Self {
            fairness_id: text_header(FAIRNESS_ID)?,
            objective: text_header(OBJECTIVE)?,
            slo: Slo { ttft: duration_header(SLO_TTFT)?, tpot: duration_header(SLO_TPOT)? },
        })
    }

    /// Applies the headers to the caller. They cannot give a key a larger share or a more urgent priority
    /// than it has.
    pub fn apply(&self, caller: &mut Caller, objectives: &Objectives) {
        if let Some(id) = self.fairness_id.as_ref().filter(|_| caller.honors_fairness_ids) {
            caller.fairness_key = Some(caller.derived_key(id));
        }
        if let Some(priority) = self.objective.as_ref().and_then(|name| objectives.get(name)) {
            caller.priority = caller.priority.max(*priority);
        }
    }
}

/// Gateways send whole numbers as well as fractions.
fn milliseconds(name: &'static str, value: &[u8]) -> Result<Duration, RouterError> {
    let number = std::str::from_utf8(value).ok().and_then(|text| text.trim().parse().ok());
    match number.filter(|number| (0.0..=SLO_MS_MAX).contains(number) && *number > 0.0) {
        Some(number) => Ok(Duration::from_secs_f64(number / 1e3)),
        None => {
            let message =
                format!("the header {name} must be milliseconds, more than 0 and at most {SLO_MS_MAX}");
            Err(RouterError::invalid(name, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(headers: &[(&str, &str)]) -> Result<GatewayHeaders, RouterError> {
        GatewayHeaders::read(|name| {
            headers.iter().find(|(header, _)| *header == name).map(|(_, value)| value.as_bytes())
        })
    }

    #[test]
    fn headers_are_read_by_their_new_and_old_names() {
        assert_eq!(read(&[]).unwrap(), GatewayHeaders::default());
        let new =
            [(FAIRNESS_ID[0], "team-a"), (OBJECTIVE[0], "batch"), (SLO_TTFT, "200"), (SLO_TPOT, "12.5")];
        let headers = read(&new).unwrap();
        assert_eq!(
            (headers.fairness_id.as_deref(), headers.objective.as_deref()),
            (Some("team-a"), Some("batch"))
        );
        let slo = Slo { ttft: Some(Duration::from_millis(200)), tpot: Some(Duration::from_micros(12_500)) };
        assert_eq!(headers.slo, slo);
        let old = read(&[(FAIRNESS_ID[1], "team-a"), (OBJECTIVE[1], "batch")]).unwrap();
        assert_eq!(old, GatewayHeaders { slo: Slo::default(), ..headers });
        for (name, value) in [
            (FAIRNESS_ID[0], ""),
            (FAIRNESS_ID[1], "a b"),
            (OBJECTIVE[0], "\u{e9}"),
            (SLO_TTFT, "soon"),
            (SLO_TTFT, "0"),
            (SLO_TPOT, "-1"),
            (SLO_TPOT, "inf"),
            (SLO_TPOT, "NaN"),
            (SLO_TPOT, "86400001"),
        ] {
            let error = read(&[(name, value)]).unwrap_err().to_string();
            assert!(error.contains(name), "{name}: {value}: {error}");
        }
    }

    #[test]
    fn fairness_ids_separate_queues_only_for_keys_that_honor_them() {
        let queue_key = |isolation_key, honors_fairness_ids, id: &str| {
            let mut caller = Caller { isolation_key, honors_fairness_ids, ..Caller::default() };
            read(&[(FAIRNESS_ID[0], id)]).unwrap().apply(&mut caller, &Objectives::new());
            assert_eq!(caller.isolation_key, isolation_key, "prefix sharing is unchanged");
            caller.fair_queue_key()
        };
        assert_eq!(queue_key(7, true, "a"), queue_key(7, true, "a"));
        let different = [
            queue_key(7, true, "a"),
            queue_key(7, true, "b"),
            queue_key(8, true, "a"),
            queue_key(7, false, "a"),
        ];
        let distinct: std::collections::BTreeSet<u64> = different.into();
        assert_eq!((distinct.len(), different[3]), (4, 7));
    }

    #[test]
    fn an_objective_sets_the_priority_within_the_limit_of_its_key() {
        let objectives = Objectives::from([("batch".to_owned(), 200), ("chat".to_owned(), 2)]);
        for (own, objective, expected) in [(0, "batch", 200), (0, "chat", 2), (7, "chat", 7), (7, "?", 7)] {
            let mut caller = Caller { priority: own, ..Caller::default() };
            read(&[(OBJECTIVE[0], objective)]).unwrap().apply(&mut caller, &objectives);
            assert_eq!(caller.priority, expected, "{objective}");
        }
    }
}
