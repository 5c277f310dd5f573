//! What the generator itself took of the machine it shares.

use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;
use serde::Serialize;

use super::driver::Run;
use super::statistics::percentile;

/// Measures the CPU time of this process.
#[derive(Debug)]
pub struct CpuMeter {
    began: Instant,
    cpu: Duration,
}

impl CpuMeter {
    /// From now on.
    pub fn start() -> Self {
        Self { began: Instant::now(), cpu: process_cpu() }
    }

    /// Time and CPU time since the start.
    pub fn read(&self) -> (Duration, Duration) {
        (self.began.elapsed(), process_cpu().saturating_sub(self.cpu))
    }
}

/// What the generator cost, and how well it kept up.
#[derive(Debug, Clone, Default)]
pub struct GeneratorCost {
    wall: Duration,
    cpu: Duration,
    noticed_after_ms: Vec<f64>,
    sent_after_ms: Vec<f64>,
    reads: usize,
    events: usize,
}

/// The same, for a report.
#[derive(Debug, Clone, Serialize)]
pub struct GeneratorReport {
    /// CPU time of this process for each server-sent event, microseconds.
    pub cpu_us_per_event: f64,
    /// CPU time of this process over time and cores.
    pub share_of_machine: f64,
    /// Of this machine.
    pub cores: usize,
    /// Events received while it was measured.
    pub events: usize,
    /// Reads of sockets; one may hold several events.
    pub reads: usize,
    /// Between the arrival of bytes at this host and their reading. Latencies count from the arrival.
    pub read_late_ms_p50: f64,
    /// The same, of the slowest.
    pub read_late_ms_p99: f64,
    /// Between the intended and the actual moment of sending. Latencies count from the intended one.
    pub sent_late_ms_p50: f64,
    /// The same, of the slowest.
    pub sent_late_ms_p99: f64,
}

impl GeneratorCost {
    /// Adds a run and what the meter, started with it, showed at its end.
    pub fn add(&mut self, run: &Run, (wall, cpu): (Duration, Duration)) {
        self.wall += wall;
        self.cpu += cpu;
        for exchange in &run.exchanges {
            let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
            self.noticed_after_ms.extend(exchange.reads.iter().map(|read| ms(read.noticed_after)));
            self.sent_after_ms.extend(exchange.sent.map(|sent| ms(sent - exchange.intended)));
            self.reads += exchange.reads.len();
            self.events += super::sse::events(&exchange.bytes).len();
        }
    }

    /// Sums up.
    pub fn report(&self) -> GeneratorReport {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let sorted = |values: &[f64]| {
            let mut values = values.to_vec();
            values.sort_by(f64::total_cmp);
            values
        };
        let (noticed, sent) = (sorted(&self.noticed_after_ms), sorted(&self.sent_after_ms));
        GeneratorReport {
            cpu_us_per_event: self.cpu.as_secs_f64() * 1e6 / self.events.max(1) as f64,
            share_of_machine: self.cpu.as_secs_f64()
                / (self.wall.as_secs_f64() * cores as f64).max(f64::MIN_POSITIVE),
            cores,
            events: self.events,
            reads: self.reads,
            read_late_ms_p50: percentile(&noticed, 50.0),
            read_late_ms_p99: percentile(&noticed, 99.0),
            sent_late_ms_p50: percentile(&sent, 50.0),
            sent_late_ms_p99: percentile(&sent, 99.0),
        }
    }
}

fn process_cpu() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_SELF).expect("a process may always ask for its own usage");
    let time = |value: TimeVal| {
        Duration::new(value.tv_sec().unsigned_abs(), 0)
            + Duration::from_micros(value.tv_usec().unsigned_abs())
    };
    time(usage.user_time()) + time(usage.system_time())
}
