//! The sections of `gpu_check`, which runs on a machine with a GPU. They check correctness (every kernel
//! against its naive twin, whole models against the CPU engine, ranks and graphs against a single rank
//! without graphs, drafted text against undrafted text) and measure times. Sections are independent, so that
//! each can run in a separate process: after an illegal address a process can no longer use the device.
//!
//! A dry run executes the same code at sizes that the host driver (`host_driver`) can run. Its times mean
//! nothing.

mod decode;
mod library;
mod models;
mod peer_sums;
mod peers;
mod product_blocks;
mod products;
mod ranks;
mod roofline;
mod speculation;
pub mod step_roofline;
pub(super) mod step_work;
mod text;

use std::path::PathBuf;

use super::parity::{Scale, run_all};
use super::{CudaDevice, CudaError, GpuOptions};
use crate::EngineError;

/// What to check.
#[derive(Debug, Clone)]
pub struct CheckTarget {
    /// Device number as the driver counts it.
    pub ordinal: usize,
    /// Folder of compiled kernels. `None`: NVRTC compiles them.
    pub kernels: Option<PathBuf>,
    /// Checkpoints of a draft and its target.
    pub pair: (PathBuf, PathBuf),
    /// Folder of the scripts that run other programs: `deploy`.
    pub peers: PathBuf,
    /// Whether this is a dry run on the host driver, with small sizes.
    pub is_dry: bool,
    /// Whether products share operands in clusters.
    pub clusters: bool,
}

impl CheckTarget {
    fn open(&self) -> Result<CudaDevice, CudaError> {
        let mut device = CudaDevice::open(self.ordinal, self.kernels.as_deref())?;
        if self.clusters {
            device.use_clusters();
        }
        Ok(device)
    }

    fn gpus(&self) -> GpuOptions {
        let (kernels, clusters) = (self.kernels.clone(), self.clusters);
        GpuOptions { kernels, clusters, ..GpuOptions::for_devices(&[self.ordinal]) }
    }

    fn scale(&self) -> Scale {
        if self.is_dry { Scale::Small } else { Scale::Large }
    }

    /// The pair's checkpoints, without duplicates.
    fn models(&self) -> Vec<&PathBuf> {
        let (draft, target) = &self.pair;
        if draft == target { vec![draft] } else { vec![draft, target] }
    }
}

/// Output lines, and the number of failed cases.
pub struct Report<'a> {
    say: &'a mut dyn FnMut(&str),
    /// Cases with wrong results, and steps that are too slow.
    pub failed: usize,
}

impl<'a> Report<'a> {
    /// A report without failures.
    pub fn new(say: &'a mut dyn FnMut(&str)) -> Self {
        Self { say, failed: 0 }
    }

    /// Prints a line that is not a verdict.
    fn say(&mut self, line: impl AsRef<str>) {
        (self.say)(line.as_ref());
    }

    fn check(&mut self, is_good: bool, case: impl std::fmt::Display) {
        self.failed += usize::from(!is_good);
        let verdict = if is_good { "ok" } else { "DIFFERS" };
        (self.say)(&format!("{verdict:<8}{case}"));
    }

    /// Reports whether a step is fast enough.
    fn check_speed(&mut self, is_good: bool, case: impl std::fmt::Display) {
        self.failed += usize::from(!is_good);
        let verdict = if is_good { "ok" } else { "SLOW" };
        (self.say)(&format!("{verdict:<8}{case}"));
    }

    fn skipped(&mut self, case: &str, why: impl std::fmt::Display) {
        (self.say)(&format!("NOT RUN {case}: {why}"));
    }
}

impl std::fmt::Debug for Report<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Report").field("failed", &self.failed).finish_non_exhaustive()
    }
}

/// A section of the check, ordered by how much its result is worth on a machine that is available for
/// minutes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Section {
    /// The device, its driver and memory, and its memory bandwidth.
    Device,
    /// Every kernel against its twin.
    Kernels,
    /// Logits of whole models against the CPU engine.
    Models,
    /// Rows alone against rows in a batch, and drafted text against undrafted text: `==`.
    Text,
    /// Replayed steps against launched steps: `==`.
    Graphs,
    /// Several ranks against one: `==`.
    Ranks,
    /// Times of weight products.
    Products,
    /// Products by cuBLASLt against the kernels of this crate.
    Library,
    /// Drafted text against undrafted text, end to end: `==`, and the speedup.
    Speculation,
    /// The same pair with transformers.
    Peer,
    /// Steps of Llama 3 8B relative to their roofline: pass or fail.
    Roofline,
    /// Steps of two layers of Llama 3 8B, for a profiler.
    Profile,
    /// Times of steps of Llama 3 8B, bf16.
    Decode8bBf16,
    /// Times of steps of Llama 3 8B, int8.
    Decode8bInt8,
    /// Times of steps of Llama 3 70B, int8.
    Decode70bInt8,
    /// The steps of the roofline section with vLLM.
    Vllm,
}

impl Section {
    /// All sections, in order.
    pub const ALL: [Self; 16] = [
        Self::Device,
        Self::Kernels,
        Self::Models,
        Self::Text,
        Self::Graphs,
        Self::Ranks,
        Self::Products,
        Self::Roofline,
        Self::Library,
        Self::Decode8bBf16,
        Self::Speculation,
        Self::Peer,
        Self::Decode8bInt8,
        Self::Decode70bInt8,
        Self::Profile,
        Self::Vllm,
    ];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Kernels => "kernels",
            Self::Models => "models",
            Self::Text => "text",
            Self::Graphs => "graphs",
            Self::Ranks => "ranks",
            Self::Products => "products",
            Self::Library => "library",
            Self::Speculation => "speculation",
            Self::Peer => "peer",
            Self::Roofline => "roofline",
            Self::Decode8bBf16 => "decode-8b-bf16",
            Self::Decode8bInt8 => "decode-8b-int8",
            Self::Decode70bInt8 => "decode-70b-int8",
            Self::Profile => "profile",
            Self::Vllm => "vllm",
        }
    }

    /// Seconds on an H100 or H200: measured on an H200, except for products, decode, speculation, peer and
    /// vllm, which are estimates. The default sections together fill the nine minutes of a run.
    pub fn budget_seconds(self) -> u64 {
        match self {
            Self::Device | Self::Graphs | Self::Models | Self::Text => 5,
            Self::Ranks | Self::Profile => 10,
            Self::Library => 20,
            Self::Peer => 30,
            Self::Decode8bInt8 => 40,
            Self::Kernels | Self::Decode70bInt8 => 50,
            Self::Products => 60,
            Self::Speculation => 70,
            Self::Decode8bBf16 => 80,
            Self::Roofline => 100,
            Self::Vllm => 300,
        }
    }

    /// The sections that run if none is named. Loading vLLM twice takes minutes.
    pub fn defaults() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|section| *section != Self::Vllm)
    }

    /// The section with this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|section| section.name() == name)
    }

    /// Runs the section. An error ends it; lines printed before the error remain valid.
    pub fn run(self, target: &CheckTarget, report: &mut Report<'_>) -> Result<(), EngineError> {
        match self {
            Self::Device => device(target, report),
            Self::Kernels => kernels(target, report),
            Self::Models => models::logits(target, report),
            Self::Text => text::text(target, report),
            Self::Graphs => models::graphs(target, report),
            Self::Ranks => ranks::ranks(target, report),
            Self::Products => products::products(target, report),
            Self::Library => library::library(target, report),
            Self::Speculation => speculation::speculation(target, report),
            Self::Peer => peers::transformers(target, report),
            Self::Vllm => peers::vllm(target, report),
            Self::Roofline => roofline::roofline(target, report),
            Self::Profile => roofline::profile(target, report),
            Self::Decode8bBf16 => decode::decode(target, decode::LLAMA_8B_BF16, report),
            Self::Decode8bInt8 => decode::decode(target, decode::LLAMA_8B_INT8, report),
            Self::Decode70bInt8 => decode::decode(target, decode::LLAMA_70B_INT8, report),
        }
    }
}

fn device(target: &CheckTarget, report: &mut Report<'_>) -> Result<(), EngineError> {
    let mut device = target.open()?;
    let facts = device.properties()?;
    let (free, total) = (facts.free_bytes, facts.total_bytes);
    report.say(format!("cuda:{} is {}, {}", target.ordinal, facts.name, facts.arch));
    report.say(format!("{free} of {total} bytes are free"));
    report.say(format!("the driver is for cuda {}", facts.driver));
    let origin = match &target.kernels {
        Some(dir) => format!("read from {}", dir.display()),
        None => "compiled here by nvrtc".to_owned(),
    };
    report.say(format!("the kernels were {origin}"));
    let rate = products::read_bandwidth(&mut device, target.is_dry)?;
    report.say(format!("memory is read at {rate:.0} GB/s"));
    let peak = products::multiply_peak(&mut device, target.is_dry)?;
    report.say(format!("bf16 is multiplied at {peak:.1} TFLOP/s by mma.sync"));
    Ok(())
}

fn kernels(target: &CheckTarget, report: &mut Report<'_>) -> Result<(), EngineError> {
    Ok(run_all(&mut target.open()?, target.scale(), |parity| {
        report.failed += usize::from(!parity.is_good());
        report.say(parity.to_string());
    })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_are_found_by_their_names() {
        for section in Section::ALL {
            assert_eq!(Section::named(section.name()), Some(section));
        }
        assert_eq!(Section::named("everything"), None);
    }

    #[test]
    fn the_budgets_fill_nine_minutes() {
        assert_eq!(Section::defaults().map(Section::budget_seconds).sum::<u64>(), 9 * 60);
    }

    #[test]
    fn verdicts_are_counted() {
        let mut lines = Vec::new();
        let mut say = |line: &str| lines.push(line.to_owned());
        let mut report = Report::new(&mut say);
        report.check(true, "this");
        report.check(false, "that");
        report.skipped("the other", "no reason");
        report.check_speed(true, "a step");
        report.check_speed(false, "another");
        assert_eq!(report.failed, 2);
        let expected = [
            "ok      this",
            "DIFFERS that",
            "NOT RUN the other: no reason",
            "ok      a step",
            "SLOW    another",
        ];
        assert_eq!(lines, expected);
    }
}
