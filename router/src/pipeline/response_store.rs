//! [`ResponseStore`]: responses that clients may go on from, in this router's memory. It is bounded in number and in bytes, all keys
//! together; the oldest gives way. Another router, or this one after a restart, does not have them: who needs more sends the whole
//! conversation.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use text::ConversationMessage;

/// Responses kept at once.
pub const STORED_RESPONSES_MAX: usize = 4_096;

/// What they may hold together.
pub const STORED_BYTES_MAX: usize = 64 << 20;

/// One response, and what a later one goes on from.
#[derive(Debug, PartialEq, Eq)]
pub struct StoredResponse {
    /// Every message up to and with this response's own, instructions left out.
    pub conversation: Vec<ConversationMessage>,
    /// The response as it was sent.
    pub json: String,
}

impl StoredResponse {
    fn num_bytes(&self) -> usize {
        let of_message = |message: &ConversationMessage| {
            let calls = message.tool_calls.iter().map(|call| call.to_string().len()).sum::<usize>();
            let thought = message.reasoning_content.as_ref().map_or(0, String::len);
            size_of::<ConversationMessage>() + message.content.len() + thought + calls
        };
        self.json.len() + self.conversation.iter().map(of_message).sum::<usize>()
    }
}

/// The store. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct ResponseStore(Arc<Mutex<Stored>>);

/// Whose it is, by isolation key, and its id.
type Key = (u64, String);

#[derive(Debug, Default)]
struct Stored {
    responses: HashMap<Key, Arc<StoredResponse>>,
    /// The oldest first; those that were removed may still be here.
    order: VecDeque<Key>,
    num_bytes: usize,
}

impl ResponseStore {
    /// Keeps a response; older ones give way. One that is too large for the store is not kept.
    pub fn put(&self, isolation_key: u64, id: &str, response: StoredResponse) {
        let num_bytes = response.num_bytes();
        if num_bytes > STORED_BYTES_MAX {
            return;
        }
        let key = (isolation_key, id.to_owned());
        let mut stored = self.stored();
        stored.remove(&key);
        stored.num_bytes += num_bytes;
        stored.order.push_back(key.clone());
        stored.responses.insert(key, Arc::new(response));
        while stored.order.len() > STORED_RESPONSES_MAX || stored.num_bytes > STORED_BYTES_MAX {
            let Some(oldest) = stored.order.pop_front() else { break };
            stored.remove(&oldest);
        }
    }

    /// The response of this id, if it was this key's.
    pub fn get(&self, isolation_key: u64, id: &str) -> Option<Arc<StoredResponse>> {
        self.stored().responses.get(&(isolation_key, id.to_owned())).cloned()
    }

    /// Forgets it; whether it was there.
    pub fn remove(&self, isolation_key: u64, id: &str) -> bool {
        self.stored().remove(&(isolation_key, id.to_owned()))
    }

    fn stored(&self) -> MutexGuard<'_, Stored> {
        // Whoever panicked while it held the lock had changed a count at most.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Stored {
    fn remove(&mut self, key: &Key) -> bool {
        let removed = self.responses.remove(key);
        self.num_bytes -= removed.as_ref().map_or(0, |response| response.num_bytes());
        removed.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(bytes: usize) -> StoredResponse {
        StoredResponse { conversation: Vec::new(), json: "x".repeat(bytes) }
    }

    #[test]
    fn a_response_is_its_keys_own() {
        let store = ResponseStore::default();
        store.put(1, "resp_a", response(3));
        assert!(store.get(1, "resp_a").is_some() && store.get(2, "resp_a").is_none());
        assert!(!store.remove(2, "resp_a") && store.remove(1, "resp_a") && !store.remove(1, "resp_a"));
        assert!(store.get(1, "resp_a").is_none());
        assert_eq!(store.stored().num_bytes, 0);
    }

    #[test]
    fn the_oldest_gives_way() {
        let store = ResponseStore::default();
        for idx in 0..=STORED_RESPONSES_MAX {
            store.put(1, &idx.to_string(), response(1));
        }
        assert!(store.get(1, "0").is_none() && store.get(1, "1").is_some());
        store.put(1, "large", response(STORED_BYTES_MAX));
        assert_eq!(store.stored().responses.len(), 1);
        store.put(1, "too large", response(STORED_BYTES_MAX + 1));
        assert!(store.get(1, "too large").is_none() && store.get(1, "large").is_some());
    }

    #[test]
    fn what_is_removed_leaves_nothing_behind_for_ever() {
        let store = ResponseStore::default();
        for idx in 0..3 * STORED_RESPONSES_MAX {
            store.put(1, &idx.to_string(), response(1));
            store.remove(1, &idx.to_string());
        }
        let stored = store.stored();
        assert!(stored.order.len() <= STORED_RESPONSES_MAX && stored.responses.is_empty());
    }
}
