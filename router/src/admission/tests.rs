//! Capacity, order, and which requests are refused.

use futures::FutureExt as _;

use super::*;

/// A request with the default key.
fn request(num_sequences: u32, priority: u8) -> AdmissionRequest {
    AdmissionRequest { num_sequences, priority, fair_queue_key: 0 }
}

fn request_of_key(fair_queue_key: u64) -> AdmissionRequest {
    AdmissionRequest { num_sequences: 1, priority: 0, fair_queue_key }
}

fn admission(max_sequences: u32, max_waiting_requests: usize) -> Admission {
    Admission::new(AdmissionLimits { max_sequences, max_waiting_requests })
}

#[tokio::test]
async fn a_dropped_permit_is_released() {
    let admission = admission(3, 0);
    let permit = admission.admit(request(2, 0)).await.unwrap();
    assert_eq!(admission.available(), 1);
    assert!(matches!(admission.admit(request(2, 0)).await, Err(RouterError::Overloaded { .. })));
    drop(permit);
    assert!(admission.admit(request(3, 0)).await.is_ok());
}

#[tokio::test]
async fn the_queue_is_limited_and_drops_cancelled_requests() {
    let admission = admission(1, 1);
    let permit = admission.admit(request(1, 0)).await.unwrap();
    let mut waiting = Box::pin(admission.admit(request(1, 0)));
    assert!(waiting.as_mut().now_or_never().is_none());
    assert!(matches!(admission.admit(request(1, 0)).await, Err(RouterError::Overloaded { .. })));
    drop(waiting);
    let mut waiting = Box::pin(admission.admit(request(1, 0)));
    assert!(waiting.as_mut().now_or_never().is_none());
    drop(permit);
    assert!(waiting.await.is_ok());
}

#[tokio::test]
async fn a_large_request_is_not_starved_by_small_ones() {
    let admission = admission(4, 8);
    let permit = admission.admit(request(2, 0)).await.unwrap();
    let mut large = Box::pin(admission.admit(request(4, 0)));
    assert!(large.as_mut().now_or_never().is_none());
    let mut small = Box::pin(admission.admit(request(1, 0)));
    assert!(small.as_mut().now_or_never().is_none(), "it must wait behind the large one");
    drop(permit);
    drop(large.await.unwrap());
    assert!(small.await.is_ok());
}

#[tokio::test]
async fn lower_priorities_go_first() {
    let admission = admission(1, 8);
    let permit = admission.admit(request(1, 0)).await.unwrap();
    let mut patient = Box::pin(admission.admit(request(1, 9)));
    assert!(patient.as_mut().now_or_never().is_none());
    let mut urgent = Box::pin(admission.admit(request(1, 0)));
    assert!(urgent.as_mut().now_or_never().is_none());
    drop(permit);
    assert!(patient.as_mut().now_or_never().is_none());
    drop(urgent.await.unwrap());
    assert!(patient.await.is_ok());
}

#[tokio::test]
async fn a_request_that_goes_first_and_fits_does_not_wait_for_the_next_release() {
    let admission = admission(4, 8);
    let _permit = admission.admit(request(2, 9)).await.unwrap();
    let mut large = Box::pin(admission.admit(request(4, 9)));
    assert!(large.as_mut().now_or_never().is_none());
    let urgent = admission.admit(request(1, 0)).now_or_never();
    assert!(urgent.is_some_and(|permit| permit.is_ok()), "it goes before the large one, and it fits");
    assert!(large.as_mut().now_or_never().is_none());
}

#[tokio::test]
async fn a_cancelled_request_unblocks_those_behind_it() {
    let admission = admission(4, 8);
    let _permit = admission.admit(request(2, 0)).await.unwrap();
    let mut large = Box::pin(admission.admit(request(4, 0)));
    assert!(large.as_mut().now_or_never().is_none());
    let mut small = Box::pin(admission.admit(request(1, 0)));
    assert!(small.as_mut().now_or_never().is_none());
    drop(large);
    assert!(small.await.is_ok());
}

#[tokio::test]
async fn a_request_that_waits_too_long_is_refused() {
    let wait_max = Duration::from_millis(1);
    let admission = Admission { wait_max, ..admission(1, 1) };
    let _permit = admission.admit(request(1, 0)).await.unwrap();
    let refused = admission.admit(request(1, 0)).await.unwrap_err();
    assert_eq!(refused, RouterError::WaitedTooLong { what: "the router", waited: wait_max });
}

#[tokio::test]
async fn a_request_larger_than_the_limit_is_refused() {
    let error = admission(2, 1).admit(request(3, 0)).await.unwrap_err();
    assert!(error.to_string().contains("3 sequences") && error.to_string().contains("at most 2"), "{error}");
}

#[tokio::test]
async fn admission_alternates_between_keys() {
    let admission = admission(1, 64);
    let permit = admission.admit(request_of_key(1)).await.unwrap();
    let mut many: Vec<_> = (0..32).map(|_| Box::pin(admission.admit(request_of_key(1)))).collect();
    assert!(many.iter_mut().all(|one| one.as_mut().now_or_never().is_none()));
    let mut other = Box::pin(admission.admit(request_of_key(2)));
    assert!(other.as_mut().now_or_never().is_none());
    // Both keys are new to the queue, and the first one arrived earlier.
    drop(permit);
    drop(many.remove(0).await.unwrap());
    drop(other.await.expect("the other key is admitted second"));
    assert!(many[0].as_mut().now_or_never().is_some_and(|permit| permit.is_ok()), "in order of arrival");
}

#[tokio::test]
async fn a_full_queue_evicts_a_request_of_the_key_with_most() {
    let admission = admission(1, 4);
    let _permit = admission.admit(request_of_key(1)).await.unwrap();
    let mut many: Vec<_> = (0..4).map(|_| Box::pin(admission.admit(request_of_key(1)))).collect();
    assert!(many.iter_mut().all(|one| one.as_mut().now_or_never().is_none()));
    let full = admission.admit(request_of_key(1)).now_or_never().unwrap();
    assert!(matches!(full, Err(RouterError::Overloaded { .. })), "its own requests fill the queue");
    let mut other = Box::pin(admission.admit(request_of_key(2)));
    assert!(other.as_mut().now_or_never().is_none(), "a key with fewer waiting requests is queued");
    let evicted = many.pop().unwrap().now_or_never().unwrap();
    assert!(
        matches!(evicted, Err(RouterError::Overloaded { .. })),
        "the newest request of the first key is evicted"
    );
    assert!(many.iter_mut().all(|one| one.as_mut().now_or_never().is_none()));
    // Evicted requests no longer count, even before they are polled.
    let mut second = Box::pin(admission.admit(request_of_key(2)));
    assert!(second.as_mut().now_or_never().is_none());
    let third = admission.admit(request_of_key(2)).now_or_never().unwrap();
    assert!(third.is_err(), "2 and 2 are fair shares: nothing is evicted");
}
