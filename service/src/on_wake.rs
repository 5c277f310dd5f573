//! [`OnWake`]: a future that rarely has news beside one that often has.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures::Stream;
use futures::stream::FuturesUnordered;

/// Polls its future only when that was woken itself, and not each time that the task around it is. What rarely happens (a timer, the end of
/// the process) so costs nothing beside what often does.
#[derive(Debug)]
pub struct OnWake<F>(FuturesUnordered<F>);

impl<F: Future> OnWake<F> {
    /// Of a future that was not polled yet.
    pub fn new(future: F) -> Self {
        Self(std::iter::once(future).collect())
    }
}

impl<F: Future> Future for OnWake<F> {
    type Output = F::Output;

    /// Pending for ever once it was ready.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        match Pin::new(&mut self.0).poll_next(context) {
            Poll::Ready(Some(output)) => Poll::Ready(output),
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
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
