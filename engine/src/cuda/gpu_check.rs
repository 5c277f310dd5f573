//! What `gpu_check` runs on a machine with a GPU, section by section: is it right (every kernel against its naive twin, whole
//! models against the CPU engine, ranks and graphs against themselves, drafted text against undrafted), and what does it
//! take. Sections stand alone, so that each can be a process of its own: after an illegal address a process has no device.
//!
//! A dry run is the same code at sizes that the host's driver (`host_driver`) can run. Its times are of no meaning.

mod decode;
mod library;
mod models;
mod products;
mod ranks;
mod roofline;
mod speculation;
pub(super) mod step_work;
mod text;

use std::path::PathBuf;

use super::parity::{Scale, run_all};
use super::{CudaDevice, CudaError, GpuOptions};
use crate::EngineError;

/// What is checked, and with what.
#[derive(Debug, Clone)]
pub struct Target {
    /// The driver's number of the device.
    pub ordinal: usize,
    /// A folder of compiled kernels; `None` compiles them with NVRTC.
    pub kernels: Option<PathBuf>,
    /// A checkpoint of a draft, and one of its target.
    pub pair: (PathBuf, PathBuf),
    /// The script that runs the same pair by transformers.
    pub peer: PathBuf,
    /// Whether a host plays the device: small sizes.
    pub is_dry: bool,
}

impl Target {
    fn open(&self) -> Result<CudaDevice, CudaError> {
        CudaDevice::open(self.ordinal, self.kernels.as_deref())
    }

    fn gpus(&self) -> GpuOptions {
        GpuOptions { kernels: self.kernels.clone(), ..GpuOptions::on(&[self.ordinal]) }
    }

    fn scale(&self) -> Scale {
        if self.is_dry { Scale::Small } else { Scale::Large }
    }

    /// The pair's checkpoints, each once.
    fn models(&self) -> Vec<&PathBuf> {
        let (draft, target) = &self.pair;
        if draft == target { vec![draft] } else { vec![draft, target] }
    }
}

/// Where lines go, and how many cases were found wrong.
pub struct Report<'a> {
    say: &'a mut dyn FnMut(&str),
    /// Cases that differ from what they must be, and steps that are slower than they must be.
    pub failed: usize,
}

impl<'a> Report<'a> {
    /// Nothing was found yet.
    pub fn new(say: &'a mut dyn FnMut(&str)) -> Self {
        Self { say, failed: 0 }
    }

    /// A line that is no verdict.
    fn say(&mut self, line: impl AsRef<str>) {
        (self.say)(line.as_ref());
    }

    fn judge(&mut self, is_good: bool, case: impl std::fmt::Display) {
        self.failed += usize::from(!is_good);
        let verdict = if is_good { "ok" } else { "DIFFERS" };
        (self.say)(&format!("{verdict:<8}{case}"));
    }

    /// Whether a step is as fast as it must be.
    fn reach(&mut self, is_good: bool, case: impl std::fmt::Display) {
        self.failed += usize::from(!is_good);
        let verdict = if is_good { "ok" } else { "SLOW" };
        (self.say)(&format!("{verdict:<8}{case}"));
    }

    fn not_run(&mut self, case: &str, why: impl std::fmt::Display) {
        (self.say)(&format!("NOT RUN {case}: {why}"));
    }
}

impl std::fmt::Debug for Report<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Report").field("failed", &self.failed).finish_non_exhaustive()
    }
}

/// A part of the check, in the order in which they are worth the time of a machine that is lent for minutes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Section {
    /// The device, its driver, its memory and how fast that is read.
    Device,
    /// Every kernel against its twin.
    Kernels,
    /// Logits of whole models against the CPU engine's.
    Models,
    /// Rows alone against rows in company, and drafted text against undrafted: `==`.
    Text,
    /// Replayed steps against launched ones: `==`.
    Graphs,
    /// Several ranks against one: `==`.
    Ranks,
    /// What weight products take.
    Products,
    /// Products by cuBLASLt against our own.
    Library,
    /// Drafted text against undrafted, end to end: `==`, and how much faster.
    Speculation,
    /// The same pair by transformers.
    Peer,
    /// Steps of a Llama 3 8B by their share of the roofline: pass or fail.
    Roofline,
    /// What steps of a Llama 3 8B take, bf16.
    Decode8bBf16,
    /// The same, int8.
    Decode8bInt8,
    /// What steps of a Llama 3 70B take, int8.
    Decode70bInt8,
}

impl Section {
    /// All of them, in order.
    pub const ALL: [Self; 14] = [
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
    ];

    /// As it is named on the command line.
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
        }
    }

    /// Seconds that it is expected to take on an H100, estimated; together they fill the nine minutes of a run.
    pub fn budget_seconds(self) -> u64 {
        match self {
            Self::Device | Self::Graphs => 10,
            Self::Kernels => 40,
            Self::Models | Self::Text | Self::Ranks | Self::Decode70bInt8 => 30,
            Self::Products => 15,
            Self::Roofline => 120,
            Self::Library | Self::Decode8bBf16 | Self::Speculation => 60,
            Self::Peer => 25,
            Self::Decode8bInt8 => 20,
        }
    }

    /// The section of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|section| section.name() == name)
    }

    /// Runs it. An error is the section's end; what was said before stands.
    pub fn run(self, target: &Target, report: &mut Report<'_>) -> Result<(), EngineError> {
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
            Self::Peer => speculation::peer(target, report),
            Self::Roofline => roofline::roofline(target, report),
            Self::Decode8bBf16 => decode::decode(target, decode::LLAMA_8B_BF16, report),
            Self::Decode8bInt8 => decode::decode(target, decode::LLAMA_8B_INT8, report),
            Self::Decode70bInt8 => decode::decode(target, decode::LLAMA_70B_INT8, report),
        }
    }
}

fn device(target: &Target, report: &mut Report<'_>) -> Result<(), EngineError> {
    let mut device = target.open()?;
    let facts = device.facts()?;
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

fn kernels(target: &Target, report: &mut Report<'_>) -> Result<(), EngineError> {
    for parity in run_all(&mut target.open()?, target.scale())? {
        report.failed += usize::from(!parity.is_good());
        report.say(parity.to_string());
    }
    Ok(())
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
        assert_eq!(Section::ALL.into_iter().map(Section::budget_seconds).sum::<u64>(), 9 * 60);
    }

    #[test]
    fn verdicts_are_counted() {
        let mut lines = Vec::new();
        let mut say = |line: &str| lines.push(line.to_owned());
        let mut report = Report::new(&mut say);
        report.judge(true, "this");
        report.judge(false, "that");
        report.not_run("the other", "no reason");
        report.reach(true, "a step");
        report.reach(false, "another");
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
