//! The bundled draft as the worker of these tests.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use clap::Parser;
use draft_worker::config::{DraftConfig, Flags, RawDraft};
use draft_worker::propose::Propose;
use speculation::cached_sequence::{Admission, CachedSequence};
use speculation::{ReplyBody, Role, SequenceId, SequenceSpec, Step, TokenId, Work};
use worker::Task;
use worker::executor::StepExecutor as _;
use worker::model::ModelExecutor;
use worker::table::{RouterId, SequenceKey};

/// The prompt of [`proposed`], and its length.
const PROMPT: [TokenId; 3] = [11, 245, 803];
pub(crate) const PROMPT_LEN: u32 = PROMPT.len() as u32;

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

/// The reply to a request for a chain of `num_draft_tokens` after a prompt.
pub(crate) fn proposed(
    executor: &mut ModelExecutor<Propose>,
    num_draft_tokens: u32,
    spec: SequenceSpec,
) -> ReplyBody {
    let step = Step {
        sequence_id: SequenceId(1),
        epoch: 1,
        step_seq: 1,
        spec: Some(Arc::new(spec)),
        base_len: 0,
        prefix_hash: 0,
        append_ids: PROMPT.to_vec(),
        work: Work::Propose { num_draft_tokens, num_tree_tokens: 0 },
    };
    let (slot, mut cached) = (executor.open(), CachedSequence::default());
    assert_eq!(cached.admit(&step, &executor.limits()), Admission::Run);
    let key = SequenceKey { router: RouterId(1), sequence: SequenceId(1) };
    let mut tasks = VecDeque::from([Task::new(key, slot, step, cached, Instant::now())]);
    let body = loop {
        if let Some((_, body)) = executor.advance(&mut tasks, u32::MAX).expect("there is room").pop() {
            break body;
        }
    };
    executor.close(slot);
    body
}
