//! Which errors a client retries and when, and the form of messages.

use super::*;

#[test]
fn retryable_errors_are_those_that_a_client_library_retries() {
    for error in [
        RouterError::Overloaded { what: "the queue" },
        RouterError::WaitedTooLong { what: "the router", waited: Duration::from_secs(30) },
        RouterError::Draining,
        RouterError::Unavailable { reason: "no target".into() },
        RouterError::RateLimited { limit: "1 requests per minute".into(), retry_after: Duration::ZERO },
    ] {
        let mapping = error.mapping();
        assert!(mapping.retryable && matches!(mapping.status.as_u16(), 429 | 503), "{error}");
        assert!(tonic::Status::from(error).metadata().contains_key("retry-after"));
    }
    assert!(!RouterError::invalid("n", "n must be positive").mapping().retryable);
}

#[test]
fn retry_after_is_rounded_up_to_whole_seconds() {
    for (millis, seconds) in [(0, 1), (1, 1), (1_000, 1), (1_001, 2), (59_999, 60)] {
        let retry_after = Duration::from_millis(millis);
        let error = RouterError::RateLimited { limit: "1 requests per minute".into(), retry_after };
        assert_eq!(error.retry_after_seconds(), Some(seconds));
        assert!(error.to_string().ends_with(&format!("retry after {seconds} s")), "{error}");
    }
    let error = RouterError::WaitedTooLong { what: "the router", waited: Duration::from_millis(29_999) };
    assert_eq!(error.retry_after_seconds(), Some(30));
    assert_eq!(
        error.to_string(),
        "the router had no capacity within 30 s: retry after 30 s, or send fewer or shorter requests"
    );
    assert_eq!(RouterError::Draining.retry_after_seconds(), Some(1));
    assert_eq!(RouterError::SlowClient.retry_after_seconds(), None);
}

#[test]
fn messages_are_one_lowercase_line_without_a_full_stop() {
    for error in [
        RouterError::ContextLengthExceeded {
            max_model_len: 2048,
            prompt_tokens: 2049,
            excess: Excess::Prompt,
            param: "prompt",
        },
        RouterError::BodyTooLarge { limit: 7 },
        RouterError::RateLimited {
            limit: "60 requests per minute".into(),
            retry_after: Duration::from_millis(2_001),
        },
        RouterError::SlowClient,
        RouterError::Refused { reason: "logits hold a NaN".into() },
        RouterError::Quarantined {
            reason: "this request ran at 4 target workers in a row that failed".into(),
        },
    ] {
        let text = error.to_string();
        assert!(!text.contains('\n') && !text.ends_with('.'), "{text}");
        assert!(text.starts_with(|c: char| c.is_lowercase()), "{text}");
    }
}

#[test]
fn a_long_text_loses_its_middle_and_no_part_of_a_character() {
    for character in ["x", "\u{e9}", "\u{20ac}", "\u{1F600}"] {
        for num_chars in (1_000..1_050).chain([100_000]) {
            let message = format!("n: {} is wrong", character.repeat(num_chars));
            let error = RouterError::invalid(message.clone(), message.clone());
            let (clipped, param) = (error.message(), error.param().expect("a field").into_owned());
            if message.len() <= MESSAGE_BYTES_MAX {
                assert_eq!(clipped, message);
            } else {
                assert!((MESSAGE_BYTES_MAX - 8..=MESSAGE_BYTES_MAX).contains(&clipped.len()), "{clipped}");
                let rest = clipped.replacen('\u{2026}', "", 1).replace(character, "");
                assert_eq!(rest, "n:  is wrong");
            }
            assert!((PARAM_BYTES_MAX - 8..=PARAM_BYTES_MAX).contains(&param.len()), "{param}");
        }
    }
}
