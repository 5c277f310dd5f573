//! The backend as a server runs it, driver calls included, with a driver that runs on the host
//! (`engine::cuda::host_driver`): sections of `gpu_check` at small sizes. The driver completes calls as late
//! as the real one may, so that a missing wait leads to wrong numbers. Sections that compare a model with
//! itself take a small pair, because kernels are slow here.

use std::path::{Path, PathBuf};

use engine::cuda::gpu_check::{CheckTarget, Report, Section};
use engine::cuda::host_driver::HostDriver;
use engine::cuda::{CudaDevice, CudaError};

use crate::small_model::write_small_model;
use crate::support::demo_dir;

fn target(kernels: &Path, pair: (PathBuf, PathBuf)) -> CheckTarget {
    let peers = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy");
    CheckTarget { ordinal: 0, kernels: Some(kernels.to_owned()), pair, peers, is_dry: true, clusters: true }
}

/// Runs sections with a small target of two layers and a draft that is its first layer; returns the lines
/// that they reported.
fn run(sections: &[Section], kernels: &Path) -> Vec<String> {
    let (draft, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_small_model(draft.path(), 1);
    write_small_model(target.path(), 2);
    run_with(sections, kernels, (draft.path().to_owned(), target.path().to_owned()))
}

fn run_with(sections: &[Section], kernels: &Path, pair: (PathBuf, PathBuf)) -> Vec<String> {
    let mut lines = Vec::new();
    let mut say = |line: &str| lines.push(line.to_owned());
    let mut report = Report::new(&mut say);
    let target = target(kernels, pair);
    for section in sections {
        section.run(&target, &mut report).unwrap_or_else(|error| panic!("{section:?}: {error}"));
    }
    assert_eq!(report.failed, 0, "{lines:#?}");
    lines
}

#[test]
fn drafts_do_not_change_the_text() {
    let Some(driver) = HostDriver::for_test("host_driver::drafts_do_not_change_the_text") else { return };
    let lines = run(&[Section::Text], &driver.kernels);
    assert!(lines.iter().all(|line| line.starts_with("ok")) && lines.len() > 15, "{lines:#?}");
    // Guesses were accepted, and rejected: then both engines cut their KV.
    let rates: Vec<&String> = lines.iter().filter(|line| line.contains("of the guesses accepted")).collect();
    for extreme in ["0.00 of the guesses", "1.00 of the guesses"] {
        assert!(rates.iter().any(|line| !line.contains(extreme)), "{lines:#?}");
    }
}

#[test]
fn graphs_give_equal_bits() {
    let Some(driver) = HostDriver::for_test("host_driver::graphs_give_equal_bits") else { return };
    let lines = run(&[Section::Graphs], &driver.kernels);
    assert!(lines.iter().any(|line| line.starts_with("ok")), "{lines:#?}");
}

/// Shards on one device, and one rank on each of several devices, connected by the host's NCCL.
#[test]
fn ranks_give_equal_bits() {
    let name = "host_driver::ranks_give_equal_bits";
    let Some(driver) = HostDriver::for_test_with(name, &[("OUTRIDER_HOST_DEVICES", "4")]) else { return };
    let lines = run(&[Section::Ranks], &driver.kernels);
    let count = |case: &str| {
        let case = format!("{case}: logits == one rank's");
        lines.iter().filter(|line| line.starts_with("ok") && line.contains(&case)).count()
    };
    for case in [
        "2 shards on one device",
        "4 shards on one device, two phases",
        "nccl with 1 rank",
        "nccl with 2 gpus",
        "nccl with 4 gpus",
        "nccl with 4 gpus, two phases",
        "sums over peer pointers of 2 gpus, launched",
        "sums over peer pointers of 4 gpus, launched",
    ] {
        assert_eq!(count(case), 3, "bf16, fp8 and int8: {case}: {lines:#?}");
    }
    for gpus in [2, 4] {
        let case = format!("sums over peer pointers of {gpus} gpus, replayed");
        assert_eq!(count(&case), 1, "bf16: {case}: {lines:#?}");
    }
}

#[test]
fn timings_run() {
    let Some(driver) = HostDriver::for_test("host_driver::timings_run") else { return };
    let lines = run(
        &[Section::Device, Section::Products, Section::Decode8bBf16, Section::Decode8bInt8],
        &driver.kernels,
    );
    assert!(lines[0].contains("the host (emulated, no GPU), sm_90"), "{lines:#?}");
    for words in [
        "memory is read at",
        "gemm_int8",
        "graphs,   3 sequences",
        "verify rows",
        "of what multiplying alone",
    ] {
        assert!(lines.iter().any(|line| line.contains(words)), "{words}: {lines:#?}");
    }
}

/// Times are meaningless here, so none is checked; every kind of step runs and is reported.
#[test]
fn roofline_timings_run() {
    let Some(driver) = HostDriver::for_test("host_driver::roofline_timings_run") else { return };
    let lines = run(&[Section::Roofline], &driver.kernels);
    for context in [20, 60, 130] {
        for step in ["1 x 1 rows", "2 x 5 rows", "3 x 5 rows", "prompt of 70 rows"] {
            let case = format!("UNJUDGED {step} behind {context} ");
            assert_eq!(lines.iter().filter(|line| line.starts_with(&case)).count(), 1, "{case}: {lines:#?}");
        }
        let filtered = format!("UNJUDGED 2 x 5 rows behind {context}, top-p ");
        assert!(lines.iter().any(|line| line.starts_with(&filtered)), "{filtered}: {lines:#?}");
    }
    assert!(lines.iter().all(|line| !line.starts_with("NOT RUN")), "{lines:#?}");
}

#[test]
fn library_gemms_are_close_to_our_own() {
    let Some(driver) = HostDriver::for_test("host_driver::library_gemms_are_close_to_our_own") else {
        return;
    };
    // The tolerance is the bundled draft's.
    let draft = demo_dir("draft");
    let lines = run_with(&[Section::Library], &driver.kernels, (draft.clone(), draft));
    for words in ["by cublaslt, against the cpu's", "by cublaslt beside graphs, against the cpu's"] {
        assert!(
            lines.iter().any(|line| line.starts_with("ok") && line.contains(words)),
            "{words}: {lines:#?}"
        );
    }
    let products =
        lines.iter().filter(|line| line.starts_with("ok") && line.contains("us, cublaslt")).count();
    assert!(products >= 4, "{lines:#?}");
}

#[test]
fn speculation_timings_run() {
    let Some(driver) = HostDriver::for_test("host_driver::speculation_timings_run") else {
        return;
    };
    let lines = run(&[Section::Speculation], &driver.kernels);
    for words in
        ["pair, bf16, draft on the gpu", "pair, bf16, draft on the host", "0.8 of the guesses made right"]
    {
        assert!(
            lines.iter().any(|line| line.starts_with("ok") && line.contains(words)),
            "{words}: {lines:#?}"
        );
    }
}

#[test]
fn missing_devices_and_kernels_are_named() {
    let Some(driver) = HostDriver::for_test("host_driver::missing_devices_and_kernels_are_named") else {
        return;
    };
    let error = CudaDevice::open(1, Some(&driver.kernels)).unwrap_err();
    assert_eq!(error, CudaError::NoSuchDevice { ordinal: 1, count: 1 });
    let nowhere = CudaDevice::open(0, Some(Path::new("/nowhere"))).unwrap_err().to_string();
    assert!(nowhere.starts_with("kernels in /nowhere: sources.sha256"), "{nowhere}");
}
