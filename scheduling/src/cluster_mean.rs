//! A mean over clustered observations, with its standard error. Drafts of one sequence resemble each other,
//! so a thousand drafts of ten sequences tell less than a thousand drafts of a thousand sequences. The
//! estimator is the ratio of two sums over clusters, with the linearised error (Cochran, "Sampling
//! Techniques", 3rd ed., 1977, section 6.3). Stores running sums only, so memory does not grow.

/// A mean over clusters; see the module documentation.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ClusterMean {
    clusters: u64,
    n: f64,
    x: f64,
    nn: f64,
    xn: f64,
    xx: f64,
}

impl ClusterMean {
    /// Records one cluster of `n` observations with the sum `x`. Empty clusters are ignored.
    pub fn observe(&mut self, n: f64, x: f64) {
        if n <= 0.0 {
            return;
        }
        self.clusters += 1;
        self.n += n;
        self.x += x;
        self.nn += n * n;
        self.xn += x * n;
        self.xx += x * x;
    }

    /// Number of clusters.
    pub fn clusters(&self) -> u64 {
        self.clusters
    }

    /// Number of observations.
    pub fn observations(&self) -> u64 {
        self.n as u64
    }

    /// Mean of all observations.
    pub fn mean(&self) -> Option<f64> {
        (self.n > 0.0).then(|| self.x / self.n)
    }

    /// Standard error of the mean; requires two clusters.
    pub fn error(&self) -> Option<f64> {
        let (mean, clusters) = (self.mean()?, self.clusters as f64);
        let squares = (self.xx - 2.0 * mean * self.xn + mean * mean * self.nn).max(0.0);
        (clusters >= 2.0).then(|| (squares * clusters / (clusters - 1.0)).sqrt() / self.n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(clusters: &[(f64, f64)]) -> ClusterMean {
        let mut mean = ClusterMean::default();
        clusters.iter().for_each(|(n, x)| mean.observe(*n, *x));
        mean
    }

    #[test]
    fn with_clusters_of_one_it_is_the_error_of_an_ordinary_mean() {
        let mean = of(&[(1.0, 1.0), (1.0, 2.0), (1.0, 3.0), (1.0, 6.0), (0.0, 9.0)]);
        assert_eq!((mean.clusters(), mean.observations(), mean.mean()), (4, 4, Some(3.0)));
        // Deviations -2, -1, 0, 3: a variance of 14 / 3, divided by 4.
        assert!((mean.error().unwrap() - (14.0_f64 / 3.0 / 4.0).sqrt()).abs() < 1e-12);
    }

    #[test]
    fn equal_observations_within_clusters_count_as_little_as_the_clusters() {
        let (once, often) = (of(&[(1.0, 0.0), (1.0, 1.0)]), of(&[(50.0, 0.0), (50.0, 50.0)]));
        assert_eq!(once.error(), often.error());
        assert_eq!(of(&[(9.0, 4.0)]).error(), None);
        assert_eq!(ClusterMean::default().mean(), None);
    }
}
