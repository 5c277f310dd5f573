//! Handshakes that node 0 has begun. Their number is limited, and a new connection never waits for one of
//! them: strangers that say nothing keep no node out.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::FutureExt as _;
use futures::future::{BoxFuture, select_all};

/// Maximum number of handshakes at a time.
const HANDSHAKES_MAX: usize = 32;

/// See the module documentation.
pub(super) struct Greetings<'a, T> {
    /// Oldest first.
    pending: VecDeque<Greeting<'a, T>>,
}

struct Greeting<'a, T> {
    address: SocketAddr,
    begun: Begun,
    handshake: BoxFuture<'a, T>,
}

/// Whether the other end has said what nodes say first.
#[derive(Clone, Default)]
pub(super) struct Begun(Arc<AtomicBool>);

impl Begun {
    pub(super) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl<'a, T> Greetings<'a, T> {
    pub(super) fn new() -> Self {
        Self { pending: VecDeque::new() }
    }

    /// Adds the handshake of a connection. One too many ends the oldest connection on which nothing was said,
    /// or if there is none, the oldest of all: a node connects again.
    pub(super) fn push<F>(&mut self, address: SocketAddr, handshake: impl FnOnce(Begun) -> F)
    where
        F: Future<Output = T> + Send + 'a,
    {
        if self.pending.len() >= HANDSHAKES_MAX {
            let silent = self.pending.iter().position(|greeting| !greeting.begun.is_set());
            if let Some(Greeting { address, .. }) = self.pending.remove(silent.unwrap_or(0)) {
                tracing::warn!(%address, "too many connections at once: one that has not joined was closed");
            }
        }
        let begun = Begun::default();
        let handshake = handshake(begun.clone()).boxed();
        self.pending.push_back(Greeting { address, begun, handshake });
    }

    /// Waits for the next handshake that ends.
    ///
    /// Cancel safety: safe.
    pub(super) async fn next(&mut self) -> T {
        if self.pending.is_empty() {
            return std::future::pending().await;
        }
        let handshakes = self.pending.iter_mut().map(|greeting| &mut greeting.handshake);
        let (ended, i, _) = select_all(handshakes).await;
        drop(self.pending.remove(i));
        ended
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::net::Ipv4Addr;
    use std::sync::Weak;

    use super::*;

    const ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 7070);

    /// Adds a connection whose handshake never ends. It is closed when the result is gone.
    fn add_endless(greetings: &mut Greetings<'_, u32>, speaks: bool) -> Weak<()> {
        let connection = Arc::new(());
        let seen = Arc::downgrade(&connection);
        greetings.push(ADDRESS, |begun| {
            if speaks {
                begun.set();
            }
            async move {
                let _connection = connection;
                pending().await
            }
        });
        seen
    }

    fn closed(seen: &[Weak<()>]) -> Vec<usize> {
        (0..seen.len()).filter(|&i| seen[i].strong_count() == 0).collect()
    }

    #[tokio::test]
    async fn a_newcomer_takes_the_place_of_the_oldest_silent_connection() {
        let mut greetings = Greetings::new();
        let speaks = |i: usize| matches!(i, 0 | 1 | 4);
        let mut seen: Vec<_> = (0..HANDSHAKES_MAX).map(|i| add_endless(&mut greetings, speaks(i))).collect();
        assert!(closed(&seen).is_empty());
        for gone in [&[2_usize][..], &[2, 3], &[2, 3, 5]] {
            seen.push(add_endless(&mut greetings, false));
            assert_eq!(closed(&seen), gone);
        }
        // A handshake that ends waits for none of the silent ones, and leaves no room unused.
        greetings.push(ADDRESS, |_| ready(7));
        assert_eq!((greetings.next().await, closed(&seen)), (7, vec![2, 3, 5, 6]));
        seen.push(add_endless(&mut greetings, false));
        assert_eq!(closed(&seen), [2, 3, 5, 6]);
    }

    #[tokio::test]
    async fn the_oldest_goes_where_none_is_silent() {
        let mut greetings = Greetings::new();
        let seen: Vec<_> = (0..HANDSHAKES_MAX + 2).map(|_| add_endless(&mut greetings, true)).collect();
        assert_eq!(closed(&seen), [0, 1]);
    }
}
