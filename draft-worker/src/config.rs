//! Settings of the draft worker: those common to all workers, and how it drafts.

use std::path::PathBuf;

use clap::Parser;
use serde::{Deserialize, Serialize};
use service::config::{Faults, RawConfig};
use worker::config::{DefaultPorts, RawWorker, WorkerConfig, WorkerFlags};

const EXAMPLES: &str = "\
The tokenizer must equal the target's: routers compare fingerprints and report the first token
that differs. For a draft with another tokenizer, pass the target's with --target-tokenizer; the
draft worker then translates to the target's ids.

Examples:
  outrider-draft-worker --model models/qwen3-0.6b --weights int8 --insecure \\
      --discovery etcd://10.0.0.5:2379/outrider \\
      --listen 0.0.0.0:8120 --advertise http://10.0.0.21:8120
  outrider-draft-worker --model models/qwen3-0.6b --target-tokenizer models/llama-3.1-70b \\
      --discovery static:workers.toml
  # No model: drafts from the text itself.
  outrider-draft-worker --method ngram --task-types code,sql --discovery static:workers.toml";

/// Serves drafts: guesses the next tokens of sequences that a target worker then checks.
///
/// Settings come from --config FILE (TOML), then OUTRIDER_* environment variables, then flags; later ones
/// win.
#[derive(Debug, Parser, Serialize)]
#[command(name = "outrider-draft-worker", version = service::release::version(), after_long_help = EXAMPLES)]
pub struct Flags {
    /// Draft method: model (a small model) or ngram (from the sequence itself)
    #[arg(long, value_name = "model|ngram")]
    pub method: Option<String>,
    /// Tokenizer of the target, if it differs from this model's: its tokenizer.json, or better the checkpoint
    /// directory, whose generation_config.json names the tokens that end a text. Tokens are mapped by their
    /// bytes; the text stays the target's own
    #[arg(long, value_name = "FILE|DIR")]
    pub target_tokenizer: Option<PathBuf>,
    /// Task types that this worker is intended for, as code,sql; all if none is given. A router detects
    /// translation, summarization, sql, api_call, shell, code, support, creative, math, qa and chat, and
    /// requests may name others
    #[arg(long, value_name = "TYPE", value_delimiter = ',')]
    pub task_types: Vec<String>,
    /// Maximum outcomes of a proposal to draft ahead while a target verifies it and the worker is idle, as
    /// far as extra rows cost little; 0: never, for a draft worker that shares its cores with the target
    #[arg(long, value_name = "OUTCOMES")]
    pub draft_ahead: Option<usize>,
    /// Run on trial: routers open a share of their sequences here too and compare the proposals with what
    /// targets commit; no target receives them until an operator rolls this draft out at a router (POST
    /// /admin/rollout)
    #[arg(long, value_name = "true|false", num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    pub shadow: Option<bool>,
    #[command(flatten)]
    #[serde(flatten)]
    #[expect(missing_docs, reason = "clap would take a doc comment here for the help of every flag below")]
    pub worker: WorkerFlags,
}

/// Unvalidated settings.
#[derive(Debug, Serialize, Deserialize)]
pub struct RawDraft {
    method: String,
    target_tokenizer: Option<PathBuf>,
    task_types: Vec<String>,
    draft_ahead: usize,
    shadow: bool,
    #[serde(flatten)]
    worker: RawWorker,
}

impl Default for RawDraft {
    fn default() -> Self {
        let (method, worker) =
            ("model".to_owned(), RawWorker::new(DefaultPorts { listen: 8120, admin: 8121 }));
        let (target_tokenizer, task_types) = (None, Vec::new());
        Self { method, target_tokenizer, task_types, draft_ahead: DRAFT_AHEAD, shadow: false, worker }
    }
}

/// Default maximum of outcomes to draft ahead.
const DRAFT_AHEAD: usize = 16;

/// Upper bound of `draft_ahead`: each outcome is a row of a forward.
const DRAFT_AHEAD_MAX: usize = 64;

/// A draft method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftMethod {
    /// A small model.
    Model,
    /// N-grams of the sequence itself.
    Ngram,
}

/// Validated settings.
#[derive(Debug, Clone)]
pub struct DraftConfig {
    /// The draft method.
    pub method: DraftMethod,
    /// The target's tokenizer.json or the directory that contains it, if the model has a different tokenizer.
    pub target_tokenizer: Option<PathBuf>,
    /// Task types that this worker is intended for; empty for all.
    pub task_types: Vec<String>,
    /// Maximum outcomes of a proposal to draft ahead.
    pub draft_ahead: usize,
    /// Whether the worker is on trial (shadow).
    pub is_shadow: bool,
    /// Settings common to all workers.
    pub worker: WorkerConfig,
}

impl RawConfig for RawDraft {
    type Config = DraftConfig;

    fn validate(self, faults: &mut Faults) -> Option<DraftConfig> {
        let method = match self.method.as_str() {
            "model" => {
                if self.worker.needs_model() {
                    faults.require("model", self.worker.model());
                }
                Some(DraftMethod::Model)
            }
            "ngram" => {
                faults.check("engine", self.worker.needs_model(), || {
                    "method ngram has no engine: use method model with a synthetic engine".to_owned()
                });
                faults.check("model", self.worker.model().is_none(), || {
                    "method ngram runs no model: remove --model".to_owned()
                });
                Some(DraftMethod::Ngram)
            }
            other => {
                faults.add("method", format_args!("`{other}` is unknown, expected model or ngram"));
                None
            }
        };
        faults.check("draft_ahead", self.draft_ahead <= DRAFT_AHEAD_MAX, || {
            format!("{} is above {DRAFT_AHEAD_MAX}", self.draft_ahead)
        });
        let takes_tokenizer = method == Some(DraftMethod::Model) && self.worker.needs_model();
        faults.check("target_tokenizer", self.target_tokenizer.is_none() || takes_tokenizer, || {
            "applies only to a draft that runs a model: n-gram and synthetic drafts work with any target's ids".to_owned()
        });
        if let Some(path) = &self.target_tokenizer {
            faults.check("target_tokenizer", path.exists(), || {
                format!(
                    "{} cannot be read: give the target's tokenizer.json or its directory",
                    path.display()
                )
            });
        }
        let worker = self.worker.validate(faults);
        let (task_types, draft_ahead, is_shadow) = (self.task_types, self.draft_ahead, self.shadow);
        let is_model = method == Some(DraftMethod::Model);
        faults.check("ballast", is_model || worker.as_ref().is_none_or(|worker| worker.ballast == 0), || {
            "method ngram has no weights: remove --ballast".to_owned()
        });
        let (method, target_tokenizer) = (method?, self.target_tokenizer);
        Some(DraftConfig { method, target_tokenizer, task_types, draft_ahead, is_shadow, worker: worker? })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// The faults of a draft for a target with this tokenizer, if any.
    fn fault(target_tokenizer: &Path) -> Option<String> {
        let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/draft");
        let tokenizer = target_tokenizer.to_str().unwrap();
        let flags =
            Flags::parse_from(["outrider-draft-worker", "--model", demo, "--target-tokenizer", tokenizer]);
        let config = service::config::load::<RawDraft>(&flags, None, "OUTRIDER_NOWHERE_");
        config.err().map(|error| error.to_string())
    }

    #[test]
    fn the_targets_tokenizer_is_a_file_or_a_directory_that_exists() {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/target");
        assert_eq!(fault(&demo), None);
        assert_eq!(fault(&demo.join("tokenizer.json")), None);
        let missing = fault(&demo.join("nowhere")).unwrap();
        assert!(missing.contains("target_tokenizer (set by --target-tokenizer): "), "{missing}");
        assert!(missing.contains("nowhere cannot be read"), "{missing}");
    }
}
