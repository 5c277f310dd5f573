//! Staged copies with the host driver.

use super::*;
use crate::SequenceRows;
use crate::cuda::host_driver::{DriverCounts, HostDriver};
use crate::cuda::step_counts::two_layers;

/// The host driver copies as late as possible, so a piece staged over one that is still being copied would be
/// lost.
#[test]
fn what_is_staged_arrives_whole() {
    let Some(driver) = HostDriver::for_test("cuda::device::tests::what_is_staged_arrives_whole") else {
        return;
    };
    let mut device = CudaDevice::open(0, Some(&driver.kernels)).unwrap();
    let pieces = [5usize << 20, 3, (7 << 20) + 5, HALF_BYTES, 1 << 20, HALF_BYTES + 9];
    let total: usize = pieces.iter().sum();
    let mut memory = device.alloc(2 * total, "pieces").unwrap();
    let byte = |at: usize| (at.wrapping_mul(2_654_435_761) >> 13) as u8;
    let mut at = 0;
    for (i, &piece) in pieces.iter().chain(&pieces).enumerate() {
        let expected: Vec<u8> = (at..at + piece).map(byte).collect();
        if i % 2 == 0 {
            device.write(&mut memory, at, &expected).unwrap();
        } else {
            let mut fill = |place: &mut [u8]| {
                place.copy_from_slice(&expected);
                Ok(())
            };
            device.write_by(&mut memory, (at, piece), &mut fill).unwrap();
        }
        at += piece;
    }
    let mut found = vec![0; 2 * total];
    device.read(&memory, 0, &mut found).unwrap();
    let wrong = (0..2 * total).find(|&at| found[at] != byte(at));
    assert_eq!(wrong, None, "the first byte that differs");
    // Through pinned memory, and each before the next one overwrites it.
    for at in [0, 3, total, 2 * total - DOWNLOAD_BYTES] {
        for len in [1, 1000, DOWNLOAD_BYTES] {
            let mut found = vec![0; len];
            device.read(&memory, at, &mut found).unwrap();
            assert!(found.iter().zip(at..).all(|(&found, at)| found == byte(at)), "{len} bytes from {at}");
        }
    }
}

/// Otherwise prompts would be requested at the host's speed, and a step would wait for all of them.
#[test]
fn a_forward_that_reads_nothing_waits_for_the_device() {
    let name = "cuda::device::tests::a_forward_that_reads_nothing_waits_for_the_device";
    let Some(driver) = HostDriver::for_test(name) else { return };
    let mut engine = two_layers(&driver, None);
    let slot = engine.open();
    let mut counts = |token_ids: &[u32], num_logits| -> DriverCounts {
        let earlier = driver.counts();
        engine.forward(&[SequenceRows { slot, token_ids, num_logits }]).unwrap();
        driver.counts().since(earlier)
    };
    let prompt = counts(&[1, 2, 3], 0);
    assert_eq!((prompt.waits, prompt.copies_from_device), (1, 0), "{prompt:?}");
    let step = counts(&[4], 1);
    assert!(step.waits > 0 && step.copies_from_device == 1, "{step:?}");
}
