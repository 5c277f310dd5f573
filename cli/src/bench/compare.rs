//! Compares two arms: how much faster the first is, with what confidence, and whether to ship it. Pure.
//!
//! Compares the time per token of whole requests (latency from the intended sending time, divided by tokens):
//! late reading cannot hide time, and answers of different lengths stay comparable. The equal questions of a
//! pair of blocks each give a ratio. A pair of blocks is one observation (the geometric mean of its ratios),
//! because requests that run together share the machine's current speed. The interval is Student's t on the
//! logarithms of the observations.

use std::collections::BTreeMap;

use serde::Serialize;

use super::failures::{FAILED_SHARE_MAX, failed_share};
use crate::load::Sample;
use crate::load::statistics::{Estimate, mean_interval};

/// Minimum number of pairs of blocks for a verdict.
const OBSERVATIONS_MIN: usize = 4;
/// Largest number of blocks that is proposed for a longer run.
const PROPOSED_BLOCKS_MAX: f64 = 1000.0;

/// Rules of the verdict.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct VerdictRules {
    /// The speedup above which the first arm is worth shipping.
    pub threshold: f64,
    /// Confidence level of the interval.
    pub confidence: f64,
}

/// Whether to ship the first arm in place of the second.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "verdict", content = "reason")]
pub enum ShipVerdict {
    /// The whole interval lies above the threshold.
    Ship,
    /// The whole interval lies below the threshold.
    DoNot,
    /// Neither, with the reason or what would help.
    Undecided(String),
}

impl ShipVerdict {
    /// The verdict in one or two words.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Ship => "ship",
            Self::DoNot => "do not",
            Self::Undecided(_) => "undecided",
        }
    }
}

/// Whether the arms differ at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Difference {
    /// The interval lies above 1.
    Faster,
    /// The interval lies below 1.
    Slower,
    /// The interval contains 1, or there is none.
    NoneFound,
}

/// The first arm against the second.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// Time per token of the second arm over that of the first: above 1 the first is faster.
    pub speedup: Option<Estimate>,
    /// Number of pairs of blocks.
    pub observations: usize,
    /// Number of pairs of requests.
    pub pairs: usize,
    /// Failed requests of both arms.
    pub failed: usize,
    /// Pairs with equal texts.
    pub same_text: usize,
    /// Whether they differ.
    pub difference: Difference,
    /// Whether to ship.
    #[serde(flatten)]
    pub verdict: ShipVerdict,
}

/// Compares samples with equal (block, item).
pub fn compare(first: &[&Sample], second: &[&Sample], rules: &VerdictRules) -> Comparison {
    let others: BTreeMap<(usize, usize), &Sample> =
        second.iter().map(|sample| ((sample.block, sample.item), *sample)).collect();
    let mut blocks = BTreeMap::<usize, Vec<f64>>::new();
    let (mut pairs, mut same_text) = (0, 0);
    for one in first.iter().filter(|sample| sample.is_completed()) {
        let other = others.get(&(one.block, one.item)).filter(|other| other.is_completed());
        let Some(other) = other else { continue };
        let times = one.seconds_per_token().zip(other.seconds_per_token());
        let Some((one_time, other_time)) = times.filter(|(a, b)| *a > 0.0 && *b > 0.0) else { continue };
        blocks.entry(one.block).or_default().push((other_time / one_time).ln());
        pairs += 1;
        same_text += usize::from(one.text_hash == other.text_hash);
    }
    let observations: Vec<f64> =
        blocks.values().map(|ratios| ratios.iter().sum::<f64>() / ratios.len() as f64).collect();
    let interval = mean_interval(&observations, rules.confidence);
    let speedup = interval.filter(|_| observations.len() >= OBSERVATIONS_MIN).map(|log| Estimate {
        value: log.value.exp(),
        low: log.low.exp(),
        high: log.high.exp(),
    });
    let failures = |samples: &[&Sample]| samples.iter().filter(|sample| !sample.is_completed()).count();
    let worst_share = [first, second]
        .map(|samples| failed_share(failures(samples), samples.len()))
        .into_iter()
        .fold(0.0, f64::max);
    Comparison {
        speedup,
        observations: observations.len(),
        pairs,
        failed: failures(first) + failures(second),
        same_text,
        difference: difference(speedup),
        verdict: verdict(speedup, observations.len(), worst_share, rules),
    }
}

fn difference(speedup: Option<Estimate>) -> Difference {
    match speedup {
        Some(speedup) if speedup.low > 1.0 => Difference::Faster,
        Some(speedup) if speedup.high < 1.0 => Difference::Slower,
        _ => Difference::NoneFound,
    }
}

fn verdict(
    speedup: Option<Estimate>,
    observations: usize,
    failed_share: f64,
    rules: &VerdictRules,
) -> ShipVerdict {
    if failed_share > FAILED_SHARE_MAX {
        return ShipVerdict::Undecided(format!("{:.0}% of an arm's requests failed", failed_share * 100.0));
    }
    let Some(speedup) = speedup else {
        return ShipVerdict::Undecided(format!(
            "only {observations} pairs of blocks, at least {OBSERVATIONS_MIN} are needed: raise --blocks"
        ));
    };
    if speedup.low > rules.threshold {
        return ShipVerdict::Ship;
    }
    if speedup.high < rules.threshold {
        return ShipVerdict::DoNot;
    }
    // The interval narrows with the square root of the number of observations; it must end before the
    // threshold.
    let half = (speedup.high / speedup.low).ln() / 2.0;
    let distance = (speedup.value / rules.threshold).ln().abs();
    let needed = (observations as f64 * (half / distance).powi(2)).ceil();
    ShipVerdict::Undecided(match needed {
        needed if needed <= PROPOSED_BLOCKS_MAX => format!("run longer: --blocks {needed} may decide"),
        _ => "the speedup is too close to the threshold: a longer run is unlikely to decide".to_owned(),
    })
}

#[cfg(test)]
mod tests;
