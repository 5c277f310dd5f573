//! Proposals that were drafted ahead: when they are used, and what the draft worker is told.

use super::*;

fn ahead_of(step: &Step, committed_ids: &[TokenId], ids: &[TokenId]) -> ProposalAhead {
    let Step { sequence_id, epoch, step_seq, .. } = *step;
    let (committed_ids, draft) = (committed_ids.to_vec(), Draft::chain(ids.to_vec()));
    ProposalAhead { sequence_id, epoch, step_seq, committed_ids, draft }
}

fn receive(sequence: &mut Sequence, ahead: ProposalAhead) -> Vec<Action> {
    sequence.step(NOW, Event::ProposalAhead(ahead))
}

/// A sequence of three ids whose proposal of 11 and 12 is being verified, with the steps of both workers.
fn verifying() -> (Sequence, Step, Step) {
    let mut sequence = assigned(sequence(&[1, 2, 3], 100));
    let draft = sent(&begin(&mut sequence, 2), Role::Draft);
    let actions = answer(&mut sequence, Role::Draft, &draft, proposal(&draft, &[11, 12]));
    let target = sent(&actions, Role::Target);
    (sequence, draft, target)
}

#[test]
fn a_proposal_drafted_ahead_of_what_was_committed_is_verified_at_once() {
    for (committed, num_accepted, expected) in
        [(&[11, 12, 13][..], 2, &[14, 15][..]), (&[11, 99], 1, &[21, 22]), (&[77], 0, &[31])]
    {
        let (mut sequence, draft, target) = verifying();
        for ahead in [
            // The first id after the whole proposal is a guess of its own.
            ahead_of(&draft, &[11, 12], &[13, 14, 15]),
            ahead_of(&draft, &[11, 99], &[21, 22, 23]),
            ahead_of(&draft, &[77], &[31]),
        ] {
            assert_eq!(receive(&mut sequence, ahead), []);
        }
        answer(&mut sequence, Role::Target, &target, span(&target, num_accepted, committed));
        let actions = begin(&mut sequence, 2);
        assert!(actions.contains(&Action::UsedProposalAhead), "{actions:?}");
        let next = sent(&actions, Role::Target);
        assert_eq!(next.work, Work::Verify { draft: Draft::chain(expected.to_vec()) });
        // The draft worker is told what was committed, and asked for the same proposal.
        let asked = sent(&actions, Role::Draft);
        assert_eq!(asked.start() as usize, 3 + committed.len());
        assert_eq!(asked.work, Work::Propose { num_draft_tokens: 2, num_tree_tokens: 0 });
        // Its answer is not used again, but the round after next continues from it.
        assert_eq!(answer(&mut sequence, Role::Draft, &asked, proposal(&asked, expected)), []);
        let ids: Vec<TokenId> = expected.iter().copied().chain([50]).collect();
        answer(&mut sequence, Role::Target, &next, span(&next, expected.len() as u32, &ids));
        let actions = begin(&mut sequence, 2);
        assert_eq!(sent(&actions, Role::Draft).base_len, asked.start() + expected.len() as u32 - 1);
        assert!(sequence.is_drafting() && actions.len() == 1, "{actions:?}");
    }
}

#[test]
fn another_outcome_waits_for_the_draft_worker() {
    let (mut sequence, draft, target) = verifying();
    receive(&mut sequence, ahead_of(&draft, &[11, 12], &[13, 14, 15]));
    receive(&mut sequence, ahead_of(&draft, &[11, 99], &[21]));
    // The guess after the whole proposal was wrong.
    answer(&mut sequence, Role::Target, &target, span(&target, 2, &[11, 12, 44]));
    let actions = begin(&mut sequence, 2);
    sent(&actions, Role::Draft);
    assert!(sequence.is_drafting(), "{actions:?}");
}

#[test]
fn what_was_drafted_ahead_of_an_earlier_proposal_or_by_another_worker_is_not_used() {
    let stale = |draft: &Step| ahead_of(draft, &[11, 12, 13], &[14, 15]);
    // Before the proposal itself.
    let mut early = assigned(sequence(&[1, 2, 3], 100));
    let draft = sent(&begin(&mut early, 2), Role::Draft);
    receive(&mut early, stale(&draft));
    let target = sent(&answer(&mut early, Role::Draft, &draft, proposal(&draft, &[11, 12])), Role::Target);
    answer(&mut early, Role::Target, &target, span(&target, 2, &[11, 12, 13]));
    begin(&mut early, 2);
    assert!(early.is_drafting());

    // After the next request.
    let (mut late, draft, target) = verifying();
    answer(&mut late, Role::Target, &target, span(&target, 2, &[11, 12, 13]));
    let next = sent(&begin(&mut late, 2), Role::Draft);
    receive(&mut late, stale(&draft));
    let target = sent(&answer(&mut late, Role::Draft, &next, proposal(&next, &[14])), Role::Target);
    receive(&mut late, stale(&draft));
    answer(&mut late, Role::Target, &target, span(&target, 1, &[14, 15]));
    begin(&mut late, 2);
    assert!(late.is_drafting());

    // From a worker that was lost meanwhile.
    let (mut moved, draft, target) = verifying();
    receive(&mut moved, stale(&draft));
    moved.step(NOW, Event::Lost(Role::Draft));
    moved.step(NOW, Event::Assigned(Role::Draft));
    receive(&mut moved, stale(&draft));
    answer(&mut moved, Role::Target, &target, span(&target, 2, &[11, 12, 13]));
    assert!(!begin(&mut moved, 2).contains(&Action::UsedProposalAhead));
}

#[test]
fn what_no_target_may_get_is_not_kept() {
    let (mut sequence, draft, _) = verifying();
    let malformed = [Action::Anomaly(Anomaly::MalformedReply)];
    let mut cyclic = ahead_of(&draft, &[11], &[13, 14]);
    cyclic.draft.parents = vec![2, 0];
    for (what, ahead) in [
        ("a drafted id outside the vocabulary", ahead_of(&draft, &[11], &[50_000])),
        ("a committed id outside the vocabulary", ahead_of(&draft, &[50_000], &[13])),
        ("a row before its parent", cyclic),
        ("more ids than an outcome has", ahead_of(&draft, &[11; 40], &[13])),
        ("more ids than a tree has", ahead_of(&draft, &[11], &[13; 65])),
    ] {
        assert_eq!(receive(&mut sequence, ahead), malformed, "{what}");
    }
    for id in 0..200 {
        assert_eq!(receive(&mut sequence, ahead_of(&draft, &[11, id], &[13])), []);
    }
    let num_kept = sequence.last_proposal.map_or(0, |last| last.ahead.len());
    assert!((1..200).contains(&num_kept), "a worker that sends without end takes no memory: {num_kept}");
}
