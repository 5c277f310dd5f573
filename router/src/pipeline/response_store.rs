//! [`ResponseStore`]: responses that a later request may continue, kept in this router's memory. Number and
//! bytes are bounded over all keys together; the oldest response is evicted first. Other routers do not have
//! them, and a restart loses them: clients that cannot accept that send the whole conversation.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;
use text::ConversationMessage;

use crate::request::json_values::num_values;

/// Maximum number of stored responses.
const STORED_RESPONSES_MAX: usize = 4_096;

/// Maximum size of all stored responses together, in bytes.
const STORED_BYTES_MAX: usize = 64 << 20;

/// A response, with the conversation that a later request continues.
#[derive(Debug, PartialEq, Eq)]
pub struct StoredResponse {
    /// All messages up to and including the response's own, without instructions. The responses of one
    /// conversation share them, but each counts their bytes: any of them may be the last that holds them.
    pub conversation: Vec<Arc<ConversationMessage>>,
    /// The items of the response's own input, as JSON.
    pub input: Arc<str>,
    /// The response as sent.
    pub json: String,
}

impl StoredResponse {
    fn num_bytes(&self) -> usize {
        let call_bytes = |call: &Value| num_values(call) * size_of::<Value>() + call.to_string().len();
        let message_bytes = |message: &Arc<ConversationMessage>| {
            let ConversationMessage { role, content, name, reasoning_content, tool_calls, tool_call_id } =
                &**message;
            let texts = [content, name, reasoning_content, tool_call_id].into_iter().flatten();
            size_of::<ConversationMessage>()
                + role.len()
                + texts.map(String::len).sum::<usize>()
                + tool_calls.iter().map(call_bytes).sum::<usize>()
        };
        self.input.len() + self.json.len() + self.conversation.iter().map(message_bytes).sum::<usize>()
    }
}

/// Store of responses. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct ResponseStore(Arc<Mutex<Stored>>);

/// Isolation key of the owner, and the response's id.
type Key = (u64, String);

#[derive(Debug, Default)]
struct Stored {
    responses: HashMap<Key, Arc<StoredResponse>>,
    /// Oldest first.
    order: VecDeque<Key>,
    num_bytes: usize,
}

impl ResponseStore {
    /// Stores a response, evicting the oldest ones. A response larger than the whole store is not kept.
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
            stored.forget(&oldest);
        }
    }

    /// Returns the response with this id if it belongs to this isolation key.
    pub fn get(&self, isolation_key: u64, id: &str) -> Option<Arc<StoredResponse>> {
        self.stored().responses.get(&(isolation_key, id.to_owned())).cloned()
    }

    /// Removes a response; returns whether it existed.
    pub fn remove(&self, isolation_key: u64, id: &str) -> bool {
        self.stored().remove(&(isolation_key, id.to_owned()))
    }

    fn stored(&self) -> MutexGuard<'_, Stored> {
        // A panic under the lock can leave at most a wrong count.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Stored {
    fn remove(&mut self, key: &Key) -> bool {
        let is_removed = self.forget(key);
        if is_removed {
            // A key that stayed would count as a response, and another one would be evicted for it.
            self.order.retain(|other| other != key);
        }
        is_removed
    }

    /// Removes a response, but not its place in the order.
    fn forget(&mut self, key: &Key) -> bool {
        let removed = self.responses.remove(key);
        self.num_bytes -= removed.as_ref().map_or(0, |response| response.num_bytes());
        removed.is_some()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn response(bytes: usize) -> StoredResponse {
        StoredResponse { conversation: Vec::new(), input: "".into(), json: "x".repeat(bytes) }
    }

    #[test]
    fn responses_are_isolated_by_key() {
        let store = ResponseStore::default();
        store.put(1, "resp_a", response(3));
        assert!(store.get(1, "resp_a").is_some() && store.get(2, "resp_a").is_none());
        assert!(!store.remove(2, "resp_a") && store.remove(1, "resp_a") && !store.remove(1, "resp_a"));
        assert!(store.get(1, "resp_a").is_none());
        assert_eq!(store.stored().num_bytes, 0);
    }

    #[test]
    fn the_oldest_response_is_evicted() {
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
    fn calls_count_with_the_memory_of_their_values() {
        let mut message = ConversationMessage::new("assistant", "x".repeat(100));
        message.tool_calls = vec![json!({ "function": { "arguments": { "x": vec![0; 1_000] } } })];
        message.tool_call_id = Some("x".repeat(200));
        let stored = StoredResponse { conversation: vec![Arc::new(message)], ..response(0) };
        assert!(stored.num_bytes() > 1_004 * size_of::<Value>() + 300, "{}", stored.num_bytes());
    }

    #[test]
    fn removed_responses_evict_no_others() {
        let store = ResponseStore::default();
        store.put(1, "kept", response(1));
        for idx in 0..2 * STORED_RESPONSES_MAX {
            store.put(2, &idx.to_string(), response(1));
            store.remove(2, &idx.to_string());
        }
        assert!(store.get(1, "kept").is_some());
        assert_eq!(store.stored().order.len(), 1);
    }
}
