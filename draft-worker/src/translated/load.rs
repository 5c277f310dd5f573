//! Loads a draft for a target with another tokenizer.

use std::collections::HashMap;
use std::path::Path;

use anyhow::Context as _;
use speculation::{Role, TokenId};
use text::asset::TOKENIZER;
use text::translation::{TokenizerFile, Translation};
use worker::assets::Assets;
use worker::config::WorkerConfig;
use worker::executor::ExecutorCounters;
use worker::serve::{LoadedModel, LoadedWorker, grammars, load_model};

use super::TranslatedExecutor;
use crate::propose::Propose;

/// Files that may contain the target's EOS ids; the first one that does wins.
const END_FILES: [&str; 2] = ["generation_config.json", "config.json"];

/// Loads the configured checkpoint. `target_tokenizer` is the target's tokenizer.json or the directory that
/// contains it. With the target's `generation_config.json` or `config.json` in the directory, the EOS ids are
/// mapped too.
pub fn load(
    config: &WorkerConfig,
    target_tokenizer: &Path,
    role_logic: Propose,
) -> anyhow::Result<LoadedWorker<TranslatedExecutor>> {
    let target = read_target(target_tokenizer).context("target_tokenizer")?;
    let LoadedModel { engine, assets: draft, mut facts, cores } = load_model(config, Role::Draft, None)?;
    let target_ends = end_token_ids(&target)?;
    let translation = {
        let (target_json, draft_json) = (tokenizer_json(&target)?, tokenizer_json(&draft)?);
        let target = TokenizerFile { json: &target_json, eos_token_ids: &target_ends };
        let draft = TokenizerFile { json: &draft_json, eos_token_ids: &facts.eos_token_ids };
        // Until it is set below, this is the number of the draft's ids that have an embedding.
        Box::new(Translation::for_embeddings(target, draft, facts.vocab_size)?)
    };
    let coverage = translation.coverage();
    tracing::info!(
        draft_tokens = coverage.draft_tokens,
        target_tokens = coverage.target_tokens,
        shared_tokens = coverage.shared,
        target_share = format!("{:.3}", coverage.target_share()),
        target_fingerprint = target.token_list().fingerprint(),
        "the draft uses another tokenizer: tokens are translated to the target's ids by their bytes"
    );
    facts.vocab_size = target.token_list().num_ids();
    facts.eos_token_ids = target_ends;
    let executor = TranslatedExecutor {
        row: vec![f32::NEG_INFINITY; translation.num_target_ids()],
        engine,
        translation,
        role_logic,
        grammars: grammars(&target)?,
        max_batch_rows: config.max_batch_rows,
        cores,
        sequences: HashMap::new(),
        counts: ExecutorCounters::default(),
    };
    Ok(LoadedWorker::new(executor, facts, Some(target)))
}

fn read_target(path: &Path) -> anyhow::Result<Assets> {
    if path.is_dir() {
        return Ok(Assets::load(path)?);
    }
    let text = std::fs::read_to_string(path).with_context(|| {
        format!("cannot read {}: give the target's tokenizer.json or its directory", path.display())
    })?;
    Assets::from_files(vec![(TOKENIZER, text)]).with_context(|| path.display().to_string())
}

fn tokenizer_json(assets: &Assets) -> anyhow::Result<Vec<u8>> {
    Ok(assets.get(TOKENIZER).context("a model's assets hold its tokenizer.json")?.to_vec())
}

/// EOS ids, if the files name any.
fn end_token_ids(assets: &Assets) -> anyhow::Result<Vec<TokenId>> {
    for name in END_FILES {
        let Some(bytes) = assets.get(name) else { continue };
        let ids = engine::eos_token_ids(Path::new(name), &bytes).context("target_tokenizer")?;
        if !ids.is_empty() {
            return Ok(ids);
        }
    }
    Ok(Vec::new())
}
