//! `make gpu-check`: on a machine with a GPU, checks correctness and measures times
//! (`engine::cuda::gpu_check`). Without a GPU it prints one line and fails.
//!
//!     gpu_check [--device N] [--kernels DIR] [--models DIR] [--peers DIR] [--minutes M] [--out FILE]
//!               [--clusters] [--dry]
//!         [SECTION ..]
//!
//! N is the driver's device number [0]. `--kernels` is a folder of compiled kernels [compiled at start, which
//! needs NVRTC]. `--models` holds `draft` and `target` [models/demo]. `--peers` is the folder of
//! gpu-peer.py and gpu-peer-vllm.py [deploy]. After M minutes the current section is stopped and no other starts [9]. `--out`
//! appends the report to FILE as well, line by line. `--clusters` lets blocks of products share operands, as
//! workers do not yet. `--dry` uses sizes for a host that emulates the device,
//! with the draft in place of both models.
//!
//! Each section runs in a separate process, so that a section which crashes, hangs, or breaks its device does
//! not affect the others.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use engine::cuda::gpu_check::{CheckTarget, Report, Section};

/// Lines of a section's output that may be queued.
const MAX_QUEUED_LINES: usize = 64;
const SECOND: Duration = Duration::from_secs(1);
/// Option that runs sections in this process.
const IN_PROCESS: &str = "--inside";

struct Options {
    target: CheckTarget,
    sections: Vec<Section>,
    time: Duration,
    out: Option<PathBuf>,
    in_process: bool,
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match Options::parse(&args) {
        Ok(options) if options.in_process => run_in_process(&options),
        Ok(options) => run_in_children(&options, &args),
        Err(error) => Err(error),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

#[expect(clippy::print_stderr, reason = "one line with the reason")]
fn fail(reason: &str) -> ExitCode {
    eprintln!("gpu-check: {reason}");
    ExitCode::FAILURE
}

impl Options {
    fn parse(args: &[String]) -> Result<Self, String> {
        let models = PathBuf::from("models/demo");
        let (pair, peers) = ((models.clone(), models), PathBuf::from("deploy"));
        let target = CheckTarget { ordinal: 0, kernels: None, pair, peers, is_dry: false, clusters: false };
        let time = 9 * 60 * SECOND;
        let mut options = Self { target, sections: Vec::new(), time, out: None, in_process: false };
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or(format!("{arg} needs a value"));
            match arg.as_str() {
                "--device" => {
                    options.target.ordinal =
                        value()?.parse().map_err(|error| format!("--device: {error}"))?;
                }
                "--minutes" => {
                    let minutes: u32 = value()?.parse().map_err(|error| format!("--minutes: {error}"))?;
                    options.time = minutes * 60 * SECOND;
                }
                "--kernels" => options.target.kernels = Some(value()?.into()),
                "--models" => options.target.pair = (value()?.into(), PathBuf::new()),
                "--peers" => options.target.peers = value()?.into(),
                "--out" => options.out = Some(value()?.into()),
                "--clusters" => options.target.clusters = true,
                "--dry" => options.target.is_dry = true,
                IN_PROCESS => options.in_process = true,
                name => options.sections.push(
                    Section::named(name)
                        .ok_or_else(|| format!("unknown section `{name}`, {}", expected_names()))?,
                ),
            }
        }
        let models = options.target.pair.0.clone();
        let target_name = if options.target.is_dry { "draft" } else { "target" };
        options.target.pair = (models.join("draft"), models.join(target_name));
        if options.sections.is_empty() {
            options.sections = Section::defaults().collect();
        }
        Ok(options)
    }
}

fn expected_names() -> String {
    let names: Vec<&str> = Section::ALL.into_iter().map(Section::name).collect();
    format!("expected some of {}", names.join(", "))
}

/// Runs sections in this process. Lines are printed as they come.
#[expect(clippy::print_stdout, reason = "the parent process reads them")]
fn run_in_process(options: &Options) -> Result<(), String> {
    let mut print_line = |line: &str| println!("{line}");
    let mut report = Report::new(&mut print_line);
    for section in &options.sections {
        section.run(&options.target, &mut report).map_err(|error| error.to_string())?;
    }
    match report.failed {
        0 => Ok(()),
        failed => Err(format!("{failed} cases differ or are slow")),
    }
}

/// Runs every section as a process and writes the report.
fn run_in_children(options: &Options, args: &[String]) -> Result<(), String> {
    let started_at = Instant::now();
    let mut report = ReportWriter::begin(options, args)?;
    let mut failed = Vec::new();
    for &section in &options.sections {
        let (name, budget) = (section.name(), section.budget_seconds());
        let left = options.time.saturating_sub(started_at.elapsed());
        report.line(&format!("\n## {name}"))?;
        if left.is_zero() {
            report.line(&format!("NOT RUN {name}: the time limit of {:?} has passed", options.time))?;
            failed.push(name);
            continue;
        }
        let start = Instant::now();
        let failure = run_section(options, section, left, &mut report)?;
        let took = start.elapsed().as_secs_f64();
        match failure {
            None => report.line(&format!("[{name}: passed, {took:.1} s of {budget}]"))?,
            Some(reason) => {
                report.line(&format!("[{name}: FAILED, {reason}, {took:.1} s of {budget}]"))?;
                failed.push(name);
            }
        }
    }
    let verdict =
        if failed.is_empty() { "all good".to_owned() } else { format!("failed: {}", failed.join(", ")) };
    report.line(&format!("\n{verdict}; {:.0} s in all", started_at.elapsed().as_secs_f64()))?;
    if failed.is_empty() { Ok(()) } else { Err(verdict) }
}

/// Runs a section as a process, for at most `left`. Returns the reason if it failed.
fn run_section(
    options: &Options,
    section: Section,
    left: Duration,
    report: &mut ReportWriter,
) -> Result<Option<String>, String> {
    let CheckTarget { ordinal, kernels, pair, peers, is_dry, clusters } = &options.target;
    let this = std::env::current_exe().map_err(to_message)?;
    let models = pair.0.parent().unwrap_or(&pair.0);
    let mut command = Command::new(this);
    command.args([IN_PROCESS, section.name(), "--device", &ordinal.to_string(), "--models"]).arg(models);
    command.arg("--peers").arg(peers);
    if let Some(dir) = kernels {
        command.arg("--kernels").arg(dir);
    }
    for (is_set, flag) in [(*is_dry, "--dry"), (*clusters, "--clusters")] {
        if is_set {
            command.arg(flag);
        }
    }
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(to_message)?;
    let (sender, lines) = sync_channel::<String>(MAX_QUEUED_LINES);
    let streams: [Option<Box<dyn std::io::Read + Send>>; 2] =
        [child.stdout.take().map(|s| Box::new(s) as _), child.stderr.take().map(|s| Box::new(s) as _)];
    for stream in streams.into_iter().flatten() {
        let sender = sender.clone();
        std::thread::spawn(move || {
            BufReader::new(stream).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
    }
    drop(sender);
    let deadline = Instant::now() + left;
    loop {
        match lines.recv_timeout(SECOND) {
            Ok(line) => report.line(&line)?,
            // Both streams have ended, and so has the process, or it is about to.
            Err(RecvTimeoutError::Disconnected) => return exit_reason(&mut child),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if Instant::now() > deadline {
            child.kill().and_then(|()| child.wait()).map_err(to_message)?;
            return Ok(Some(format!("stopped: the time limit of {:?} has passed", options.time)));
        }
    }
}

fn exit_reason(child: &mut Child) -> Result<Option<String>, String> {
    let status = child.wait().map_err(to_message)?;
    Ok((!status.success()).then(|| status.to_string()))
}

/// The report: on the terminal and, if a file is named, in that file, which is complete after every line.
struct ReportWriter(Option<File>);

impl ReportWriter {
    fn begin(options: &Options, args: &[String]) -> Result<Self, String> {
        let open = |path: &PathBuf| File::options().create(true).append(true).open(path);
        let file = options.out.as_ref().map(open).transpose().map_err(to_message)?;
        let mut report = Self(file);
        report.line("# gpu-check")?;
        if options.target.is_dry {
            report.line("A dry run: sizes are small, and times are measured on the host and meaningless.")?;
        }
        report.line(&format!("command: gpu_check {}", args.join(" ")))?;
        // The driver's version, if the machine reports it.
        let version = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
        version.lines().take(1).try_for_each(|line| report.line(line))?;
        Ok(report)
    }

    #[expect(clippy::print_stdout, reason = "a report for people")]
    fn line(&mut self, line: &str) -> Result<(), String> {
        println!("{line}");
        self.0.as_mut().map_or(Ok(()), |file| writeln!(file, "{line}")).map_err(to_message)
    }
}

fn to_message(error: impl std::error::Error) -> String {
    error.to_string()
}
