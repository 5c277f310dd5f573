//! [`OnWake`]: a future that is rarely ready, polled next to one that often is.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures::task::AtomicWaker;

/// Polls its future only when that future itself was woken, not whenever the surrounding task is. So rare
/// events (a timer, the end of the process) add no cost to frequent ones.
#[derive(Debug)]
pub struct OnWake<F> {
    /// `None` once it was ready.
    future: Option<Pin<Box<F>>>,
    flag: Arc<WakeFlag>,
    /// The flag as a waker for the future.
    waker: Waker,
}

#[derive(Debug)]
struct WakeFlag {
    /// Whether the future is to be polled.
    is_woken: AtomicBool,
    /// The surrounding task.
    task: AtomicWaker,
}

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_woken.store(true, Ordering::Release);
        self.task.wake();
    }
}

impl<F: Future> OnWake<F> {
    /// Wraps a future that was not polled yet.
    pub fn new(future: F) -> Self {
        let flag = Arc::new(WakeFlag { is_woken: AtomicBool::new(true), task: AtomicWaker::new() });
        let waker = Waker::from(Arc::clone(&flag));
        Self { future: Some(Box::pin(future)), flag, waker }
    }
}

impl<F: Future> Future for OnWake<F> {
    type Output = F::Output;

    /// Stays pending after it was ready.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let Self { future, flag, waker } = &mut *self;
        // Register first: a wake-up after the check below then wakes this task.
        flag.task.register(context.waker());
        if !flag.is_woken.load(Ordering::Acquire) {
            return Poll::Pending;
        }
        flag.is_woken.swap(false, Ordering::AcqRel);
        let Some(pinned) = future else { return Poll::Pending };
        let polled = pinned.as_mut().poll(&mut Context::from_waker(waker));
        if polled.is_ready() {
            *future = None;
        }
        polled
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::poll_fn;
    use std::task::Waker;

    use super::*;

    #[test]
    fn it_is_polled_once_and_then_only_after_it_was_woken() {
        let polls = Cell::new(0);
        let its_waker = Cell::new(None);
        let mut future = OnWake::new(poll_fn(|context| {
            polls.set(polls.get() + 1);
            its_waker.set(Some(context.waker().clone()));
            if polls.get() == 2 { Poll::Ready("news") } else { Poll::Pending }
        }));
        let mut context = Context::from_waker(Waker::noop());
        let mut poll = || Pin::new(&mut future).poll(&mut context);
        assert_eq!((poll(), poll(), polls.get()), (Poll::Pending, Poll::Pending, 1));
        its_waker.take().expect("it was polled").wake();
        assert_eq!((poll(), poll(), polls.get()), (Poll::Ready("news"), Poll::Pending, 2));
    }
}
