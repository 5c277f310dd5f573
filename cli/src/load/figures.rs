//! Summary of many samples: latencies with intervals, throughput, goodput, acceptance.
//!
//! Only completed requests have latencies; failed ones are counted separately and never count as good. JSON
//! fields have the names of `vllm bench serve` where it has an equivalent.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::sample::Sample;
use super::statistics::{Distribution, Estimate, percentile};

/// Latency limits of a good request.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Slo {
    /// Time to first token.
    pub ttft: Option<Duration>,
    /// Time per output token after the first.
    pub tpot: Option<Duration>,
    /// Latency of the whole response.
    pub e2el: Option<Duration>,
}

impl Slo {
    /// Whether there is no limit.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether the sample keeps all limits. A response of a single token has no time per token and keeps any
    /// limit on it.
    fn is_met_by(&self, sample: &Sample) -> bool {
        let keeps = |limit: Option<Duration>, found: Option<Duration>| {
            limit.is_none_or(|limit| found.is_none_or(|found| found <= limit))
        };
        sample.is_completed()
            && (self.ttft.is_none() || sample.ttft.is_some())
            && keeps(self.ttft, sample.ttft)
            && keeps(self.tpot, sample.tpot())
            && keeps(self.e2el, Some(sample.e2el))
    }
}

/// Options of the summary.
#[derive(Debug, Clone, Copy, Default)]
pub struct FigureOptions {
    /// Limits for goodput.
    pub slo: Slo,
    /// Seed of the bootstrap.
    pub seed: u64,
}

/// Figures of a set of requests. Latencies are in milliseconds.
#[derive(Debug, Clone)]
pub struct Figures {
    /// Number of requests.
    pub num_prompts: usize,
    /// Number of completed requests.
    pub completed: usize,
    /// Number of failures by kind.
    pub failures: BTreeMap<&'static str, usize>,
    /// Duration of the run in seconds, for rates.
    pub duration: f64,
    /// Prompt tokens of completed requests.
    pub total_input_tokens: u64,
    /// Output tokens of completed requests.
    pub total_output_tokens: u64,
    /// Requests per second that kept the SLO; `None` without an SLO.
    pub request_goodput: Option<f64>,
    /// Time to first token.
    pub ttft: Option<Distribution>,
    /// Time per output token after the first.
    pub tpot: Option<Distribution>,
    /// Time between chunks. With speculation one chunk contains several tokens: compare TPOT instead.
    pub itl: Option<Distribution>,
    /// Latency of the whole response.
    pub e2el: Option<Distribution>,
    /// Acceptance, if the server reports speculation counters.
    pub acceptance: Option<Acceptance>,
}

/// Acceptance in a set of requests.
#[derive(Debug, Clone, PartialEq)]
pub struct Acceptance {
    /// Requests with drafted tokens.
    pub requests: usize,
    /// Verifications; 0 if the server does not report them.
    pub rounds: u64,
    /// Drafted tokens.
    pub draft_tokens: u64,
    /// Accepted of these.
    pub accepted_tokens: u64,
    /// P10, P50 and P90 of the acceptance rates of single requests.
    pub rate_percentiles: [f64; 3],
    /// Number of requests by acceptance rate, in ten bins from 0 to 1.
    pub rate_histogram: [usize; 10],
    /// Share of verifications (including plain ones) accepted at least as far as each position.
    pub per_position: Option<Vec<f64>>,
}

impl Acceptance {
    /// Accepted / drafted tokens.
    pub fn rate(&self) -> f64 {
        self.accepted_tokens as f64 / self.draft_tokens as f64
    }

    /// Tokens committed per verification.
    pub fn length(&self) -> Option<f64> {
        (self.rounds > 0).then(|| 1.0 + self.accepted_tokens as f64 / self.rounds as f64)
    }

    fn of(samples: &[&Sample]) -> Option<Self> {
        let counts = samples.iter().filter_map(|sample| sample.speculation);
        let drafted: Vec<_> = counts.clone().filter(|counts| counts.draft_tokens > 0).collect();
        if drafted.is_empty() {
            return None;
        }
        let rounds = counts.map(|counts| counts.rounds).sum();
        let rate_of = |accepted: u64, drafted: u64| accepted as f64 / drafted as f64;
        let mut rates: Vec<f64> =
            drafted.iter().map(|counts| rate_of(counts.accepted_tokens, counts.draft_tokens)).collect();
        rates.sort_by(f64::total_cmp);
        let mut rate_histogram = [0; 10];
        rates.iter().for_each(|rate| rate_histogram[((rate * 10.0) as usize).min(9)] += 1);
        Some(Self {
            requests: drafted.len(),
            rounds,
            draft_tokens: drafted.iter().map(|counts| counts.draft_tokens).sum(),
            accepted_tokens: drafted.iter().map(|counts| counts.accepted_tokens).sum(),
            rate_percentiles: [10.0, 50.0, 90.0].map(|p| percentile(&rates, p)),
            rate_histogram,
            per_position: (rounds > 0).then(|| per_position(samples, rounds)).flatten(),
        })
    }
}

fn per_position(samples: &[&Sample], rounds: u64) -> Option<Vec<f64>> {
    let mut totals: Vec<u64> = Vec::new();
    for counts in samples.iter().filter_map(|sample| sample.accepted_by_position.as_ref()) {
        totals.resize(totals.len().max(counts.len()), 0);
        totals.iter_mut().zip(counts).for_each(|(total, count)| *total += count);
    }
    (!totals.is_empty()).then(|| totals.iter().map(|total| *total as f64 / rounds as f64).collect())
}

impl Figures {
    /// Summarizes `samples`, which together took `duration`.
    pub fn of<'a>(
        samples: impl IntoIterator<Item = &'a Sample>,
        duration: Duration,
        options: &FigureOptions,
    ) -> Self {
        let all: Vec<&Sample> = samples.into_iter().collect();
        let completed: Vec<&Sample> = all.iter().copied().filter(|sample| sample.is_completed()).collect();
        let mut failures = BTreeMap::new();
        for failed in all.iter().filter(|sample| !sample.is_completed()) {
            *failures.entry(failed.outcome.label()).or_default() += 1;
        }
        let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
        let of_requests = |metric: &dyn Fn(&Sample) -> Option<Duration>| {
            Distribution::of(completed.iter().filter_map(|sample| metric(sample)).map(ms), options.seed)
        };
        let gaps: Vec<Vec<f64>> =
            completed.iter().map(|sample| sample.gaps.iter().copied().map(ms).collect()).collect();
        let good = all.iter().filter(|sample| options.slo.is_met_by(sample)).count();
        let seconds = duration.as_secs_f64();
        Self {
            num_prompts: all.len(),
            completed: completed.len(),
            failures,
            duration: seconds,
            total_input_tokens: completed.iter().map(|sample| sample.input_tokens).sum(),
            total_output_tokens: completed.iter().map(|sample| sample.output_tokens).sum(),
            request_goodput: (!options.slo.is_empty()).then(|| good as f64 / seconds),
            ttft: of_requests(&|sample| sample.ttft),
            tpot: of_requests(&Sample::tpot),
            itl: Distribution::of_groups(&gaps, options.seed),
            e2el: of_requests(&|sample| Some(sample.e2el)),
            acceptance: Acceptance::of(&completed),
        }
    }

    /// Completed requests per second.
    pub fn request_throughput(&self) -> f64 {
        self.completed as f64 / self.duration
    }

    /// Output tokens per second.
    pub fn output_throughput(&self) -> f64 {
        self.total_output_tokens as f64 / self.duration
    }

    /// The four latencies with their JSON names.
    pub fn latencies(&self) -> [(&'static str, Option<&Distribution>); 4] {
        [
            ("ttft", self.ttft.as_ref()),
            ("tpot", self.tpot.as_ref()),
            ("itl", self.itl.as_ref()),
            ("e2el", self.e2el.as_ref()),
        ]
    }

    /// JSON fields. Values without an equivalent in vLLM, such as intervals and P99/P50, are additional
    /// fields.
    pub fn to_json(&self) -> Map<String, Value> {
        let tokens = self.total_input_tokens + self.total_output_tokens;
        let mut fields = as_object(json!({
            "num_prompts": self.num_prompts,
            "completed": self.completed,
            "failed": self.num_prompts - self.completed,
            "failures": self.failures,
            "duration": self.duration,
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "request_throughput": self.request_throughput(),
            "request_goodput": self.request_goodput,
            "output_throughput": self.output_throughput(),
            "total_token_throughput": tokens as f64 / self.duration,
        }));
        for (name, latency) in self.latencies() {
            fields.extend(latency.map(|latency| latency_json(name, latency)).unwrap_or_default());
        }
        if let Some(acceptance) = &self.acceptance {
            fields.extend(acceptance_json(acceptance));
        }
        fields
    }
}

fn latency_json(name: &str, latency: &Distribution) -> Map<String, Value> {
    let interval = |estimate: &Estimate| json!([estimate.low, estimate.high]);
    let Distribution { count, mean, p50, p90, p99, std } = latency;
    let named = [
        (format!("mean_{name}_ms"), json!(mean.value)),
        (format!("median_{name}_ms"), json!(p50.value)),
        (format!("std_{name}_ms"), json!(std)),
        (format!("p90_{name}_ms"), json!(p90.value)),
        (format!("p99_{name}_ms"), json!(p99.value)),
        (format!("{name}_count"), json!(count)),
        (format!("{name}_p99_over_p50"), json!(p99.value / p50.value)),
        (
            format!("{name}_ms_intervals"),
            json!({ "mean": interval(mean), "p50": interval(p50), "p90": interval(p90), "p99": interval(p99) }),
        ),
    ];
    named.into_iter().collect()
}

fn acceptance_json(acceptance: &Acceptance) -> Map<String, Value> {
    let [p10, p50, p90] = acceptance.rate_percentiles;
    as_object(json!({
        // In percent, as in vLLM.
        "spec_decode_acceptance_rate": acceptance.rate() * 100.0,
        "spec_decode_acceptance_length": acceptance.length(),
        "spec_decode_num_drafts": acceptance.rounds,
        "spec_decode_draft_tokens": acceptance.draft_tokens,
        "spec_decode_accepted_tokens": acceptance.accepted_tokens,
        "spec_decode_per_position_acceptance_rates": acceptance.per_position,
        "spec_decode_requests": acceptance.requests,
        "spec_decode_request_rate_percentiles": { "p10": p10, "p50": p50, "p90": p90 },
        "spec_decode_request_rate_histogram": acceptance.rate_histogram,
    }))
}

fn as_object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::answer::SpeculationCounts;
    use crate::load::sample::RequestOutcome;

    fn sample(ttft_ms: u64, e2el_ms: u64, tokens: u64) -> Sample {
        Sample {
            task: "chat".to_owned(),
            item: 0,
            block: 0,
            outcome: RequestOutcome::Completed,
            intended_after: Duration::ZERO,
            ttft: Some(Duration::from_millis(ttft_ms)),
            e2el: Duration::from_millis(e2el_ms),
            gaps: vec![Duration::from_millis((e2el_ms - ttft_ms) / 2); 2],
            input_tokens: 7,
            output_tokens: tokens,
            speculation: None,
            accepted_by_position: None,
            text_hash: 0,
        }
    }

    #[test]
    fn rates_count_completed_requests_and_goodput_those_that_keep_the_slo() {
        let mut samples = vec![sample(100, 400, 4), sample(300, 400, 3), sample(100, 1300, 4)];
        samples.push(Sample { outcome: RequestOutcome::TimedOut, ..sample(1, 2, 2) });
        let slo = Slo {
            ttft: Some(Duration::from_millis(200)),
            tpot: Some(Duration::from_millis(100)),
            e2el: None,
        };
        let figures = Figures::of(&samples, Duration::from_secs(2), &FigureOptions { slo, seed: 0 });
        let json = Value::Object(figures.to_json());
        for (field, expected) in [
            ("num_prompts", 4.0),
            ("completed", 3.0),
            ("failed", 1.0),
            ("total_input_tokens", 21.0),
            ("total_output_tokens", 11.0),
            ("request_throughput", 1.5),
            ("output_throughput", 5.5),
            ("total_token_throughput", 16.0),
            ("request_goodput", 0.5),
            ("mean_ttft_ms", 500.0 / 3.0),
            ("median_ttft_ms", 100.0),
            // (400 - 100) / 3, (400 - 300) / 2, (1300 - 100) / 3
            ("mean_tpot_ms", 550.0 / 3.0),
            ("median_itl_ms", 150.0),
            ("median_e2el_ms", 400.0),
        ] {
            let found = json[field].as_f64().unwrap();
            assert!((found - expected).abs() < 1e-9, "{field}: {found}, not {expected}");
        }
        assert_eq!(json["failures"]["timed out"], 1);
        assert_eq!(json["spec_decode_acceptance_rate"], Value::Null);
    }

    #[test]
    fn acceptance_is_a_distribution_over_requests() {
        let with = |rounds, draft_tokens, accepted_tokens, accepted_by_position: Option<Vec<u64>>| Sample {
            speculation: Some(SpeculationCounts { rounds, draft_tokens, accepted_tokens }),
            accepted_by_position,
            ..sample(1, 3, 3)
        };
        let samples = [
            with(4, 10, 5, Some(vec![3, 2])),
            with(2, 10, 10, Some(vec![2, 1, 1])),
            // Plain rounds only: no acceptance rate, but its rounds count.
            with(4, 0, 0, Some(vec![])),
            sample(1, 3, 3),
        ];
        let figures = Figures::of(&samples, Duration::from_secs(1), &FigureOptions::default());
        let found = figures.acceptance.unwrap();
        assert_eq!((found.requests, found.rounds), (2, 10));
        assert_eq!((found.rate(), found.length()), (0.75, Some(2.5)));
        assert_eq!(found.rate_percentiles, [0.55, 0.75, 0.95]);
        assert_eq!((found.rate_histogram[5], found.rate_histogram[9]), (1, 1));
        assert_eq!(found.per_position, Some(vec![0.5, 0.3, 0.1]));
    }
}
