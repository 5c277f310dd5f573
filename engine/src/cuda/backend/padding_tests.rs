//! Padded passes on the emulator: rows keep their bits, and rows behind those of sequences change nothing.

use std::sync::atomic::Ordering;

use speculation::acceptance::DrawResult;
use speculation::{SamplingParams, SequenceSpec, TokenLogprobs};

use super::step_tests::{rows, spec};
use crate::cuda::emulator::Emulator;
use crate::cuda::ranks::{Ranks, load_on};
use crate::cuda::test_model::changed_config;
use crate::{DrawRequest, Engine, Logits, SequenceRows, SlotId, TokenId};

/// Results of a run.
#[derive(Debug, Default, PartialEq)]
struct Run {
    logits: Vec<u32>,
    drawn: Vec<DrawResult>,
    scores: Vec<TokenLogprobs>,
}

impl Run {
    fn add_logits(&mut self, logits: &Logits) {
        self.logits.extend((0..logits.rows()).flat_map(|row| logits.row(row).to_vec()).map(f32::to_bits));
    }

    fn forward(&mut self, engine: &mut Engine, batch: &[SequenceRows<'_>]) {
        self.add_logits(&engine.forward(batch).unwrap());
    }

    /// Draws from the last rows of two sequences, and reads the logits of a third one.
    fn draw<'a>(
        &mut self,
        engine: &mut Engine,
        drawn: [(SlotId, &'a [TokenId], &SequenceSpec); 2],
        other: SequenceRows<'a>,
    ) {
        let request = |(slot, token_ids, spec): (SlotId, &[TokenId], &SequenceSpec)| {
            let held: Vec<TokenId> = vec![5; engine.len(slot) as usize];
            ([&held[..], &token_ids[..1]].concat(), token_ids[1..].to_vec(), spec.clone())
        };
        let owned = drawn.map(request);
        let requests: Vec<Option<DrawRequest<'_>>> = owned
            .iter()
            .map(|(prefix, suffix, spec)| {
                let (vocab_size, logprobs, prompt, candidate_rows) = (100, spec.logprobs, None, 0);
                Some(DrawRequest { spec, prefix, suffix, vocab_size, logprobs, prompt, candidate_rows })
            })
            .chain([None])
            .collect();
        let of = |&(slot, token_ids, _): &(SlotId, &'a [TokenId], &SequenceSpec)| {
            rows(slot, token_ids, token_ids.len())
        };
        let batch: Vec<SequenceRows<'a>> = drawn.iter().map(of).chain([other]).collect();
        let output = engine.forward_and_draw(&batch, &requests).unwrap();
        self.add_logits(&output.logits);
        self.drawn.extend(output.drawn);
        self.scores.extend(output.scores);
    }
}

/// Passes of 21, 14, 6 and 1 rows, of which the last two are padded; draws with filters, penalties and log
/// probabilities; and rows behind 2,200 tokens, whose splits a launch merges.
fn run(emulator: Emulator) -> Run {
    let config = "tests/golden/qwen3_norms/config.json";
    let (_dir, options) = changed_config(config, &[("head_dim", 16), ("max_position_embeddings", 4096)]);
    let load = |source: &dyn crate::weights::TensorSource, model| {
        load_on(Ranks::alone(emulator), &options, source, model)
    };
    let engine = &mut Engine::random_by(&options, 3, load).unwrap();
    let ids: Vec<TokenId> = (0..60).collect();
    let [a, b, c] = [(); 3].map(|()| engine.open());
    let mut run = Run::default();
    run.forward(engine, &[rows(a, &ids[..21], 0)]);
    run.forward(engine, &[rows(b, &ids[..9], 3), rows(a, &ids[21..24], 1), rows(c, &ids[..2], 2)]);
    run.forward(engine, &[rows(b, &ids[9..12], 3), rows(c, &ids[2..5], 3)]);
    run.forward(engine, &[rows(a, &ids[24..25], 1)]);
    let sampling = SamplingParams { top_p: 0.9, presence_penalty: 0.5, ..SamplingParams::default() };
    let filtered = SequenceSpec { logprobs: Some(2), ..spec(3, sampling) };
    let plain = spec(4, SamplingParams::default());
    for _ in 0..3 {
        run.draw(engine, [(b, &[7, 8, 9], &filtered), (c, &[7, 8], &plain)], rows(a, &[6, 5], 2));
    }
    let long = engine.open_unwritten(2200).unwrap();
    for _ in 0..5 {
        run.forward(engine, &[rows(long, &[3, 4, 5], 3), rows(a, &[6, 7], 2)]);
    }
    // Seven and eight rows in turns.
    for i in 0..6 {
        run.forward(engine, &[rows(long, &[3, 4, 5], 3), rows(a, &ids[..4 + i % 2], 4 + i % 2)]);
    }
    run
}

#[test]
fn padded_passes_give_the_bits_of_others() {
    let replayed = |mut emulator: Emulator| {
        let replays = emulator.enable_graphs();
        (run(emulator), replays.load(Ordering::Relaxed))
    };
    let (padded, with_padding) = replayed(Emulator::with_race_check());
    let (repeated, without_padding) = replayed(Emulator::build().without_padding());
    let expected = run(Emulator::build());
    assert_eq!(padded.logits.len(), expected.logits.len());
    assert!(padded == expected && repeated == expected, "the results differ");
    assert!(
        with_padding > without_padding,
        "{with_padding} and {without_padding} replays: nothing was padded"
    );
}
