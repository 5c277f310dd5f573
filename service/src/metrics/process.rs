//! Metrics of every process, whatever its role: what was built, and what the process uses of its machine. The
//! latter have the names of Prometheus' client libraries.

use std::fs;
use std::time::Duration;

use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage};
use nix::sys::time::TimeVal;

use super::{CounterName, EncodeLabelSet, GaugeName, LabelValues, Metrics};
use crate::release;

const BUILD_INFO: GaugeName =
    GaugeName::new("outrider_build_info", "Version and build of this program, in labels; the value is 1")
        .with_labels(&[
            ("version", LabelValues::Described("such as 0.1.0")),
            ("build", LabelValues::Described("such as a commit; empty if the build has no name")),
        ]);
const RESIDENT: GaugeName =
    GaugeName::new("process_resident_memory_bytes", "Resident memory of this process");
const CPU: CounterName =
    CounterName::new("process_cpu_seconds_total", "User and system CPU time of this process");
const OPEN_FDS: GaugeName = GaugeName::new("process_open_fds", "Open file descriptors");
const MAX_FDS: GaugeName = GaugeName::new("process_max_fds", "Limit on open file descriptors");
const START_TIME: GaugeName =
    GaugeName::new("process_start_time_seconds", "Unix time at which this process started");

/// Clock ticks per second in `/proc/self/stat`: `USER_HZ`, which is 100 on x86-64 and 64-bit ARM.
const TICKS_PER_SECOND: f64 = 100.0;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BuildLabels {
    version: &'static str,
    build: &'static str,
}

/// Registers the metrics of a process. A value that cannot be read has no series.
pub(super) fn register(metrics: &Metrics) {
    let build = BuildLabels { version: release::VERSION, build: release::BUILD };
    metrics.gauge_family(&BUILD_INFO).get_or_create(&build).set(1);
    metrics.scraped_gauge(&RESIDENT, || resident_bytes(&read("status")?));
    metrics.scraped_counter(&CPU, cpu_seconds);
    metrics.scraped_gauge(&OPEN_FDS, open_descriptors);
    metrics.scraped_gauge(&MAX_FDS, || getrlimit(Resource::RLIMIT_NOFILE).ok().map(|(soft, _)| soft as f64));
    metrics.scraped_gauge(&START_TIME, || {
        let boot = boot_time(&fs::read_to_string("/proc/stat").ok()?)?;
        Some(boot + started_after_boot(&read("stat")?)?)
    });
}

fn read(file: &str) -> Option<String> {
    fs::read_to_string(format!("/proc/self/{file}")).ok()
}

/// The line `VmRSS:   1234 kB` of `/proc/self/status`.
fn resident_bytes(status: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some((kib * 1_024) as f64)
}

fn cpu_seconds() -> Option<f64> {
    let usage = getrusage(UsageWho::RUSAGE_SELF).ok()?;
    let time = |value: TimeVal| {
        Duration::from_secs(value.tv_sec().unsigned_abs())
            + Duration::from_micros(value.tv_usec().unsigned_abs())
    };
    Some((time(usage.user_time()) + time(usage.system_time())).as_secs_f64())
}

/// The one that reads the directory is not counted.
fn open_descriptors() -> Option<f64> {
    let entries = fs::read_dir("/proc/self/fd").ok()?.count();
    Some(entries.saturating_sub(1) as f64)
}

/// The line `btime 1234` of `/proc/stat`, in Unix seconds.
fn boot_time(stat: &str) -> Option<f64> {
    let seconds: u64 = stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    Some(seconds as f64)
}

/// Seconds from the boot to the start of a process: the 22nd field of its `stat`. The second field is the
/// program's name in parentheses, which may contain both spaces and parentheses.
fn started_after_boot(stat: &str) -> Option<f64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    let ticks: u64 = after_name.split_whitespace().nth(22 - 3)?.parse().ok()?;
    Some(ticks as f64 / TICKS_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Exposition;
    use crate::unix_time;

    #[test]
    fn what_the_kernel_writes_is_read() {
        assert_eq!(resident_bytes("Name:\tx\nVmHWM:\t  9 kB\nVmRSS:\t    1234 kB\n"), Some(1_263_616.0));
        assert_eq!(resident_bytes("Name:\tx\n"), None);
        assert_eq!(boot_time("cpu  1 2 3\nbtime 1700000000\nprocesses 5\n"), Some(1_700_000_000.0));
        assert_eq!(boot_time("cpu  1 2 3\n"), None);
        let stat = "7 (a b) c) S 1 7 7 0 -1 4194304 1 0 0 0 5 6 0 0 20 0 3 0 4250 1000 50 99";
        assert_eq!(started_after_boot(stat), Some(42.5));
        assert_eq!(started_after_boot("7 (a) S 1"), None);
    }

    #[test]
    fn a_scrape_has_the_build_and_what_this_process_uses() {
        fn value_in(page: &str, name: &str) -> f64 {
            let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.unwrap_or_else(|| panic!("{name} is not in {page}")).parse().unwrap()
        }
        let metrics = Metrics::of_process();
        let page = metrics.encode(Exposition::Prometheus);
        let value = |name: &str| value_in(&page, name);
        let build =
            format!("outrider_build_info{{version=\"{}\",build=\"{}\"}}", release::VERSION, release::BUILD);
        assert_eq!(value(&build), 1.0);
        // This program alone has megabytes.
        assert!(value("process_resident_memory_bytes") > 1e6, "{page}");
        assert!(page.contains("# TYPE process_cpu_seconds_total counter\n"), "{page}");
        assert!((0.0..=value("process_max_fds")).contains(&value("process_open_fds")), "{page}");
        let now = unix_time::since_unix_epoch().as_secs_f64();
        let started = value("process_start_time_seconds");
        // Both clocks are rounded to seconds. No test runs for a day.
        assert!((now - 86_400.0..=now + 1.0).contains(&started), "{started} at {now}: {page}");
        let before = value("process_cpu_seconds_total");
        while cpu_seconds().unwrap() <= before {
            std::hint::spin_loop();
        }
        let later = metrics.encode(Exposition::OpenMetrics);
        assert!(value_in(&later, "process_cpu_seconds_total") > before, "it is read at each scrape");
    }
}
