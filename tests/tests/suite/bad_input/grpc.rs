//! Over gRPC: the same errors with the same texts, as a status.

use anyhow::{Context as _, ensure};
use proto::v1;
use proto::v1::generate_request::Prompt;
use proto::v1::inference_client::InferenceClient;
use tests::pair::MODEL;
use tonic::Code;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic_prost::ProstCodec;

use super::{Fixture, PROMPT};

fn valid_message() -> v1::GenerateRequest {
    v1::GenerateRequest {
        model: MODEL.to_owned(),
        prompt: Some(Prompt::Text(PROMPT.to_owned())),
        max_tokens: Some(8),
        seed: Some(1),
        ..v1::GenerateRequest::default()
    }
}

async fn generate(
    client: &mut InferenceClient<Channel>,
    request: v1::GenerateRequest,
) -> Result<String, tonic::Status> {
    let mut messages = client.generate(request).await?.into_inner();
    let mut text = String::new();
    while let Some(message) = messages.message().await? {
        text.push_str(&message.text);
    }
    Ok(text)
}

/// A change that makes a valid request invalid, and the expected error.
type GrpcRow = (fn(&mut v1::GenerateRequest), Code, &'static str, &'static str);

fn sampling(request: &mut v1::GenerateRequest) -> &mut v1::SamplingParams {
    request.sampling.get_or_insert_default()
}

fn speculation(request: &mut v1::GenerateRequest) -> &mut v1::Speculation {
    request.speculation.get_or_insert_default()
}

fn ids(ids: &[u32]) -> Option<Prompt> {
    Some(Prompt::TokenIds(v1::TokenIds { ids: ids.to_vec() }))
}

fn chat(role: &str, content: &str) -> Option<Prompt> {
    let message = v1::ChatMessage { role: role.to_owned(), content: content.to_owned(), name: None };
    Some(Prompt::Chat(v1::Chat { messages: vec![message], template_kwargs: String::new() }))
}

const GRPC_ROWS: [GrpcRow; 27] = [
    (|r| r.model = "nobody".to_owned(), Code::NotFound, "model_not_found", "`nobody` does not exist"),
    (|r| r.model.clear(), Code::InvalidArgument, "invalid_request", "model is required"),
    (
        |r| r.prompt = None,
        Code::InvalidArgument,
        "invalid_request",
        "prompt is required and must not be empty",
    ),
    (
        |r| r.prompt = Some(Prompt::Text(String::new())),
        Code::InvalidArgument,
        "invalid_request",
        "prompt must not be empty",
    ),
    (|r| r.prompt = ids(&[]), Code::InvalidArgument, "invalid_request", "prompt must not be empty"),
    (
        |r| r.prompt = ids(&[5, 4_096]),
        Code::InvalidArgument,
        "invalid_request",
        "prompt[1] is 4096, but token ids of this model are 0 to 4095",
    ),
    (|r| r.prompt = ids(&[u32::MAX]), Code::InvalidArgument, "invalid_request", "prompt[0] is 4294967295"),
    (
        |r| r.prompt = Some(Prompt::Text("word ".repeat(2_100))),
        Code::InvalidArgument,
        "context_length_exceeded",
        "maximum context length is 2048 tokens",
    ),
    (
        |r| r.prompt = Some(Prompt::Text("x".repeat(5 << 20))),
        Code::OutOfRange,
        "",
        "the limit is: 2097152 bytes",
    ),
    (
        |r| r.prompt = chat("king", "x"),
        Code::InvalidArgument,
        "invalid_request",
        "messages[0].role must be one of system",
    ),
    (
        |r| r.prompt = Some(Prompt::Chat(v1::Chat::default())),
        Code::InvalidArgument,
        "invalid_request",
        "messages must not be empty",
    ),
    (|r| r.max_tokens = Some(0), Code::InvalidArgument, "invalid_request", "max_tokens must be at least 1"),
    (
        |r| r.max_tokens = Some(u32::MAX),
        Code::InvalidArgument,
        "context_length_exceeded",
        "maximum context length is 2048 tokens",
    ),
    (
        |r| sampling(r).temperature = Some(-1.0),
        Code::InvalidArgument,
        "invalid_request",
        "temperature must be between 0 and 2, not -1",
    ),
    (
        |r| sampling(r).temperature = Some(f32::NAN),
        Code::InvalidArgument,
        "invalid_request",
        "temperature must be between 0 and 2, not NaN",
    ),
    (
        |r| sampling(r).top_p = Some(2.0),
        Code::InvalidArgument,
        "invalid_request",
        "top_p must be between 0 and 1, not 2",
    ),
    (
        |r| sampling(r).min_p = Some(f32::INFINITY),
        Code::InvalidArgument,
        "invalid_request",
        "min_p must be between 0 and 1",
    ),
    (
        |r| sampling(r).min_tokens = Some(9),
        Code::InvalidArgument,
        "invalid_request",
        "min_tokens must be between 0 and 8, not 9",
    ),
    (
        |r| sampling(r).logit_bias = vec![v1::TokenBias { token_id: 4_096, bias: 1.0 }],
        Code::InvalidArgument,
        "invalid_request",
        "logit_bias[4096] is 4096",
    ),
    (
        |r| sampling(r).logit_bias = vec![v1::TokenBias { token_id: 5, bias: 101.0 }],
        Code::InvalidArgument,
        "invalid_request",
        "between -100 and 100, not 101",
    ),
    (|r| r.n = Some(0), Code::InvalidArgument, "invalid_request", "n must be between 1 and 128, not 0"),
    (
        |r| r.n = Some(1_000),
        Code::InvalidArgument,
        "invalid_request",
        "n must be between 1 and 128, not 1000",
    ),
    (
        |r| r.stop = vec!["x".to_owned(); 100],
        Code::InvalidArgument,
        "invalid_request",
        "stop has 100 strings, at most 64",
    ),
    (
        |r| r.logprobs = Some(21),
        Code::InvalidArgument,
        "invalid_request",
        "logprobs must be between 0 and 20, not 21",
    ),
    (
        |r| r.task_type = "Sql!".to_owned(),
        Code::InvalidArgument,
        "invalid_request",
        "task_type must have 1 to 64",
    ),
    (
        |r| speculation(r).acceptance = 99,
        Code::InvalidArgument,
        "invalid_request",
        "must be one of coupled, rejection, typical, not `99`",
    ),
    (
        |r| speculation(r).num_draft_tokens = Some(33),
        Code::InvalidArgument,
        "invalid_request",
        "between 0 and 32, not 33",
    ),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_name_fields_with_invalid_values() -> anyhow::Result<()> {
    let fixture = Fixture::start().await?;
    let mut client = InferenceClient::connect(fixture.cluster.grpc_url()).await?;
    for (invalidate, code, label, words) in GRPC_ROWS {
        let mut request = valid_message();
        invalidate(&mut request);
        let status = generate(&mut client, request)
            .await
            .err()
            .with_context(|| format!("{words}: it was accepted"))?;
        ensure!(status.code() == code, "{words}: {status:?}");
        ensure!(status.message().contains(words), "`{words}` is not in: {}", status.message());
        let sent = status.metadata().get("x-error-code").map(|code| code.to_str()).transpose()?;
        ensure!(sent.unwrap_or_default() == label, "{words}: x-error-code is {sent:?}");
        ensure!(generate(&mut client, valid_message()).await? == fixture.text, "another text after {words}");
    }
    fixture.next_request_works("all of these").await?;
    fixture.cluster.stop().await;
    Ok(())
}

/// A request whose model may be any bytes.
#[derive(Clone, PartialEq, prost::Message)]
struct UntypedRequest {
    #[prost(bytes = "vec", tag = "1")]
    model: Vec<u8>,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_that_is_not_utf8_is_rejected() -> anyhow::Result<()> {
    let fixture = Fixture::start().await?;
    let channel = Channel::from_shared(fixture.cluster.grpc_url())?.connect().await?;
    let mut grpc = tonic::client::Grpc::new(channel);
    grpc.ready().await?;
    let path = PathAndQuery::from_static("/outrider.v1.Inference/Generate");
    let codec = ProstCodec::<UntypedRequest, v1::GenerateResponse>::default();
    let request = tonic::Request::new(UntypedRequest { model: b"demo\xff".to_vec() });
    let status = grpc.server_streaming(request, path, codec).await.err().context("it was accepted")?;
    // An error of the transport: protobuf allows no such string, so no handler sees it.
    ensure!(status.code() == Code::Internal, "{status:?}");
    for words in ["GenerateRequest.model", "not UTF-8"] {
        ensure!(status.message().contains(words), "`{words}` is not in: {}", status.message());
    }
    fixture.next_request_works("invalid UTF-8 over gRPC").await?;
    fixture.cluster.stop().await;
    Ok(())
}
