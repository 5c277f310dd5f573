//! Failed requests: what is said about them, and whether they are too many for the figures to count. Pure.
//!
//! A server that rejects a few requests under load has been measured. If more fail, the figures are those of
//! the requests that it happened to answer, and a script that reads only the exit code must notice.

use crate::load::Figures;

/// Above this share of failed requests in an arm, under one condition, nothing is claimed.
pub(super) const FAILED_SHARE_MAX: f64 = 0.02;

/// The failed requests of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Failures {
    failed: usize,
    requests: usize,
    /// The largest share of one arm under one condition.
    worst_share: f64,
}

impl Failures {
    /// Sums the figures of all arms and conditions.
    pub(super) fn of<'a>(cells: impl IntoIterator<Item = &'a Figures>) -> Self {
        let counts = cells.into_iter().map(|cell| (cell.num_prompts - cell.completed, cell.num_prompts));
        counts.fold(Self::default(), Self::plus)
    }

    fn plus(self, (failed, requests): (usize, usize)) -> Self {
        Self {
            failed: self.failed + failed,
            requests: self.requests + requests,
            worst_share: self.worst_share.max(failed_share(failed, requests)),
        }
    }

    /// Whether the figures of an arm claim nothing.
    pub(super) fn are_too_many(&self) -> bool {
        self.worst_share > FAILED_SHARE_MAX
    }

    /// Describes them on one line, with the first of the error texts; `None` if no request failed.
    pub(super) fn explain(&self, faults: &[String]) -> Option<String> {
        let Self { failed, requests, worst_share } = *self;
        let example = faults.first().map_or(String::new(), |fault| format!(", such as: {fault}"));
        let consequence = match self.are_too_many() {
            true => format!(
                "; in one arm at one load {:.1}%, over the {:.0}% up to which its figures count",
                worst_share * 100.0,
                FAILED_SHARE_MAX * 100.0
            ),
            false => String::new(),
        };
        (failed > 0).then(|| format!("{failed} of {requests} requests failed{consequence}{example}"))
    }
}

/// Failed requests as a share of all; 0 if there were none.
pub(super) fn failed_share(failed: usize, requests: usize) -> f64 {
    failed as f64 / requests.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arm_may_fail_one_request_in_fifty() {
        let of = |cells: &[(usize, usize)]| cells.iter().copied().fold(Failures::default(), Failures::plus);
        let faults = ["cut: early".to_owned(), "timed out".to_owned()];
        let none = of(&[(0, 50), (0, 50)]);
        assert!(!none.are_too_many() && none.explain(&[]).is_none());
        assert!(!of(&[]).are_too_many());
        let few = of(&[(1, 50), (0, 50)]);
        assert!(!few.are_too_many());
        assert_eq!(few.explain(&faults).as_deref(), Some("1 of 100 requests failed, such as: cut: early"));
        // All requests of one arm: less than two in a hundred of the whole run.
        let many = of(&[(0, 500), (4, 4)]);
        assert!(many.are_too_many());
        let text = many.explain(&faults).unwrap();
        assert!(text.starts_with("4 of 504 requests failed; in one arm at one load 100.0%, over"), "{text}");
        assert!(text.ends_with(", such as: cut: early"), "{text}");
    }
}
