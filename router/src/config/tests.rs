//! Which settings of a router are refused, and what follows from some of them.

use scheduling::scheduler::policy::SpeculationRequest;

use super::*;
use crate::catalog::settings::RequestDefaults;

#[test]
fn connections_have_no_maximum_age_unless_it_is_set() {
    for (max_connection_age_seconds, max_age) in [(0, None), (600, Some(Duration::from_secs(600)))] {
        let raw = RawRouter { max_connection_age_seconds, ..RawRouter::default() };
        let config = raw.validate(&mut Faults::new()).unwrap();
        assert_eq!(config.listener.timeouts.max_age, max_age);
    }
    let mut faults = Faults::new();
    let too_old = RawRouter { max_connection_age_seconds: u64::MAX, ..RawRouter::default() };
    drop(too_old.validate(&mut faults));
    let error = faults.finish().unwrap_err().to_string();
    assert!(error.contains("max_connection_age_seconds"), "{error}");
}

#[test]
fn one_setting_turns_off_all_drafts() {
    let lane = serde_json::from_str(r#"{"max_k": 6}"#).unwrap();
    let lanes = BTreeMap::from([("code".to_owned(), lane)]);
    let draft_tokens = DraftTokens::Fixed(4);
    let mut faults = Faults::new();
    let config = RawRouter { max_draft_tokens: 0, draft_tokens, lanes, ..RawRouter::default() }
        .validate(&mut faults)
        .unwrap();
    assert!(faults.is_empty());
    let policy = config.scheduler.policy;
    for task_type in ["code", "other"] {
        let request = SpeculationRequest { num_draft_tokens: Some(8), ..SpeculationRequest::default() };
        assert_eq!(policy.lane(task_type).max_k, 0);
        assert_eq!(policy.pinned_draft_tokens(task_type, &request), Some(0));
    }
}

#[test]
fn every_fault_is_reported_with_its_setting() {
    let serves = |served: &str| ModelSettings { serves: Some(served.to_owned()), ..ModelSettings::default() };
    let defaults = RequestDefaults { temperature: Some(3.0), ..RequestDefaults::default() };
    let hot = ModelSettings { serves: None, defaults };
    let models = [("a", serves("b")), ("b", serves("demo")), ("hot", hot), ("fine", serves("hot"))];
    let models = models.map(|(name, settings)| (name.to_owned(), settings)).into();
    let mut faults = Faults::new();
    let allowed_origins = vec!["chat.example".to_owned()];
    let draft_tokens = DraftTokens::Fixed(33);
    RawRouter { models, allowed_origins, draft_tokens, ..RawRouter::default() }.validate(&mut faults);
    let message = faults.finish().unwrap_err().to_string();
    for expected in [
        "models.a: serves is `b`, which is an alias itself",
        "models.hot: temperature must be between 0 and 2, not 3",
        "allowed_origins: `chat.example` is not an origin",
        "draft_tokens: 33 is over the limit of 32",
    ] {
        assert!(message.contains(expected), "{expected} is missing from {message}");
    }
    assert!(!message.contains("models.fine") && !message.contains("models.b"), "{message}");
}
