//! Authentication by API keys from a file, which is reread when it changes. Keys are stored and compared as
//! SHA-256 digests. Every request is compared with every key, in constant time, so that the timing of an
//! answer reveals nothing about a key.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use service::polled_file::PolledFile;
use service::shutdown::Lifetime;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;
use tokio::sync::watch;

pub use super::api_keys::ApiKeysError;
use super::api_keys::{self, ApiKey, digest};
use super::key_limits::KeyUsage;
use crate::catalog::{Catalog, ModelEntry};
use crate::error::RouterError;

/// The sender of a request, with the settings of its key.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Caller {
    /// The key's name, for logs and traces.
    pub name: Option<String>,
    /// Default task type of the key's requests.
    pub task_type: Option<String>,
    /// Most urgent priority that the key's requests may have; lower is more urgent.
    pub priority: u8,
    /// Callers with different keys never share prefix blocks.
    pub isolation_key: u64,
    /// Whether fairness ids of the key's requests are honored: the key belongs to a gateway, or no keys are
    /// configured.
    pub honors_fairness_ids: bool,
    /// Whether requests may be written to the request log: the key allows it, or no keys are configured.
    pub may_be_logged: bool,
    /// Whether the key may give an operator's orders and read other clients' requests, or no keys are
    /// configured.
    pub is_operator: bool,
    /// Key for fair queueing derived from a fairness id, if the request has one.
    pub fairness_key: Option<u64>,
    /// Models that the key may use; absent: all.
    pub models: Option<Arc<BTreeSet<String>>>,
    /// Usage and limits of the key; absent: unlimited.
    pub usage: Option<KeyUsage>,
}

/// How callers are authenticated. Clones share the keys.
#[derive(Debug, Clone, Default)]
pub enum Auth {
    /// Anyone may send requests; for a router that listens on loopback only.
    #[default]
    Open,
    /// Only holders of these keys.
    Keys(ApiKeys),
}

/// Keys of a file, as last read.
#[derive(Debug, Clone)]
pub struct ApiKeys(watch::Receiver<Vec<ApiKey>>);

impl Auth {
    /// Reads a key file once.
    pub fn from_file(path: &Path) -> Result<Self, ApiKeysError> {
        Ok(Self::Keys(ApiKeys(watch::channel(read(path)?.1).1)))
    }

    /// Reads a key file, and rereads it under `lifetime` whenever it changes. A broken file is logged and the
    /// last good keys stay. Keys that remain in the file keep their usage.
    pub fn watch_file(
        path: PathBuf,
        poll_interval: Duration,
        lifetime: &Lifetime,
    ) -> Result<Self, ApiKeysError> {
        let (text, first) = read(&path)?;
        let (sender, keys) = watch::channel(first);
        let file = PolledFile::new(path, &text, poll_interval);
        // Without it, keys that are removed from the file would stay valid.
        lifetime.spawn_essential("api-keys", lifetime.until_cancelled(reload_on_edit(file, sender)));
        Ok(Self::Keys(ApiKeys(keys)))
    }

    /// Whether anyone may send requests.
    pub fn is_open(&self) -> bool {
        matches!(self, Self::Open)
    }

    /// Returns the caller with this `authorization` header.
    pub fn authenticate(&self, authorization: Option<&[u8]>) -> Result<Caller, RouterError> {
        let Self::Keys(ApiKeys(keys)) = self else {
            return Ok(Caller {
                honors_fairness_ids: true,
                may_be_logged: true,
                is_operator: true,
                ..Caller::default()
            });
        };
        let header = authorization.ok_or(RouterError::Unauthenticated(
            "an API key is required: send it as `Authorization: Bearer KEY`",
        ))?;
        let key = bearer_key(header)
            .ok_or(RouterError::Unauthenticated("the authorization header must be `Bearer KEY`"))?;
        let digest = digest(key);
        let keys = keys.borrow();
        let mut found = None;
        for candidate in keys.iter() {
            if bool::from(candidate.digest.ct_eq(&digest)) {
                found = Some(&candidate.caller);
            }
        }
        found.cloned().ok_or(RouterError::Unauthenticated("the API key is invalid"))
    }

    /// Returns the operator with this `authorization` header.
    pub fn authenticate_operator(&self, authorization: Option<&[u8]>) -> Result<Caller, RouterError> {
        let caller = self.authenticate(authorization)?;
        if caller.is_operator { Ok(caller) } else { Err(RouterError::NotAnOperator) }
    }
}

impl Caller {
    /// Key for fair queueing among callers.
    pub fn fair_queue_key(&self) -> u64 {
        self.fairness_key.unwrap_or(self.isolation_key)
    }

    /// Returns a key that differs by isolation key and `name`.
    pub(super) fn derived_key(&self, name: &str) -> u64 {
        let hash = Sha256::new().chain_update(self.isolation_key.to_le_bytes()).chain_update(name).finalize();
        u64::from_le_bytes(hash[..8].try_into().expect("a hash has 32 bytes"))
    }

    /// Whether the key may use a model.
    pub fn may_use(&self, model: &str) -> bool {
        self.models.as_ref().is_none_or(|models| models.contains(model))
    }

    /// Returns the model with this id. A model that the key may not use is reported as not found.
    pub fn model(&self, catalog: &Catalog, id: &str) -> Result<Arc<ModelEntry>, RouterError> {
        if self.may_use(id) {
            catalog.get(id)
        } else {
            Err(RouterError::ModelNotFound { model: id.to_owned() })
        }
    }

    /// Like [`Self::model`]. Without an id, returns the only model that the key may use, under its own name
    /// if it has aliases.
    pub fn model_or_sole(&self, catalog: &Catalog, id: Option<&str>) -> Result<Arc<ModelEntry>, RouterError> {
        if let Some(id) = id.filter(|id| !id.is_empty()) {
            return self.model(catalog, id);
        }
        let mut names = self.models(catalog).into_iter();
        let first = names.next().filter(|first| names.clone().all(|other| other.model == first.model));
        first.map(|first| names.find(|entry| entry.id == entry.model).unwrap_or(first)).ok_or_else(|| {
            RouterError::invalid("model", "model is required: GET /v1/models lists the available models")
        })
    }

    /// Models that the key may use, sorted by id.
    pub fn models(&self, catalog: &Catalog) -> Vec<Arc<ModelEntry>> {
        let mut models = catalog.list();
        models.retain(|entry| self.may_use(&entry.id));
        models
    }
}

fn read(path: &Path) -> Result<(String, Vec<ApiKey>), ApiKeysError> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| ApiKeysError::Unreadable { path: path.to_owned(), error })?;
    let keys = api_keys::parse(&text, path)?;
    Ok((text, keys))
}

/// Applies every edit of the file; never returns.
async fn reload_on_edit(mut file: PolledFile, keys: watch::Sender<Vec<ApiKey>>) {
    loop {
        let edited = file.next_edit().await;
        let next = parse_edit(edited, file.path(), &keys.borrow());
        if let Some(next) = next {
            keys.send_replace(next);
        }
    }
}

/// Parses the keys of an edited file; `None` if it is broken.
fn parse_edit(edited: Result<String, String>, path: &Path, previous: &[ApiKey]) -> Option<Vec<ApiKey>> {
    let displayed_path = path.display();
    match edited.map(|text| api_keys::parse(&text, path)) {
        Ok(Ok(mut next)) => {
            next.iter_mut().for_each(|key| key.inherit_usage(previous));
            tracing::info!(path = %displayed_path, keys = next.len(), "reloaded the API keys");
            Some(next)
        }
        Ok(Err(error)) => {
            tracing::error!(%error, "invalid API key file, keeping the previous keys");
            None
        }
        Err(error) => {
            tracing::error!(path = %displayed_path, error, "cannot read the API key file, keeping the previous keys");
            None
        }
    }
}

/// Returns the key in `Bearer KEY`; the scheme is not case-sensitive.
fn bearer_key(header: &[u8]) -> Option<&[u8]> {
    let (scheme, rest) = header.split_at_checked(7)?;
    if !scheme.eq_ignore_ascii_case(b"bearer ") {
        return None;
    }
    let key = rest.trim_ascii();
    (!key.is_empty()).then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Short, so that tests wait only for the change itself.
    const POLL_INTERVAL: Duration = Duration::from_millis(2);

    fn bearer(key: &str) -> Vec<u8> {
        format!("Bearer {key}").into_bytes()
    }

    #[test]
    fn unknown_keys_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        std::fs::write(&path, "sk-one\n  sk-two bob\nsk-operator admin=true\n").unwrap();
        let auth = Auth::from_file(&path).unwrap();
        for header in
            [None, Some(&b"Bearer sk-on"[..]), Some(b"Bearer "), Some(b"Basic sk-one"), Some(b"sk-one")]
        {
            let error = auth.authenticate(header).unwrap_err();
            assert_eq!(error.mapping().status, 401, "{header:?}");
            assert!(!error.to_string().contains("sk-on"), "a key must not be repeated: {error}");
        }
        let bob = auth.authenticate(Some(b"bearer  sk-two ")).unwrap();
        assert_eq!(bob.name.as_deref(), Some("bob"));
        assert_eq!(auth.authenticate_operator(Some(b"Bearer sk-two")), Err(RouterError::NotAnOperator));
        assert!(auth.authenticate_operator(Some(b"Bearer sk-operator")).is_ok());
        let everyone =
            Caller { honors_fairness_ids: true, may_be_logged: true, is_operator: true, ..Caller::default() };
        assert_eq!(Auth::Open.authenticate_operator(None).unwrap(), everyone);
    }

    #[tokio::test]
    async fn edits_are_reloaded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        std::fs::write(&path, "sk-one alice max_concurrent_requests=1\nsk-gone\n").unwrap();
        let lifetime = Lifetime::new();
        let auth = Auth::watch_file(path.clone(), POLL_INTERVAL, &lifetime).unwrap();
        let Auth::Keys(ApiKeys(mut edits)) = auth.clone() else { panic!("there are keys") };
        let alice = auth.authenticate(Some(&bearer("sk-one"))).unwrap();
        let running = alice.usage.as_ref().unwrap().acquire().unwrap();

        std::fs::write(&path, "sk-one alice max_concurrent_requests=1 priority=3\nsk-new\n").unwrap();
        edits.changed().await.unwrap();
        assert!(auth.authenticate(Some(&bearer("sk-gone"))).is_err());
        assert!(auth.authenticate(Some(&bearer("sk-new"))).is_ok());
        let alice = auth.authenticate(Some(&bearer("sk-one"))).unwrap();
        assert_eq!(alice.priority, 3);
        assert!(alice.usage.as_ref().unwrap().acquire().is_err(), "running requests still count");
        drop(running);
        assert!(alice.usage.unwrap().acquire().is_ok());
    }

    #[test]
    fn an_invalid_file_is_not_applied() {
        let path = Path::new("keys");
        let previous = api_keys::parse("sk-one alice\n", path).unwrap();
        for broken in [Ok("sk-one color=red\n".to_owned()), Ok(String::new()), Err("no such file".to_owned())]
        {
            assert!(parse_edit(broken.clone(), path, &previous).is_none(), "{broken:?}");
        }
        assert_eq!(parse_edit(Ok("sk-one\nsk-two\n".to_owned()), path, &previous).unwrap().len(), 2);
    }
}
