//! Response bodies of `/v1/models`.

use serde::Serialize;

use crate::catalog::ModelEntry;

/// List of all models.
#[derive(Debug, Serialize)]
pub struct ModelList {
    object: &'static str,
    data: Vec<Model>,
}

/// One model.
#[derive(Debug, Serialize)]
pub struct Model {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    /// vLLM's: the model that the name is an alias of.
    root: String,
    /// Outrider's and vLLM's: maximum length of prompt and output together.
    max_model_len: u32,
    /// Outrider's: numerics id of the targets, a class with results equal bit for bit.
    system_fingerprint: String,
}

impl From<&ModelEntry> for Model {
    fn from(entry: &ModelEntry) -> Self {
        Self {
            id: entry.id.clone(),
            object: "model",
            created: entry.created,
            owned_by: "outrider",
            root: entry.model.clone(),
            max_model_len: entry.max_model_len,
            system_fingerprint: entry.numerics_id.clone(),
        }
    }
}

impl FromIterator<Model> for ModelList {
    fn from_iter<I: IntoIterator<Item = Model>>(models: I) -> Self {
        Self { object: "list", data: models.into_iter().collect() }
    }
}
