//! Finds which resource runs out first: for each, the number of sequences at one target at which it does.
//! Pure.

use scheduling::pool_size::desired_drafts;

use super::round::{Drafting, RoundModel};
use super::step_time::{ForwardBatch, Roofline};

/// A limiting resource.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Limit {
    /// The resource: memory, bandwidth, compute, draft or speculation.
    pub what: &'static str,
    /// Number of sequences at which the limit is reached; `None` if it is not reached within the range
    /// searched.
    pub sequences: Option<u64>,
    /// The consequence.
    pub then: String,
}

/// Largest number of sequences considered.
pub(super) const SEQUENCES_MAX: u64 = 1 << 16;

/// The limits of a target, lowest first; limits that are never reached come last.
pub fn limits(rounds: &RoundModel<'_>, target: &Roofline, concurrency: u64) -> Vec<Limit> {
    let forward = |sequences: f64| ForwardBatch { sequences, rows_each: 1.0, context: rounds.context };
    let k = rounds.best(1.0).k;
    let mut all = vec![
        Limit {
            what: "memory",
            sequences: Some(concurrency),
            then: "the KV of another sequence does not fit: it waits, or another one is preempted".to_owned(),
        },
        Limit {
            what: "bandwidth",
            sequences: first(|n| {
                let parts = target.parts(forward(n));
                parts.kv >= parts.weights
            }),
            then: "reading keys and values takes as long as reading the weights: a step takes twice as long"
                .to_owned(),
        },
        Limit {
            what: "compute",
            sequences: first(|n| {
                let parts = target.parts(ForwardBatch { rows_each: f64::from(k + 1), ..forward(n) });
                parts.compute >= parts.weights + parts.kv
            }),
            then: format!("rows of k = {k} are no longer free: from here on drafted rows cost time"),
        },
    ];
    if !matches!(rounds.drafting, Drafting::Nowhere) {
        all.push(Limit {
            what: "draft",
            sequences: first(|n| {
                let best = rounds.at(n, k.max(1));
                best.draft_ms >= best.verify_ms
            }),
            then:
                "the wait for the draft is as long as the verification: more draft GPUs, or a smaller draft"
                    .to_owned(),
        });
        all.push(Limit {
            what: "speculation",
            sequences: stops_paying(rounds, concurrency),
            then: "k = 0 is best from here on: drafting stops paying".to_owned(),
        });
    }
    all.sort_by_key(|limit| limit.sequences.unwrap_or(u64::MAX));
    all
}

/// The smallest number of sequences from which on no draft pays at any load that fits; `None` if one pays at
/// the largest. The best k does not fall steadily: where a forward is full, other numbers of rows fit better.
fn stops_paying(rounds: &RoundModel<'_>, concurrency: u64) -> Option<u64> {
    let most = concurrency.min(SEQUENCES_MAX);
    let last_that_pays = (1..=most).rev().find(|&n| rounds.best(n as f64).k > 0).unwrap_or(0);
    (last_that_pays < most).then_some(last_that_pays + 1)
}

/// The longest round-trip time to a draft worker at which drafting still pays, milliseconds; `None` if it
/// never pays or there is no wire.
pub fn longest_wire_ms(rounds: &RoundModel<'_>, sequences: f64) -> Option<f64> {
    let Drafting::Apart { draft, workers, .. } = rounds.drafting else { return None };
    let off = rounds.at(sequences, 0).tpot_ms;
    let pays = |wire_us: f64| {
        let drafting = Drafting::Apart { draft, workers, wire_us };
        let best = RoundModel { drafting, ..*rounds }.best(sequences);
        best.k > 0 && best.tpot_ms < off
    };
    if !pays(0.0) {
        return None;
    }
    // A wire of one second never pays.
    let (mut low, mut high) = (0.0, 1e6);
    while high - low > 10.0 {
        let middle = (low + high) / 2.0;
        if pays(middle) { low = middle } else { high = middle }
    }
    Some(low / 1e3)
}

/// The smallest sufficient number of draft workers for `sequences` at one target, by the rule for scaling
/// pools ([`scheduling::pool_size`]); `None` if drafting never pays.
pub fn desired_draft_workers(rounds: &RoundModel<'_>, sequences: f64) -> Option<u64> {
    let Drafting::Apart { draft, wire_us, .. } = rounds.drafting else { return None };
    desired_drafts(sequences.ceil() as u64, |workers| {
        if workers == 0.0 {
            return rounds.at(sequences, 0).tokens_per_second;
        }
        let drafting = Drafting::Apart { draft, workers, wire_us };
        RoundModel { drafting, ..*rounds }.best(sequences).tokens_per_second
    })
}

/// The smallest number of sequences for which `is_over` holds; it must hold for all larger numbers.
fn first(is_over: impl Fn(f64) -> bool) -> Option<u64> {
    if !is_over(SEQUENCES_MAX as f64) {
        return None;
    }
    let (mut low, mut high) = (0, SEQUENCES_MAX);
    while high - low > 1 {
        let middle = u64::midpoint(low, high);
        if is_over(middle as f64) { high = middle } else { low = middle }
    }
    Some(high)
}
