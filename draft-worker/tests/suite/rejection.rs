//! Proposals in rejection mode, by the bundled draft.

use draft_worker::propose::Propose;
use speculation::{AcceptanceMode, ReplyBody, SequenceSpec};

use crate::bundled_draft::{self, PROMPT_LEN, proposed};

/// A proposal that ended at a stop token was answered sooner than the others. A deadline in between dropped
/// only the others, and the text had too many stop tokens.
#[test]
fn a_proposal_takes_as_long_whether_or_not_it_has_a_stop_token() {
    let mut executor = bundled_draft::executor(Propose { keeps_candidates: false }, &[]);
    for acceptance in [AcceptanceMode::Rejection, AcceptanceMode::Coupled] {
        let spec =
            SequenceSpec { prompt_len: PROMPT_LEN, max_len: 100, acceptance, ..SequenceSpec::default() };
        let body = proposed(&mut executor, 4, spec.clone());
        let ReplyBody::Proposal(endless) = &body else { panic!("{acceptance:?}: {body:?}") };
        let first = endless.draft.token_ids[0];
        assert_eq!(endless.draft.token_ids.len(), 4);
        let with_stop = proposed(&mut executor, 4, SequenceSpec { stop_token_ids: vec![first], ..spec });
        match acceptance {
            AcceptanceMode::Rejection => assert_eq!(with_stop, body),
            AcceptanceMode::Coupled | AcceptanceMode::Typical => {
                let ReplyBody::Proposal(ended) = &with_stop else { panic!("{with_stop:?}") };
                assert_eq!(ended.draft.token_ids, [first]);
            }
        }
    }
}
