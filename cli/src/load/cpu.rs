//! CPU usage of the generator itself on the machine that it shares.

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
    /// Starts measuring now.
    pub fn start() -> Self {
        Self { began: Instant::now(), cpu: process_cpu() }
    }

    /// Wall-clock time and CPU time since the start.
    pub fn read(&self) -> (Duration, Duration) {
        (self.began.elapsed(), process_cpu().saturating_sub(self.cpu))
    }
}

/// CPU cost of the generator, and its delays.
#[derive(Debug, Clone, Default)]
pub struct GeneratorCost {
    wall: Duration,
    cpu: Duration,
    read_delays_ms: Vec<f64>,
    send_delays_ms: Vec<f64>,
    reads: usize,
    events: usize,
}

/// The same as figures for a report.
#[derive(Debug, Clone, Serialize)]
pub struct GeneratorReport {
    /// CPU time of this process per server-sent event, microseconds.
    pub cpu_us_per_event: f64,
    /// CPU time of this process divided by wall-clock time and cores.
    pub share_of_machine: f64,
    /// Number of cores of this machine.
    pub cores: usize,
    /// Number of events received during the measurement.
    pub events: usize,
    /// Number of socket reads; one may contain several events.
    pub reads: usize,
    /// Delay between the arrival of bytes at this host and their reading. Latencies are measured from the
    /// arrival.
    pub read_late_ms_p50: f64,
    /// 99th percentile of the same delay.
    pub read_late_ms_p99: f64,
    /// Delay between the intended and the actual sending time. Latencies are measured from the intended time.
    pub sent_late_ms_p50: f64,
    /// 99th percentile of the same delay.
    pub sent_late_ms_p99: f64,
}

impl GeneratorCost {
    /// Adds a run and the reading at its end of the meter that was started with it.
    pub fn add(&mut self, run: &Run, (wall, cpu): (Duration, Duration)) {
        self.wall += wall;
        self.cpu += cpu;
        for exchange in &run.exchanges {
            let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
            self.read_delays_ms.extend(exchange.reads.iter().map(|read| ms(read.read_delay)));
            self.send_delays_ms.extend(exchange.sent.map(|sent| ms(sent - exchange.intended)));
            self.reads += exchange.reads.len();
            self.events += super::sse::events(&exchange.bytes).len();
        }
    }

    /// Summarizes the measurements.
    pub fn report(&self) -> GeneratorReport {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let sorted = |values: &[f64]| {
            let mut values = values.to_vec();
            values.sort_by(f64::total_cmp);
            values
        };
        let (noticed, sent) = (sorted(&self.read_delays_ms), sorted(&self.send_delays_ms));
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
    let usage = getrusage(UsageWho::RUSAGE_SELF).expect("reading the own process's usage cannot fail");
    let time = |value: TimeVal| {
        Duration::new(value.tv_sec().unsigned_abs(), 0)
            + Duration::from_micros(value.tv_usec().unsigned_abs())
    };
    time(usage.user_time()) + time(usage.system_time())
}
