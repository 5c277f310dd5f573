//! Limits of one API key: concurrent requests, requests per minute, tokens per minute.
//!
//! Rates are token buckets with the capacity of one minute that refill at a constant rate. The number of
//! tokens of a request is not known in advance, so prompt and output tokens are charged as they occur: a key
//! with an empty bucket is refused, running requests continue, and what they overdraw has to refill first.
//! Libraries such as `governor` need the cost in advance, hence this implementation.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::error::{RETRY_AFTER, RouterError};

/// Tolerance for rounding, so that a client that waited for `retry-after` is not refused for a rounding
/// error.
const ROUNDING: f64 = 1e-6;

/// Limits of one key; absent: unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KeyLimits {
    /// Maximum number of requests that wait or run at once.
    pub max_concurrent_requests: Option<u32>,
    /// Maximum number of requests started per minute.
    pub requests_per_minute: Option<u32>,
    /// Maximum number of prompt and output tokens per minute.
    pub tokens_per_minute: Option<u32>,
}

/// Current usage of a key. Clones share it; two are equal if they share the same state.
#[derive(Debug, Clone)]
pub struct KeyUsage(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    max_concurrent_requests: Option<u32>,
    num_running: u32,
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
}

/// Token bucket with the capacity of one minute.
#[derive(Debug, Clone, Copy)]
struct Bucket {
    per_minute: u32,
    /// Tokens left; negative when overdrawn.
    level: f64,
    refilled_at: Instant,
}

/// A running request; dropping it frees its slot.
#[derive(Debug)]
pub struct RunningRequest(KeyUsage);

impl KeyUsage {
    /// A key without usage.
    pub fn new(limits: KeyLimits) -> Self {
        Self(Arc::new(Mutex::new(State::new(limits, Instant::now()))))
    }

    /// Changes the limits of the key; its usage is kept.
    pub fn set_limits(&self, limits: KeyLimits) {
        self.state().set_limits(limits, Instant::now());
    }

    /// Starts a request unless a limit is reached. Refused requests are not counted.
    pub fn acquire(&self) -> Result<RunningRequest, RouterError> {
        self.state().acquire(Instant::now())?;
        Ok(RunningRequest(self.clone()))
    }

    /// Writes OpenAI's `x-ratelimit-*` headers: for each limited rate the limit, the remainder and the time
    /// until it is full again.
    pub fn write_headers(&self, headers: &mut HeaderMap) {
        for (name, value) in self.state().headers(Instant::now()) {
            let value = HeaderValue::from_str(&value).expect("digits, points and letters");
            headers.insert(HeaderName::from_static(name), value);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic under the lock can leave only numbers half updated.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PartialEq for KeyUsage {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for KeyUsage {}

impl RunningRequest {
    /// Charges tokens of the request's prompt or output.
    pub fn charge(&self, num_tokens: u64) {
        self.0.state().charge(num_tokens, Instant::now());
    }
}

impl Drop for RunningRequest {
    fn drop(&mut self) {
        self.0.state().num_running -= 1;
    }
}

impl State {
    fn new(limits: KeyLimits, now: Instant) -> Self {
        let mut state = Self { max_concurrent_requests: None, num_running: 0, requests: None, tokens: None };
        state.set_limits(limits, now);
        state
    }

    fn set_limits(&mut self, limits: KeyLimits, now: Instant) {
        self.max_concurrent_requests = limits.max_concurrent_requests;
        self.requests = Bucket::resized(self.requests, limits.requests_per_minute, now);
        self.tokens = Bucket::resized(self.tokens, limits.tokens_per_minute, now);
    }

    fn acquire(&mut self, now: Instant) -> Result<(), RouterError> {
        if let Some(limit) = self.max_concurrent_requests
            && self.num_running >= limit
        {
            return Err(rate_limited(limit, "concurrent requests", RETRY_AFTER));
        }
        for (bucket, what) in [(self.requests, "requests per minute"), (self.tokens, "tokens per minute")] {
            if let Some(bucket) = bucket
                && bucket.level_at(now) < 1.0 - ROUNDING
            {
                return Err(rate_limited(bucket.per_minute, what, bucket.time_until(1.0, now)));
            }
        }
        if let Some(requests) = &mut self.requests {
            requests.take(1.0, now);
        }
        self.num_running += 1;
        Ok(())
    }

    fn charge(&mut self, num_tokens: u64, now: Instant) {
        if let Some(tokens) = &mut self.tokens {
            tokens.take(num_tokens as f64, now);
        }
    }

    fn headers(&self, now: Instant) -> Vec<(&'static str, String)> {
        const REQUESTS: [&str; 3] =
            ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"];
        const TOKENS: [&str; 3] =
            ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"];
        let mut headers = Vec::new();
        for (names, bucket) in [(REQUESTS, self.requests), (TOKENS, self.tokens)] {
            let Some(bucket) = bucket else { continue };
            let remaining = (bucket.level_at(now) + ROUNDING).max(0.0) as u32;
            let reset = bucket.time_until(f64::from(bucket.per_minute), now);
            let values = [bucket.per_minute.to_string(), remaining.to_string(), format_duration(reset)];
            headers.extend(names.into_iter().zip(values));
        }
        headers
    }
}

impl Bucket {
    /// Bucket for a new limit. A new bucket starts full; an existing one keeps its usage.
    fn resized(previous: Option<Self>, per_minute: Option<u32>, now: Instant) -> Option<Self> {
        let per_minute = per_minute?;
        let used = previous.map_or(0.0, |previous| f64::from(previous.per_minute) - previous.level_at(now));
        Some(Self { per_minute, level: f64::from(per_minute) - used, refilled_at: now })
    }

    fn level_at(&self, now: Instant) -> f64 {
        let minutes = now.saturating_duration_since(self.refilled_at).as_secs_f64() / 60.0;
        let per_minute = f64::from(self.per_minute);
        (self.level + minutes * per_minute).min(per_minute)
    }

    fn take(&mut self, amount: f64, now: Instant) {
        (self.level, self.refilled_at) = (self.level_at(now) - amount, now);
    }

    /// Time until the bucket is filled to `level`.
    fn time_until(&self, level: f64, now: Instant) -> Duration {
        let missing = (level - self.level_at(now)).max(0.0);
        Duration::try_from_secs_f64(missing * 60.0 / f64::from(self.per_minute)).unwrap_or(Duration::MAX)
    }
}

fn rate_limited(limit: u32, what: &str, retry_after: Duration) -> RouterError {
    RouterError::RateLimited { limit: format!("{limit} {what}"), retry_after }
}

/// Formats a duration as OpenAI does, rounded up to milliseconds: `17ms`, `8.64s`, `6m0s`.
fn format_duration(duration: Duration) -> String {
    let millis = duration.as_nanos().div_ceil(1_000_000);
    let seconds = (millis % 60_000) as f64 / 1_000.0;
    match millis {
        0..1_000 => format!("{millis}ms"),
        1_000..60_000 => format!("{seconds}s"),
        _ => format!("{}m{seconds}s", millis / 60_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A key with a clock that only the test advances.
    struct Key {
        state: State,
        now: Instant,
    }

    impl Key {
        fn new(concurrent: Option<u32>, requests: Option<u32>, tokens: Option<u32>) -> Self {
            let now = Instant::now();
            Self { state: State::new(limits(concurrent, requests, tokens), now), now }
        }

        /// Starts a request; returns the limit that refused it and the time to wait.
        fn acquire(&mut self) -> Option<(String, Duration)> {
            match self.state.acquire(self.now) {
                Ok(()) => None,
                Err(RouterError::RateLimited { limit, retry_after }) => Some((limit, retry_after)),
                Err(error) => panic!("{error}"),
            }
        }

        fn charge(&mut self, num_tokens: u64) {
            self.state.charge(num_tokens, self.now);
        }

        fn set_limits(&mut self, limits: KeyLimits) {
            self.state.set_limits(limits, self.now);
        }

        fn headers(&self) -> Vec<String> {
            let headers = self.state.headers(self.now).into_iter();
            headers.map(|(name, value)| format!("{} {value}", name.replace("x-ratelimit-", ""))).collect()
        }
    }

    fn limits(concurrent: Option<u32>, requests: Option<u32>, tokens: Option<u32>) -> KeyLimits {
        KeyLimits {
            max_concurrent_requests: concurrent,
            requests_per_minute: requests,
            tokens_per_minute: tokens,
        }
    }

    #[test]
    fn dropping_a_request_frees_its_slot() {
        let usage = KeyUsage::new(limits(Some(2), None, None));
        let first = usage.acquire().unwrap();
        let _second = usage.acquire().unwrap();
        let error = usage.acquire().unwrap_err();
        assert!(error.to_string().contains("limited to 2 concurrent requests: retry after 1 s"), "{error}");
        drop(first);
        let _third = usage.acquire().unwrap();
        let mut headers = HeaderMap::new();
        usage.write_headers(&mut headers);
        assert!(headers.is_empty(), "no rate is limited");
    }

    #[test]
    fn the_request_rate_refills_and_refused_requests_are_not_counted() {
        let mut key = Key::new(None, Some(6), None);
        for _ in 0..6 {
            assert_eq!(key.acquire(), None, "the bucket allows a burst of one minute");
        }
        for _ in 0..3 {
            assert_eq!(key.acquire(), Some(("6 requests per minute".to_owned(), 10 * SECOND)));
        }
        assert_eq!(key.headers(), ["limit-requests 6", "remaining-requests 0", "reset-requests 1m0s"]);
        key.now += 9 * SECOND;
        assert!(key.acquire().is_some_and(|(_, wait)| wait <= SECOND + SECOND / 1_000));
        key.now += SECOND;
        assert_eq!(key.acquire(), None);
        assert!(key.acquire().is_some(), "only one token was refilled");
        key.now += 3_600 * SECOND;
        assert_eq!(key.headers(), ["limit-requests 6", "remaining-requests 6", "reset-requests 0ms"]);
    }

    #[test]
    fn tokens_are_charged_as_they_occur_and_an_overdraft_must_refill() {
        let mut key = Key::new(None, None, Some(60));
        assert_eq!(key.acquire(), None);
        key.charge(40);
        assert_eq!(key.headers(), ["limit-tokens 60", "remaining-tokens 20", "reset-tokens 40s"]);
        assert_eq!(key.acquire(), None, "the bucket is not empty");
        key.charge(50);
        assert_eq!(key.headers()[1], "remaining-tokens 0");
        assert_eq!(key.acquire(), Some(("60 tokens per minute".to_owned(), 31 * SECOND)));
        key.now += 31 * SECOND;
        assert_eq!(key.acquire(), None);
    }

    #[test]
    fn changed_limits_keep_the_usage() {
        let mut key = Key::new(Some(1), Some(2), Some(100));
        assert_eq!(key.acquire(), None);
        key.charge(90);
        key.set_limits(limits(None, Some(5), Some(80)));
        assert_eq!(key.headers()[0..2], ["limit-requests 5", "remaining-requests 4"]);
        assert_eq!(key.headers()[3..5], ["limit-tokens 80", "remaining-tokens 0"]);
        assert_eq!(key.acquire().map(|(limit, _)| limit).as_deref(), Some("80 tokens per minute"));
        key.set_limits(limits(None, Some(5), Some(1_000)));
        assert_eq!(key.acquire(), None);
        key.set_limits(limits(Some(2), None, None));
        assert!(key.acquire().is_some(), "both requests are still running");
    }

    #[test]
    fn durations_are_formatted_as_by_openai() {
        let rows = [(0, "0ms"), (17, "17ms"), (1_000, "1s"), (8_640, "8.64s"), (60_000, "1m0s")];
        for (millis, expected) in rows {
            assert_eq!(format_duration(Duration::from_millis(millis)), expected);
        }
        assert_eq!(format_duration(Duration::from_millis(61_500)), "1m1.5s");
        assert_eq!(format_duration(Duration::from_nanos(1)), "1ms", "rounded up");
    }
}
