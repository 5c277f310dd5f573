//! Forwards that run out of memory: nothing has changed afterwards, and the same call gives the same ids.

use std::sync::atomic::{AtomicU32, Ordering};

use speculation::SamplingParams;
use speculation::acceptance::DrawResult;

use super::step_tests::{engine, rows, spec};
use crate::cuda::emulator::Emulator;
use crate::{DrawRequest, Engine, EngineError, SequenceRows, TokenId};

const VOCAB: u32 = 100;

/// Results of a run.
#[derive(Debug, Default, PartialEq)]
struct Run {
    drawn: Vec<DrawResult>,
    logits: Vec<f32>,
}

/// Failures of a run: the allocations so far at the end of each forward, and the forwards that failed.
#[derive(Debug, Default)]
struct Failures {
    allocations: Vec<u32>,
    failed: Vec<usize>,
}

/// An engine, its number of allocations, and what happened so far.
struct Harness<'a> {
    engine: Engine,
    allocations: &'a AtomicU32,
    run: Run,
    failures: Failures,
}

impl Harness<'_> {
    /// Runs a forward that draws `drawn` rows of the first sequence. If it fails, checks that nothing has
    /// changed, and runs it again.
    fn forward(&mut self, batch: &[SequenceRows<'_>], drawn: Option<(&[TokenId], usize)>) {
        let spec = spec(5, SamplingParams { temperature: 0.9, top_p: 0.9, ..SamplingParams::default() });
        let request = drawn.map(|(ids, num_rows)| {
            let (prefix, suffix) = ids.split_at(ids.len() - num_rows + 1);
            let (logprobs, prompt, candidate_rows) = (None, None, 0);
            DrawRequest { spec: &spec, prefix, suffix, vocab_size: VOCAB, logprobs, prompt, candidate_rows }
        });
        let requests: Vec<_> = batch.iter().enumerate().map(|(i, _)| request.filter(|_| i == 0)).collect();
        let held = |engine: &Engine| {
            let lens: Vec<u32> = batch.iter().map(|rows| engine.len(rows.slot)).collect();
            // A last block that was shared may have been copied: then one block less is free, and needed.
            let needed =
                |rows: &SequenceRows<'_>| engine.blocks_needed(rows.slot, rows.token_ids.len() as u32);
            let left = engine.free_blocks() - batch.iter().map(needed).sum::<u64>();
            (lens, left, engine.stats().forwards, engine.stats().cached_blocks)
        };
        let before = held(&self.engine);
        let mut output = self.engine.forward_and_draw(batch, &requests);
        if let Err(error) = &output {
            assert!(!error.is_fatal() && error.to_string().contains("out of device memory"), "{error}");
            assert_eq!(held(&self.engine), before, "{error}");
            self.failures.failed.push(self.failures.allocations.len());
            output = self.engine.forward_and_draw(batch, &requests);
        }
        let output = output.unwrap();
        self.run.drawn.extend(output.drawn);
        self.run.logits.extend((0..output.logits.rows()).flat_map(|row| output.logits.row(row).to_vec()));
        self.failures.allocations.push(self.allocations.load(Ordering::Relaxed));
    }
}

/// A prompt without logits, a fork inside its last block, a verify step beside a long prompt, and a step of
/// the sequence that was forked. The allocation with this number fails. Returns the allocations before the
/// first forward.
fn run(failing: u32) -> (Run, u32, Failures) {
    let emulator = Emulator::build();
    let to_fail = emulator.failing_allocation();
    let (engine, allocations) = engine(emulator);
    let loaded = allocations.load(Ordering::Relaxed);
    to_fail.store(failing, Ordering::Relaxed);
    let (run, failures) = Default::default();
    let mut harness = Harness { engine, allocations: &allocations, run, failures };

    let prompt: Vec<TokenId> = (0..22).collect();
    let a = harness.engine.open();
    harness.engine.share_prefix(a, 1, &prompt);
    harness.forward(&[rows(a, &prompt[..20], 0)], None);
    let fork = harness.engine.fork(a, 19).unwrap();
    let verified: Vec<TokenId> = [&prompt[..19], &[7, 8, 9]].concat();
    let long: Vec<TokenId> = (0..40).collect();
    let b = harness.engine.open();
    harness.forward(&[rows(fork, &verified[19..], 3), rows(b, &long, 1)], Some((&verified, 3)));
    harness.forward(&[rows(a, &prompt[20..], 1), rows(b, &[3], 1)], Some((&prompt, 1)));
    let Harness { run, failures, .. } = harness;
    (run, loaded, failures)
}

#[test]
fn a_forward_without_memory_changes_nothing_and_can_be_repeated() {
    let (expected, first, failures) = run(u32::MAX);
    let end = *failures.allocations.last().unwrap();
    assert!(failures.failed.is_empty() && failures.allocations[0] > first + 7, "{first}, {failures:?}");
    assert!(failures.allocations[1] > failures.allocations[0], "{failures:?}");
    for failing in first..end {
        let forward = failures.allocations.iter().position(|&after| failing < after).unwrap();
        let (found, _, failures) = run(failing);
        assert_eq!(failures.failed, [forward], "allocation {failing}");
        assert!(found == expected, "allocation {failing}: the results differ");
    }
}

/// A prompt whose KV was never computed is not shared.
#[test]
fn a_failed_prompt_is_not_published() {
    let emulator = Emulator::build();
    let to_fail = emulator.failing_allocation();
    let (mut engine, allocations) = engine(emulator);
    let prompt: Vec<TokenId> = (0..40).collect();
    let (first, second) = (engine.open(), engine.open());
    engine.share_prefix(first, 1, &prompt);
    // Behind the first rows of the pass.
    to_fail.store(allocations.load(Ordering::Relaxed) + 2, Ordering::Relaxed);
    let failed = engine.forward(&[rows(first, &prompt, 0)]).unwrap_err();
    assert!(matches!(failed, EngineError::Cuda(_)), "{failed}");
    assert_eq!((engine.len(first), engine.share_prefix(second, 1, &prompt).len), (0, 0));
}
