//! Finds cases in which a smaller format was slower than a larger one: there it saves memory but costs time.

use serde::Serialize;

use super::measure::{Case, CaseResult, FormatBench};

/// Smaller ratios are treated as noise.
const NOISE_RATIO: f64 = 1.05;

/// Size and times of a format.
#[derive(Clone, Copy)]
pub(super) struct FormatTimes<'a> {
    weights: &'a str,
    bytes: u64,
    measured: &'a [CaseResult],
}

impl<'a> FormatTimes<'a> {
    pub(super) fn new(format: &'a FormatBench) -> Self {
        Self {
            weights: &format.weights,
            bytes: format.engine.info().weight_bytes,
            measured: &format.measured,
        }
    }
}

/// A case in which a format took longer than a larger one; the fastest larger one is named.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct SlowerThan {
    #[serde(flatten)]
    pub(super) case: Case,
    pub(super) ms: f64,
    pub(super) other_weights: String,
    pub(super) other_ms: f64,
}

pub(super) fn slower_than<'a>(
    own: FormatTimes<'a>,
    all: impl Iterator<Item = FormatTimes<'a>> + Clone,
) -> Vec<SlowerThan> {
    let slower = |measured: &CaseResult| {
        let larger = all.clone().filter(|other| other.bytes > own.bytes);
        let times = larger.filter_map(|other| {
            let same = other.measured.iter().find(|theirs| theirs.case == measured.case)?;
            Some((other.weights, same.seconds))
        });
        let (other, seconds) = times.min_by(|(_, a), (_, b)| a.total_cmp(b))?;
        (measured.seconds > NOISE_RATIO * seconds).then(|| SlowerThan {
            case: measured.case,
            ms: measured.seconds * 1e3,
            other_weights: other.to_owned(),
            other_ms: seconds * 1e3,
        })
    };
    own.measured.iter().filter_map(slower).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine_bench::measure::StepParts;

    fn measured(times: &[(usize, f64)]) -> Vec<CaseResult> {
        let one = |&(rows, seconds)| {
            let case = Case { context: 16, rows, sequences: 1 };
            CaseResult { case, seconds, bandwidth_share: 1.0, parts: StepParts::default() }
        };
        times.iter().map(one).collect()
    }

    #[test]
    fn fewer_bytes_in_more_time_are_named_with_the_fastest_larger_format() {
        let (wide, middle, small) = (
            measured(&[(1, 4.0), (8, 5.0)]),
            measured(&[(1, 2.0), (8, 6.0)]),
            measured(&[(1, 2.04), (8, 8.0)]),
        );
        let timed = |weights, bytes, measured| FormatTimes { weights, bytes, measured };
        let all = [timed("bf16", 4, &wide[..]), timed("int8", 2, &middle[..]), timed("int4", 1, &small[..])];
        let named = |own: usize| -> Vec<(usize, String)> {
            let found = slower_than(all[own], all.iter().copied());
            found.into_iter().map(|slower| (slower.case.rows, slower.other_weights)).collect()
        };
        assert_eq!(named(0), []);
        assert_eq!(named(1), [(8, "bf16".to_owned())]);
        // At one row 2.04 over 2.0 is within the noise.
        assert_eq!(named(2), [(8, "bf16".to_owned())]);
    }
}
