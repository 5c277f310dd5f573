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
const CALM: Duration = Duration::from_micros(50);

/// Minimum time between two samples of a thread's run-queue delay; a sample takes about a microsecond.
const ASK_EVERY: Duration = Duration::from_millis(8);

/// The cores count as contended if a thread was delayed for at least this share of the time.
const CROWD_PERCENT: u64 = 10;

/// How long contention is assumed after it was last seen.
const HOLD: Duration = Duration::from_millis(50);

/// Spin iterations per read of the clock, which costs about as much as one of them.
const PAUSES: u32 = 16;

/// Spin-then-block policy, shared by threads that wait for each other: tracks whether their cores are
/// contended.
#[derive(Debug)]
pub struct Patience {
    born: Instant,
    /// Nanoseconds after `born`.
    crowded_until: AtomicU64,
}

impl Default for Patience {
    fn default() -> Self {
        Self { born: Instant::now(), crowded_until: AtomicU64::new(0) }
    }
}

impl Patience {
    /// Spins until `ready` is true or the spin limit is reached. Returns whether it was ready.
    pub fn look(&self, ready: impl Fn() -> bool) -> bool {
        let mut begin = None;
        loop {
            for _ in 0..PAUSES {
                if ready() {
                    return true;
                }
                std::hint::spin_loop();
            }
            let now = Instant::now();
            let begin = *begin.get_or_insert(now);
            if now - begin >= self.at(now) {
                return ready();
            }
        }
    }

    /// The spin limit at this moment.
    fn at(&self, now: Instant) -> Duration {
        let lost = LOST.with_borrow_mut(|lost| lost.percent_since_asked(now));
        let now = now.saturating_duration_since(self.born).as_nanos() as u64;
        if lost.is_some_and(|percent| percent >= CROWD_PERCENT) {
            self.crowded_until.store(now + HOLD.as_nanos() as u64, Ordering::Relaxed);
        }
        if now < self.crowded_until.load(Ordering::Relaxed) { Duration::ZERO } else { CALM }
    }
}

thread_local! {
    static LOST: RefCell<LostTime> = RefCell::new(LostTime::of_this_thread());
}

/// Run-queue delay of this thread: time that it was runnable while another had its core.
struct LostTime {
    /// Linux: nanoseconds on a core, nanoseconds runnable without one, and number of time slices. `None` if
    /// the system does not provide it.
    schedstat: Option<File>,
    asked: Instant,
    total_ns: u64,
}

impl LostTime {
    fn of_this_thread() -> Self {
        let schedstat = File::open("/proc/thread-self/schedstat").ok();
        let mut this = Self { schedstat, asked: Instant::now(), total_ns: 0 };
        this.total_ns = this.read().unwrap_or(0);
        this
    }

    /// Delay since the last sample, in percent of the time; `None` if that sample is too recent, or if the
    /// system does not report it.
    fn percent_since_asked(&mut self, now: Instant) -> Option<u64> {
        let since = now.saturating_duration_since(self.asked);
        if since < ASK_EVERY {
            return None;
        }
        let total_ns = self.read()?;
        let lost = total_ns.saturating_sub(self.total_ns);
        (self.asked, self.total_ns) = (now, total_ns);
        Some(lost * 100 / since.as_nanos() as u64)
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
    fn a_crowd_ends_patience_until_it_is_over() {
        let (patience, mut file) = (Patience::default(), tempfile::tempfile().unwrap());
        let after = |ms| patience.born + Duration::from_millis(ms);
        let schedstat = Some(file.try_clone().unwrap());
        LOST.set(LostTime { schedstat, asked: patience.born, total_ns: 0 });
        // 16 ms on a core and 4 ms runnable; the first call is too early to sample.
        file.write_all(b"16000000 4000000 7\n").unwrap();
        assert_eq!(patience.at(after(7)), CALM);
        assert_eq!(patience.at(after(20)), Duration::ZERO);
        // No delay since.
        assert_eq!(patience.at(after(69)), Duration::ZERO);
        assert_eq!(patience.at(after(70)), CALM);
        // A tenth of 10 ms is contention, less is not.
        let mut lost = LostTime { schedstat: Some(file), asked: after(0), total_ns: 3_000_001 };
        assert_eq!(lost.percent_since_asked(after(10)), Some(9));
    }

    #[test]
    fn what_is_ready_is_seen_and_what_is_not_is_given_up() {
        let patience = Patience::default();
        assert!(patience.look(|| true));
        assert!(!patience.look(|| false));
    }
}
