//! A mean over observations that come in clusters, with its standard error: drafts of one sequence resemble each other, so a thousand drafts of
//! ten sequences say less than a thousand of a thousand. The estimator is the ratio of two sums over clusters, and its error the linearised one
//! (Cochran, "Sampling Techniques", 3rd ed., 1977, section 6.3). Running sums only: memory does not grow.

/// See the module's page.
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
    /// One cluster of `n` observations that add up to `x`. Empty ones say nothing.
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

    /// How many clusters.
    pub fn clusters(&self) -> u64 {
        self.clusters
    }

    /// How many observations.
    pub fn observations(&self) -> u64 {
        self.n as u64
    }

    /// The mean of all observations.
    pub fn mean(&self) -> Option<f64> {
        (self.n > 0.0).then(|| self.x / self.n)
    }

    /// Its standard error; it takes two clusters.
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
        // Deviations -2, -1, 0, 3: a variance of 14 / 3, over 4.
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
