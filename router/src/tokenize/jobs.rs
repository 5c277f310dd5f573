//! [`JobQueue`]: jobs that wait for a thread. API keys take turns, and the key with the most jobs gives way
//! when the queue is full.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use scheduling::fair_queue::{NumberedQueue, Ticket};

pub(super) type Job = Box<dyn FnOnce() + Send>;

/// The queue is full, and no key has more jobs in it than the one that adds another.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct QueueFull;

/// A bounded queue of jobs.
pub(super) struct JobQueue {
    max_jobs: usize,
    jobs: Mutex<NumberedQueue<Job>>,
}

impl JobQueue {
    pub(super) fn new(max_jobs: usize) -> Self {
        Self { max_jobs, jobs: Mutex::default() }
    }

    /// Adds a job of an API key. If the queue is full, it replaces the newest job of the key with the most
    /// jobs, which is dropped.
    pub(super) fn push(&self, key: u64, job: Job) -> Result<(), QueueFull> {
        let mut jobs = self.jobs();
        let mut replaced = None;
        if jobs.len() >= self.max_jobs {
            replaced = Some(jobs.evict_for(key).ok_or(QueueFull)?);
        }
        // All jobs are of the same class, so their times do not matter.
        let now = Duration::ZERO;
        let ticket = Ticket { priority: 0, weight: 1.0, cost: 1.0, arrived: now, since: now };
        jobs.push(key, ticket, job);
        drop(jobs);
        // A job may hold a long prompt: freed without the lock.
        drop(replaced);
        Ok(())
    }

    /// Takes the job whose turn it is.
    pub(super) fn pop(&self) -> Option<Job> {
        let mut jobs = self.jobs();
        let (number, _) = jobs.peek(Duration::ZERO)?;
        jobs.serve(number)
    }

    fn jobs(&self) -> MutexGuard<'_, NumberedQueue<Job>> {
        // No job runs under the lock, so nothing is half updated.
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// A queue of `max_jobs` jobs, and what its jobs have done.
    fn queue(max_jobs: usize) -> (JobQueue, Arc<Mutex<Vec<&'static str>>>) {
        (JobQueue::new(max_jobs), Arc::default())
    }

    fn push(queue: &JobQueue, key: u64, done: &Arc<Mutex<Vec<&'static str>>>, name: &'static str) -> bool {
        let done = Arc::clone(done);
        queue.push(key, Box::new(move || done.lock().unwrap().push(name))).is_ok()
    }

    fn run_all(queue: &JobQueue, done: &Mutex<Vec<&'static str>>) -> Vec<&'static str> {
        while let Some(job) = queue.pop() {
            job();
        }
        std::mem::take(&mut *done.lock().unwrap())
    }

    #[test]
    fn keys_take_turns() {
        let (queue, done) = queue(8);
        for (key, name) in [(1, "a1"), (1, "a2"), (1, "a3"), (1, "a4"), (2, "b1"), (3, "c1"), (2, "b2")] {
            assert!(push(&queue, key, &done, name));
        }
        assert_eq!(run_all(&queue, &done), ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]);
    }

    #[test]
    fn the_key_with_the_most_jobs_gives_way_in_a_full_queue() {
        let (queue, done) = queue(4);
        for name in ["a1", "a2", "a3", "a4"] {
            assert!(push(&queue, 1, &done, name));
        }
        assert!(!push(&queue, 1, &done, "a5"), "nobody has more");
        assert!(push(&queue, 2, &done, "b1") && push(&queue, 2, &done, "b2"));
        assert!(!push(&queue, 2, &done, "b3"), "two and two are fair shares");
        assert_eq!(run_all(&queue, &done), ["a1", "b1", "a2", "b2"]);
    }
}
