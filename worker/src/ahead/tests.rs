//! Tests which outcomes are drafted ahead of and what is reused, with an executor whose guesses follow from
//! the ids before them.

use std::sync::Arc;

use speculation::cached_sequence::WorkerLimits;
use speculation::{Draft, Proposal, Role, SequenceId, SequenceSpec};

use super::*;
use crate::executor::{ExecutorStats, OutOfKvBlocks};

const KEY: SequenceKey = SequenceKey { router: RouterId(1), sequence: SequenceId(1) };

/// Guesses ten times the number of ids before a position; the alternatives are one and two more.
#[derive(Default)]
struct Counting {
    slots: HashMap<Slot, u32>,
    next: u64,
    total: u64,
    rows: u64,
}

fn candidates(at: u32) -> Candidates {
    Candidates::new(vec![10 * at, 10 * at + 1, 10 * at + 2], [0.6, 0.2, 0.1])
}

impl StepExecutor for Counting {
    fn limits(&self) -> WorkerLimits {
        WorkerLimits {
            role: Role::Draft,
            vocab_size: 10_000,
            max_model_len: 500,
            max_tree_tokens: 0,
            grammars: false,
        }
    }

    fn open(&mut self) -> Slot {
        self.next += 1;
        self.slots.insert(Slot(self.next), 0);
        Slot(self.next)
    }

    fn fork(&mut self, slot: Slot, len: u32) -> Option<Slot> {
        assert!(len <= self.slots[&slot], "{len} of {} are held", self.slots[&slot]);
        let fork = self.open();
        self.slots.insert(fork, len);
        Some(fork)
    }

    fn close(&mut self, slot: Slot) {
        self.slots.remove(&slot).expect("closed once");
    }

    fn truncate(&mut self, slot: Slot, len: u32) {
        let held = self.slots.get_mut(&slot).expect("open");
        *held = len.min(*held);
    }

    fn advance(
        &mut self,
        tasks: &mut VecDeque<Task>,
        _prompt_rows: u32,
    ) -> Result<Vec<(Task, ReplyBody)>, OutOfKvBlocks> {
        if self.total == 0 {
            return Err(OutOfKvBlocks);
        }
        let (mut finished, mut left) = (Vec::new(), VecDeque::new());
        for mut task in tasks.drain(..) {
            let rows = task.rows_left().rows();
            assert_eq!(rows, 1, "a branch is a row");
            self.rows += 1;
            if let Some(&last) = task.guesses.token_ids.last() {
                task.cached.append(&[last]);
            }
            task.context_done = task.step.append_ids.len();
            self.slots.insert(task.slot, task.cached.len());
            let next = candidates(task.cached.len());
            task.guesses.token_ids.push(next.token_ids[0]);
            task.candidates.push(next);
            let Work::Propose { num_draft_tokens, .. } = task.step.work else { panic!("{task:?}") };
            if task.guesses.token_ids.len() < num_draft_tokens as usize {
                left.push_back(task);
                continue;
            }
            let draft = Draft::chain(task.guesses.token_ids.clone());
            let start = task.step.start();
            finished.push((task, ReplyBody::Proposal(Proposal { start, draft })));
        }
        *tasks = left;
        Ok(finished)
    }

    fn blocks_held(&self, _slot: Slot) -> u64 {
        0
    }

    fn stats(&self) -> ExecutorStats {
        ExecutorStats { rows: self.rows, kv_blocks_total: self.total, ..ExecutorStats::default() }
    }
}

struct Bench {
    executor: Counting,
    ahead: DraftAhead,
    table: SequenceTable,
    /// What routers were sent.
    drafted: Vec<(RouterId, ProposalAhead)>,
}

impl Bench {
    /// A sequence of four ids for which three more are proposed: 40, 50 and 60.
    fn proposed(max_branches: usize) -> Self {
        Self::beside(1, max_branches)
    }

    /// The same at a worker that holds `num_sequences` sequences.
    fn beside(num_sequences: usize, max_branches: usize) -> Self {
        let mut bench = Self::empty(max_branches);
        bench.propose((KEY, num_sequences), &[]);
        bench
    }

    fn empty(max_branches: usize) -> Self {
        let executor = Counting { total: 100, ..Counting::default() };
        let (ahead, table) = (DraftAhead::new(max_branches), SequenceTable::default());
        Self { executor, ahead, table, drafted: Vec::new() }
    }

    /// Proposes 40, 50 and 60 for a new sequence of four ids with these stop tokens.
    fn propose(&mut self, (key, num_sequences): (SequenceKey, usize), stop_token_ids: &[TokenId]) {
        let Self { executor, ahead, table, .. } = self;
        let held = table.entry(key, || executor.open());
        let mut step = step(0, &[1, 2, 3, 4], 3);
        let spec = step.spec.as_deref().expect("the first step has one").clone();
        step.spec = Some(Arc::new(SequenceSpec { stop_token_ids: stop_token_ids.to_vec(), ..spec }));
        let mut cached = held.cached.take().expect("a new one");
        cached.admit(&step, &executor.limits());
        let mut tasks = VecDeque::from([Task::new(key, held.slot, step, cached, Instant::now())]);
        tasks[0].context_done = 3;
        let (mut task, body) = loop {
            if let Some(done) = executor.advance(&mut tasks, u32::MAX).expect("room").pop() {
                break done;
            }
        };
        ahead.on_reply(&mut task, &body, num_sequences);
        held.cached = Some(task.cached);
    }

    fn forward(&mut self) -> u32 {
        let (rows, drafted) = self.ahead.forward(&mut self.executor, &mut self.table);
        self.drafted.extend(drafted);
        rows
    }

    fn idle(&mut self) -> u32 {
        let mut rows = 0;
        while self.ahead.next_rows().is_some() {
            rows += self.forward();
        }
        rows
    }

    /// Sends the next step, after these ids were committed.
    fn asked(&mut self, base: u32, committed: &[TokenId]) -> Option<PrecomputedDraft> {
        self.asked_at(Instant::now(), base, committed)
    }

    /// The same for a step that arrived at `received`.
    fn asked_at(&mut self, received: Instant, base: u32, committed: &[TokenId]) -> Option<PrecomputedDraft> {
        let held = self.table.get_mut(&KEY).expect("held");
        let cached = held.cached.as_mut().expect("idle");
        let step = step(base, committed, 3);
        cached.truncate(base);
        cached.append(committed);
        let found = self.ahead.take(&mut self.executor, (&KEY, &step, cached), received);
        if let Some(found) = &found {
            assert_eq!(
                self.executor.slots[&found.slot] as usize + 1,
                cached.len() as usize + found.guesses.len()
            );
            self.executor.close(found.slot);
        }
        assert_eq!(self.executor.slots.len(), 1, "all branches but the found one are closed");
        found
    }
}

fn step(base_len: u32, append_ids: &[TokenId], num_draft_tokens: u32) -> Step {
    let spec = SequenceSpec { max_len: 400, prompt_len: 4, ..SequenceSpec::default() };
    Step {
        sequence_id: KEY.sequence,
        epoch: 1,
        step_seq: 1,
        spec: (base_len == 0).then(|| Arc::new(spec)),
        base_len,
        prefix_hash: 0,
        append_ids: append_ids.to_vec(),
        work: Work::Propose { num_draft_tokens, num_tree_tokens: 0 },
    }
}

#[test]
fn the_whole_proposal_and_its_likeliest_rivals_are_drafted_ahead_of() {
    // The whole chain with its own next guess, and one alternative after it; then alternatives at the first
    // and at the second position.
    for (base, committed, guesses) in [
        (6, &[60, 70][..], &[80, 90, 100][..]),
        (6, &[60, 71], &[80, 90, 100]),
        (4, &[41], &[50, 60, 70]),
        (4, &[42], &[50, 60, 70]),
        (5, &[51], &[60, 70, 80]),
    ] {
        let mut bench = Bench::proposed(7);
        bench.idle();
        let found = bench.asked(base, committed).unwrap_or_else(|| panic!("{committed:?} is likely"));
        assert_eq!(found.guesses, guesses, "behind {committed:?}");
        assert_eq!(found.candidates.len(), guesses.len());
        assert_eq!(found.context_done, committed.len());
        let stats = bench.ahead.stats();
        assert_eq!((stats.hits, stats.misses, stats.guesses), (1, 0, 3));
    }
}

#[test]
fn each_id_of_the_context_is_the_workers_own_or_not() {
    let agreed = |base, committed: &[TokenId]| {
        let mut bench = Bench::proposed(7);
        bench.idle();
        bench.asked(base, committed).map(|found| found.agreed)
    };
    assert_eq!(agreed(6, &[60, 70]), Some(vec![true]));
    assert_eq!(agreed(6, &[60, 71]), Some(vec![false]));
    assert_eq!(agreed(5, &[51]), Some(vec![]));
}

#[test]
fn another_outcome_is_a_miss_and_an_early_step_is_told_apart() {
    let mut bench = Bench::proposed(7);
    bench.idle();
    assert!(bench.asked(4, &[999]).is_none());
    assert_eq!((bench.ahead.stats().misses, bench.ahead.stats().too_early), (1, 0));
    let mut bench = Bench::proposed(7);
    assert!(bench.asked(4, &[41]).is_none());
    assert_eq!((bench.ahead.stats().misses, bench.ahead.stats().too_early), (0, 1));
}

#[test]
fn what_is_not_finished_is_of_use_as_far_as_it_goes() {
    let mut bench = Bench::proposed(7);
    bench.forward();
    let found = bench.asked(4, &[41]).expect("its first guess was made");
    assert_eq!((found.guesses, found.context_done), (vec![50], 1));
    let mut bench = Bench::proposed(7);
    bench.forward();
    // The committed guess has no row yet.
    let found = bench.asked(6, &[60, 70]).expect("it guessed 70");
    assert_eq!((found.guesses, found.context_done), (vec![], 1));
}

#[test]
fn rows_and_branches_are_bounded() {
    let mut bench = Bench::proposed(4);
    // The whole chain has four guesses to make; its alternatives three each, from the second forward on; one
    // alternative three.
    assert_eq!(bench.idle(), 4 + 2 * 3 + 3);
    assert_eq!(bench.executor.slots.len(), 1 + 4);
    bench.ahead.drop_sequence(&mut bench.executor, &KEY);
    assert_eq!(bench.executor.slots.len(), 1);
}

#[test]
fn a_branch_that_ends_is_sent_with_the_outcome_that_it_follows() {
    let mut bench = Bench::proposed(8);
    while bench.drafted.is_empty() {
        assert!(bench.forward() > 0, "branches end");
    }
    bench.idle();
    let after = |committed_ids: &[TokenId], ids: &[TokenId]| {
        let (committed_ids, draft) = (committed_ids.to_vec(), Draft::chain(ids.to_vec()));
        (KEY.router, ProposalAhead { sequence_id: KEY.sequence, epoch: 1, step_seq: 1, committed_ids, draft })
    };
    // Three ids are asked for; after the whole proposal the first one is the target's own.
    for expected in [
        after(&[40, 50, 60], &[70, 80, 90, 100]),
        after(&[41], &[50, 60, 70]),
        after(&[40, 51], &[60, 70, 80]),
        after(&[40, 50, 60, 71], &[80, 90, 100]),
    ] {
        assert!(bench.drafted.contains(&expected), "{expected:?} is not in {:?}", bench.drafted);
    }
    assert!(bench.drafted.len() <= 8, "each branch once: {:?}", bench.drafted);
    // The router's step still finds the branch.
    assert_eq!(bench.asked(4, &[40, 51]).map(|found| found.guesses), Some(vec![60, 70, 80]));
}

#[test]
fn a_wait_for_what_the_router_has_is_no_loss() {
    // A step arrives while a forward of branches runs. Guesses save nothing here, because no forward of steps
    // was measured; so one wait that counts is a loss, and drafting ahead pauses.
    let hits = |forwards_before: usize| {
        let mut bench = Bench::empty(7);
        for _ in 0..200 {
            bench.propose((KEY, 1), &[]);
            (0..forwards_before).for_each(|_| _ = bench.forward());
            let received = Instant::now();
            bench.forward();
            bench.asked_at(received, 4, &[41]);
            bench.table.get_mut(&KEY).expect("held").cached = Some(CachedSequence::default());
            bench.executor.slots.values_mut().for_each(|held| *held = 0);
        }
        bench.ahead.stats().hits
    };
    assert!(hits(1) < 100, "the router waits for a branch that has not ended");
    assert_eq!(hits(4), 200, "the branch had ended and was sent");
}

#[test]
fn branches_of_two_sequences_share_the_rows_of_a_forward_pass() {
    let mut bench = Bench::empty(7);
    for sequence in [SequenceId(1), SequenceId(2)] {
        bench.propose((SequenceKey { sequence, ..KEY }, 2), &[]);
    }
    let rows: Vec<u32> = (0..4).map(|_| bench.forward()).collect();
    assert!(rows.iter().all(|rows| (1..=7).contains(rows)), "{rows:?}");
}

#[test]
fn stop_tokens_take_no_place_of_a_branch() {
    let mut bench = Bench::empty(4);
    bench.propose((KEY, 1), &[41]);
    bench.idle();
    assert!(bench.asked(5, &[51]).is_some(), "the alternative that is next in rank");
}

#[test]
fn sequences_that_share_forward_passes_are_left_together() {
    for (num_sequences, is_drafted) in [(1, true), (MAX_SEQUENCES, true), (MAX_SEQUENCES + 1, false)] {
        let mut bench = Bench::beside(num_sequences, 7);
        assert_eq!(bench.idle() > 0, is_drafted, "{num_sequences} sequences");
    }
}

#[test]
fn nothing_is_drafted_ahead_without_memory() {
    let mut bench = Bench::proposed(7);
    bench.executor.total = 0;
    assert_eq!(bench.idle(), 0);
    assert!(bench.asked(4, &[41]).is_none());
    let mut bench = Bench::proposed(7);
    bench.forward();
    assert!(bench.ahead.drop_all(&mut bench.executor), "it gives way to steps");
    assert_eq!(bench.executor.slots.len(), 1);
    assert!(bench.asked(4, &[41]).is_none());
}

#[test]
fn a_step_of_another_epoch_finds_nothing() {
    let mut bench = Bench::proposed(7);
    bench.idle();
    let held = bench.table.get_mut(&KEY).expect("held");
    let mut cached = held.cached.take().expect("idle");
    cached.truncate(4);
    cached.append(&[41]);
    let step = Step { epoch: 2, ..step(4, &[41], 3) };
    assert!(bench.ahead.take(&mut bench.executor, (&KEY, &step, &cached), Instant::now()).is_none());
    assert_eq!(bench.executor.slots.len(), 1);
}
