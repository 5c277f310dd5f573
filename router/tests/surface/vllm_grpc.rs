//! `vllm.grpc.engine.VllmEngine`, called as by gateways.

use proto::vllm;
use proto::vllm::generate_request::Input;
use proto::vllm::generate_response::Response as Answer;
use proto::vllm::sampling_params::Constraint;
use proto::vllm::vllm_engine_client::VllmEngineClient;
use router::admission::AdmissionLimits;
use router::request::Auth;
use serde_json::{Value, json};
use tonic::transport::Channel;
use tonic::{Code, Request};
use tonic_types::StatusExt as _;

use crate::client::{MAX_MODEL_LEN, MODEL, TestRouter, demo_encode, eventually, merged};
use crate::fake_lanes::Script;

async fn connect(router: &TestRouter) -> VllmEngineClient<Channel> {
    VllmEngineClient::connect(router.listen_grpc().await).await.unwrap()
}

/// The protocol has no model field; the metadata names the model.
fn with_model<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("x-model", MODEL.parse().unwrap());
    request
}

fn generate(change: impl FnOnce(&mut vllm::GenerateRequest)) -> Request<vllm::GenerateRequest> {
    let tokenized = vllm::TokenizedInput { original_text: String::new(), input_ids: demo_encode("one two") };
    let sampling = vllm::SamplingParams { seed: Some(7), max_tokens: Some(16), ..Default::default() };
    let mut message = vllm::GenerateRequest {
        request_id: "one".into(),
        input: Some(Input::Tokenized(tokenized)),
        sampling_params: Some(sampling),
        stream: true,
        mm_inputs: None,
    };
    change(&mut message);
    with_model(message)
}

/// Returns the chunks' ids and the last message.
async fn read(
    client: &mut VllmEngineClient<Channel>,
    request: Request<vllm::GenerateRequest>,
) -> (Vec<Vec<u32>>, vllm::GenerateComplete) {
    let mut stream = client.generate(request).await.unwrap().into_inner();
    let mut chunks = Vec::new();
    while let Some(message) = stream.message().await.unwrap() {
        match message.response.unwrap() {
            Answer::Chunk(chunk) => chunks.push(chunk.token_ids),
            Answer::Complete(complete) => {
                assert!(stream.message().await.unwrap().is_none(), "no message follows");
                return (chunks, complete);
            }
        }
    }
    panic!("the last message is missing")
}

fn sampling(message: &mut vllm::GenerateRequest) -> &mut vllm::SamplingParams {
    message.sampling_params.as_mut().unwrap()
}

#[tokio::test]
async fn ids_are_returned_streamed_and_in_full() {
    let router = TestRouter::start().with_reply(" shines");
    let mut client = connect(&router).await;
    let (chunks, complete) = read(&mut client, generate(|_| ())).await;
    let mut ids = demo_encode("0 shines");
    ids.push(crate::client::END);
    assert!(chunks.len() > 1);
    assert_eq!((chunks.concat(), &complete.output_ids), (ids.clone(), &ids));
    assert_eq!((complete.finish_reason.as_str(), complete.completion_tokens), ("stop", ids.len() as u32));
    assert_eq!((complete.prompt_tokens, complete.cached_tokens), (demo_encode("one two").len() as u32, 1));
    let sent = router.lanes.take_one();
    assert_eq!((sent.prompt_ids, sent.spec.seed, sent.model.as_str()), (demo_encode("one two"), 7, MODEL));

    let (chunks, whole) = read(&mut client, generate(|message| message.stream = false)).await;
    assert_eq!((chunks.len(), whole.output_ids), (0, ids));
    let text = |message: &mut vllm::GenerateRequest| message.input = Some(Input::Text("one two".into()));
    let (_, cut) = read(
        &mut client,
        generate(|message| {
            text(message);
            sampling(message).max_tokens = Some(2)
        }),
    )
    .await;
    assert_eq!((cut.finish_reason.as_str(), cut.output_ids.len()), ("length", 2));
}

#[tokio::test]
async fn unset_fields_take_the_defaults_of_vllm() {
    let router = TestRouter::start().with_reply(" fine");
    let mut client = connect(&router).await;
    read(&mut client, generate(|message| message.sampling_params = None)).await;
    let spec = router.lanes.take_one().spec;
    assert_eq!(
        (spec.sampling.temperature, spec.sampling.top_p, spec.sampling.repetition_penalty),
        (1.0, 1.0, 1.0)
    );
    assert_eq!(spec.max_len, MAX_MODEL_LEN, "the rest of the context window");
    let set = |message: &mut vllm::GenerateRequest| {
        *sampling(message) = vllm::SamplingParams {
            temperature: Some(0.0),
            top_p: 0.5,
            top_k: 3,
            min_p: 0.25,
            frequency_penalty: 1.0,
            presence_penalty: -1.0,
            repetition_penalty: 1.5,
            max_tokens: Some(5),
            min_tokens: 2,
            stop_token_ids: vec![9],
            n: 1,
            logit_bias: [(7, 2.0), (3, 1.0)].into(),
            truncate_prompt_tokens: Some(1),
            ..Default::default()
        };
    };
    read(&mut client, generate(set)).await;
    let generation = router.lanes.take_one();
    let spec = generation.spec;
    assert_eq!((spec.sampling.temperature, spec.sampling.top_p, spec.sampling.top_k), (0.0, 0.5, 3));
    assert_eq!(
        (spec.sampling.min_p, spec.sampling.frequency_penalty, spec.sampling.presence_penalty),
        (0.25, 1.0, -1.0)
    );
    assert_eq!((spec.sampling.repetition_penalty, spec.sampling.min_tokens), (1.5, 2));
    assert_eq!(spec.sampling.logit_bias, [(3, 1.0), (7, 2.0)]);
    assert!(spec.stop_token_ids.contains(&9) && generation.prompt_ids.len() == 1);
}

#[tokio::test]
async fn stop_strings_match_special_tokens_unless_these_are_skipped() {
    let router = TestRouter::start().with_reply(" one<|user|> two");
    let mut client = connect(&router).await;
    let whole = [demo_encode("0 one<|user|> two"), vec![crate::client::END]].concat();
    let cut = demo_encode("0 one<|user|>");
    for (skip_special_tokens, expected) in [(true, &whole), (false, &cut)] {
        let change = |message: &mut vllm::GenerateRequest| {
            sampling(message).stop = vec!["<|user|>".to_owned()];
            sampling(message).skip_special_tokens = skip_special_tokens;
        };
        let (_, complete) = read(&mut client, generate(change)).await;
        assert_eq!(&complete.output_ids, expected, "{skip_special_tokens}");
        assert_eq!(complete.finish_reason, "stop");
    }
}

#[tokio::test]
async fn a_request_is_aborted_by_its_id() {
    let router = TestRouter::start();
    router.lanes.set_script(Script::Hang);
    let mut client = connect(&router).await;
    let mut stream = client.generate(generate(|_| ())).await.unwrap().into_inner();
    assert!(matches!(stream.message().await.unwrap().unwrap().response, Some(Answer::Chunk(_))));
    let again = client.generate(generate(|_| ())).await.unwrap_err();
    assert!(again.message().contains("`one` is already running"), "{again:?}");
    let info = client.get_server_info(vllm::GetServerInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.active_requests, info.server_type.as_str()), (1, "vllm-grpc"));
    assert!(info.last_receive_timestamp > 1.6e9 && info.uptime_seconds > 0.0 && !info.is_paused, "{info:?}");

    let request_ids = vec!["nobody".to_owned(), "one".to_owned()];
    client.abort(vllm::AbortRequest { request_ids }).await.unwrap();
    let last = stream.message().await.unwrap().unwrap().response;
    let Some(Answer::Complete(complete)) = last else { panic!("{last:?}") };
    assert_eq!(complete.finish_reason, "abort");
    assert!(!complete.output_ids.is_empty() && stream.message().await.unwrap().is_none());
    eventually("the end of the sequence", || router.lanes.cancelled() == [(0, 0)]).await;
    drop(stream);
    eventually("the permit", || router.state.admission.available() == 1_024).await;
    let router = router.with_reply(" fine");
    assert_eq!(read(&mut client, generate(|_| ())).await.1.finish_reason, "stop", "the id can be reused");
    drop(router);
}

#[tokio::test]
async fn a_request_that_waits_is_aborted_at_once() {
    let limits = AdmissionLimits { max_sequences: 1, max_waiting_requests: 1 };
    let router = TestRouter::with(Auth::Open, limits);
    router.lanes.set_script(Script::Hang);
    let mut client = connect(&router).await;
    let running = client.generate(generate(|_| ())).await.unwrap().into_inner();
    let page = || router.state.metrics_page.encode(service::metrics::Exposition::Prometheus);
    let num_waiting =
        |count| format!(r#"vllm:num_requests_waiting{{model_name="org/demo",engine="0"}} {count}"#);
    let mut second = client.clone();
    let waiting = second.generate(generate(|message| message.request_id = "two".into()));
    let (waiting, ()) = tokio::join!(waiting, async {
        eventually("waiting", || page().contains(&num_waiting(1))).await;
        client.abort(vllm::AbortRequest { request_ids: vec!["two".to_owned()] }).await.unwrap();
    });
    let mut stream = waiting.unwrap().into_inner();
    let last = stream.message().await.unwrap().unwrap().response;
    let Some(Answer::Complete(complete)) = last else { panic!("{last:?}") };
    assert_eq!((complete.finish_reason.as_str(), complete.output_ids.len()), ("abort", 0));
    assert!(stream.message().await.unwrap().is_none());
    assert!(page().contains(&num_waiting(0)), "it left the queue");
    assert!(page().contains(r#"outrider_requests_total{protocol="grpc",outcome="client_gone"} 1"#));
    assert_eq!(router.lanes.take_submitted().len(), 1);
    drop(running);
}

#[tokio::test]
async fn models_and_health_are_reported() {
    let router = TestRouter::start();
    let mut client = connect(&router).await;
    let info = client.get_model_info(with_model(vllm::GetModelInfoRequest {})).await.unwrap().into_inner();
    assert_eq!(
        (info.model_path.as_str(), info.max_context_length, info.vocab_size),
        (MODEL, MAX_MODEL_LEN, 4_096)
    );
    assert!(info.is_generation && !info.supports_vision);
    let unnamed = client.get_model_info(vllm::GetModelInfoRequest {}).await.unwrap_err();
    assert_eq!(unnamed.code(), Code::InvalidArgument, "two models are served");
    let health = async |client: &mut VllmEngineClient<Channel>| {
        client.health_check(vllm::HealthCheckRequest {}).await.unwrap().into_inner().healthy
    };
    assert!(!health(&mut client).await);
    router.state.health.set_ready();
    assert!(health(&mut client).await);
    let embed = client.embed(vllm::EmbedRequest::default()).await.unwrap_err();
    assert_eq!(embed.code(), Code::Unimplemented);
}

/// A change to a valid request, the refused field, and part of the message.
type Refused = (fn(&mut vllm::GenerateRequest), &'static str, &'static str);

const REFUSED: &[Refused] = &[
    (|message| message.input = None, "prompt", "prompt is required"),
    (|message| message.request_id = "a b".into(), "request_id", "visible ASCII"),
    (|message| message.mm_inputs = Some(vllm::MultimodalInputs {}), "mm_inputs", "not supported"),
    (|message| sampling(message).n = 2, "sampling_params.n", "not supported over this protocol"),
    (|message| sampling(message).logprobs = Some(1), "sampling_params.logprobs", "not supported"),
    (|message| sampling(message).temperature = Some(3.0), "temperature", "between 0 and 2, not 3"),
    (|message| sampling(message).max_tokens = Some(0), "max_tokens", "max_tokens must be at least 1"),
    (|message| sampling(message).stop_token_ids = vec![4_096], "stop_token_ids", "stop_token_ids[0] is 4096"),
    (
        |message| sampling(message).constraint = Some(Constraint::Grammar("root ::= x".into())),
        "sampling_params.grammar",
        "not supported",
    ),
    (
        |message| sampling(message).constraint = Some(Constraint::StructuralTag("{}".into())),
        "sampling_params.structural_tag",
        "not supported",
    ),
    (
        |message| sampling(message).constraint = Some(Constraint::Regex("(".into())),
        "sampling_params.regex",
        "sampling_params.regex cannot be used",
    ),
    (
        |message| sampling(message).constraint = Some(Constraint::JsonSchema("{".into())),
        "sampling_params.json_schema",
        "not JSON",
    ),
    (
        |message| sampling(message).constraint = Some(Constraint::Choice(Default::default())),
        "sampling_params.choice",
        "1 to 4096 are allowed",
    ),
    (
        |message| {
            sampling(message).constraint = Some(Constraint::JsonObject(true));
            sampling(message).ignore_eos = true;
        },
        "ignore_eos",
        "cannot be combined with sampling_params.json_object",
    ),
];

/// Each constraint is the same grammar as that of a field of `/v1/completions`.
#[tokio::test]
async fn constraints_are_the_grammars_of_http() {
    let router = TestRouter::start().with_reply(" fine");
    let mut client = connect(&router).await;
    let schema = json!({ "type": "object", "properties": { "a": { "type": "integer" } } });
    let choices = vec!["yes".to_owned(), "a|b".to_owned()];
    for (constraint, fields) in [
        (Constraint::JsonSchema(schema.to_string()), json!({ "guided_json": schema })),
        (Constraint::JsonObject(true), json!({ "response_format": { "type": "json_object" } })),
        (Constraint::JsonObject(false), json!({})),
        (Constraint::Regex("[a-c]+".into()), json!({ "guided_regex": "[a-c]+" })),
        (
            Constraint::Choice(vllm::ChoiceConstraint { choices: choices.clone() }),
            json!({ "guided_choice": choices }),
        ),
    ] {
        let body = merged(json!({ "model": MODEL, "prompt": "one two" }), &fields);
        router.ok("/v1/completions", &body).await;
        let expected = router.lanes.take_one().spec.grammar;
        assert_eq!(expected.is_some(), fields != json!({}));
        read(&mut client, generate(|message| sampling(message).constraint = Some(constraint))).await;
        assert_eq!(router.lanes.take_one().spec.grammar, expected, "{fields}");
    }
}

#[tokio::test]
async fn errors_name_the_field_and_the_next_request_works() {
    let router = TestRouter::start().with_reply(" fine");
    let mut client = connect(&router).await;
    for (change, field, expected) in REFUSED {
        let status = client.generate(generate(change)).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{field}: {status:?}");
        assert!(status.message().contains(expected), "{field}: {}", status.message());
        assert!(!status.message().contains("echo"), "this protocol has none: {}", status.message());
        let details = status.get_error_details();
        let violations = &details.bad_request().expect("which field").field_violations;
        assert_eq!(
            (violations[0].field.as_str(), violations[0].description.as_str()),
            (*field, status.message())
        );
        assert_eq!(details.error_info().expect("why").reason, "invalid_request");
        assert_eq!(read(&mut client, generate(|_| ())).await.1.finish_reason, "stop");
    }
}

#[tokio::test]
async fn retryable_errors_carry_a_retry_delay() {
    let router = TestRouter::start();
    let mut client = connect(&router).await;
    router.lanes.set_script(Script::Refuse(router::error::RouterError::Overloaded { what: "the lane" }));
    let status = client.generate(generate(|_| ())).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    let details = status.get_error_details();
    assert_eq!(details.retry_info().unwrap().retry_delay, Some(std::time::Duration::from_secs(1)));
    assert_eq!(details.error_info().unwrap().domain, "outrider");
    assert!(details.bad_request().is_none());
}

#[tokio::test]
async fn keys_and_deadlines_apply() {
    let router = TestRouter::with_keys("sk-one alice models=no-template\nsk-two bob\n");
    router.lanes.set_script(Script::Hang);
    let mut client = connect(&router).await;
    let with_key = |key: &str, mut request: Request<vllm::GenerateRequest>| {
        request.metadata_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
        request
    };
    assert_eq!(client.generate(generate(|_| ())).await.unwrap_err().code(), Code::Unauthenticated);
    let hidden = client.generate(with_key("sk-one", generate(|_| ()))).await.unwrap_err();
    assert_eq!(hidden.code(), Code::NotFound);
    let mut request = with_key("sk-two", generate(|_| ()));
    request.metadata_mut().insert("grpc-timeout", "2S".parse().unwrap());
    let mut stream = client.generate(request).await.unwrap().into_inner();
    let ended = loop {
        if let Err(status) = stream.message().await {
            break status;
        }
    };
    assert_eq!(ended.code(), Code::DeadlineExceeded);
    let metrics: Value = json!(router.metrics().await);
    assert!(
        metrics.as_str().unwrap().contains(r#"protocol="grpc",outcome="deadline_exceeded"} 1"#),
        "{metrics}"
    );
}
