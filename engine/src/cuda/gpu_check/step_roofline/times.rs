//! Modelled times of Llama 3 8B's kernels on an H200. Products take what their launch was chosen by
//! ([`LaunchedProduct::nanoseconds`]). All other kernels take a time that is linear in
//! their work, through two launches of run 3 (docs/gpu-runs/3-profile.txt): the smallest and the largest. A
//! kernel that was never timed has no time here.

use crate::cuda::graphs::Launch;
use crate::cuda::ops::{AttentionCounts, LaunchedProduct};

/// A measured launch: its work and its microseconds.
type Measured = (f64, f64);

/// A time that is linear in the work, through two launches.
#[derive(Debug, Clone, Copy)]
struct Line {
    small: Measured,
    large: Measured,
}

impl Line {
    fn at(self, work: f64) -> f64 {
        let Self { small, large } = self;
        let slope = if large.0 > small.0 { (large.1 - small.1) / (large.0 - small.0) } else { 0.0 };
        small.1 + slope * (work - small.0)
    }
}

/// Kernels whose work is their number of blocks, for the widths of Llama 3 8B.
const LINES: [(&str, Line); 7] = [
    ("embedding", line((1.0, 9.2), (2048.0, 12.6))),
    ("rms_norm", line((1.0, 6.8), (2048.0, 53.5))),
    ("rotate_and_write_kv", line((40.0, 4.6), (81_920.0, 66.9))),
    ("swiglu", line((14.0, 2.8), (28_672.0, 139.5))),
    ("take_rows", line((1.0, 8.2), (1.0, 11.2))),
    ("draw_parts", line((32.0, 15.6), (5120.0, 201.2))),
    ("draw_join", line((1.0, 3.0), (160.0, 3.3))),
];

const fn line(small: Measured, large: Measured) -> Line {
    Line { small, large }
}

/// Microseconds of a layer's attention and of its merge, of one row and of a prompt of 2,048 behind 128.
const ATTENTION: [f64; 2] = [11.2, 583.5];
const MERGE: [f64; 2] = [4.4, 187.4];

/// Times of attention, whose work is what [`AttentionCounts`] counts.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttentionTimes {
    splits: Line,
    merge: Line,
}

impl AttentionTimes {
    /// Takes the counts of the two steps whose times [`ATTENTION`] and [`MERGE`] are, with a partial result of
    /// every split, as run 3 had.
    pub(super) fn new(small: &AttentionCounts, large: &AttentionCounts) -> Self {
        let through = |[few, many]: [f64; 2], work: fn(&AttentionCounts) -> f64| {
            line((work(small), few), (work(large), many))
        };
        Self { splits: through(ATTENTION, warp_blocks), merge: through(MERGE, bytes_of_parts) }
    }

    /// Microseconds of a layer.
    pub(super) fn microseconds(&self, counts: &AttentionCounts) -> f64 {
        self.splits.at(warp_blocks(counts)) + self.merge.at(bytes_of_parts(counts))
    }
}

fn warp_blocks(counts: &AttentionCounts) -> f64 {
    counts.warp_blocks as f64
}

/// Bytes of partial results written and read.
fn bytes_of_parts(counts: &AttentionCounts) -> f64 {
    (counts.written_parts + counts.folded_parts + counts.merged_parts) as f64
}

/// Microseconds of launches other than attention's, or the name of a kernel that was never timed.
pub(super) fn microseconds(launches: &[Launch]) -> Result<f64, &'static str> {
    launches.iter().map(of_launch).sum()
}

fn of_launch(launch: &Launch) -> Result<f64, &'static str> {
    if let Some(product) = LaunchedProduct::of(launch.kernel, &launch.params) {
        return Ok(product.nanoseconds() as f64 / 1e3);
    }
    // Attention by warpgroups has never been timed.
    if launch.kernel.starts_with("attention_panels") {
        return Err(launch.kernel);
    }
    // A product's time contains adding its groups, [`AttentionTimes`] all other attention.
    if launch.kernel == "sum_groups" || launch.kernel.starts_with("attention") {
        return Ok(0.0);
    }
    let (_, line) = LINES.iter().find(|(kernel, _)| *kernel == launch.kernel).ok_or(launch.kernel)?;
    Ok(line.at(launch.grid.iter().map(|&blocks| f64::from(blocks)).product()))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::cuda::sources::{ATTENTION_PANELS, SCORE};

    /// The numbers of this file are lines of the profile.
    #[test]
    fn lines_go_through_measured_launches() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/gpu-runs/3-profile.txt");
        let profile = std::fs::read_to_string(path).unwrap();
        let launches: Vec<(&str, f64, f64)> = profile
            .lines()
            .filter_map(|line| {
                let mut columns = line.split_whitespace();
                let (kernel, grid, time) = (columns.next()?, columns.next()?, columns.next()?);
                let blocks = grid.split(',').map(str::parse::<f64>).product::<Result<f64, _>>().ok()?;
                Some((kernel, blocks, time.parse().ok()?))
            })
            .collect();
        assert!(launches.len() > 100, "{}", launches.len());
        for (kernel, Line { small, large }) in LINES {
            for (blocks, time) in [small, large] {
                assert!(launches.contains(&(kernel, blocks, time)), "{kernel}: {time} us of {blocks} blocks");
            }
        }
        for timed in [
            ("attention_128", ATTENTION[0]),
            ("attention_wide_128", ATTENTION[1]),
            ("attention_merge", MERGE[0]),
            ("attention_merge", MERGE[1]),
        ] {
            assert!(launches.iter().any(|&(kernel, _, us)| (kernel, us) == timed), "{timed:?}");
        }
    }

    #[test]
    fn a_kernel_that_was_never_timed_has_no_time() {
        let of = |kernel| microseconds(&[Launch::new(kernel, [1, 1, 1], &[])]);
        assert_eq!(of(ATTENTION_PANELS.kernel(1)), Err("attention_panels_128"));
        assert_eq!(of(SCORE.kernel(0)), Err("score"));
        assert_eq!(of(crate::cuda::sources::ATTENTION.kernel(0)), Ok(0.0));
    }

    #[test]
    fn a_line_goes_through_both_launches() {
        let line = line((2.0, 10.0), (4.0, 30.0));
        assert_eq!([2.0, 3.0, 6.0].map(|work| line.at(work)), [10.0, 20.0, 50.0]);
        assert_eq!(super::line((1.0, 5.0), (1.0, 7.0)).at(9.0), 5.0);
    }
}
