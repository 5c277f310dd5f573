//! Which models exist, as clients see them. The worker registry publishes; the APIs read. Must never know a worker's
//! address or load: whether a model can be served right now is the lanes' to say.

pub mod settings;

use std::collections::BTreeMap;
use std::sync::Arc;

use speculation::TokenId;
use tokio::sync::watch;

use self::settings::{ModelSettings, RequestDefaults};
use crate::error::RouterError;
use text::ModelText;

/// One model, by what its target said of itself.
#[derive(Debug, Clone)]
pub struct ModelEntry {
    /// As clients name it.
    pub id: String,
    /// As targets name it: another name where the operator gave it one.
    pub model: String,
    /// For requests that do not say.
    pub defaults: RequestDefaults,
    /// Unix seconds at which this router first saw it.
    pub created: u64,
    /// Its tokenizer and chat template.
    pub text: Arc<ModelText>,
    /// Prompt and output together.
    pub max_model_len: u32,
    /// Ids at or above this are refused.
    pub vocab_size: u32,
    /// Drawing one of these ends a sequence, unless the request ignores them.
    pub eos_token_ids: Vec<TokenId>,
    /// Names a class of targets whose bits are equal; clients see it as `system_fingerprint`.
    pub numerics_id: String,
}

type Models = Arc<BTreeMap<String, Arc<ModelEntry>>>;

/// The list of models. Clones share it.
#[derive(Debug, Clone)]
pub struct Catalog {
    models: watch::Sender<Models>,
    /// By the name that clients use.
    settings: Arc<BTreeMap<String, ModelSettings>>,
}

impl Default for Catalog {
    fn default() -> Self {
        Self::new(BTreeMap::new())
    }
}

impl Catalog {
    /// An empty list of models that are served by these settings.
    pub fn new(settings: BTreeMap<String, ModelSettings>) -> Self {
        Self { models: watch::Sender::new(Models::default()), settings: Arc::new(settings) }
    }

    /// Replaces the list. A model whose workers are gone for the moment stays listed, so that clients read "not ready"
    /// and not "does not exist".
    pub fn publish(&self, entries: impl IntoIterator<Item = Arc<ModelEntry>>) {
        let served: BTreeMap<String, Arc<ModelEntry>> =
            entries.into_iter().map(|entry| (entry.id.clone(), entry)).collect();
        let mut models = served.clone();
        for (name, settings) in self.settings.iter() {
            let Some(entry) = served.get(settings.serves.as_ref().unwrap_or(name)) else { continue };
            let defaults = settings.defaults.clone();
            let entry = ModelEntry { id: name.clone(), defaults, ..ModelEntry::clone(entry) };
            models.insert(name.clone(), Arc::new(entry));
        }
        self.models.send_replace(Arc::new(models));
    }

    /// Every model, by id.
    pub fn list(&self) -> Vec<Arc<ModelEntry>> {
        self.models.borrow().values().cloned().collect()
    }

    /// The model of this id; while no model has been seen at all, the answer is "not ready" and not "does not exist".
    pub fn get(&self, id: &str) -> Result<Arc<ModelEntry>, RouterError> {
        let models = self.models.borrow();
        if models.is_empty() {
            return Err(RouterError::Unavailable { reason: "no target worker has joined yet".into() });
        }
        models.get(id).cloned().ok_or_else(|| RouterError::ModelNotFound { model: id.to_owned() })
    }

    /// Wakes whoever waits for a change of the list.
    pub fn subscribe(&self) -> watch::Receiver<Models> {
        self.models.subscribe()
    }
}
