//! Membership within one process, for clusters in a single process and for tests.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use tokio::sync::watch;

use super::registration::constant;
use super::{Discovery, DiscoveryError, Member, Members, Registration, Unlisted, publish};

/// A membership in memory.
pub(super) struct Memory {
    shared: Arc<Shared>,
    next_ticket: AtomicU64,
}

struct Shared {
    /// Each member with the ticket of its registration: a late withdrawal must not remove a newer
    /// registration.
    present: Mutex<BTreeMap<String, (u64, Member)>>,
    members: watch::Sender<Members>,
}

impl Memory {
    pub(super) fn new() -> Self {
        let shared = Shared { present: Mutex::default(), members: watch::Sender::default() };
        Self { shared: Arc::new(shared), next_ticket: AtomicU64::new(0) }
    }
}

impl Shared {
    fn change(&self, change: impl FnOnce(&mut BTreeMap<String, (u64, Member)>)) {
        let mut present = self.present.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut present);
        publish(
            &self.members,
            present.iter().map(|(id, (_, member))| (id.clone(), member.clone())).collect(),
        );
    }
}

#[async_trait]
impl Discovery for Memory {
    async fn register(&self, member: Member) -> Result<Registration, DiscoveryError> {
        member.check()?;
        let ticket = self.next_ticket.fetch_add(1, Ordering::Relaxed);
        let id = member.id.clone();
        self.shared.change(|present| drop(present.insert(id.clone(), (ticket, member))));
        let shared = Arc::clone(&self.shared);
        Ok(Registration::with_withdrawal(move || {
            shared.change(|present| {
                if present.get(&id).is_some_and(|(newest, _)| *newest == ticket) {
                    present.remove(&id);
                }
            });
        }))
    }

    async fn watch(&self) -> Result<watch::Receiver<Members>, DiscoveryError> {
        Ok(self.shared.members.subscribe())
    }

    fn watched(&self) -> watch::Receiver<bool> {
        constant(true)
    }

    /// A member disappears only when its registration is dropped.
    fn unlisted(&self) -> Unlisted {
        Unlisted::Removed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(id: &str, port: u16) -> Member {
        let address = format!("http://127.0.0.1:{port}");
        Member {
            id: id.to_owned(),
            role: super::super::DRAFT.to_owned(),
            address,
            facts: serde_json::Value::Null,
        }
    }

    fn ports(members: &watch::Receiver<Members>) -> Vec<String> {
        members.borrow().values().map(|member| member.address[17..].to_owned()).collect()
    }

    #[tokio::test]
    async fn members_come_with_register_and_go_with_leave_or_drop() {
        let memory = Memory::new();
        let members = memory.watch().await.unwrap();
        let one = memory.register(worker("one", 1)).await.unwrap();
        let two = memory.register(worker("two", 2)).await.unwrap();
        assert_eq!(ports(&members), ["1", "2"]);
        assert!(!*one.listed().borrow(), "no router of another process sees it");
        one.leave().await;
        assert_eq!(ports(&members), ["2"]);
        drop(two);
        assert!(ports(&members).is_empty());
    }

    #[tokio::test]
    async fn a_late_goodbye_does_not_remove_a_newer_registration() {
        let memory = Memory::new();
        let members = memory.watch().await.unwrap();
        let old = memory.register(worker("one", 1)).await.unwrap();
        let new = memory.register(worker("one", 2)).await.unwrap();
        drop(old);
        assert_eq!(ports(&members), ["2"]);
        drop(new);
    }

    #[tokio::test]
    async fn members_no_router_could_use_are_refused() {
        let memory = Memory::new();
        let good = worker("one", 1);
        let rows = [
            (Member { id: String::new(), ..good.clone() }, "id is empty"),
            (Member { role: "verifier".to_owned(), ..good.clone() }, "role `verifier`"),
            (Member { address: "127.0.0.1:1".to_owned(), ..good.clone() }, "address `127.0.0.1:1`"),
            (Member { address: "http://host".to_owned(), ..good.clone() }, "http://HOST:PORT"),
            (Member { address: "ftp://host:1".to_owned(), ..good.clone() }, "https://HOST:PORT"),
            (Member { address: "http://host:1/path".to_owned(), ..good.clone() }, "http://HOST:PORT"),
        ];
        for (member, expected) in rows {
            let error = memory.register(member).await.err().expect(expected).to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert!(memory.watch().await.unwrap().borrow().is_empty());
    }
}
