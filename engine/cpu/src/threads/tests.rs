//! Stress tests of the thread pool: every task runs once, blocked threads are woken, a panic is passed on,
//! nothing hangs. The test run's time limit detects a lost wake-up.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::*;

/// More threads than most machines that run this have cores, so that some are descheduled.
const THREADS: usize = 5;

#[test]
fn every_task_runs_once_before_the_job_ends() {
    let pool = start_pool(THREADS - 1, |_| Ok(())).unwrap();
    let done: Vec<AtomicUsize> = (0..97).map(|_| AtomicUsize::new(0)).collect();
    for job in 0..4_000 {
        let num_tasks = [1, 2, 3, 7, 16, 97][job % 6];
        pool.run(num_tasks, &|task| {
            // Now and then a task is long, and waiting threads block.
            if (job + task) % 500 == 3 {
                std::thread::sleep(Duration::from_micros(300));
            }
            done[task].fetch_add(1, Ordering::Relaxed);
        });
        for (task, count) in done.iter().enumerate() {
            let expected = usize::from(task < num_tasks);
            assert_eq!(count.swap(0, Ordering::Relaxed), expected, "task {task} of {num_tasks}, job {job}");
        }
        // And now and then there is no work for a while.
        if job % 400 == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn nested_and_concurrent_jobs_complete() {
    let pool = start_pool(THREADS - 1, |_| Ok(())).unwrap();
    let count = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..200 {
                    pool.run(4, &|_| {
                        pool.run(3, &|_| {
                            count.fetch_add(1, Ordering::Relaxed);
                        });
                    });
                }
            });
        }
    });
    assert_eq!(count.into_inner(), 3 * 200 * 4 * 3);
}

#[test]
fn a_panic_is_resumed_after_all_tasks_and_the_pool_stays_usable() {
    let pool = start_pool(THREADS - 1, |_| Ok(())).unwrap();
    for round in 0..20 {
        let others = AtomicUsize::new(0);
        let run = || {
            pool.run(30, &|task| {
                assert!(task != round, "task {task}");
                others.fetch_add(1, Ordering::Relaxed);
            });
        };
        let panic = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
        assert_eq!(panic.downcast_ref::<String>().unwrap(), &format!("task {round}"));
        assert_eq!(others.into_inner(), 29);
        let sum = AtomicUsize::new(0);
        pool.run(10, &|task| {
            sum.fetch_add(task, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 45);
    }
}

#[test]
fn results_are_ordered_and_ranges_cover_all_items() {
    for count in [1, THREADS] {
        let threads = Threads::always_parallel(count).unwrap();
        let items: Vec<usize> = (0..1_000).collect();
        assert_eq!(
            threads.map(&items, |item| item * 3),
            items.iter().map(|item| item * 3).collect::<Vec<_>>()
        );
        for (items, grain) in [(0, 1), (1, 1), (31, 32), (33, 32), (1_000, 7)] {
            let mut seen = vec![0u8; items];
            let shared = SharedSliceMut::new(&mut seen);
            threads.for_ranges(items, grain, 1 << 30, |range| {
                assert!(range.start % grain == 0 && (range.end % grain == 0 || range.end == items));
                // SAFETY: the test checks that ranges are disjoint; no two threads write here at once.
                unsafe { shared.slice_mut(range) }.iter_mut().for_each(|seen| *seen += 1);
            });
            assert!(seen.iter().all(|&seen| seen == 1), "{items} by {grain}");
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn each_pinned_thread_has_its_own_core() {
    // In a separate thread, since it stays pinned.
    let cores = allowed_cores().unwrap();
    let count = cores.len().min(3);
    let found = std::thread::scope(|scope| {
        let pinned = scope.spawn(|| {
            let mut threads = Threads::always_parallel(count).unwrap();
            threads.pin(&cores).unwrap();
            // Every thread takes one task: none continues before all have arrived.
            let all_started = std::sync::Barrier::new(count);
            threads.map(&vec![(); count], |()| {
                all_started.wait();
                allowed_cores().unwrap()
            })
        });
        pinned.join().unwrap()
    });
    let mut found = found.concat();
    found.sort_unstable();
    assert_eq!(found, cores[..count], "one core each");
    assert_eq!(allowed_cores().unwrap(), cores, "other threads stay unpinned");

    let error = Threads::always_parallel(2).unwrap().pin(&cores[..1]).unwrap_err().to_string();
    assert!(error.contains("threads is 2") && error.contains("there are 1"), "{error}");
}
