//! What a step asks of a device, counted on the host driver with a Llama of two layers.

use crate::cuda::GpuOptions;
use crate::cuda::host_driver::HostDriver;
use crate::cuda::test_model::{TINY, changed_config};
use crate::{DrawRequest, Engine, SequenceRows};

/// A Llama of two layers on the host driver. `vocab` replaces the size of its vocabulary.
pub(in crate::cuda) fn two_layers(driver: &HostDriver, vocab: Option<u32>) -> Engine {
    let changes: Vec<_> = vocab.map(|vocab| ("vocab_size", u64::from(vocab))).into_iter().collect();
    let (_dir, options) = changed_config(TINY, &changes);
    let gpus = GpuOptions { kernels: Some(driver.kernels.clone()), ..GpuOptions::for_devices(&[0]) };
    Engine::random(&options.on_gpus(gpus), 7).unwrap()
}

/// How often a step reads a row of 20,480 logits that top-k and top-p filter: the reads in excess of a step
/// that draws without filters, plus one for that draw.
#[test]
fn a_filtered_row_is_read_at_most_six_times() {
    let Some(driver) = HostDriver::for_test("cuda::step_counts::a_filtered_row_is_read_at_most_six_times")
    else {
        return;
    };
    const VOCAB: u32 = 20_480;
    let mut engine = two_layers(&driver, Some(VOCAB));
    let mut bytes_read = |top_p: f32| {
        // A small k: the device decides every row itself.
        let top_k = if top_p < 1.0 { 40 } else { 0 };
        let sampling = speculation::SamplingParams { top_p, top_k, ..Default::default() };
        let spec = speculation::SequenceSpec { sampling, ..Default::default() };
        let slot = engine.open();
        let (prefix, suffix, vocab_size) = (&[1][..], &[2, 3][..], VOCAB);
        let request = DrawRequest {
            spec: &spec,
            prefix,
            suffix,
            vocab_size,
            logprobs: None,
            prompt: None,
            candidate_rows: 0,
        };
        let rows = SequenceRows { slot, token_ids: &[1, 2, 3], num_logits: 3 };
        let earlier = driver.counts();
        engine.forward_and_draw(&[rows], &[Some(request)]).unwrap();
        engine.close(slot);
        driver.counts().since(earlier).bytes_read
    };
    let (plain, filtered) = (bytes_read(1.0), bytes_read(0.9));
    let row_bytes = f64::from(VOCAB) * 4.0;
    let passes = (filtered - plain) as f64 / (3.0 * row_bytes) + 1.0;
    println!("passes over the vocabulary: {passes:.2}");
    assert!((3.0..6.0).contains(&passes), "{passes}");
}

/// Driver operations of a step of a two-layer Llama, with one row and with five that are drawn on the device:
/// one copy uploads the inputs of the pass and of the draws, and one downloads all results. That one goes to
/// pinned memory, so the host waits once.
#[test]
fn what_a_step_asks_of_the_driver() {
    let Some(driver) = HostDriver::for_test("cuda::step_counts::what_a_step_asks_of_the_driver") else {
        return;
    };
    let mut engine = two_layers(&driver, None);
    let plain = speculation::SequenceSpec::default();
    // A small k: the device decides every row itself.
    let sampling = speculation::SamplingParams { top_k: 40, top_p: 0.9, ..Default::default() };
    let filtered = speculation::SequenceSpec { sampling, ..Default::default() };
    for (spec, logprobs, candidate_rows, bytes_of_row) in
        [(&plain, None, 0, 16), (&filtered, Some(3), 1, 256)]
    {
        for rows in [1usize, 5] {
            let slot = engine.open();
            for step in 0..3 {
                let ids: Vec<u32> = (0..rows as u32).collect();
                let (prefix, suffix) = ids.split_at(1);
                let (vocab_size, prompt) = (300, None);
                let request =
                    DrawRequest { spec, prefix, suffix, vocab_size, logprobs, prompt, candidate_rows };
                let batch = [SequenceRows { slot, token_ids: &ids, num_logits: rows }];
                let earlier = driver.counts();
                let output = engine.forward_and_draw(&batch, &[Some(request)]).unwrap();
                let counts = driver.counts().since(earlier);
                println!("{rows} rows, logprobs {logprobs:?}, step {step}: {counts:?}");
                let answers = (output.drawn.len(), output.scores.len(), output.candidates.len());
                assert_eq!(answers, (rows, logprobs.map_or(0, |_| rows), candidate_rows));
                assert_eq!((counts.copies_to_device, counts.copies_from_device), (1, 1), "{counts:?}");
                assert_eq!(counts.waits, 1, "{counts:?}");
                assert!(step == 0 || counts.allocations == 0, "{counts:?}");
                assert!(counts.bytes_from_device <= bytes_of_row * rows as u64, "{counts:?}");
            }
            engine.close(slot);
        }
    }
}

/// Rows without logits beside others, and edits of logits: one copy to the device.
#[test]
fn rows_without_logits_and_edits_take_no_copy_of_their_own() {
    let name = "cuda::step_counts::rows_without_logits_and_edits_take_no_copy_of_their_own";
    let Some(driver) = HostDriver::for_test(name) else { return };
    let mut engine = two_layers(&driver, None);
    let plain = speculation::SequenceSpec::default();
    let sampling = speculation::SamplingParams { presence_penalty: 0.5, ..Default::default() };
    let penalized = speculation::SequenceSpec { sampling, ..Default::default() };
    let token_ids = &[1, 2, 3, 4][..];
    for (spec, num_logits) in [(&plain, 4), (&plain, 1), (&penalized, 4), (&penalized, 1)] {
        let slot = engine.open();
        let (prefix, suffix) = token_ids.split_at(token_ids.len() + 1 - num_logits);
        let (vocab_size, logprobs, prompt, candidate_rows) = (300, None, None, 0);
        let request = DrawRequest { spec, prefix, suffix, vocab_size, logprobs, prompt, candidate_rows };
        let earlier = driver.counts();
        let batch = [SequenceRows { slot, token_ids, num_logits }];
        let output = engine.forward_and_draw(&batch, &[Some(request)]).unwrap();
        let counts = driver.counts().since(earlier);
        assert_eq!(output.drawn.len(), num_logits);
        assert_eq!((counts.copies_to_device, counts.copies_from_device), (1, 1), "{counts:?}");
        engine.close(slot);
    }
}
