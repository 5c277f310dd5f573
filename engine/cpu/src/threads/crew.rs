//! A thread pool that lives as long as an engine and runs one job after another; a job is a number of tasks.
//! The thread that submits a job (the leader) works on it too. It waits for tasks that were started, never
//! for idle threads: a thread that the system has descheduled only delays the job if it is in a task.
//!
//! A job's closure may be accessed only between taking a task and counting it as done. That keeps the borrow
//! alive, and all the unsafe code here relies on it.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::thread::JoinHandle;

use super::bell::Bell;
use super::patience::Patience;

/// State shared by all threads of a pool.
#[derive(Default)]
struct Board {
    /// Written by the leader, while no task is in progress.
    section: UnsafeCell<Option<Section>>,
    /// Number of tasks not yet taken. The next task to take is `pieces - left`.
    left: OwnLine<AtomicUsize>,
    /// Number of tasks not yet done.
    unfinished: OwnLine<AtomicUsize>,
    /// Notified when there are tasks to take, or when the pool shuts down.
    work: Bell,
    /// Notified when the last task is done.
    done: Bell,
    patience: Patience,
    /// Payload of the first task that panicked.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    ended: AtomicBool,
}

/// A value that all threads write, on its own cache lines to avoid false sharing.
#[derive(Default)]
#[repr(align(128))]
struct OwnLine<T>(T);

/// Calls of `run` with 0..`pieces`.
struct Section {
    run: *const (dyn Fn(usize) + Sync),
    pieces: usize,
}

// SAFETY: `section` is written only by the holder of `Crew::leading` while `unfinished` is 0, and read only
// between taking a task and counting it as done, when `unfinished` is above 0; the closure that it points to
// is Sync.
unsafe impl Sync for Board {}
// SAFETY: as above; nothing in it is tied to one thread.
unsafe impl Send for Board {}

/// The pool's threads, without the leader. They end when this is dropped.
#[derive(Default)]
pub(super) struct Crew {
    board: Arc<Board>,
    /// Held by the leader of the current job.
    leading: Mutex<()>,
    threads: Vec<JoinHandle<()>>,
}

impl Crew {
    /// Starts one more thread.
    pub(super) fn hire(&mut self) -> std::io::Result<()> {
        let board = Arc::clone(&self.board);
        let named = std::thread::Builder::new().name(format!("engine-{}", self.len()));
        self.threads.push(named.spawn(move || board.serve())?);
        Ok(())
    }

    /// Number of threads that work on a job, the leader included.
    pub(super) fn len(&self) -> usize {
        self.threads.len() + 1
    }

    /// Runs tasks 0..`pieces` on the threads that are available, and returns when all are done. The panic
    /// of a task is resumed here. If called from a task, or while another thread is the leader, it runs the
    /// tasks in order on the calling thread.
    pub(super) fn run(&self, pieces: usize, run: &(dyn Fn(usize) + Sync)) {
        let _leading = match self.leading.try_lock() {
            Ok(leading) => leading,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return (0..pieces).for_each(run),
        };
        self.board.begin(pieces, run);
        while self.board.take_piece() {}
        let board = &self.board;
        board.done.wait_until(&board.patience, || board.unfinished.0.load(Ordering::Acquire) == 0);
        let panic = board.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.board.ended.store(true, Ordering::Release);
        self.board.work.ring();
        for thread in self.threads.drain(..) {
            // Panics of tasks were caught, so the thread itself has not panicked.
            drop(thread.join());
        }
    }
}

impl Board {
    /// Publishes a job to all threads. The caller is the leader, and waits until the job is done before `run`
    /// is dropped.
    fn begin(&self, pieces: usize, run: &(dyn Fn(usize) + Sync)) {
        // SAFETY: this only drops the lifetime; `Crew::run` keeps `run` borrowed until every task
        // is done.
        let run =
            unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(run) };
        // SAFETY: the caller is the leader and no task is in progress, so no other thread reads the job.
        unsafe { *self.section.get() = Some(Section { run, pieces }) };
        self.unfinished.0.store(pieces, Ordering::Relaxed);
        self.left.0.store(pieces, Ordering::Release);
        self.work.ring();
    }

    /// Takes a task and runs it; returns false if none was left.
    fn take_piece(&self) -> bool {
        let less_one = |left: usize| left.checked_sub(1);
        let Ok(left) = self.left.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, less_one) else {
            return false;
        };
        // SAFETY: the task counts as unfinished until the decrement below, so the job does not change and its
        // closure lives.
        let (run, piece) = unsafe {
            let section =
                (*self.section.get()).as_ref().expect("tasks are left only while a job is published");
            (&*section.run, section.pieces - left)
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(piece))) {
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
        }
        // From here on the closure may be dropped.
        if self.unfinished.0.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.done.ring();
        }
        true
    }

    /// Loop of a pool thread, until the pool shuts down.
    fn serve(&self) {
        loop {
            while self.take_piece() {}
            let ended = || self.ended.load(Ordering::Acquire);
            self.work.wait_until(&self.patience, || self.left.0.load(Ordering::Relaxed) > 0 || ended());
            if ended() {
                return;
            }
        }
    }
}

impl std::fmt::Debug for Crew {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Crew").field("len", &self.len()).finish_non_exhaustive()
    }
}
