//! The phases, the names of holders, and panics.

use std::time::Duration;

use super::{Lifetime, ShutdownOutcome, TerminationSignals};

/// A grace period that a passing test never uses up.
const AMPLE: Duration = Duration::from_secs(60);

#[tokio::test]
async fn shut_down_waits_for_tasks_that_watch_the_token() {
    let lifetime = Lifetime::new();
    let task = lifetime.spawn("watcher", lifetime.cancelled());
    assert!(!lifetime.is_cancelled());
    assert_eq!(lifetime.shut_down(AMPLE).await, ShutdownOutcome::Clean);
    assert!(lifetime.is_cancelled() && lifetime.is_draining());
    assert!(task.is_finished());
}

#[tokio::test]
async fn what_outlives_the_grace_period_is_named() {
    let lifetime = Lifetime::new();
    let stuck = [
        lifetime.spawn("stuck", std::future::pending::<()>()),
        lifetime.spawn("stuck", std::future::pending()),
    ];
    let _thread = lifetime.thread("engine");
    assert_eq!(lifetime.shut_down(Duration::ZERO).await, ShutdownOutcome::TimedOut);
    assert_eq!(lifetime.inner.tasks.holders().to_string(), "engine x1, stuck x2");
    stuck.iter().for_each(tokio::task::JoinHandle::abort);
    drop(_thread);
    assert_eq!(lifetime.shut_down(AMPLE).await, ShutdownOutcome::Clean, "an aborted task lets go as well");
}

#[tokio::test]
async fn drain_stops_intake_and_waits_for_work_but_cancels_nothing() {
    let lifetime = Lifetime::new();
    let _background = lifetime.spawn("background", lifetime.cancelled());
    let work = lifetime.work("stream");
    assert_eq!(lifetime.drain(Duration::ZERO).await, ShutdownOutcome::TimedOut);
    assert!(lifetime.is_draining() && !lifetime.is_cancelled());
    drop(work);
    assert_eq!(
        lifetime.drain(AMPLE).await,
        ShutdownOutcome::Clean,
        "background tasks do not hold a drain open"
    );
    assert_eq!(lifetime.shut_down(AMPLE).await, ShutdownOutcome::Clean);
}

#[tokio::test]
async fn a_child_ends_alone_and_a_parent_ends_and_awaits_its_children() {
    let parent = Lifetime::new();
    let (first, second) = (parent.child(), parent.child());
    let _first_task = first.spawn("first", first.cancelled());
    let second_task = second.spawn("second", second.cancelled());

    assert_eq!(first.shut_down(AMPLE).await, ShutdownOutcome::Clean);
    assert!(!parent.is_cancelled() && !second.is_cancelled());
    assert_eq!(parent.inner.tasks.holders().to_string(), "second x1");

    assert_eq!(parent.shut_down(AMPLE).await, ShutdownOutcome::Clean);
    assert!(second.is_cancelled() && second_task.is_finished());
}

#[tokio::test]
async fn a_panic_opens_the_gate_and_reaches_the_handle() {
    let lifetime = Lifetime::new();
    let panicking = lifetime.spawn("panicking", async { panic!("on purpose, by a test") });
    let error = panicking.await.expect_err("the panic reaches whoever awaits the task");
    assert!(error.is_panic());
    assert_eq!(lifetime.shut_down(AMPLE).await, ShutdownOutcome::Clean);
}

#[tokio::test]
async fn the_panic_of_an_essential_task_is_a_failure_of_the_whole_process() {
    let process = Lifetime::new();
    let connection = process.child();
    let failed = process.failed();
    assert_eq!(process.failed_task(), None);
    let unimportant = connection.spawn("request", async { panic!("on purpose, by a test") });
    assert!(unimportant.await.is_err());
    let finished = connection.spawn_essential("done", async { 7 });
    assert_eq!(finished.await.unwrap(), 7);
    let essential = connection.spawn_essential("listener", async { panic!("on purpose, by a test") });
    assert!(essential.await.expect_err("the panic reaches the handle as well").is_panic());
    assert_eq!(failed.await, "listener");
    assert_eq!(process.failed_task(), Some("listener"));
}

#[tokio::test]
async fn the_panic_of_an_essential_thread_is_a_failure_of_the_whole_process() {
    let process = Lifetime::new();
    let (end, ended) = std::sync::mpsc::channel::<()>();
    process.spawn_essential_thread("idle", move || assert!(ended.recv().is_err())).unwrap();
    assert_eq!(process.tasks(), "idle x1");
    process.child().spawn_essential_thread("device", || panic!("on purpose, by a test")).unwrap();
    assert_eq!(process.failed().await, "device");
    drop(end);
    assert_eq!(process.shut_down(AMPLE).await, ShutdownOutcome::Clean);
}

#[tokio::test]
async fn sigterm_is_seen_even_before_the_future_is_awaited() {
    let mut signals = TerminationSignals::listen();
    nix::sys::signal::raise(nix::sys::signal::Signal::SIGTERM).unwrap();
    assert_eq!(signals.next().await, "SIGTERM");
}

#[tokio::test]
async fn a_task_that_asks_the_process_to_stop_is_heard_with_its_first_reason() {
    let process = Lifetime::new();
    let early = process.stop_requested();
    process.child().request_stop("node 0 has ended");
    process.request_stop("another reason");
    assert_eq!(early.await, "node 0 has ended");
    assert_eq!(process.stop_requested().await, "node 0 has ended");
    assert!(!process.is_draining(), "whoever waits for the request stops the process");
}
