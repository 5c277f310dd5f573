//! How long a thread looks before it sleeps: as long as a sleep would cost, or not at all while others want the cores.
//!
//! Whoever looks as long as falling asleep and waking up take loses at most twice what the best choice would have
//! (Karlin, Li, Manasse, Owicki 1991). That holds where nobody else wants the core. Where somebody does, the thread that is
//! waited for is often one that was put aside, for milliseconds, and it runs again the sooner its waiting peers leave their
//! cores to it: then a thread that waits sleeps at once. Which of the two it is the system says: how long a thread stood ready
//! and another had its core. How often that happened says nothing, for the system's own chores do it a hundred times a second.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What a sleep costs, the ringing of the bell included: 32 us were measured (docs/adr/0019-own-thread-pool.md).
const CALM: Duration = Duration::from_micros(50);

/// A thread asks the system at most so often, which takes about a microsecond.
const ASK_EVERY: Duration = Duration::from_millis(8);

/// Others want the cores where a thread has lost so many hundredths of its time to them.
const CROWD_PERCENT: u64 = 10;

/// How long a crowd is believed in after the last sign of it.
const HOLD: Duration = Duration::from_millis(50);

/// Pauses between two looks at the clock, which costs about as much as one of them.
const PAUSES: u32 = 16;

/// What threads that wait for each other know of the others on their cores.
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
    /// Looks until `ready` says so or patience is at its end; whether it did.
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

    /// How long to look, at this moment.
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

/// How long this thread has stood ready while another had its core.
struct LostTime {
    /// Linux: nanoseconds on a core, nanoseconds ready without one, and how often. `None` where the system does not say.
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

    /// Hundredths of the time since the last answer; nothing where that was a moment ago, or the system does not say.
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
        // On a core 16 ms and ready 4 ms; the first look is too early to ask.
        file.write_all(b"16000000 4000000 7\n").unwrap();
        assert_eq!(patience.at(after(7)), CALM);
        assert_eq!(patience.at(after(20)), Duration::ZERO);
        // Nothing was lost since.
        assert_eq!(patience.at(after(69)), Duration::ZERO);
        assert_eq!(patience.at(after(70)), CALM);
        // A tenth of 10 ms is a crowd, less is none.
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
