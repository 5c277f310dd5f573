//! Completions of several prompts: an error of any of them before the first token sets the status.

use router::error::RouterError;
use serde_json::json;

use crate::client::{MODEL, TestRouter};
use crate::fake_lanes::Script;

#[tokio::test]
async fn a_prompt_that_fails_before_the_first_token_fails_the_request_with_its_status() {
    let router = TestRouter::start();
    let error = RouterError::Unavailable { reason: "no target worker is ready".into() };
    router.lanes.set_script(Script::FailOtherPrompts(error));
    for stream in [false, true] {
        let body = json!({ "model": MODEL, "prompt": ["a", "b", "c"], "stream": stream });
        let answer = router.post_json("/v1/completions", &body).await;
        assert_eq!((answer.status.as_u16(), &answer.headers["retry-after"]), (503, &"1".parse().unwrap()));
        assert_eq!(answer.json()["error"]["code"], "unavailable");
        router.lanes.take_submitted();
    }
}
