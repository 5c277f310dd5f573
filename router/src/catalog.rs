//! The models that clients can request. The worker registry publishes the list, the APIs read it. Must not
//! depend on worker addresses or load: the scheduler decides whether a model can be served right now.

pub mod settings;

use std::collections::BTreeMap;
use std::sync::Arc;

use speculation::TokenId;
use tokio::sync::watch;

use self::settings::{ModelSettings, RequestDefaults};
use crate::error::RouterError;
use text::ModelText;

/// One model, as described by its target.
#[derive(Debug, Clone)]
pub struct ModelEntry {
    /// Name used by clients.
    pub id: String,
    /// Name used by targets; differs from `id` for an operator's alias.
    pub model: String,
    /// Defaults of absent request fields.
    pub defaults: RequestDefaults,
    /// Unix time in seconds when this router first saw the model.
    pub created: u64,
    /// Tokenizer and chat template.
    pub text: Arc<ModelText>,
    /// Maximum length of prompt and output together, in tokens.
    pub max_model_len: u32,
    /// Vocabulary size; larger or equal ids are refused.
    pub vocab_size: u32,
    /// Tokens that end a sequence, unless the request ignores them.
    pub eos_token_ids: Vec<TokenId>,
    /// Names a class of targets whose results are equal bit for bit; clients see it as `system_fingerprint`.
    pub numerics_id: String,
}

type Models = Arc<BTreeMap<String, Arc<ModelEntry>>>;

/// The list of models. Clones share it.
#[derive(Debug, Clone)]
pub struct Catalog {
    models: watch::Sender<Models>,
    /// By the name used by clients.
    settings: Arc<BTreeMap<String, ModelSettings>>,
}

impl Catalog {
    /// Creates an empty list; models are published with these settings.
    pub fn new(settings: BTreeMap<String, ModelSettings>) -> Self {
        Self { models: watch::Sender::new(Models::default()), settings: Arc::new(settings) }
    }

    /// Replaces the list. A model that currently has no workers stays listed, so that clients get "not ready"
    /// instead of "does not exist".
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

    /// All models, sorted by id.
    pub fn list(&self) -> Vec<Arc<ModelEntry>> {
        self.models.borrow().values().cloned().collect()
    }

    /// Returns the model with this id. Before the first model has been seen the error is "not ready", not
    /// "does not exist".
    pub fn get(&self, id: &str) -> Result<Arc<ModelEntry>, RouterError> {
        let models = self.models.borrow();
        if models.is_empty() {
            let reason =
                "no target worker has joined yet (operators: GET /health/ready and /debug/lanes at --admin)";
            return Err(RouterError::Unavailable { reason: reason.into() });
        }
        models.get(id).cloned().ok_or_else(|| RouterError::ModelNotFound { model: id.to_owned() })
    }
}
