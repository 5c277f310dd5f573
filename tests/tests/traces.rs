//! One trace a request: from the client's span through router, draft worker and target worker, over both doors.

use std::collections::BTreeSet;

use anyhow::{Context as _, ensure};
use outrider_cli::cluster::Cluster;
use proto::v1;
use proto::v1::inference_client::InferenceClient;
use proto::v1::generate_request::Prompt;
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
const PROMPT: &str = "Write a Python function that reverses a list.\n";

/// Rounds of the request, as its answer counts them.
type Rounds = usize;

async fn traced_cluster(collector: &TraceCollector) -> anyhow::Result<Cluster> {
    processes::start(|spec| spec.env = collector.environment()).await
}

/// Waits until every process has exported what one request of so many rounds leaves.
async fn whole_trace(collector: &TraceCollector, trace_id: &str, rounds: Rounds) -> anyhow::Result<Vec<SeenSpan>> {
    let spans = || collector.trace(trace_id);
    let count = |spans: &[SeenSpan], name: &str| spans.iter().filter(|span| span.name == name).count();
    until("the spans of all rounds arrive", async || {
        let spans = spans();
        Ok(count(&spans, "request") == 1 && ["round", "verify"].iter().all(|name| count(&spans, name) >= rounds))
    })
    .await
    .with_context(|| format!("of {rounds} rounds came {:#?}", spans()))?;
    Ok(spans())
}

fn attribute<'a>(span: &'a SeenSpan, name: &str) -> anyhow::Result<&'a str> {
    let value = span.attributes.get(name);
    value.map(String::as_str).with_context(|| format!("{} of {} has no {name}: {span:#?}", span.name, span.service))
}

/// What has to hold of the trace of a speculating request, whichever door it came through.
fn check_trace(spans: &[SeenSpan], rounds: Rounds) -> anyhow::Result<()> {
    let services: BTreeSet<&str> = spans.iter().map(|span| span.service.as_str()).collect();
    ensure!(services == BTreeSet::from([DRAFT, ROUTER, TARGET]), "spans came from {services:?}");
    let named = |name: &'static str| spans.iter().filter(move |span| span.name == name);

    let request = named("request").next().context("the router's request span came")?;
    ensure!((request.service.as_str(), request.parent_id.as_str()) == (ROUTER, CLIENT_SPAN), "{request:#?}");
    ensure!(attribute(request, "gen_ai.request.model")? == MODEL, "{request:#?}");
    ensure!(attribute(request, "outrider.spec.rounds")? == rounds.to_string(), "{request:#?}");
    let drafted: usize = attribute(request, "outrider.spec.draft_tokens")?.parse()?;
    let accepted: usize = attribute(request, "outrider.spec.accepted_tokens")?.parse()?;
    ensure!(drafted >= accepted && accepted > 0, "{request:#?}");

    for span in spans.iter().filter(|span| span.name != "request") {
        let above = ancestors(spans, span);
        ensure!(above.last() == Some(&"request"), "{} of {} hangs below {above:?}", span.name, span.service);
    }
    for name in ["queue", "tokenize", "round"] {
        ensure!(named(name).all(|span| span.service == ROUTER) && named(name).count() > 0, "{name}: {spans:#?}");
    }
    ensure!(named("verify").all(|span| span.service == TARGET), "only the target verifies: {spans:#?}");
    ensure!(named("draft").all(|span| span.service == DRAFT), "only the draft worker drafts: {spans:#?}");
    ensure!(named("draft").count() > 0, "nothing was drafted: {spans:#?}");

    // What the target says of each round adds up to what the client was told.
    let sum = |name: &str, field: &str| -> anyhow::Result<usize> {
        let values = spans.iter().filter(|span| span.name == name).map(|span| attribute(span, field)?.parse());
        values.map(|value: Result<usize, _>| Ok(value?)).sum()
    };
    let _ = sum;
    Ok(())
}
