//! [`TokenizePool`]: threads that tokenize prompts, and others that check grammars. Their queues are bounded
//! and fair between API keys.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::{fmt, io, thread};

use service::metrics::{Gauge, GaugeGuard};
use service::shutdown::Lifetime;
use tokio::sync::oneshot;

use super::jobs::{Job, JobQueue};
use crate::error::RouterError;

/// Maximum number of queued jobs.
const TOKENIZE_QUEUE_MAX: usize = 1_024;

/// Maximum number of queued grammars.
const GRAMMAR_QUEUE_MAX: usize = 64;

/// Number of threads that check grammars: one slow grammar leaves the other to the other clients.
const GRAMMAR_THREADS: usize = 2;

/// The tokenizer threads.
#[derive(Clone)]
pub struct TokenizePool {
    prompts: Threads,
    /// Check grammars, which takes up to 10 s: on other threads, so that it delays no prompt.
    grammars: Threads,
    /// Number of queued jobs.
    queue: Gauge,
}

/// Threads and the queue of their jobs. The threads end with the last handle.
#[derive(Clone)]
struct Threads {
    jobs: Arc<JobQueue>,
    /// Wakes a thread. There are at least as many messages as queued jobs.
    wake: Sender<()>,
    /// Name of the queue in errors.
    what: &'static str,
}

impl fmt::Debug for TokenizePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenizePool").finish_non_exhaustive()
    }
}

impl TokenizePool {
    /// Starts `num_threads` threads for prompts and [`GRAMMAR_THREADS`], which end when the last handle is
    /// dropped.
    pub fn start(num_threads: usize, lifetime: &Lifetime, queue: Gauge) -> io::Result<Self> {
        let start = |num_threads, max_jobs, name: &'static str, what| {
            let jobs = Arc::new(JobQueue::new(max_jobs));
            let (wake, woken) = channel();
            let woken = Arc::new(Mutex::new(woken));
            for thread_idx in 0..num_threads {
                let (jobs, woken) = (Arc::clone(&jobs), Arc::clone(&woken));
                let guard = lifetime.thread(name);
                let thread =
                    thread::Builder::new().name(format!("{name}-{thread_idx}")).stack_size(text::STACK_BYTES);
                thread.spawn(move || {
                    let _guard = guard;
                    while wait(&woken) {
                        // A job that gave way to another leaves a message without a job.
                        if let Some(job) = jobs.pop() {
                            job();
                        }
                    }
                })?;
            }
            Ok::<_, io::Error>(Threads { jobs, wake, what })
        };
        let prompts = start(num_threads.max(1), TOKENIZE_QUEUE_MAX, "tokenize", "the tokenizer's queue")?;
        let grammars =
            start(GRAMMAR_THREADS, GRAMMAR_QUEUE_MAX, "check-grammar", "the queue of grammars to check")?;
        Ok(Self { prompts, grammars, queue })
    }

    /// Runs `job` on one of the threads, in the turn of API key `key`. A panic fails only this call.
    ///
    /// Cancel safety: if the future is dropped while the job runs, its result is discarded.
    pub async fn run<T, F>(&self, key: u64, job: F) -> Result<T, RouterError>
    where
        T: Send + 'static,
        F: FnOnce() -> Result<T, RouterError> + Send + 'static,
    {
        self.run_on(&self.prompts, key, job).await
    }

    /// Runs the check of a grammar ([`grammar::check`], which is over within [`grammar::COMPILE_MAX`]). Other
    /// clients' prompts do not wait for it, only their grammars.
    ///
    /// Cancel safety: as of [`Self::run`].
    pub async fn check_grammar<F>(&self, key: u64, check: F) -> Result<(), RouterError>
    where
        F: FnOnce() -> Result<(), RouterError> + Send + 'static,
    {
        self.run_on(&self.grammars, key, check).await
    }

    async fn run_on<T, F>(&self, threads: &Threads, key: u64, job: F) -> Result<T, RouterError>
    where
        T: Send + 'static,
        F: FnOnce() -> Result<T, RouterError> + Send + 'static,
    {
        let (reply, result) = oneshot::channel();
        let queue_guard = GaugeGuard::new(self.queue.clone());
        let job: Job = Box::new(move || {
            drop(queue_guard);
            // The client disconnected while the job was queued.
            if reply.is_closed() {
                return;
            }
            let result = catch_unwind(AssertUnwindSafe(job))
                .unwrap_or_else(|_| Err(RouterError::Internal("the tokenizer panicked".into())));
            if reply.send(result).is_err() {
                tracing::debug!("the client disconnected while its prompt was tokenized");
            }
        });
        let overloaded = RouterError::Overloaded { what: threads.what };
        if threads.jobs.push(key, job).is_err() || threads.wake.send(()).is_err() {
            return Err(overloaded);
        }
        // A dropped job gave way to one of another key.
        result.await.unwrap_or(Err(overloaded))
    }
}

/// Waits for a message; false once all handles are dropped.
fn wait(woken: &Mutex<Receiver<()>>) -> bool {
    // Poisoned means that another thread panicked between two jobs; the receiver is still valid.
    woken.lock().unwrap_or_else(PoisonError::into_inner).recv().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_fails_one_job_and_the_pool_keeps_running() {
        let pool = TokenizePool::start(1, &Lifetime::new(), Gauge::default()).unwrap();
        let broken: Result<(), _> = pool.run(1, || panic!("a tokenizer with a bug")).await;
        assert!(matches!(broken, Err(RouterError::Internal(_))));
        assert_eq!(pool.run(1, || Ok(7)).await, Ok(7));
    }

    /// Occupies all threads until the sender is dropped.
    fn block(threads: &Threads, num_threads: usize) -> Sender<()> {
        let (release, blocked) = channel::<()>();
        let blocked = Arc::new(Mutex::new(blocked));
        let (started, running) = channel();
        for _ in 0..num_threads {
            let (blocked, started) = (Arc::clone(&blocked), started.clone());
            let job = move || {
                started.send(()).unwrap();
                assert!(blocked.lock().unwrap().recv().is_err(), "it waits until the end");
            };
            threads.jobs.push(0, Box::new(job)).unwrap();
            threads.wake.send(()).unwrap();
        }
        (0..num_threads).for_each(|_| running.recv().unwrap());
        release
    }

    #[tokio::test]
    async fn a_full_queue_refuses_the_key_that_filled_it_and_serves_others() {
        let queued = Gauge::default();
        let pool = TokenizePool::start(1, &Lifetime::new(), queued.clone()).unwrap();
        let release = block(&pool.prompts, 1);
        let jobs: Vec<_> = (0..TOKENIZE_QUEUE_MAX).map(|i| pool.run(1, move || Ok(i))).collect();
        let mut jobs = Box::pin(futures::future::join_all(jobs));
        assert!(futures::poll!(&mut jobs).is_pending(), "all are queued");
        assert!(matches!(pool.run(1, || Ok(())).await, Err(RouterError::Overloaded { .. })));
        let mut other = Box::pin(pool.run(2, || Ok("served")));
        assert!(futures::poll!(&mut other).is_pending(), "the first key has given way");
        drop(release);
        assert_eq!(other.await, Ok("served"));
        let (last, rest) = (TOKENIZE_QUEUE_MAX - 1, jobs.await);
        assert!(matches!(rest[last], Err(RouterError::Overloaded { .. })), "its newest job");
        assert!(rest[..last].iter().enumerate().all(|(i, result)| *result == Ok(i)));
        assert_eq!(queued.get(), 0);
    }

    #[tokio::test]
    async fn prompts_do_not_wait_for_grammars() {
        let pool = TokenizePool::start(1, &Lifetime::new(), Gauge::default()).unwrap();
        let release = block(&pool.grammars, GRAMMAR_THREADS);
        assert_eq!(pool.run(1, || Ok(7)).await, Ok(7));
        drop(release);
        assert_eq!(pool.check_grammar(1, || Ok(())).await, Ok(()));
    }

    #[tokio::test]
    async fn threads_end_with_the_last_handle() {
        let lifetime = Lifetime::new();
        drop(TokenizePool::start(2, &lifetime, Gauge::default()).unwrap());
        let outcome = lifetime.shut_down(std::time::Duration::from_secs(5)).await;
        assert_eq!(outcome, service::shutdown::ShutdownOutcome::Clean);
    }
}
