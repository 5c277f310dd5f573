//! The gRPC API: the same semantics as over HTTP, checked in the same place.

use http::uri::PathAndQuery;
use proto::v1::inference_client::InferenceClient;
use proto::v1::{self, generate_request::Prompt};
use router::admission::AdmissionLimits;
use router::error::RouterError;
use router::request::Auth;
use serde_json::json;
use tonic::transport::Channel;
use tonic::{Code, Request};
use tonic_prost::ProstCodec;
use tonic_types::StatusExt as _;

use crate::client::{ALIAS, END, MAX_MODEL_LEN, MODEL, TestRouter, demo_encode, eventually};
use crate::fake_lanes::Script;

async fn client(router: &TestRouter) -> InferenceClient<Channel> {
    InferenceClient::connect(router.listen_grpc().await).await.unwrap()
}

fn text_request(text: &str) -> v1::GenerateRequest {
    v1::GenerateRequest {
        model: MODEL.into(),
        prompt: Some(Prompt::Text(text.into())),
        max_tokens: Some(64),
        ..v1::GenerateRequest::default()
    }
}

async fn generate(
    client: &mut InferenceClient<Channel>,
    request: v1::GenerateRequest,
) -> Result<Vec<v1::GenerateResponse>, tonic::Status> {
    let mut stream = client.generate(request).await?.into_inner();
    let mut messages = Vec::new();
    while let Some(message) = stream.message().await? {
        messages.push(message);
    }
    Ok(messages)
}

fn text_of(messages: &[v1::GenerateResponse], choice: u32) -> String {
    messages.iter().filter(|message| message.choice == choice).map(|message| message.text.as_str()).collect()
}

#[tokio::test]
async fn text_ids_and_usage_equal_those_over_http() {
    let router = TestRouter::start().with_reply(" and the same text");
    let mut client = client(&router).await;
    let request = v1::GenerateRequest { n: Some(2), seed: Some(-5), ..text_request("hi") };
    let messages = generate(&mut client, request).await.unwrap();
    let body = json!({ "model": MODEL, "prompt": "hi", "n": 2, "max_tokens": 64, "seed": -5 });
    let over_http = router.ok("/v1/completions", &body).await;
    for choice in 0..2 {
        let text = text_of(&messages, choice);
        assert_eq!(over_http["choices"][choice as usize]["text"], text);
        let ids: Vec<u32> = messages
            .iter()
            .filter(|message| message.choice == choice)
            .flat_map(|message| message.token_ids.clone())
            .collect();
        assert_eq!(ids, [demo_encode(&text), vec![END]].concat());
        let finishes = messages.iter().filter(|message| message.choice == choice && message.finish != 0);
        assert_eq!(finishes.count(), 1);
    }
    assert!(messages.iter().any(|message| message.num_drafted > 0));
    let (last, earlier) = messages.split_last().unwrap();
    assert!(earlier.iter().all(|message| message.usage.is_none()));
    let usage = last.usage.as_ref().unwrap();
    assert_eq!(over_http["usage"]["completion_tokens"], usage.completion_tokens);
    let speculation = usage.speculation.as_ref().unwrap();
    assert_eq!(over_http["usage"]["speculation"]["accepted_tokens"], speculation.accepted_tokens);
    assert!(messages.iter().all(|message| message.seed == -5 && message.system_fingerprint == "numerics-1"));
    let [over_grpc, over_http] = &router.lanes.take_submitted()[..] else { panic!("two generations") };
    assert_eq!(over_grpc.spec, over_http.spec);
    assert_eq!(over_grpc.prompt_ids, over_http.prompt_ids);
}

#[tokio::test]
async fn special_tokens_are_spelled_out_on_request() {
    let router = TestRouter::start().with_reply(" one<|user|> two");
    let mut client = client(&router).await;
    for (skip_special_tokens, expected) in
        [(None, "0 one two"), (Some(true), "0 one two"), (Some(false), "0 one<|user|> two")]
    {
        let request = v1::GenerateRequest { skip_special_tokens, ..text_request("hi") };
        let messages = generate(&mut client, request).await.unwrap();
        assert_eq!(text_of(&messages, 0), expected, "{skip_special_tokens:?}");
    }
}

#[tokio::test]
async fn a_conversation_is_rendered() {
    let router = TestRouter::start().with_reply(" fine");
    let mut client = client(&router).await;
    let message = v1::ChatMessage { role: "user".into(), content: "hi".into(), ..v1::ChatMessage::default() };
    let request = v1::GenerateRequest {
        model: MODEL.into(),
        prompt: Some(Prompt::Chat(v1::Chat { messages: vec![message], ..v1::Chat::default() })),
        ..v1::GenerateRequest::default()
    };
    let messages = generate(&mut client, request).await.unwrap();
    assert_eq!(text_of(&messages, 0), "0 fine");
    let generation = router.lanes.take_one();
    assert_eq!(generation.prompt_ids, demo_encode("<|user|>\nhi<|end|>\n<|assistant|>\n"));
    assert_eq!(generation.spec.max_len, MAX_MODEL_LEN);
    assert!(messages[0].request_id.starts_with("chatcmpl-"));
}

#[tokio::test]
async fn the_role_developer_is_that_of_the_system() {
    let router = TestRouter::start().with_reply(" fine");
    let mut client = client(&router).await;
    let message = |role: &str| v1::ChatMessage {
        role: role.into(),
        content: "be brief".into(),
        ..v1::ChatMessage::default()
    };
    let chat = v1::Chat { messages: vec![message("developer"), message("user")], ..v1::Chat::default() };
    generate(&mut client, v1::GenerateRequest { prompt: Some(Prompt::Chat(chat)), ..text_request("") })
        .await
        .unwrap();
    let expected = "<|system|>\nbe brief<|end|>\n<|user|>\nbe brief<|end|>\n<|assistant|>\n";
    assert_eq!(router.lanes.take_one().prompt_ids, demo_encode(expected));
}

#[tokio::test]
async fn an_echo_contains_the_logprobs_of_the_prompt() {
    let router = TestRouter::start().with_reply(" fine");
    let mut client = client(&router).await;
    let ids = demo_encode("one two three");
    let request = v1::GenerateRequest {
        prompt: Some(Prompt::TokenIds(v1::TokenIds { ids: ids.clone() })),
        echo: true,
        logprobs: Some(2),
        ..text_request("")
    };
    let messages = generate(&mut client, request).await.unwrap();
    let echo = messages[0].prompt.as_ref().unwrap();
    assert_eq!((echo.text.as_str(), &echo.token_ids), ("one two three", &ids));
    assert_eq!(echo.logprobs.len(), ids.len() - 1);
    assert_eq!(echo.logprobs[0].top.len(), 2);
    assert!(messages[1..].iter().all(|message| message.prompt.is_none()));
    assert_eq!(messages[1].logprobs.len(), messages[1].token_ids.len());
}

#[tokio::test]
async fn excluded_tokens_are_sent_as_ids() {
    let router = TestRouter::start().with_reply(" fine");
    let mut client = client(&router).await;
    let request = |bad_words: &[&[u32]]| {
        let word = |ids: &&[u32]| v1::TokenSequence { token_ids: ids.to_vec() };
        let bad_words = bad_words.iter().map(word).collect();
        let sampling =
            v1::SamplingParams { allowed_token_ids: vec![9, 7], bad_words, ..v1::SamplingParams::default() };
        v1::GenerateRequest { sampling: Some(sampling), ..text_request("hi") }
    };
    generate(&mut client, request(&[&[7], &[9, 8]])).await.unwrap();
    let sampling = router.lanes.take_one().spec.sampling;
    assert_eq!((sampling.allowed_token_ids, sampling.bad_words), (vec![7, 9], vec![vec![7], vec![9, 8]]));
    for (bad_words, expected) in [
        (&[&[7][..], &[]][..], "bad_words[1] has no token ids"),
        (&[&[4_096]], "bad_words[0][0] is 4096"),
        (&[&[7], &[9]], "allowed_token_ids may leave no token to generate"),
    ] {
        let status = generate(&mut client, request(bad_words)).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        assert!(status.message().contains(expected), "{status:?}");
    }
}

#[tokio::test]
async fn bad_input_is_refused_with_the_same_messages() {
    let router = TestRouter::start().with_reply(" fine");
    let mut client = client(&router).await;
    let sampling = |sampling| Some(v1::SamplingParams { ..sampling });
    let cold = v1::SamplingParams { temperature: Some(-1.0), ..v1::SamplingParams::default() };
    let wide = v1::SamplingParams { top_p: Some(2.0), ..v1::SamplingParams::default() };
    let unknown_mode = v1::Speculation { acceptance: 17, ..v1::Speculation::default() };
    let kwargs = v1::Chat { template_kwargs: "[".into(), ..v1::Chat::default() };
    let many_values = json!({ "x": vec![0; 65_536] }).to_string();
    let many_values = v1::Chat { template_kwargs: many_values, ..v1::Chat::default() };
    let rows = [
        (
            v1::GenerateRequest { sampling: sampling(cold), ..text_request("hi") },
            "temperature must be between 0 and 2, not -1",
        ),
        (
            v1::GenerateRequest { sampling: sampling(wide), ..text_request("hi") },
            "top_p must be between 0 and 1, not 2",
        ),
        (v1::GenerateRequest { prompt: None, ..text_request("") }, "prompt is required"),
        (text_request(""), "prompt must not be empty"),
        (v1::GenerateRequest { max_tokens: Some(0), ..text_request("hi") }, "max_tokens must be at least 1"),
        (
            v1::GenerateRequest { max_tokens: Some(2_048), ..text_request("hi") },
            "maximum context length is 2048",
        ),
        (
            v1::GenerateRequest { stop: vec!["x".into(); 100], ..text_request("hi") },
            "stop has 100 strings, at most 64",
        ),
        (
            v1::GenerateRequest { speculation: Some(unknown_mode), ..text_request("hi") },
            "coupled, rejection, typical, not `17`",
        ),
        (v1::GenerateRequest { priority: 256, ..text_request("hi") }, "priority must be between 0 and 255"),
        (
            v1::GenerateRequest { prompt: Some(Prompt::Chat(v1::Chat::default())), ..text_request("") },
            "messages must not be empty",
        ),
        (
            v1::GenerateRequest { prompt: Some(Prompt::Chat(kwargs)), ..text_request("") },
            "template_kwargs must be a JSON object",
        ),
        (
            v1::GenerateRequest { prompt: Some(Prompt::Chat(many_values)), ..text_request("") },
            "65537 JSON values in schemas, calls, variables and metadata, at most 65536 are allowed",
        ),
        (v1::GenerateRequest { model: String::new(), ..text_request("hi") }, "model is required"),
    ];
    for (request, expected) in rows {
        let status = generate(&mut client, request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{expected}: {status}");
        assert!(status.message().contains(expected), "{expected}: {status}");
        assert!(router.lanes.take_submitted().is_empty(), "{expected}: it was submitted");
        assert_eq!(text_of(&generate(&mut client, text_request("hi")).await.unwrap(), 0), "0 fine");
        router.lanes.take_submitted();
    }
    let unknown = v1::GenerateRequest { model: "nobody".into(), ..text_request("hi") };
    assert_eq!(generate(&mut client, unknown).await.unwrap_err().code(), Code::NotFound);
    let huge = text_request(&"x".repeat(5 << 20));
    assert_eq!(generate(&mut client, huge).await.unwrap_err().code(), Code::OutOfRange);
    assert_eq!(text_of(&generate(&mut client, text_request("hi")).await.unwrap(), 0), "0 fine");
}

/// Clients refuse metadata of more than 8 KiB and report RESOURCE_EXHAUSTED instead of the error.
#[tokio::test]
async fn errors_fit_the_metadata_of_an_answer() {
    let router = TestRouter::start();
    let mut client = client(&router).await;
    let chat = |role: String| {
        let message = v1::ChatMessage { role, content: "hi".into(), ..v1::ChatMessage::default() };
        Some(Prompt::Chat(v1::Chat { messages: vec![message], ..v1::Chat::default() }))
    };
    for long in ["x".repeat(5_000), "x".repeat(200_000), "\u{20ac}".repeat(5_000), "\n".repeat(5_000)] {
        let model = v1::GenerateRequest { model: long.clone(), ..text_request("hi") };
        let role = v1::GenerateRequest { prompt: chat(long), ..text_request("") };
        for (request, code, expected) in [
            (model, Code::NotFound, "does not exist; GET /v1/models lists the available models"),
            (role, Code::InvalidArgument, "messages[0].role must be one of"),
        ] {
            let status = generate(&mut client, request).await.unwrap_err();
            assert_eq!(status.code(), code, "{status}");
            assert!(status.message().len() <= 1_024 && status.message().contains(expected), "{status}");
            let violations = status.get_error_details().bad_request().unwrap().field_violations.clone();
            assert_eq!(violations[0].description, status.message());
            let headers = status.metadata().clone().into_headers();
            let size: usize =
                headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 32).sum();
            // The message is percent-encoded: three bytes for each that is not ASCII.
            let message: usize =
                status.message().bytes().map(|byte| if byte.is_ascii_graphic() { 1 } else { 3 }).sum();
            let details = status.details().len() * 4 / 3;
            assert!(size + message + details < 7_000, "{size} + {message} + {details}");
        }
    }
}

#[tokio::test]
async fn variables_of_the_router_are_refused_in_template_kwargs() {
    let router = TestRouter::start().with_reply(" fine");
    let mut client = client(&router).await;
    let message = v1::ChatMessage { role: "user".into(), content: "hi".into(), ..v1::ChatMessage::default() };
    let request = |kwargs: &str| {
        let chat = v1::Chat { messages: vec![message.clone()], template_kwargs: kwargs.into() };
        v1::GenerateRequest { prompt: Some(Prompt::Chat(chat)), ..text_request("") }
    };
    let status = generate(&mut client, request(r#"{"bos_token": "x"}"#)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    assert!(status.message().starts_with("template_kwargs.bos_token "), "{status}");
    generate(&mut client, request(r#"{"thinking": true}"#)).await.unwrap();
}

#[tokio::test]
async fn failures_keep_their_codes() {
    let router = TestRouter::start();
    let mut client = client(&router).await;
    for (script, code) in [
        (Script::Refuse(RouterError::Unavailable { reason: "no target".into() }), Code::Unavailable),
        (Script::Panic, Code::Internal),
        (Script::FailAfterOneSpan(RouterError::Refused { reason: "a NaN".into() }), Code::FailedPrecondition),
    ] {
        router.lanes.set_script(script);
        assert_eq!(generate(&mut client, text_request("hi")).await.unwrap_err().code(), code);
    }
}

#[tokio::test]
async fn keys_and_limits_apply() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys");
    std::fs::write(&path, "sk-one task_type=sql\n").unwrap();
    let limits = AdmissionLimits { max_sequences: 1, max_waiting_requests: 0 };
    let router = TestRouter::with(Auth::from_file(&path).unwrap(), limits);
    router.lanes.set_script(Script::Hang);
    let mut client = client(&router).await;
    let keyed = |message| {
        let mut request = Request::new(message);
        request.metadata_mut().insert("authorization", "Bearer sk-one".parse().unwrap());
        request
    };
    let status = client.generate(text_request("hi")).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
    assert_eq!(client.list_models(v1::ListModelsRequest {}).await.unwrap_err().code(), Code::Unauthenticated);
    assert_eq!(before_a_message(&router).await.code(), Code::Unauthenticated);
    let open = client.generate(keyed(text_request("hi"))).await.unwrap();
    assert_eq!(router.lanes.take_one().task_type, "sql");
    let status = client.generate(keyed(text_request("hi"))).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert_eq!(status.metadata().get("retry-after").unwrap(), "1");
    drop(open);
    eventually("cancellation", || router.lanes.cancelled().len() == 1).await;
    eventually("the permit's return", || router.state.admission.available() == 1).await;
}

#[tokio::test]
async fn models_are_listed() {
    let router = TestRouter::start();
    let models =
        client(&router).await.list_models(v1::ListModelsRequest {}).await.unwrap().into_inner().models;
    assert_eq!(
        models.iter().map(|model| model.id.as_str()).collect::<Vec<_>>(),
        ["no-template", MODEL, ALIAS]
    );
    assert_eq!(models[1].max_model_len, MAX_MODEL_LEN);
}

/// The answer to a call without a key whose message never arrives.
async fn before_a_message(router: &TestRouter) -> tonic::Status {
    let channel = Channel::from_shared(router.listen_grpc().await).unwrap().connect().await.unwrap();
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.unwrap();
    let codec = ProstCodec::<v1::GenerateRequest, v1::GenerateResponse>::default();
    let path = PathAndQuery::from_static("/outrider.v1.Inference/Generate");
    client.streaming(Request::new(futures::stream::pending()), path, codec).await.unwrap_err()
}
