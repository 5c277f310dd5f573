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

use super::event_count::EventCount;
use super::spin_policy::SpinPolicy;

/// State shared by all threads of a pool.
#[derive(Default)]
struct PoolState {
    /// Written by the leader, while no task is in progress.
    job: UnsafeCell<Option<Job>>,
    /// Number of tasks not yet taken. The next task to take is `num_tasks - remaining`.
    remaining: CachePadded<AtomicUsize>,
    /// Number of tasks not yet done.
    unfinished: CachePadded<AtomicUsize>,
    /// Notified when there are tasks to take, or when the pool shuts down.
    work_available: EventCount,
    /// Notified when the last task is done.
    job_done: EventCount,
    spin_policy: SpinPolicy,
    /// Payload of the first task that panicked.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    shutdown: AtomicBool,
}

/// A value that all threads write, on its own cache lines to avoid false sharing.
#[derive(Default)]
#[repr(align(128))]
struct CachePadded<T>(T);

/// Calls of `run` with 0..`num_tasks`.
struct Job {
    run: *const (dyn Fn(usize) + Sync),
    num_tasks: usize,
}

// SAFETY: `job` is written only by the holder of `ThreadPool::leader` while `unfinished` is 0, and read only
// between taking a task and counting it as done, when `unfinished` is above 0; the closure that it points to
// is Sync.
unsafe impl Sync for PoolState {}
// SAFETY: as above; nothing in it is tied to one thread.
unsafe impl Send for PoolState {}

/// The pool's threads, without the leader. They end when this is dropped.
#[derive(Default)]
pub(super) struct ThreadPool {
    state: Arc<PoolState>,
    /// Held by the leader of the current job.
    leader: Mutex<()>,
    threads: Vec<JoinHandle<()>>,
}

impl ThreadPool {
    /// Starts one more thread.
    pub(super) fn spawn_thread(&mut self) -> std::io::Result<()> {
        let state = Arc::clone(&self.state);
        let named = std::thread::Builder::new().name(format!("engine-{}", self.len()));
        self.threads.push(named.spawn(move || state.run_thread())?);
        Ok(())
    }

    /// Number of threads that work on a job, the leader included.
    pub(super) fn len(&self) -> usize {
        self.threads.len() + 1
    }

    /// Runs tasks 0..`num_tasks` on the threads that are available, and returns when all are done. The panic
    /// of a task is resumed here. If called from a task, or while another thread is the leader, it runs the
    /// tasks in order on the calling thread.
    pub(super) fn run(&self, num_tasks: usize, run: &(dyn Fn(usize) + Sync)) {
        let _leader = match self.leader.try_lock() {
            Ok(leader) => leader,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return (0..num_tasks).for_each(run),
        };
        self.state.publish(num_tasks, run);
        while self.state.run_next_task() {}
        let state = &self.state;
        state.job_done.wait_until(&state.spin_policy, || state.unfinished.0.load(Ordering::Acquire) == 0);
        let panic = state.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.state.shutdown.store(true, Ordering::Release);
        self.state.work_available.notify_all();
        for thread in self.threads.drain(..) {
            // Panics of tasks were caught, so the thread itself has not panicked.
            drop(thread.join());
        }
    }
}

impl PoolState {
    /// Publishes a job to all threads. The caller is the leader, and waits until the job is done before `run`
    /// is dropped.
    fn publish(&self, num_tasks: usize, run: &(dyn Fn(usize) + Sync)) {
        // SAFETY: this only drops the lifetime; `ThreadPool::run` keeps `run` borrowed until every task
        // is done.
        let run =
            unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(run) };
        // SAFETY: the caller is the leader and no task is in progress, so no other thread reads the job.
        unsafe { *self.job.get() = Some(Job { run, num_tasks }) };
        self.unfinished.0.store(num_tasks, Ordering::Relaxed);
        self.remaining.0.store(num_tasks, Ordering::Release);
        self.work_available.notify_all();
    }

    /// Takes a task and runs it; returns false if none was left.
    fn run_next_task(&self) -> bool {
        let decrement = |remaining: usize| remaining.checked_sub(1);
        let Ok(remaining) = self.remaining.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, decrement)
        else {
            return false;
        };
        // SAFETY: the task counts as unfinished until the decrement below, so the job does not change and its
        // closure lives.
        let (run, task) = unsafe {
            let job = (*self.job.get()).as_ref().expect("tasks are left only while a job is published");
            (&*job.run, job.num_tasks - remaining)
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(task))) {
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
        }
        // From here on the closure may be dropped.
        if self.unfinished.0.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.job_done.notify_all();
        }
        true
    }

    /// Loop of a pool thread, until the pool shuts down.
    fn run_thread(&self) {
        loop {
            while self.run_next_task() {}
            let shutdown = || self.shutdown.load(Ordering::Acquire);
            self.work_available
                .wait_until(&self.spin_policy, || self.remaining.0.load(Ordering::Relaxed) > 0 || shutdown());
            if shutdown() {
                return;
            }
        }
    }
}

impl std::fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ThreadPool").field("len", &self.len()).finish_non_exhaustive()
    }
}
