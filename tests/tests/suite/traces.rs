//! One trace per request: from the client's span through router, draft worker and target worker, over both
//! protocols.

use std::collections::BTreeSet;

use anyhow::{Context as _, ensure};
use proto::v1;
use proto::v1::inference_client::InferenceClient;
use serde_json::json;
use tests::http_client::{COMPLETIONS, HttpAnswer, HttpClient};
use tests::pair::MODEL;
use tests::processes;
use tests::trace_collector::{SeenSpan, TraceCollector, ancestors};
use tests::wait::until;

const CLIENT_SPAN: &str = "00f067aa0ba902b7";
const ROUTER: &str = "outrider-router";
const DRAFT: &str = "outrider-draft-worker";
const TARGET: &str = "outrider-target-worker";
/// Fixed in the request, so that it has drafts regardless of the lane's policy.
const NUM_DRAFT_TOKENS: u32 = 4;
const PROMPT: &str = "Write a Python function that reverses a list.\n";

/// The usage that the client received.
#[derive(Debug, PartialEq, Eq)]
struct Usage {
    rounds: usize,
    draft_tokens: usize,
    accepted_tokens: usize,
}

fn attribute<'a>(span: &'a SeenSpan, name: &str) -> anyhow::Result<&'a str> {
    let value = span.attributes.get(name);
    value.map(String::as_str).with_context(|| format!("no {name} in {span:#?}"))
}

fn number(span: &SeenSpan, name: &str) -> anyhow::Result<usize> {
    attribute(span, name)?.parse().with_context(|| format!("{name} in {span:#?}"))
}

/// The sum of an attribute over all spans with this name.
fn sum(spans: &[SeenSpan], span: &str, field: &str) -> anyhow::Result<usize> {
    spans.iter().filter(|entry| entry.name == span).map(|entry| number(entry, field)).sum()
}

/// Waits until every process has exported the spans of the request.
async fn whole_trace(
    collector: &TraceCollector,
    trace_id: &str,
    usage: &Usage,
) -> anyhow::Result<Vec<SeenSpan>> {
    until("the spans of all rounds arrive", async || {
        let spans = collector.trace(trace_id);
        let count = |name: &str| spans.iter().filter(|span| span.name == name).count();
        let of_each_round = count("round") >= usage.rounds && count("verify") >= usage.rounds;
        let all_drafts = sum(&spans, "draft", "outrider.spec.k")? >= usage.draft_tokens;
        Ok(of_each_round && all_drafts && count("request") == 1)
    })
    .await
    .with_context(|| format!("of {usage:?} came {:#?}", collector.trace(trace_id)))?;
    Ok(collector.trace(trace_id))
}

/// Checks the trace of a request with speculation, for either protocol.
fn check_trace(spans: &[SeenSpan], usage: &Usage) -> anyhow::Result<()> {
    let services: BTreeSet<&str> = spans.iter().map(|span| span.service.as_str()).collect();
    ensure!(services == BTreeSet::from([DRAFT, ROUTER, TARGET]), "spans came from {services:?}");
    let named = |name: &'static str| spans.iter().filter(move |span| span.name == name);

    let request = named("request").next().context("the router's request span came")?;
    ensure!((request.service.as_str(), request.parent_id.as_str()) == (ROUTER, CLIENT_SPAN), "{request:#?}");
    ensure!(attribute(request, "gen_ai.request.model")? == MODEL, "{request:#?}");
    let recorded = Usage {
        rounds: number(request, "outrider.spec.rounds")?,
        draft_tokens: number(request, "outrider.spec.draft_tokens")?,
        accepted_tokens: number(request, "outrider.spec.accepted_tokens")?,
    };
    ensure!(recorded == *usage && usage.accepted_tokens > 0, "the client received {usage:?}: {request:#?}");

    for span in spans.iter().filter(|span| span.name != "request") {
        let above = ancestors(spans, span);
        ensure!(above.last() == Some(&"request"), "{} of {} hangs below {above:?}", span.name, span.service);
        let is_of_round = matches!(span.name.as_str(), "draft" | "verify");
        ensure!(!is_of_round || above == ["round", "request"], "{} hangs below {above:?}", span.name);
    }
    for (name, service) in
        [("queue", ROUTER), ("tokenize", ROUTER), ("round", ROUTER), ("draft", DRAFT), ("verify", TARGET)]
    {
        ensure!(named(name).count() > 0, "no span {name} came");
        ensure!(
            named(name).all(|span| span.service == service),
            "not every {name} is of {service}: {spans:#?}"
        );
    }

    // The values of single rounds add up to the totals that the client received.
    ensure!(named("verify").count() == usage.rounds, "{} verify spans, {usage:?}", named("verify").count());
    ensure!(sum(spans, "verify", "outrider.spec.k")? == usage.draft_tokens, "{usage:?}: {spans:#?}");
    for name in ["verify", "round"] {
        ensure!(
            sum(spans, name, "outrider.spec.accepted")? == usage.accepted_tokens,
            "{usage:?}: {spans:#?}"
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_over_http_is_one_trace_from_the_client_to_both_workers() -> anyhow::Result<()> {
    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    let collector = TraceCollector::start().await?;
    let cluster = processes::start(|spec| spec.env = collector.environment()).await?;
    let http = HttpClient::new(cluster.http_url())?;
    let speculation = json!({ "num_draft_tokens": NUM_DRAFT_TOKENS });
    let body = json!({
        "model": MODEL, "prompt": PROMPT, "max_tokens": 24, "seed": 5, "ignore_eos": true, "speculation": speculation,
    });
    let request = http.request(reqwest::Method::POST, COMPLETIONS).json(&body);
    let request = request.header("traceparent", format!("00-{TRACE}-{CLIENT_SPAN}-01"));
    let answer = HttpAnswer::of(request).await?.json()?;
    let usage = &answer["usage"]["speculation"];
    let field = |name: &str| usage[name].as_u64().map(|count| count as usize).context("usage has counts");
    let usage = Usage {
        rounds: field("rounds")?,
        draft_tokens: field("draft_tokens")?,
        accepted_tokens: field("accepted_tokens")?,
    };
    let spans = whole_trace(&collector, TRACE, &usage).await?;
    check_trace(&spans, &usage)?;
    ensure!(collector.trace_ids() == [TRACE], "one trace, not {:?}", collector.trace_ids());

    // The histogram buckets of this request have exemplars with its trace id, in the format that supports
    // them.
    let admin = HttpClient::new(cluster.admin_url("router")?)?;
    let page = admin.request(reqwest::Method::GET, "/metrics");
    let page = HttpAnswer::of(page.header("accept", "application/openmetrics-text")).await?.text;
    for name in ["vllm:time_to_first_token_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket"] {
        let exemplar = format!("# {{trace_id=\"{TRACE}\"}}");
        let is_named = |line: &str| line.starts_with(name) && line.contains(&exemplar);
        ensure!(page.lines().filter(|line| is_named(line)).count() == 1, "no exemplar of {name}: {page}");
    }

    // A request without a client trace starts one.
    http.ask(COMPLETIONS, &json!({ "model": MODEL, "prompt": PROMPT, "max_tokens": 4 })).await?;
    until("a second trace arrives", async || Ok(collector.trace_ids().len() == 2)).await?;
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_over_grpc_is_one_trace_from_the_client_to_both_workers() -> anyhow::Result<()> {
    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    let collector = TraceCollector::start().await?;
    let cluster = processes::start(|spec| spec.env = collector.environment()).await?;
    let mut client = InferenceClient::connect(cluster.grpc_url()).await?;
    let mut request = tonic::Request::new(v1::GenerateRequest {
        model: MODEL.to_owned(),
        prompt: Some(v1::generate_request::Prompt::Text(PROMPT.to_owned())),
        max_tokens: Some(24),
        seed: Some(5),
        ignore_eos: true,
        speculation: Some(v1::Speculation {
            num_draft_tokens: Some(NUM_DRAFT_TOKENS),
            ..v1::Speculation::default()
        }),
        ..v1::GenerateRequest::default()
    });
    request.metadata_mut().insert("traceparent", format!("00-{TRACE}-{CLIENT_SPAN}-01").parse()?);
    let mut messages = client.generate(request).await?.into_inner();
    let mut usage = None;
    while let Some(message) = messages.message().await? {
        usage = usage.or(message.usage);
    }
    let usage = usage.and_then(|usage| usage.speculation).context("the last message holds the usage")?;
    let usage = Usage {
        rounds: usage.rounds as usize,
        draft_tokens: usage.draft_tokens as usize,
        accepted_tokens: usage.accepted_tokens as usize,
    };
    check_trace(&whole_trace(&collector, TRACE, &usage).await?, &usage)?;
    ensure!(collector.trace_ids() == [TRACE], "one trace, not {:?}", collector.trace_ids());
    cluster.stop().await;
    Ok(())
}
