//! Proposals for a sequence with a grammar, by the bundled draft: each ends where the grammar ends, except in
//! rejection mode.

use draft_worker::propose::Propose;
use speculation::{AcceptanceMode, ReplyBody, SequenceSpec};

use crate::bundled_draft::{self, PROMPT_LEN, proposed};

/// The end token of the bundled models.
const END: u32 = 0;

/// A text of three letters.
fn spec(acceptance: AcceptanceMode) -> SequenceSpec {
    let grammar = Some(serde_json::json!({ "kind": "regex", "text": "[a-c]{3}" }).to_string());
    let stop_token_ids = vec![END];
    SequenceSpec {
        prompt_len: PROMPT_LEN,
        max_len: 100,
        acceptance,
        grammar,
        stop_token_ids,
        ..Default::default()
    }
}

/// In rejection mode the draft goes on behind the end token, where the grammar once gave no mask. The worker
/// refused the step, and the sequence lost its draft worker.
#[test]
fn a_proposal_ends_with_the_end_token_except_in_rejection_mode() {
    let mut executor = bundled_draft::executor(Propose { keeps_candidates: true }, &[]);
    for acceptance in [AcceptanceMode::Coupled, AcceptanceMode::Rejection, AcceptanceMode::Typical] {
        let body = proposed(&mut executor, 8, spec(acceptance));
        let ReplyBody::Proposal(proposal) = body else { panic!("{acceptance:?}: {body:?}") };
        let ids = proposal.draft.token_ids;
        let end = ids.iter().position(|id| *id == END).expect("three letters are at most three tokens");
        let (len, num_distributions) = match acceptance {
            AcceptanceMode::Rejection => (8, 8),
            AcceptanceMode::Coupled | AcceptanceMode::Typical => (end + 1, 0),
        };
        assert_eq!((ids.len(), proposal.draft.q.len()), (len, num_distributions), "{acceptance:?}: {ids:?}");
    }
}
