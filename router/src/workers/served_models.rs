//! The models of the connected targets, merged into one published entry per model.
//!
//! Targets of one model may differ, for instance after a restart with other options or during an update. The
//! newest connected target determines everything except the window: that is the longest of all connected
//! targets, because the scheduler assigns a sequence only to a target whose window it fits. A model without
//! connected targets stays as it was last published. Nothing tells clients that targets differ, so the log
//! does.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proto::v1;
use scheduling::scheduler::WorkerKey;
use service::unix_time::since_unix_epoch;
use speculation::TokenId;
use text::ModelText;

use crate::catalog::ModelEntry;
use crate::catalog::settings::RequestDefaults;

/// The SHA-256 hash of each asset, by the asset's name.
pub(super) type AssetHashes = BTreeMap<String, String>;

/// Returns the hashes that a worker announces.
pub(super) fn asset_hashes(hello: &v1::WorkerHello) -> AssetHashes {
    hello.assets.iter().map(|asset| (asset.name.clone(), asset.sha256.clone())).collect()
}

/// The model of one connected target.
#[derive(Debug, Clone)]
pub(super) struct TargetModel {
    address: String,
    facts: ModelFacts,
    text: Arc<ModelText>,
}

impl TargetModel {
    /// Reads the facts from the hello of the target at `address`; `text` was made from its assets.
    pub(super) fn new(address: &str, hello: &v1::WorkerHello, text: Arc<ModelText>) -> Self {
        let facts = ModelFacts {
            id: hello.model_id.clone(),
            numerics_id: hello.numerics_id.clone(),
            max_model_len: hello.max_model_len,
            vocab_size: hello.vocab_size,
            eos_token_ids: hello.eos_token_ids.clone(),
            assets: asset_hashes(hello),
        };
        Self { address: address.to_owned(), facts, text }
    }
}

/// What a target says of its model, as far as it is published or determines what is published.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ModelFacts {
    id: String,
    numerics_id: String,
    max_model_len: u32,
    vocab_size: u32,
    eos_token_ids: Vec<TokenId>,
    assets: AssetHashes,
}

impl ModelFacts {
    /// What differs between two targets of a model in such a way that the same request gets different
    /// answers; empty if nothing does.
    fn differences(&self, other: &Self) -> String {
        let mut differences = Vec::new();
        if self.numerics_id != other.numerics_id {
            differences.push(format!("numerics_id {} and {}", self.numerics_id, other.numerics_id));
        }
        let names: BTreeSet<&String> = self.assets.keys().chain(other.assets.keys()).collect();
        let differing = names.into_iter().filter(|&name| self.assets.get(name) != other.assets.get(name));
        differences.extend(differing.cloned());
        differences.join(", ")
    }
}

/// The models of the connected targets, and every model that a target has served here.
#[derive(Debug, Default)]
pub(super) struct ServedModels {
    /// Keys ascend, so a later target is a newer one.
    targets: BTreeMap<WorkerKey, TargetModel>,
    published: BTreeMap<String, PublishedModel>,
}

#[derive(Debug)]
struct PublishedModel {
    facts: ModelFacts,
    entry: Arc<ModelEntry>,
}

impl ServedModels {
    /// Adds a connected target. Returns whether the entries changed.
    pub(super) fn join(&mut self, key: WorkerKey, mut model: TargetModel) -> bool {
        if let Some(text) = self.text(&model.facts.assets) {
            model.text = text;
        }
        let id = model.facts.id.clone();
        if let Some((other, differences)) = self.differing(&model) {
            tracing::warn!(
                model = id,
                address = model.address,
                other,
                differences,
                "targets of one model differ: the same seed gives different texts; clients see the numerics_id of the newest"
            );
        }
        self.targets.insert(key, model);
        self.publish(&id)
    }

    /// The newest of the connected targets of the model that differs from this one, by its address, and what
    /// differs.
    fn differing(&self, model: &TargetModel) -> Option<(&str, String)> {
        let of_model = self.targets.values().rev().filter(|target| target.facts.id == model.facts.id);
        let mut compared = of_model.map(|target| (&*target.address, target.facts.differences(&model.facts)));
        compared.find(|(_, differences)| !differences.is_empty())
    }

    /// Removes a worker, if it is a target. Returns whether the entries changed.
    pub(super) fn leave(&mut self, key: WorkerKey) -> bool {
        self.targets.remove(&key).is_some_and(|target| self.publish(&target.facts.id))
    }

    /// Returns the tokenizer and template of these assets, if they are known.
    pub(super) fn text(&self, assets: &AssetHashes) -> Option<Arc<ModelText>> {
        let connected = self.targets.values().map(|target| (&target.facts, &target.text));
        let published = self.published.values().map(|model| (&model.facts, &model.entry.text));
        let mut known = connected.chain(published);
        known.find(|(facts, _)| facts.assets == *assets).map(|(_, text)| Arc::clone(text))
    }

    /// The published entries.
    pub(super) fn entries(&self) -> impl Iterator<Item = Arc<ModelEntry>> {
        self.published.values().map(|model| Arc::clone(&model.entry))
    }

    /// Updates the entry of a model from its connected targets. Returns whether it changed.
    fn publish(&mut self, id: &str) -> bool {
        let mut of_model = self.targets.values().filter(|target| target.facts.id == id);
        let max_model_len = of_model.clone().map(|target| target.facts.max_model_len).max();
        let (Some(newest), Some(max_model_len)) = (of_model.next_back(), max_model_len) else { return false };
        let facts = ModelFacts { max_model_len, ..newest.facts.clone() };
        let last = self.published.get(id);
        if last.is_some_and(|last| last.facts == facts) {
            return false;
        }
        let entry = ModelEntry {
            id: facts.id.clone(),
            model: facts.id.clone(),
            defaults: RequestDefaults::default(),
            created: last.map_or_else(|| since_unix_epoch().as_secs(), |last| last.entry.created),
            text: Arc::clone(&newest.text),
            max_model_len,
            vocab_size: facts.vocab_size,
            eos_token_ids: facts.eos_token_ids.clone(),
            numerics_id: facts.numerics_id.clone(),
        };
        tracing::debug!(model = id, max_model_len, numerics_id = facts.numerics_id, "model published");
        self.published.insert(id.to_owned(), PublishedModel { facts, entry: Arc::new(entry) });
        true
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::OnceLock;

    use text::asset;

    use super::*;

    /// The bundled tokenizer. Every call returns another handle, so that handles can be told apart.
    fn new_text() -> Arc<ModelText> {
        static TOKENIZER: OnceLock<Vec<u8>> = OnceLock::new();
        let bytes = TOKENIZER.get_or_init(|| {
            let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/target");
            std::fs::read(directory.join(asset::TOKENIZER)).unwrap()
        });
        Arc::new(
            ModelText::from_assets(|name| (name == asset::TOKENIZER).then_some(bytes.as_slice())).unwrap(),
        )
    }

    fn hello(max_model_len: u32) -> v1::WorkerHello {
        let asset = |name: &str, sha256: &str| v1::Asset {
            name: name.to_owned(),
            sha256: sha256.to_owned(),
            ..v1::Asset::default()
        };
        v1::WorkerHello {
            model_id: "demo".to_owned(),
            numerics_id: "n1".to_owned(),
            max_model_len,
            vocab_size: 4_096,
            eos_token_ids: vec![0],
            assets: vec![asset(asset::TOKENIZER, "aa"), asset(asset::CHAT_TEMPLATE, "bb")],
            ..v1::WorkerHello::default()
        }
    }

    /// Adds a target; returns whether the entries changed.
    fn join(models: &mut ServedModels, key: u64, hello: &v1::WorkerHello) -> bool {
        models.join(WorkerKey(key), TargetModel::new(&format!("http://t{key}:1"), hello, new_text()))
    }

    fn entry(models: &ServedModels) -> Arc<ModelEntry> {
        let entries: Vec<_> = models.entries().collect();
        assert_eq!(entries.len(), 1);
        Arc::clone(&entries[0])
    }

    #[test]
    fn the_window_is_the_longest_of_the_connected_targets() {
        let mut models = ServedModels::default();
        // (key, its window if it joins or none if it leaves, whether that changes the entry, its window then)
        let rows = [
            (1, Some(512), true, 512),
            (2, Some(256), false, 512),
            (3, Some(512), false, 512),
            (1, None, false, 512),
            (3, None, true, 256),
            (4, Some(1_024), true, 1_024),
            (4, None, true, 256),
            // The model stays as it was until another target joins.
            (2, None, false, 256),
            (5, Some(128), true, 128),
            // A draft worker.
            (6, None, false, 128),
        ];
        for (row, (key, window, is_changed, published)) in rows.into_iter().enumerate() {
            let changed = match window {
                Some(window) => join(&mut models, key, &hello(window)),
                None => models.leave(WorkerKey(key)),
            };
            assert_eq!((changed, entry(&models).max_model_len), (is_changed, published), "row {row}");
        }
    }

    type Change = fn(&mut v1::WorkerHello);

    #[test]
    fn every_published_fact_follows_the_newest_connected_target() {
        let changes: [(&str, Change); 5] = [
            ("numerics id", |hello| hello.numerics_id = "n2".to_owned()),
            ("vocabulary", |hello| hello.vocab_size = 4_097),
            ("end tokens", |hello| hello.eos_token_ids = vec![0, 2]),
            ("hash", |hello| hello.assets[1].sha256 = "cc".to_owned()),
            ("assets", |hello| hello.assets.truncate(1)),
        ];
        for (what, change) in changes {
            let mut models = ServedModels::default();
            assert!(join(&mut models, 1, &hello(512)), "{what}");
            let first = entry(&models);
            let mut other = hello(512);
            change(&mut other);
            assert!(join(&mut models, 2, &other), "{what}");
            let second = entry(&models);
            assert_eq!(second.numerics_id, other.numerics_id, "{what}");
            assert_eq!(second.vocab_size, other.vocab_size, "{what}");
            assert_eq!(second.eos_token_ids, other.eos_token_ids, "{what}");
            let has_new_text = !Arc::ptr_eq(&first.text, &second.text);
            assert_eq!(has_new_text, asset_hashes(&other) != asset_hashes(&hello(512)), "{what}");
            // The older target is the only one again.
            assert!(models.leave(WorkerKey(2)), "{what}");
            assert!(Arc::ptr_eq(&first.text, &entry(&models).text), "{what}");
            assert_eq!(entry(&models).eos_token_ids, first.eos_token_ids, "{what}");
        }
    }

    #[test]
    fn a_target_that_answers_differently_is_noticed_and_one_with_another_window_is_not() {
        let mut models = ServedModels::default();
        join(&mut models, 1, &hello(512));
        let differing = |models: &ServedModels, change: Change| {
            let mut other = hello(256);
            change(&mut other);
            let new = TargetModel::new("http://new:1", &other, new_text());
            let (other, differences) = models.differing(&new)?;
            Some((other.to_owned(), differences))
        };
        assert_eq!(differing(&models, |_| ()), None);
        assert_eq!(differing(&models, |hello| hello.model_id = "other".to_owned()), None);
        let found = |other: &str, differences: &str| Some((other.to_owned(), differences.to_owned()));
        let other_weights: Change = |hello| hello.numerics_id = "n2".to_owned();
        assert_eq!(differing(&models, other_weights), found("http://t1:1", "numerics_id n1 and n2"));
        let other_template: Change = |hello| hello.assets[1].sha256 = "cc".to_owned();
        assert_eq!(differing(&models, other_template), found("http://t1:1", asset::CHAT_TEMPLATE));
        let no_template: Change = |hello| hello.assets.truncate(1);
        assert_eq!(differing(&models, no_template), found("http://t1:1", asset::CHAT_TEMPLATE));
        join(&mut models, 2, &hello(512));
        assert_eq!(differing(&models, no_template), found("http://t2:1", asset::CHAT_TEMPLATE));
        models.leave(WorkerKey(1));
        models.leave(WorkerKey(2));
        assert_eq!(differing(&models, other_weights), None, "nobody else is connected");
    }

    #[test]
    fn equal_assets_are_fetched_once_even_after_their_target_left() {
        let mut models = ServedModels::default();
        assert!(models.text(&asset_hashes(&hello(512))).is_none());
        join(&mut models, 1, &hello(512));
        models.leave(WorkerKey(1));
        let known = models.text(&asset_hashes(&hello(256))).unwrap();
        assert!(Arc::ptr_eq(&known, &entry(&models).text));
        let mut changed = hello(256);
        changed.assets[0].sha256 = "dd".to_owned();
        assert!(models.text(&asset_hashes(&changed)).is_none());
    }
}
