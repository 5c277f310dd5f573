//! Tests of which tasks run in a forward, with the bundled draft. Steps only feed, so nothing is drawn.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use engine::{LoadOptions, WeightFormat};
use speculation::cached_sequence::{Admission, CachedSequence};
use speculation::logits::DrawError;
use speculation::{SequenceId, SequenceSpec, Step, TokenId};

use super::*;
use crate::role_logic::{OutputRows, StepProgress};
use crate::table::{RouterId, SequenceKey};

pub(crate) struct FeedsOnly;

impl RoleLogic for FeedsOnly {
    fn process_rows(&mut self, _: &mut Task, _: OutputRows<'_>) -> Result<StepProgress, DrawError> {
        unreachable!("nothing is drawn")
    }
}

/// The bundled draft with this much memory for KV.
pub(crate) fn executor(kv_memory_bytes: u64) -> ModelExecutor<FeedsOnly> {
    let model_dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/draft");
    let options = LoadOptions::new(model_dir, WeightFormat::AsStored, kv_memory_bytes);
    ModelExecutor::new(Engine::load(&options).unwrap(), Role::Draft, 1_000, 512, FeedsOnly)
}

/// `num_ids` ids, the first of which is `first`.
fn ids_from(first: u32, num_ids: u32) -> Vec<TokenId> {
    (0..num_ids).map(|i| 7 + (i + first) % 90).collect()
}

/// A step that feeds these ids into a new sequence.
fn task(executor: &mut ModelExecutor<FeedsOnly>, append_ids: Vec<TokenId>, grammar: Option<&str>) -> Task {
    let slot = executor.open();
    let key = SequenceKey { router: RouterId(1), sequence: SequenceId(slot.0) };
    let spec = SequenceSpec { grammar: grammar.map(str::to_owned), ..SequenceSpec::default() };
    let step = Step {
        sequence_id: key.sequence,
        epoch: 1,
        step_seq: 1,
        spec: Some(Arc::new(spec)),
        base_len: 0,
        prefix_hash: 0,
        append_ids,
        work: Work::Feed,
    };
    let mut cached = CachedSequence::default();
    assert_eq!(cached.admit(&step, &executor.limits()), Admission::Run);
    Task::new(key, slot, step, cached, Instant::now())
}

/// The device thread frees KV only if it is told that some is missing. A grammar may take seconds.
#[test]
fn who_lacks_kv_does_not_wait_for_the_grammar_of_another() {
    let (grammars, _threads) = Grammars::that_never_compile();
    let mut executor = executor(256 << 10).with_grammars(grammars);
    let most = executor.engine.info().kv_blocks * u64::from(executor.engine.info().kv_block_size);
    let mut filling = VecDeque::from([task(&mut executor, ids_from(0, most as u32), None)]);
    while executor.advance(&mut filling, u32::MAX).expect("it fits").is_empty() {}
    let waiting = task(&mut executor, ids_from(1, 1), Some("{}"));
    let mut tasks = VecDeque::from([waiting, task(&mut executor, ids_from(2, 20), None)]);
    assert!(matches!(executor.advance(&mut tasks, u32::MAX), Err(OutOfKvBlocks)));
    tasks.pop_back();
    assert!(matches!(executor.advance(&mut tasks, u32::MAX), Ok(finished) if finished.is_empty()));
}

/// The step whose grammar compiles claimed the blocks of the prefix, and all others with the prefix waited
/// for it while the device was idle.
#[test]
fn nobody_waits_for_the_prefix_of_a_step_that_waits_for_its_grammar() {
    let (grammars, _threads) = Grammars::that_never_compile();
    let mut executor = executor(1 << 20).with_grammars(grammars);
    let prompt = ids_from(0, 40);
    let compiling = task(&mut executor, prompt.clone(), Some("{}"));
    let [first, second] = [0, 1].map(|_| task(&mut executor, prompt.clone(), None));
    let keys = [first.key, second.key];
    let mut tasks = VecDeque::from([compiling, first, second]);
    // The second task needs the blocks that the first one computes.
    for key in keys {
        let finished = executor.advance(&mut tasks, u32::MAX).expect("there is room");
        assert_eq!(finished.iter().map(|(task, _)| task.key).collect::<Vec<_>>(), [key]);
    }
    assert_eq!(tasks[0].prefix, PrefixLookup::Wanted, "it claimed no block");
    // Two tasks that wait for a third one, which is not in this forward: the first of them runs.
    let [absent, first, second] = [0, 1, 2].map(|_| task(&mut executor, ids_from(5, 40), None));
    let mut alone = VecDeque::from([absent]);
    assert!(executor.advance(&mut alone, 0).is_err(), "no row is left for it, and its blocks are claimed");
    let key = first.key;
    tasks.extend([first, second]);
    let finished = executor.advance(&mut tasks, u32::MAX).expect("there is room");
    assert_eq!(finished.iter().map(|(task, _)| task.key).collect::<Vec<_>>(), [key]);
}

/// A step counted as begun in the first forward that it was ready for, and its wait for rows as network time.
#[test]
fn only_tasks_that_get_rows_have_run() {
    let mut executor = executor(1 << 20);
    let [first, second] = [0, 50].map(|from| task(&mut executor, ids_from(from, 40), None));
    let mut tasks = VecDeque::from([first, second]);
    assert!(executor.advance(&mut tasks, 8).expect("there is room").is_empty());
    let marked = |task: &Task| (task.has_run, task.context_done);
    assert_eq!(tasks.iter().map(marked).collect::<Vec<_>>(), [(true, 8), (false, 0)]);
}
