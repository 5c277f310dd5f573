//! Decides how long a waiting thread spins before it blocks: as long as blocking would cost, or not at all
//! while other processes need the cores.
//!
//! A thread that spins for as long as blocking and waking up take loses at most twice the cost of the best
//! choice (Karlin, Li, Manasse, Owicki 1991). That holds if no other thread needs the core. If one does, the
//! thread that is waited for has often been descheduled, for milliseconds, and runs again sooner if its
//! waiting peers give up their cores: then a waiting thread blocks at once. The run-queue delay that the
//! system reports tells the two cases apart: how long a thread was runnable while another had its core. The
//! number of involuntary context switches does not, since the system's own housekeeping causes a hundred of
//! them per second.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Spin limit: about the cost of blocking and waking up, measured as 32 us
/// (docs/adr/0019-own-thread-pool.md).
const SPIN_LIMIT: Duration = Duration::from_micros(50);

/// Minimum time between two samples of a thread's run-queue delay; a sample takes about a microsecond.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(8);

/// The cores count as contended if a thread was delayed for at least this share of the time.
const CONTENTION_PERCENT: u64 = 10;

/// How long contention is assumed after it was last seen.
const CONTENTION_HOLD: Duration = Duration::from_millis(50);

/// Spin iterations per read of the clock, which costs about as much as one of them.
const SPINS_PER_CLOCK_READ: u32 = 16;

/// Spin-then-block policy, shared by threads that wait for each other: tracks whether their cores are
/// contended.
#[derive(Debug)]
pub struct SpinPolicy {
    created_at: Instant,
    /// Nanoseconds after `created_at`.
    contended_until: AtomicU64,
}

impl Default for SpinPolicy {
    fn default() -> Self {
        Self { created_at: Instant::now(), contended_until: AtomicU64::new(0) }
    }
}

impl SpinPolicy {
    /// Spins until `ready` is true or the spin limit is reached. Returns whether it was ready.
    pub fn spin_until(&self, ready: impl Fn() -> bool) -> bool {
        let mut begin = None;
        loop {
            for _ in 0..SPINS_PER_CLOCK_READ {
                if ready() {
                    return true;
                }
                std::hint::spin_loop();
            }
            let now = Instant::now();
            let begin = *begin.get_or_insert(now);
            if now - begin >= self.spin_limit(now) {
                return ready();
            }
        }
    }

    /// The spin limit at this moment.
    fn spin_limit(&self, now: Instant) -> Duration {
        let delay = RUN_DELAY.with_borrow_mut(|delay| delay.percent_since_sample(now));
        let now = now.saturating_duration_since(self.created_at).as_nanos() as u64;
        if delay.is_some_and(|percent| percent >= CONTENTION_PERCENT) {
            self.contended_until.store(now + CONTENTION_HOLD.as_nanos() as u64, Ordering::Relaxed);
        }
        if now < self.contended_until.load(Ordering::Relaxed) { Duration::ZERO } else { SPIN_LIMIT }
    }
}

thread_local! {
    static RUN_DELAY: RefCell<RunDelay> = RefCell::new(RunDelay::of_current_thread());
}

/// Run-queue delay of this thread: time that it was runnable while another had its core.
struct RunDelay {
    /// Linux: nanoseconds on a core, nanoseconds runnable without one, and number of time slices. `None` if
    /// the system does not provide it.
    schedstat: Option<File>,
    sampled_at: Instant,
    total_ns: u64,
}

impl RunDelay {
    fn of_current_thread() -> Self {
        let schedstat = File::open("/proc/thread-self/schedstat").ok();
        let mut this = Self { schedstat, sampled_at: Instant::now(), total_ns: 0 };
        this.total_ns = this.read().unwrap_or(0);
        this
    }

    /// Delay since the last sample, in percent of the time; `None` if that sample is too recent, or if the
    /// system does not report it.
    fn percent_since_sample(&mut self, now: Instant) -> Option<u64> {
        let since = now.saturating_duration_since(self.sampled_at);
        if since < SAMPLE_INTERVAL {
            return None;
        }
        let total_ns = self.read()?;
        let delay = total_ns.saturating_sub(self.total_ns);
        (self.sampled_at, self.total_ns) = (now, total_ns);
        Some(delay * 100 / since.as_nanos() as u64)
    }

    fn read(&self) -> Option<u64> {
        let mut text = [0; 64];
        let len = self.schedstat.as_ref()?.read_at(&mut text, 0).ok()?;
        std::str::from_utf8(&text[..len]).ok()?.split_whitespace().nth(1)?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn contention_disables_spinning_while_it_lasts() {
        let (spin_policy, mut file) = (SpinPolicy::default(), tempfile::tempfile().unwrap());
        let after = |ms| spin_policy.created_at + Duration::from_millis(ms);
        let schedstat = Some(file.try_clone().unwrap());
        RUN_DELAY.set(RunDelay { schedstat, sampled_at: spin_policy.created_at, total_ns: 0 });
        // 16 ms on a core and 4 ms runnable; the first call is too early to sample.
        file.write_all(b"16000000 4000000 7\n").unwrap();
        assert_eq!(spin_policy.spin_limit(after(7)), SPIN_LIMIT);
        assert_eq!(spin_policy.spin_limit(after(20)), Duration::ZERO);
        // No delay since.
        assert_eq!(spin_policy.spin_limit(after(69)), Duration::ZERO);
        assert_eq!(spin_policy.spin_limit(after(70)), SPIN_LIMIT);
        // A tenth of 10 ms is contention, less is not.
        let mut delay = RunDelay { schedstat: Some(file), sampled_at: after(0), total_ns: 3_000_001 };
        assert_eq!(delay.percent_since_sample(after(10)), Some(9));
    }

    #[test]
    fn spinning_ends_when_ready_or_at_the_limit() {
        let spin_policy = SpinPolicy::default();
        assert!(spin_policy.spin_until(|| true));
        assert!(!spin_policy.spin_until(|| false));
    }
}
