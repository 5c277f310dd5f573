//! Descriptions of how the tokenizers of two workers differ. A pair of fingerprints is compared once, however
//! many workers have them, because that takes two tokenizers from workers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Mutex as AsyncMutex, OnceCell};

/// The fingerprints of a draft and a target worker.
pub(super) type Fingerprints = (String, String);

/// The known descriptions, of pairs of connected workers.
#[derive(Debug, Default)]
pub(super) struct TokenDifferences {
    descriptions: Mutex<BTreeMap<Fingerprints, Arc<OnceCell<String>>>>,
    /// Held during a comparison. Workers choose how large their tokenizers are, within a limit for two of
    /// them, so those of one comparison are in memory at a time.
    comparing: AsyncMutex<()>,
}

impl TokenDifferences {
    /// Returns the description of a pair; runs `compare` unless it is known. A failure is not remembered.
    ///
    /// Cancel safety: another caller compares instead.
    pub(super) async fn describe(
        &self,
        pair: Fingerprints,
        compare: impl Future<Output = anyhow::Result<String>>,
    ) -> anyhow::Result<String> {
        let description = Arc::clone(self.descriptions().entry(pair).or_default());
        let compare_alone = async {
            let _comparing = self.comparing.lock().await;
            compare.await
        };
        description.get_or_try_init(|| compare_alone).await.cloned()
    }

    /// Forgets the pairs with a fingerprint that no connected worker has.
    pub(super) fn retain(&self, is_connected: impl Fn(&str) -> bool) {
        self.descriptions().retain(|(draft, target), _| is_connected(draft) && is_connected(target));
    }

    fn descriptions(&self) -> MutexGuard<'_, BTreeMap<Fingerprints, Arc<OnceCell<String>>>> {
        // No code that can panic runs under the lock.
        self.descriptions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[tokio::test]
    async fn a_pair_is_compared_once_unless_that_fails() {
        let (differences, count) = (TokenDifferences::default(), AtomicU32::new(0));
        let describe = |draft: &str, fails: bool| {
            let count = &count;
            differences.describe((draft.to_owned(), "t".to_owned()), async move {
                tokio::task::yield_now().await;
                let number = count.fetch_add(1, Ordering::Relaxed);
                anyhow::ensure!(!fails, "no tokenizer");
                Ok(number.to_string())
            })
        };
        assert!(describe("a", true).await.is_err());
        let same = futures::future::join_all((0..100).map(|_| describe("a", false))).await;
        assert!(same.iter().all(|difference| difference.as_ref().unwrap() == "1"));
        assert_eq!(describe("b", false).await.unwrap(), "2");
        differences.retain(|fingerprint| fingerprint != "b");
        assert_eq!(describe("a", false).await.unwrap(), "1");
        assert_eq!(describe("b", false).await.unwrap(), "3", "its workers left");
    }

    #[tokio::test]
    async fn one_pair_is_compared_at_a_time() {
        let (differences, running) = (TokenDifferences::default(), AtomicU32::new(0));
        let describe = |draft: u32| {
            let running = &running;
            differences.describe((draft.to_string(), "t".to_owned()), async move {
                let others = running.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
                running.fetch_sub(1, Ordering::Relaxed);
                Ok(others.to_string())
            })
        };
        let others = futures::future::join_all((0..10).map(describe)).await;
        assert!(others.iter().all(|others| others.as_ref().unwrap() == "0"), "{others:?}");
    }
}
