//! Whether two workers compute on the same CPU cores. Then a draft does not run beside the target's forwards
//! for other sequences: it delays them.

/// Number of cores that are told apart; higher ones are ignored.
const MAX_CORES: usize = 4_096;

/// The cores that a worker's threads compute on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuShare {
    host_id: String,
    /// One bit per core.
    cores: Vec<u64>,
    threads: u32,
}

impl CpuShare {
    /// Creates the share of a worker with this number of compute threads, which may run on `cores` of the host
    /// `host_id`.
    pub fn new(host_id: String, cores: impl IntoIterator<Item = u32>, threads: u32) -> Self {
        let mut words = Vec::new();
        for core in cores.into_iter().map(|core| core as usize).filter(|core| *core < MAX_CORES) {
            words.resize(words.len().max(core / 64 + 1), 0);
            words[core / 64] |= 1_u64 << (core % 64);
        }
        Self { host_id, cores: words, threads }
    }

    /// Whether threads of the two workers have to take turns: they may run on a common core, and together they
    /// have fewer cores than threads.
    pub fn contends_with(&self, other: &Self) -> bool {
        let overlaps = self.cores.iter().zip(&other.cores).any(|(a, b)| a & b != 0);
        self.host_id == other.host_id
            && overlaps
            && self.threads.saturating_add(other.threads) > self.num_cores_with(other)
    }

    /// Number of cores that one of the two may run on.
    fn num_cores_with(&self, other: &Self) -> u32 {
        let word = |words: &[u64], i: usize| words.get(i).copied().unwrap_or(0);
        let words = self.cores.len().max(other.cores.len());
        (0..words).map(|i| (word(&self.cores, i) | word(&other.cores, i)).count_ones()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(host: &str, cores: std::ops::Range<u32>, threads: u32) -> CpuShare {
        CpuShare::new(host.to_owned(), cores, threads)
    }

    #[test]
    fn workers_contend_if_a_host_has_too_few_cores_for_both() {
        let target = share("a", 0..2, 2);
        assert!(target.contends_with(&share("a", 0..2, 2)), "both may use both cores");
        assert!(!target.contends_with(&share("b", 0..2, 2)), "another host");
        assert!(!target.contends_with(&share("a", 2..4, 2)), "other cores");
        assert!(!share("a", 0..8, 2).contends_with(&share("a", 0..8, 2)), "enough cores for both");
        assert!(share("a", 0..70, 64).contends_with(&share("a", 60..80, 20)));
        assert!(!share("a", 0..70, 60).contends_with(&share("a", 60..80, 20)));
        assert!(!share("a", 0..0, 2).contends_with(&share("a", 0..0, 2)), "no cores were reported");
        assert!(
            !share("a", 9_000..9_001, 2).contends_with(&share("a", 9_000..9_001, u32::MAX)),
            "out of range"
        );
    }
}
