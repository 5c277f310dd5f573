//! Capacity, order, and which requests are refused.

use futures::FutureExt as _;

use super::*;

/// A request with the default key.
fn of(num_sequences: u32, priority: u8) -> Asking {
    Asking { num_sequences, priority, key: 0 }
}

fn by(key: u64) -> Asking {
    Asking { num_sequences: 1, priority: 0, key }
}

fn admission(max_sequences: u32, max_waiting_requests: usize) -> Admission {
    Admission::new(AdmissionLimits { max_sequences, max_waiting_requests })
}

#[tokio::test]
async fn a_permit_is_given_back_when_dropped() {
    let admission = admission(3, 0);
    let permit = admission.admit(of(2, 0)).await.unwrap();
    assert_eq!(admission.available(), 1);
    assert!(matches!(admission.admit(of(2, 0)).await, Err(RouterError::Overloaded { .. })));
    drop(permit);
    assert!(admission.admit(of(3, 0)).await.is_ok());
}

#[tokio::test]
async fn the_queue_has_a_limit_and_forgets_who_gave_up() {
    let admission = admission(1, 1);
    let permit = admission.admit(of(1, 0)).await.unwrap();
    let mut waiting = Box::pin(admission.admit(of(1, 0)));
    assert!(waiting.as_mut().now_or_never().is_none());
    assert!(matches!(admission.admit(of(1, 0)).await, Err(RouterError::Overloaded { .. })));
    drop(waiting);
    let mut waiting = Box::pin(admission.admit(of(1, 0)));
    assert!(waiting.as_mut().now_or_never().is_none());
    drop(permit);
    assert!(waiting.await.is_ok());
}

#[tokio::test]
async fn a_large_request_is_not_overtaken_for_ever() {
    let admission = admission(4, 8);
    let permit = admission.admit(of(2, 0)).await.unwrap();
    let mut large = Box::pin(admission.admit(of(4, 0)));
    assert!(large.as_mut().now_or_never().is_none());
    let mut small = Box::pin(admission.admit(of(1, 0)));
    assert!(small.as_mut().now_or_never().is_none(), "it must wait behind the large one");
    drop(permit);
    drop(large.await.unwrap());
    assert!(small.await.is_ok());
}

#[tokio::test]
async fn lower_priorities_go_first() {
    let admission = admission(1, 8);
    let permit = admission.admit(of(1, 0)).await.unwrap();
    let mut patient = Box::pin(admission.admit(of(1, 9)));
    assert!(patient.as_mut().now_or_never().is_none());
    let mut urgent = Box::pin(admission.admit(of(1, 0)));
    assert!(urgent.as_mut().now_or_never().is_none());
    drop(permit);
    assert!(patient.as_mut().now_or_never().is_none());
    drop(urgent.await.unwrap());
    assert!(patient.await.is_ok());
}

#[tokio::test]
async fn who_gives_up_lets_those_behind_it_in() {
    let admission = admission(4, 8);
    let _permit = admission.admit(of(2, 0)).await.unwrap();
    let mut large = Box::pin(admission.admit(of(4, 0)));
    assert!(large.as_mut().now_or_never().is_none());
    let mut small = Box::pin(admission.admit(of(1, 0)));
    assert!(small.as_mut().now_or_never().is_none());
    drop(large);
    assert!(small.await.is_ok());
}

#[tokio::test]
async fn whoever_waits_too_long_is_turned_away() {
    let admission = Admission { wait_max: Duration::from_millis(1), ..admission(1, 1) };
    let _permit = admission.admit(of(1, 0)).await.unwrap();
    assert!(matches!(admission.admit(of(1, 0)).await, Err(RouterError::Overloaded { .. })));
}

#[tokio::test]
async fn what_can_never_run_is_refused_by_number() {
    let error = admission(2, 1).admit(of(3, 0)).await.unwrap_err();
    assert!(error.to_string().contains("3 sequences") && error.to_string().contains("at most 2"), "{error}");
}

#[tokio::test]
async fn a_key_with_many_requests_lets_others_have_turns() {
    let admission = admission(1, 64);
    let permit = admission.admit(by(1)).await.unwrap();
    let mut many: Vec<_> = (0..32).map(|_| Box::pin(admission.admit(by(1)))).collect();
    assert!(many.iter_mut().all(|one| one.as_mut().now_or_never().is_none()));
    let mut other = Box::pin(admission.admit(by(2)));
    assert!(other.as_mut().now_or_never().is_none());
    // Both keys are new to the queue, and the first one arrived earlier.
    drop(permit);
    drop(many.remove(0).await.unwrap());
    drop(other.await.expect("the other key is admitted second"));
    assert!(many[0].as_mut().now_or_never().is_some_and(|permit| permit.is_ok()), "in order of arrival");
}

#[tokio::test]
async fn a_key_that_fills_the_queue_makes_room_for_others() {
    let admission = admission(1, 4);
    let _permit = admission.admit(by(1)).await.unwrap();
    let mut many: Vec<_> = (0..4).map(|_| Box::pin(admission.admit(by(1)))).collect();
    assert!(many.iter_mut().all(|one| one.as_mut().now_or_never().is_none()));
    let full = admission.admit(by(1)).now_or_never().unwrap();
    assert!(matches!(full, Err(RouterError::Overloaded { .. })), "its own requests fill the queue");
    let mut other = Box::pin(admission.admit(by(2)));
    assert!(other.as_mut().now_or_never().is_none(), "a key with fewer waiting requests is queued");
    let turned_away = many.pop().unwrap().now_or_never().unwrap();
    assert!(
        matches!(turned_away, Err(RouterError::Overloaded { .. })),
        "the newest request of the first key is evicted"
    );
    assert!(many.iter_mut().all(|one| one.as_mut().now_or_never().is_none()));
    // Evicted requests no longer count, even before they are polled.
    let mut second = Box::pin(admission.admit(by(2)));
    assert!(second.as_mut().now_or_never().is_none());
    let third = admission.admit(by(2)).now_or_never().unwrap();
    assert!(third.is_err(), "2 and 2 are fair shares: nothing is evicted");
}
