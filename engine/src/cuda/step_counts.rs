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
    Engine::random_on_cuda(&options, 7, &gpus).unwrap()
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

/// Driver operations of a step of a two-layer Llama: with one row, and with five rows that are drawn on the
/// device.
#[test]
fn what_a_step_asks_of_the_driver() {
    let Some(driver) = HostDriver::for_test("cuda::step_counts::what_a_step_asks_of_the_driver") else {
        return;
    };
    let mut engine = two_layers(&driver, None);
    let spec = speculation::SequenceSpec::default();
    for rows in [1usize, 5] {
        let slot = engine.open();
        for step in 0..3 {
            let ids: Vec<u32> = (0..rows as u32).collect();
            let (prefix, suffix) = ids.split_at(1);
            let (vocab_size, logprobs, prompt) = (300, None, None);
            let request =
                DrawRequest { spec: &spec, prefix, suffix, vocab_size, logprobs, prompt, candidate_rows: 0 };
            let batch = [SequenceRows { slot, token_ids: &ids, num_logits: rows }];
            let earlier = driver.counts();
            engine.forward_and_draw(&batch, &[Some(request)]).unwrap();
            let counts = driver.counts().since(earlier);
            println!("{rows} rows, step {step}: {counts:?}");
            assert!(step == 0 || counts.allocations == 0, "{counts:?}");
            assert!(counts.bytes_from_device <= 16 * rows as u64, "{counts:?}");
        }
        engine.close(slot);
    }
}
