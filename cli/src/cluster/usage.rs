//! Reads `/proc` for programs that measure a cluster: CPU time and memory of a process, utilization of all
//! cores.

use std::io;
use std::time::{Duration, Instant};

/// Clock ticks per second in `/proc` and bytes per page: the same on every Linux target that we build for.
const TICKS_PER_SECOND: f64 = 100.0;
const PAGE_BYTES: f64 = 4_096.0;

/// A snapshot of a process's CPU time and of the machine's.
#[derive(Debug, Clone, Copy)]
pub struct CpuSnapshot {
    at: Instant,
    cpu: f64,
    busy: f64,
    all: f64,
}

/// The difference between two snapshots.
#[derive(Debug, Clone, Copy)]
pub struct CpuUsage {
    /// Wall-clock time.
    pub wall: Duration,
    /// CPU time of the process in user and kernel mode, seconds.
    pub cpu: f64,
    /// Share of the time of all cores that was not idle.
    pub busy: f64,
}

impl CpuSnapshot {
    /// Takes a snapshot now.
    pub fn at(pid: u32) -> io::Result<Self> {
        let (busy, all) = machine()?;
        Ok(Self { at: Instant::now(), cpu: process_cpu(pid)?, busy, all })
    }

    /// The difference from this snapshot to a later one.
    pub fn usage_until(&self, later: &Self) -> CpuUsage {
        CpuUsage {
            wall: later.at - self.at,
            cpu: later.cpu - self.cpu,
            busy: (later.busy - self.busy) / (later.all - self.all).max(1.0),
        }
    }
}

/// Resident memory of a process, MiB.
pub fn resident_mib(pid: u32) -> io::Result<f64> {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm"))?;
    let pages = number(statm.split_whitespace().nth(1), "/proc/PID/statm")?;
    Ok(pages * PAGE_BYTES / f64::from(1 << 20))
}

/// CPU time of a process, seconds.
pub fn process_cpu(pid: u32) -> io::Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let after_name = stat.rsplit_once(')').ok_or_else(|| io::Error::other("no name in /proc/PID/stat"))?.1;
    let field = |at: usize| number(after_name.split_whitespace().nth(at), "/proc/PID/stat");
    // Fields 14 and 15, counted from 1; the first after the name is field 3.
    Ok((field(11)? + field(12)?) / TICKS_PER_SECOND)
}

/// Busy and total clock ticks of the machine.
fn machine() -> io::Result<(f64, f64)> {
    let stat = std::fs::read_to_string("/proc/stat")?;
    let line = stat.lines().next().ok_or_else(|| io::Error::other("/proc/stat is empty"))?;
    let ticks: Vec<f64> = line.split_whitespace().skip(1).filter_map(|field| field.parse().ok()).collect();
    // The first 8 fields; guest time is already part of user time. Idle and I/O wait count as idle.
    let all: f64 = ticks.iter().take(8).sum();
    let idle: f64 = ticks.iter().skip(3).take(2).sum();
    Ok((all - idle, all))
}

fn number(field: Option<&str>, file: &str) -> io::Result<f64> {
    let number = field.and_then(|field| field.parse().ok());
    number.ok_or_else(|| io::Error::other(format!("{file} does not have the fields that it should")))
}
