//! The bundled draft as the worker of these tests.

use std::path::{Path, PathBuf};

use clap::Parser;
use draft_worker::config::{DraftConfig, Flags, RawDraft};
use draft_worker::propose::Propose;
use speculation::Role;
use worker::model::ModelExecutor;

/// Directory of the model.
pub(crate) fn model_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/draft")
}

/// Configuration of a worker that runs it, with additional flags.
pub(crate) fn config(more: &[&str]) -> DraftConfig {
    let model = model_dir();
    let flags = ["outrider-draft-worker", "--model", &model.to_string_lossy(), "--profile-steps", "false"];
    let flags = Flags::parse_from(flags.iter().chain(more));
    service::config::load::<RawDraft>(&flags, None, "OUTRIDER_NOWHERE_").expect("the flags suffice")
}

/// A worker that runs it, with additional flags.
pub(crate) fn executor(propose: Propose, more: &[&str]) -> ModelExecutor<Propose> {
    worker::serve::load(&config(more).worker, Role::Draft, propose, None)
        .expect("the bundled draft loads")
        .executor
}
