//! Echoed and scored prompts of requests with several choices. The prompt is scored for the first choice only,
//! and other choices may finish before.

use serde_json::{Value, json};

use crate::client::{COMPLETIONS, MODEL, TestRouter, chunks, merged};
use crate::fake_lanes::Script;

const PROMPT: &str = "one two three";

fn body(max_tokens: u32, stream: bool) -> Value {
    json!({
        "model": MODEL, "prompt": PROMPT, "echo": true, "logprobs": 1, "n": 3, "seed": 7,
        "max_tokens": max_tokens, "stream": stream
    })
}

/// A router whose prompts are scored before any choice, or after all but the first.
fn router(is_late: bool) -> TestRouter {
    let router = TestRouter::start();
    let text = " and so on".to_owned();
    router.lanes.set_script(if is_late { Script::ScoreLate(text) } else { Script::Reply(text) });
    router
}

#[tokio::test]
async fn choices_that_finish_before_the_prompt_is_scored_are_answered_as_others_are() {
    for max_tokens in [0, 2, 16] {
        let early = router(false).ok(COMPLETIONS, &body(max_tokens, false)).await;
        let late = router(true).ok(COMPLETIONS, &body(max_tokens, false)).await;
        assert_eq!(early["choices"].as_array().map(Vec::len), Some(3));
        assert_eq!((&early["choices"], &early["usage"]), (&late["choices"], &late["usage"]));
    }
}

#[tokio::test]
async fn in_a_stream_every_choice_begins_with_the_scored_prompt_and_ends_with_its_finish() {
    for (max_tokens, is_late) in [(0, false), (0, true), (2, true), (16, true)] {
        let chunks = chunks(&router(is_late).events(COMPLETIONS, &body(max_tokens, true)).await);
        let pieces: Vec<&Value> =
            chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap()).collect();
        // The echo of every choice comes before any output.
        let heads: Vec<(&Value, &Value)> =
            pieces.iter().take(3).map(|piece| (&piece["index"], &piece["text"])).collect();
        let prompt = json!(PROMPT);
        assert_eq!(heads, [(&json!(0), &prompt), (&json!(1), &prompt), (&json!(2), &prompt)]);
        for index in 0..3 {
            let of_choice: Vec<_> = pieces.iter().filter(|piece| piece["index"] == index).collect();
            let scores = of_choice[0]["logprobs"]["token_logprobs"].as_array().unwrap();
            assert!(scores.len() > 2 && scores[0].is_null() && scores[1] == json!(-1.25), "{scores:?}");
            let finishes: Vec<bool> =
                of_choice.iter().map(|piece| !piece["finish_reason"].is_null()).collect();
            let num_finishes = finishes.iter().filter(|is_finish| **is_finish).count();
            assert!(num_finishes == 1 && finishes.ends_with(&[true]), "{of_choice:?}");
            let num_tokens: usize = of_choice[1..]
                .iter()
                .filter_map(|piece| piece["logprobs"]["tokens"].as_array())
                .map(Vec::len)
                .sum();
            assert_eq!(num_tokens == 0, max_tokens == 0, "{of_choice:?}");
        }
    }
}

/// In completions with every choice, in chat once; the prompt is repeated only with `echo`.
#[tokio::test]
async fn a_prompt_is_scored_in_the_format_of_vllm() {
    let router = TestRouter::start().with_reply(" fine");
    let fields = json!({ "model": MODEL, "prompt": PROMPT, "prompt_logprobs": 2, "n": 2 });
    let plain = router.ok(COMPLETIONS, &fields).await;
    let generation = router.lanes.take_one();
    assert_eq!((generation.spec.prompt_logprobs, generation.spec.logprobs), (Some(2), None));
    let ids = generation.prompt_ids;
    let check = |scores: &Value| {
        let scores = scores.as_array().unwrap();
        assert_eq!(scores.len(), ids.len());
        assert_eq!(scores[0], Value::Null);
        for (id, scores) in ids.iter().zip(scores).skip(1) {
            let own = &scores[id.to_string()];
            assert!(own["logprob"].is_number() && own["decoded_token"].is_string(), "{id}: {scores}");
            assert!((2..=3).contains(&scores.as_object().unwrap().len()), "{scores}");
        }
    };
    for idx in 0..2 {
        check(&plain["choices"][idx]["prompt_logprobs"]);
        assert_eq!(plain["choices"][idx]["prompt_logprobs"][1][ids[1].to_string()]["logprob"], -1.25);
        assert_eq!(plain["choices"][idx]["logprobs"], Value::Null);
    }
    assert_eq!(plain["choices"][0]["text"], "0 fine");
    // Log probabilities of the output, and the echo, are independent of it.
    for (more, expected) in [
        (json!({ "logprobs": 1 }), "0 fine"),
        (json!({ "echo": true }), "one two three0 fine"),
        (json!({ "logprobs": 2, "echo": true }), "one two three0 fine"),
    ] {
        let mut body = merged(fields.clone(), &more);
        let both = router.ok(COMPLETIONS, &body).await;
        assert_eq!(both["choices"][0]["text"], expected);
        assert_eq!(both["choices"][0]["prompt_logprobs"], plain["choices"][0]["prompt_logprobs"], "{more}");
        body.as_object_mut().unwrap().remove("prompt_logprobs");
        let without = router.ok(COMPLETIONS, &body).await;
        assert_eq!(both["choices"][0]["logprobs"], without["choices"][0]["logprobs"], "{more}");
        assert!(without["choices"][0].get("prompt_logprobs").is_none(), "{more}");
        router.lanes.take_submitted();
    }
    let message = json!([{ "role": "user", "content": "one two" }]);
    let body = json!({ "model": MODEL, "messages": message, "prompt_logprobs": 0, "logprobs": true });
    let answer = router.ok("/v1/chat/completions", &body).await;
    let generation = router.lanes.take_one();
    assert_eq!(generation.spec.prompt_logprobs, Some(0));
    let scores = answer["prompt_logprobs"].as_array().unwrap();
    assert_eq!((scores.len(), &scores[0]), (generation.prompt_ids.len(), &Value::Null));
    assert_eq!(scores[1].as_object().unwrap().len(), 1, "only the prompt's own token");
    let num_scored = answer["choices"][0]["logprobs"]["content"].as_array().unwrap().len();
    assert_eq!(answer["usage"]["completion_tokens"], num_scored, "of the output only");
    assert_eq!(answer["choices"][0]["message"]["content"], "0 fine");
}
