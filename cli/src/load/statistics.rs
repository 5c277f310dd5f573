//! Percentiles and confidence intervals. Pure; randomness comes from a seed.

use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt as _, SeedableRng as _};
use serde::Serialize;
use statrs::distribution::{ContinuousCDF as _, StudentsT};

/// Number of bootstrap resamples.
const RESAMPLES: usize = 400;
/// Confidence level of bootstrap intervals.
pub const BOOTSTRAP_CONFIDENCE: f64 = 0.95;

/// A value with an interval; the user states method and confidence level.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    /// Value in the sample.
    pub value: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// Summary of a sample, with bootstrap intervals at [`BOOTSTRAP_CONFIDENCE`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Distribution {
    /// Number of values.
    pub count: usize,
    /// Mean.
    pub mean: Estimate,
    /// Median.
    pub p50: Estimate,
    /// 90th percentile.
    pub p90: Estimate,
    /// 99th percentile. With fewer than a hundred values it is little more than the maximum.
    pub p99: Estimate,
    /// Standard deviation of the values.
    pub std: f64,
}

/// Percentile `p` (0 to 100) of ascending values, interpolated linearly as in numpy; NaN for an empty list.
pub fn percentile(sorted: &[f64], p: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let at = p / 100.0 * last as f64;
    let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    below + (above - below) * at.fract()
}

/// Sorts the values and returns their median, of an even number the mean of the middle two; NaN for an empty
/// list.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    percentile(values, 50.0)
}

impl Distribution {
    /// Summarizes values in groups (for instance all gaps of one request). Whole groups are resampled,
    /// because values of one group are similar; `None` if there are no values.
    pub fn of_groups(groups: &[Vec<f64>], seed: u64) -> Option<Self> {
        let in_group = |(i, group): (usize, &Vec<f64>)| group.iter().map(move |&value| (value, i)).collect();
        let mut values: Vec<(f64, usize)> =
            groups.iter().enumerate().flat_map(|pair| -> Vec<_> { in_group(pair) }).collect();
        if values.is_empty() {
            return None;
        }
        values.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut resampled: [Vec<f64>; 4] = Default::default();
        for _ in 0..RESAMPLES {
            let mut times = vec![0_u32; groups.len()];
            (0..groups.len()).for_each(|_| times[random.random_range(0..groups.len())] += 1);
            for (all, value) in resampled.iter_mut().zip(weighted_figures(&values, &times)) {
                all.push(value);
            }
        }
        let plain: Vec<f64> = values.iter().map(|(value, _)| *value).collect();
        let mean = plain.iter().sum::<f64>() / plain.len() as f64;
        let variance = plain.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / plain.len() as f64;
        let [means, p50s, p90s, p99s] = resampled;
        Some(Self {
            count: plain.len(),
            mean: Estimate::from_resamples(mean, means),
            p50: Estimate::from_resamples(percentile(&plain, 50.0), p50s),
            p90: Estimate::from_resamples(percentile(&plain, 90.0), p90s),
            p99: Estimate::from_resamples(percentile(&plain, 99.0), p99s),
            std: variance.sqrt(),
        })
    }

    /// Summarizes independent values.
    pub fn of(values: impl IntoIterator<Item = f64>, seed: u64) -> Option<Self> {
        let groups: Vec<Vec<f64>> = values.into_iter().map(|value| vec![value]).collect();
        Self::of_groups(&groups, seed)
    }
}

impl Estimate {
    fn from_resamples(value: f64, mut resamples: Vec<f64>) -> Self {
        resamples.retain(|value| value.is_finite());
        resamples.sort_by(f64::total_cmp);
        let tail = (1.0 - BOOTSTRAP_CONFIDENCE) / 2.0 * 100.0;
        Self { value, low: percentile(&resamples, tail), high: percentile(&resamples, 100.0 - tail) }
    }
}

/// Mean, P50, P90 and P99 of ascending values, each weighted by the number of times that its group was drawn.
/// NaN if nothing was drawn.
fn weighted_figures(values: &[(f64, usize)], times: &[u32]) -> [f64; 4] {
    let (mut total, mut sum) = (0_u64, 0.0);
    for &(value, group) in values {
        total += u64::from(times[group]);
        sum += value * f64::from(times[group]);
    }
    let ranks = [0.5, 0.9, 0.99].map(|share| (share * total as f64).ceil().max(1.0) as u64);
    let mut found = [f64::NAN; 3];
    let (mut counted, mut next) = (0, 0);
    for &(value, group) in values {
        counted += u64::from(times[group]);
        while next < ranks.len() && total > 0 && counted >= ranks[next] {
            found[next] = value;
            next += 1;
        }
    }
    [sum / total as f64, found[0], found[1], found[2]]
}

/// The mean of independent units with Student's t interval; `None` for fewer than two units.
///
/// For a few block means, which are nearly normal because they are averages, this keeps its confidence level,
/// while a percentile bootstrap is too narrow.
pub fn mean_interval(units: &[f64], confidence: f64) -> Option<Estimate> {
    let count = units.len() as f64;
    if units.len() < 2 {
        return None;
    }
    let mean = units.iter().sum::<f64>() / count;
    let variance = units.iter().map(|unit| (unit - mean).powi(2)).sum::<f64>() / (count - 1.0);
    let t = StudentsT::new(0.0, 1.0, count - 1.0).expect("one degree of freedom or more, and unit scale");
    let half = t.inverse_cdf(0.5 + confidence / 2.0) * (variance / count).sqrt();
    Some(Estimate { value: mean, low: mean - half, high: mean + half })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values are from numpy: `numpy.percentile([1, 2, 4, 8], [0, 50, 90, 99, 100])`.
    #[test]
    fn percentiles_are_numpys() {
        let sorted = [1.0, 2.0, 4.0, 8.0];
        for (p, expected) in [(0.0, 1.0), (50.0, 3.0), (90.0, 6.8), (99.0, 7.88), (100.0, 8.0)] {
            assert!((percentile(&sorted, p) - expected).abs() < 1e-12, "P{p}");
        }
        assert!(percentile(&[], 50.0).is_nan());
    }

    #[test]
    fn the_median_of_an_even_count_is_the_mean_of_the_middle_two() {
        assert_eq!(median(&mut [4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!(median(&mut [4.0, 1.0, 3.0]), 3.0);
        assert!(median(&mut []).is_nan());
    }

    /// Known values: t(0.995, 4 degrees) = 4.604095, and the standard deviation of 1..=5 is sqrt(2.5).
    #[test]
    fn the_t_interval_is_the_textbooks() {
        let found = mean_interval(&[1.0, 2.0, 3.0, 4.0, 5.0], 0.99).unwrap();
        assert!((found.high - (3.0 + 4.604_095 * (2.5_f64 / 5.0).sqrt())).abs() < 1e-5, "{found:?}");
        assert!((found.low + found.high - 6.0).abs() < 1e-12);
        assert_eq!(mean_interval(&[1.0], 0.99), None);
    }

    /// For 300 samples of 60 exponential values, the 95% interval must contain the true mean and median about
    /// as often as stated.
    #[test]
    fn bootstrap_intervals_cover_what_they_promise() {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(3);
        let (mut means, mut medians) = (0, 0);
        for seed in 0..300 {
            let values = (0..60).map(|_| -(1.0 - random.random::<f64>()).ln());
            let found = Distribution::of(values, seed).unwrap();
            let holds = |estimate: Estimate, truth| estimate.low <= truth && truth <= estimate.high;
            means += usize::from(holds(found.mean, 1.0));
            medians += usize::from(holds(found.p50, 2.0_f64.ln()));
        }
        for covered in [means, medians] {
            assert!((270..300).contains(&covered), "means {means}, medians {medians} of 300");
        }
    }

    /// A hundred equal values in each of ten groups are ten observations, not a thousand.
    #[test]
    fn groups_are_drawn_whole() {
        let groups: Vec<Vec<f64>> = (0..10).map(|i| vec![f64::from(i); 100]).collect();
        let grouped = Distribution::of_groups(&groups, 1).unwrap();
        let single = Distribution::of(groups.concat(), 1).unwrap();
        let width = |estimate: Estimate| estimate.high - estimate.low;
        assert_eq!((grouped.count, grouped.mean.value), (1000, 4.5));
        assert!(width(grouped.mean) > 5.0 * width(single.mean));
        assert_eq!(Distribution::of([], 1), None);
    }
}
