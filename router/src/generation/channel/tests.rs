//! Tests of both ends of a generation's channel.

use speculation::{TokenId, TokenLogprobs};

use super::*;
use crate::generation::{CommittedTokens, SpeculationUsage};

fn tokens(choice: u32, id: TokenId) -> GenerationEvent {
    GenerationEvent::Tokens(CommittedTokens {
        choice,
        token_ids: [id].as_slice().into(),
        num_drafted: 0,
        logprobs: Vec::new(),
        usage: SpeculationUsage::default(),
    })
}

#[tokio::test]
async fn dropping_the_stream_cancels_every_choice() {
    let (sink, stream) = channel(2, UnreadBytes::default());
    let token = sink.cancelled(1);
    assert!(sink.send(tokens(0, 7)));
    drop(stream);
    token.cancelled().await;
    assert!(!sink.send(tokens(0, 8)));
    assert!(sink.is_cancelled(0) && sink.is_cancelled(1));
}

#[tokio::test]
async fn one_choice_is_cancelled_alone() {
    let (sink, mut stream) = channel(2, UnreadBytes::default());
    stream.stop_choice(0);
    assert!(!sink.send(tokens(0, 7)));
    assert!(sink.send(tokens(1, 8)));
    assert!(
        matches!(stream.next().await, Some(GenerationEvent::Tokens(t)) if t.choice == 1 && t.token_ids.as_slice() == [8])
    );
}

/// Sends until the sink reports no delivery; returns the number of delivered events.
fn flood(sink: &GenerationSink) -> usize {
    (0..).take_while(|&id| sink.send(tokens(0, id))).count()
}

#[tokio::test]
async fn a_slow_client_reads_the_queued_events_then_the_error() {
    let (sink, mut stream) = channel(1, UnreadBytes::default());
    let num_calls = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&num_calls);
    stream.on_overflow(move || {
        counter.fetch_add(1, Ordering::AcqRel);
    });
    let num_delivered = flood(&sink);
    assert!((1_000..=MAX_UNREAD_EVENTS).contains(&num_delivered), "{num_delivered}");
    assert!(sink.is_cancelled(0), "the sink reports the cancellation");
    assert_eq!(num_calls.load(Ordering::Acquire), 1, "the callback was called once");
    for id in 0..num_delivered {
        let event = stream.next().await;
        assert!(
            matches!(&event, Some(GenerationEvent::Tokens(t)) if t.token_ids.as_slice() == [id as TokenId]),
            "{event:?}"
        );
    }
    // The sink is still alive, but the reader must not wait for it.
    assert!(matches!(stream.next().await, Some(GenerationEvent::Failed(RouterError::SlowClient))));
    assert!(stream.next().await.is_none());
}

#[tokio::test]
async fn prompts_and_choices_of_a_request_share_the_unread_limit() {
    let (max_events, num_first) = (MAX_UNREAD_BYTES / tokens(0, 0).num_bytes(), 3_000);
    let unread = UnreadBytes::default();
    let (first, first_stream) = channel(128, unread.clone());
    let (second, mut second_stream) = channel(128, unread.clone());
    for id in 0..num_first {
        assert!(first.send(tokens(id % 128, id)));
    }
    let num_second = flood(&second);
    assert_eq!(num_second, max_events - num_first as usize);
    drop((first_stream, second));
    while second_stream.next().await.is_some() {}
    assert_eq!(unread.0.load(Ordering::Acquire), 0, "read and dropped events are released");
}

#[tokio::test]
async fn log_probabilities_count_towards_the_unread_limit() {
    let logprobs = |_| TokenLogprobs { logprob: 0.0, top: vec![(7, -1.0); 20] };
    let (sink, _stream) = channel(1, UnreadBytes::default());
    let mut num_delivered = 0;
    loop {
        let GenerationEvent::Tokens(span) = tokens(0, 7) else { unreachable!("made above") };
        let event =
            GenerationEvent::Tokens(CommittedTokens { logprobs: (0..8).map(logprobs).collect(), ..span });
        if !sink.send(event) {
            break;
        }
        num_delivered += 1;
    }
    assert!(num_delivered < 400, "{num_delivered} events of 1,500 bytes and more were delivered");
}

#[tokio::test]
async fn nothing_is_read_after_a_failure() {
    let (sink, mut stream) = channel(1, UnreadBytes::default());
    assert!(sink.send(GenerationEvent::Failed(RouterError::ClientGone)));
    assert!(sink.send(tokens(0, 1)), "the sink does not check for an earlier failure");
    assert!(matches!(stream.next().await, Some(GenerationEvent::Failed(RouterError::ClientGone))));
    assert!(stream.next().await.is_none());
}

#[tokio::test]
async fn a_failure_before_the_first_target_is_returned_before_the_stream_starts() {
    let (sink, mut stream) = channel(1, UnreadBytes::default());
    assert!(futures::FutureExt::now_or_never(wait_started([&mut stream])).is_none(), "no target yet");
    let full = RouterError::Overloaded { what: "the queue" };
    assert!(sink.send(GenerationEvent::Failed(full.clone())));
    assert_eq!(wait_started([&mut stream]).await, Err(full));

    let (sink, mut stream) = channel(1, UnreadBytes::default());
    sink.mark_started();
    assert_eq!(wait_started([&mut stream]).await, Ok(()));
    assert!(sink.send(GenerationEvent::Failed(RouterError::ClientGone)));
    assert!(matches!(stream.next().await, Some(GenerationEvent::Failed(_))), "the failure follows the start");

    let (sink, mut stream) = channel(1, UnreadBytes::default());
    assert!(sink.send(tokens(0, 7)));
    assert_eq!(wait_started([&mut stream]).await, Ok(()));
    assert!(matches!(stream.next().await, Some(GenerationEvent::Tokens(_))), "nothing is lost");
    drop((sink, stream));

    let (sink, mut stream) = channel(1, UnreadBytes::default());
    drop(sink);
    assert_eq!(wait_started([&mut stream]).await, Err(RouterError::Draining));
}

#[tokio::test]
async fn a_response_begins_once_all_generations_have_a_target_or_one_has_an_event() {
    let pair = || (channel(1, UnreadBytes::default()), channel(1, UnreadBytes::default()));
    let is_waiting = |first: &mut GenerationStream, second: &mut GenerationStream| {
        futures::FutureExt::now_or_never(wait_started([first, second])).is_none()
    };
    let ((first, mut first_stream), (second, mut second_stream)) = pair();
    first.mark_started();
    assert!(is_waiting(&mut first_stream, &mut second_stream), "the second has no target yet");
    second.mark_started();
    assert_eq!(wait_started([&mut first_stream, &mut second_stream]).await, Ok(()));

    let ((first, mut first_stream), (second, mut second_stream)) = pair();
    first.mark_started();
    assert!(is_waiting(&mut first_stream, &mut second_stream));
    assert!(second.send(GenerationEvent::Failed(RouterError::Draining)));
    let started = wait_started([&mut first_stream, &mut second_stream]).await;
    assert_eq!(started, Err(RouterError::Draining), "the second fails before the response begins");

    let ((first, mut first_stream), (_second, mut second_stream)) = pair();
    assert!(first.send(tokens(0, 7)));
    assert_eq!(wait_started([&mut first_stream, &mut second_stream]).await, Ok(()));
    assert!(matches!(first_stream.next().await, Some(GenerationEvent::Tokens(_))), "nothing is lost");
}
