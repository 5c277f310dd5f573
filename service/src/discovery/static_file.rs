//! Membership from a TOML file maintained by an operator:
//!
//! ```toml
//! [[worker]]
//! role = "draft"                      # or "target"
//! address = "http://10.0.0.7:9001"
//! id = "draft-7"                      # optional; default: the address
//! ```
//!
//! The file is reread when it changes ([`crate::polled_file`]). A broken edit is logged once, with its line,
//! and the last good list stays. Workers never write the file, so registering does nothing. Removing an entry
//! is an operator's decision: routers give that worker no new work, and end their connection to it once
//! nothing runs there.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use serde::Deserialize;
use tokio::sync::watch;
use toml::Spanned;

use super::member::{address_fault, role_fault};
use super::{Discovery, DiscoveryError, Member, Members, Registration, Unlisted, publish};
use crate::polled_file::PolledFile;
use crate::shutdown::Lifetime;
use crate::toml_file::{self, TomlFault};

/// A membership read from a file.
pub(super) struct StaticFile {
    members: watch::Receiver<Members>,
    /// Whether the last edit is in use.
    watched: watch::Receiver<bool>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    #[serde(default)]
    worker: Vec<Spanned<Entry>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    role: Spanned<String>,
    address: Spanned<String>,
    id: Option<String>,
}

impl StaticFile {
    pub(super) async fn open(
        path: PathBuf,
        poll_every: Duration,
        lifetime: &Lifetime,
    ) -> Result<Self, DiscoveryError> {
        let (text, first) = read(&path)?;
        let (sender, members) = watch::channel(Members::new(first));
        let (watched_sender, watched) = watch::channel(true);
        let file = PolledFile::new(path, &text, poll_every);
        let following = follow(file, sender, watched_sender);
        lifetime.spawn_essential("static-discovery", lifetime.until_cancelled(following));
        Ok(Self { members, watched })
    }
}

/// Checks that the list can be read and is valid.
pub(crate) fn check(path: &Path) -> Result<(), DiscoveryError> {
    read(path).map(drop)
}

/// Reads the list once, at start.
fn read(path: &Path) -> Result<(String, BTreeMap<String, Member>), DiscoveryError> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| DiscoveryError::Read { path: path.to_owned(), error })?;
    let list = parse(&text).map_err(|fault| DiscoveryError::List { path: path.to_owned(), fault })?;
    Ok((text, list))
}

/// Publishes each edit; never returns.
async fn follow(mut file: PolledFile, members: watch::Sender<Members>, watched: watch::Sender<bool>) {
    loop {
        let is_in_use = publish_next_edit(&mut file, &members).await;
        watched.send_replace(is_in_use);
    }
}

/// Waits for an edit and publishes it; the previous list stays if it is broken. Returns whether the edit is
/// in use.
async fn publish_next_edit(file: &mut PolledFile, members: &watch::Sender<Members>) -> bool {
    let edited = file.next_edit().await;
    let path = file.path().display();
    match edited.as_deref().map(parse) {
        Ok(Ok(list)) => {
            tracing::info!(%path, workers = list.len(), "reloaded the list of workers");
            publish(members, list);
            true
        }
        Ok(Err(TomlFault { line, message: reason })) => {
            tracing::error!(%path, line, reason, "invalid list of workers: the previous list stays in use");
            false
        }
        Err(error) => {
            tracing::error!(%path, error, "cannot read the list of workers: the previous list stays in use");
            false
        }
    }
}

fn parse(text: &str) -> Result<BTreeMap<String, Member>, TomlFault> {
    let list: List = toml_file::parse(text)?;
    let mut members = BTreeMap::new();
    for entry in list.worker {
        let at =
            |offset: usize, message: String| TomlFault { line: toml_file::line_of(text, offset), message };
        let start = entry.span().start;
        let Entry { role, address, id } = entry.into_inner();
        if let Some(fault) = role_fault(role.get_ref()) {
            return Err(at(role.span().start, fault));
        }
        if let Some(fault) = address_fault(address.get_ref()) {
            return Err(at(address.span().start, fault));
        }
        let id = id.unwrap_or_else(|| address.get_ref().clone());
        let facts = serde_json::Value::Null;
        let (role, address) = (role.into_inner(), address.into_inner());
        let member = Member { id, role, address, facts };
        if let Some(fault) = member.fault() {
            return Err(at(start, fault));
        }
        let id = member.id.clone();
        if members.insert(id.clone(), member).is_some() {
            return Err(at(start, format!("worker `{id}` is listed twice; give it another id")));
        }
    }
    Ok(members)
}

#[async_trait]
impl Discovery for StaticFile {
    async fn register(&self, member: Member) -> Result<Registration, DiscoveryError> {
        member.check()?;
        Ok(Registration::external())
    }

    async fn watch(&self) -> Result<watch::Receiver<Members>, DiscoveryError> {
        Ok(self.members.clone())
    }

    fn watched(&self) -> watch::Receiver<bool> {
        self.watched.clone()
    }

    /// Only an operator removes an entry: a broken or missing file keeps the last list.
    fn unlisted(&self) -> Unlisted {
        Unlisted::Removed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::polled_file::POLL_INTERVAL;

    const GOOD: &str = "\
[[worker]]
role = 'draft'
address = 'http://127.0.0.1:1'

[[worker]]
role = 'target'
address = 'http://127.0.0.1:2'
id = 'target-2'
";

    const POLL_IN_TESTS: Duration = Duration::from_millis(2);

    /// Writes a list to disk; returns its path, and the directory that holds it.
    fn written(text: &str) -> (PathBuf, tempfile::TempDir) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("workers.toml");
        std::fs::write(&path, text).unwrap();
        (path, directory)
    }

    /// Replaces a file atomically, by a rename.
    fn replace(path: &Path, text: &str) {
        let beside = path.with_extension("new");
        std::fs::write(&beside, text).unwrap();
        std::fs::rename(beside, path).unwrap();
    }

    fn ids(members: &watch::Receiver<Members>) -> Vec<String> {
        members.borrow().keys().cloned().collect()
    }

    /// A list on disk whose edits are published one by one.
    struct Edited {
        file: PolledFile,
        sender: watch::Sender<Members>,
        members: watch::Receiver<Members>,
        /// Whether the last edit is in use.
        is_in_use: bool,
        _directory: tempfile::TempDir,
    }

    impl Edited {
        fn new(text: &str) -> Self {
            let (path, directory) = written(text);
            let (sender, members) = watch::channel(Members::new(parse(text).unwrap()));
            let file = PolledFile::new(path, text, POLL_IN_TESTS);
            Self { file, sender, members, is_in_use: true, _directory: directory }
        }

        /// Edits or removes the list and waits until that was seen; returns the ids if they were published.
        async fn edit(&mut self, text: Option<&str>) -> Option<Vec<String>> {
            match text {
                Some(text) => replace(self.file.path(), text),
                None => std::fs::remove_file(self.file.path()).unwrap(),
            }
            self.is_in_use = publish_next_edit(&mut self.file, &self.sender).await;
            let is_published = self.members.has_changed().unwrap();
            self.members.mark_unchanged();
            is_published.then(|| ids(&self.members))
        }
    }

    #[tokio::test]
    async fn the_list_is_there_at_once_and_edits_are_seen() {
        let (path, _directory) = written(GOOD);
        let lifetime = Lifetime::new();
        let discovery = StaticFile::open(path.clone(), POLL_IN_TESTS, &lifetime).await.unwrap();
        let mut members = discovery.watch().await.unwrap();
        assert_eq!(ids(&members), ["http://127.0.0.1:1", "target-2"]);
        assert_eq!(members.borrow()["target-2"].role, "target");
        replace(&path, &GOOD.replace("target-2", "target-3"));
        members.changed().await.unwrap();
        assert_eq!(ids(&members), ["http://127.0.0.1:1", "target-3"]);
        let mut watched = discovery.watched();
        assert!(*watched.borrow());
        replace(&path, "[[worker]\n");
        watched.wait_for(|watched| !watched).await.unwrap();
    }

    #[tokio::test]
    async fn a_broken_or_missing_file_keeps_the_last_good_list() {
        let mut list = Edited::new(GOOD);
        for broken in [Some("[[worker]\n"), None] {
            assert_eq!(list.edit(broken).await, None);
            assert!(!list.is_in_use, "{broken:?}");
        }
        assert_eq!(ids(&list.members), ["http://127.0.0.1:1", "target-2"]);
        let after = list.edit(Some(&GOOD.replace("target-2", "after"))).await;
        assert_eq!(after.unwrap(), ["after", "http://127.0.0.1:1"]);
        assert!(list.is_in_use);
    }

    #[tokio::test]
    async fn only_an_edit_that_changes_a_member_wakes_somebody() {
        let mut list = Edited::new(GOOD);
        assert_eq!(list.edit(Some(&format!("# a comment\n{GOOD}"))).await, None);
        assert_eq!(list.edit(Some("")).await, Some(Vec::new()), "an empty list is a list");
    }

    #[tokio::test]
    async fn registering_changes_nothing() {
        let (path, _directory) = written(GOOD);
        let lifetime = Lifetime::new();
        let discovery = StaticFile::open(path, POLL_IN_TESTS, &lifetime).await.unwrap();
        let members = discovery.watch().await.unwrap();
        let member = members.borrow()["target-2"].clone();
        let registration = discovery.register(Member { id: "new".to_owned(), ..member }).await.unwrap();
        assert_eq!(ids(&members), ["http://127.0.0.1:1", "target-2"]);
        registration.leave().await;
        assert_eq!(ids(&members), ["http://127.0.0.1:1", "target-2"]);
    }

    #[test]
    fn faults_name_their_line() {
        let rows = [
            (GOOD.replace("'target'", "'verifier'"), 6, "role `verifier` is neither"),
            (GOOD.replace("http://127.0.0.1:2", "127.0.0.1:2"), 7, "not of the form http://HOST:PORT"),
            (GOOD.replace("'target-2'", "''"), 5, "id is empty"),
            (GOOD.replace("'target-2'", "'http://127.0.0.1:1'"), 5, "is listed twice"),
            (GOOD.replace("id =", "name ="), 8, "unknown field `name`"),
            (GOOD.replace("role = 'draft'\n", ""), 1, "missing field `role`"),
            (GOOD.replace("role = 'draft'", "role = 7"), 2, "invalid type"),
            (GOOD.replace("[[worker]]\nrole = 't", "[[worker]\nrole = 't"), 5, ""),
        ];
        for (text, line, expected) in rows {
            let fault = parse(&text).expect_err(expected);
            assert_eq!(fault.line, line, "{fault}");
            assert!(fault.message.contains(expected) && !fault.message.contains('\n'), "{fault}");
        }
    }

    #[tokio::test]
    async fn opening_a_missing_or_broken_list_fails() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("workers.toml");
        let lifetime = Lifetime::new();
        let missing = StaticFile::open(path.clone(), POLL_INTERVAL, &lifetime).await;
        assert!(matches!(missing, Err(DiscoveryError::Read { .. })));
        std::fs::write(&path, "worker = 3\n").unwrap();
        let error = StaticFile::open(path, POLL_INTERVAL, &lifetime).await.err().unwrap();
        assert!(error.to_string().contains("workers.toml, line 1: "), "{error}");
    }
}
