//! Proposals for a sequence with a grammar, by the bundled draft: each ends where the grammar ends, in every
//! acceptance mode.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use draft_worker::propose::Propose;
use speculation::cached_sequence::{Admission, CachedSequence};
use speculation::{AcceptanceMode, ReplyBody, SequenceId, SequenceSpec, Step, Work};
use worker::Task;
use worker::executor::StepExecutor as _;
use worker::model::ModelExecutor;
use worker::table::{RouterId, SequenceKey};

use crate::bundled_draft;

/// The end token of the bundled models.
const END: u32 = 0;

/// The reply to a request for eight tokens after a prompt, whose output must match `regex`.
fn proposed(executor: &mut ModelExecutor<Propose>, acceptance: AcceptanceMode, regex: &str) -> ReplyBody {
    let grammar = Some(serde_json::json!({ "kind": "regex", "text": regex }).to_string());
    let stop_token_ids = vec![END];
    let spec = SequenceSpec {
        prompt_len: 3,
        max_len: 100,
        acceptance,
        grammar,
        stop_token_ids,
        ..Default::default()
    };
    let step = Step {
        sequence_id: SequenceId(1),
        epoch: 1,
        step_seq: 1,
        spec: Some(Arc::new(spec)),
        base_len: 0,
        prefix_hash: 0,
        append_ids: vec![11, 245, 803],
        work: Work::Propose { num_draft_tokens: 8, num_tree_tokens: 0 },
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

/// In rejection mode the draft went on behind the end token, where the grammar gives no mask. The worker
/// refused the step, and the sequence lost its draft worker.
#[test]
fn a_proposal_ends_with_the_end_token_in_every_mode() {
    let mut executor = bundled_draft::executor(Propose { keeps_candidates: true }, &[]);
    for acceptance in [AcceptanceMode::Coupled, AcceptanceMode::Rejection, AcceptanceMode::Typical] {
        let body = proposed(&mut executor, acceptance, "[a-c]{3}");
        let ReplyBody::Proposal(proposal) = body else { panic!("{acceptance:?}: {body:?}") };
        let ids = proposal.draft.token_ids;
        assert_eq!(ids.iter().position(|id| *id == END), Some(ids.len() - 1), "{acceptance:?}: {ids:?}");
        let num_distributions = if acceptance == AcceptanceMode::Rejection { ids.len() } else { 0 };
        assert_eq!(proposal.draft.q.len(), num_distributions, "{acceptance:?}");
    }
}
