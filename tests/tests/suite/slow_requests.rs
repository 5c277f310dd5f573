//! "Why was this request slow": three causes are created in real processes, and each is found with an
//! operator's tools: the console's record of the request, its trace, and metrics. `docs/runbook.md` uses them
//! in the same way. Parts of one run are compared with each other, so that a busy machine, which makes all of
//! them longer, does not change the result.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use outrider_cli::cluster::{ClusterSpec, DraftKind, ProcessCluster, TargetKind};
use reqwest::Method;
use serde_json::{Value, json};
use tempfile::TempDir;
use tests::case::Case;
use tests::http_client::{COMPLETIONS, HttpAnswer, HttpClient};
use tests::metrics::Page;
use tests::pair::{MODEL, PairText};
use tests::processes::{self, client, metrics};
use tests::trace_collector::{SeenSpan, TraceCollector};
use tests::wait::until;

const CLIENT_SPAN: &str = "00f067aa0ba902b7";

/// A pair whose draft takes twenty times as long per token as its target.
const SLOW_DRAFT: &str = r#"
name = "a slow draft"
vocab_size = 4096
max_model_len = 2048
wire_us = 100
noise = 0.0
[target]
device = "none"
workers = 1
max_batch_rows = 256
kv_blocks = 1000
kv_block_size = 16
[target.step]
micros_by_rows = [[1, 4000], [256, 8000]]
stair_rows = 1
kv_us_per_token = 0.0
prefill_tokens_per_second = 100000
[draft]
device = "none"
workers = 1
max_batch_rows = 256
kv_blocks = 1000
kv_block_size = 16
[draft.step]
micros_by_rows = [[1, 80000], [256, 90000]]
stair_rows = 1
kv_us_per_token = 0.0
prefill_tokens_per_second = 100000
[[acceptance]]
by_position = [0.7]
"#;

/// KV memory of the bundled target for 24 blocks of 16 ids: 6 layers, keys and values of 4 heads of 32
/// numbers of 2 bytes.
const SMALL_KV_BYTES: u64 = 24 * 16 * 6 * 2 * 4 * 32 * 2;

/// A cluster and the collector of its traces.
struct Observed {
    cluster: ProcessCluster,
    collector: TraceCollector,
}

/// The records of one request.
struct Evidence {
    /// The console's record.
    timeline: Value,
    spans: Vec<SeenSpan>,
}

impl Observed {
    async fn start(change: impl FnOnce(&mut ClusterSpec)) -> anyhow::Result<Self> {
        let collector = TraceCollector::start().await?;
        let cluster = processes::start(|spec| {
            spec.env = collector.environment();
            change(spec);
        })
        .await?;
        Ok(Self { cluster, collector })
    }

    /// Sends a request under a separate trace; returns the request id.
    async fn ask(&self, trace_id: &str, mut body: Value) -> anyhow::Result<String> {
        body["model"] = json!(MODEL);
        body["ignore_eos"] = json!(true);
        let http = HttpClient::new(self.cluster.http_url())?;
        let request = http.request(Method::POST, COMPLETIONS).json(&body);
        let answer =
            HttpAnswer::of(request.header("traceparent", format!("00-{trace_id}-{CLIENT_SPAN}-01"))).await?;
        ensure!(answer.status == 200, "{}", answer.text);
        Ok(answer.json()?["id"].as_str().context("an answer has an id")?.to_owned())
    }

    /// Collects the records of a request that has ended.
    async fn evidence(&self, trace_id: &str, request_id: &str) -> anyhow::Result<Evidence> {
        let admin = HttpClient::new(self.cluster.admin_url("router")?)?;
        let mut timeline = Value::Null;
        until("the console shows the request", async || {
            let timelines = HttpAnswer::of(admin.request(Method::GET, "/console/requests")).await?.json()?;
            let found =
                timelines.as_array().and_then(|all| all.iter().find(|one| one["request_id"] == request_id));
            timeline = found.cloned().unwrap_or_default();
            Ok(!timeline.is_null())
        })
        .await?;
        let verified = steps(&timeline)?.filter(|step| step["reply"] == "span").count();
        until("the spans arrive", async || {
            let spans = self.collector.trace(trace_id);
            let count = |name: &str| spans.iter().filter(|span| span.name == name).count();
            Ok(count("verify") >= verified && count("request") == 1)
        })
        .await?;
        Ok(Evidence { timeline, spans: self.collector.trace(trace_id) })
    }

    async fn metrics(&self, process: &str) -> anyhow::Result<Page> {
        metrics(&self.cluster, process).await
    }
}

fn steps(timeline: &Value) -> anyhow::Result<impl Iterator<Item = &Value>> {
    Ok(timeline["steps"].as_array().with_context(|| format!("no steps in {timeline}"))?.iter())
}

impl Evidence {
    /// Microseconds of each part of the request, as the console's *Requests* page adds them up: the time
    /// before the first step to a target; then per step the time of the worker's forwards, of its queue, and
    /// the remaining wire time. A long prompt takes several forwards, of which only the last is reported: the
    /// time of its step beyond the wire time of later steps counts as the prompt.
    fn parts(&self) -> anyhow::Result<BTreeMap<&'static str, u64>> {
        let mut parts = BTreeMap::new();
        let wire = self.median_wire()?;
        let number =
            |step: &Value, name: &str| step[name].as_u64().with_context(|| format!("no {name} in {step}"));
        let mut has_target_step = false;
        for step in steps(&self.timeline)? {
            let is_target = step["role"] == "target";
            if is_target && !has_target_step {
                parts.insert("before", number(step, "sent_us")?);
            }
            let Some(answered_us) = step["answered_us"].as_u64() else { continue };
            let round_trip = answered_us - number(step, "sent_us")?;
            let forwards = if step["reply"] == "proposal" { number(step, "num_tokens")?.max(1) } else { 1 };
            let queue = number(step, "queue_us")?.min(round_trip);
            let reported = (number(step, "compute_us")? * forwards).min(round_trip - queue);
            let (name, compute) = match (is_target, has_target_step) {
                (false, _) => ("draft", reported),
                (true, false) => ("prompt", reported.max((round_trip - queue).saturating_sub(wire))),
                (true, true) => ("verify", reported),
            };
            has_target_step |= is_target;
            for (name, us) in [(name, compute), ("queue", queue), ("wire", round_trip - queue - compute)] {
                *parts.entry(name).or_default() += us;
            }
        }
        Ok(parts)
    }

    /// The median time that steps to the target, after the first, took beyond queue and forward.
    fn median_wire(&self) -> anyhow::Result<u64> {
        let wire = |step: &Value| {
            let number = |name: &str| step[name].as_u64();
            let round_trip = number("answered_us")? - number("sent_us")?;
            Some(round_trip.saturating_sub(number("queue_us")? + number("compute_us")?))
        };
        let of_target = steps(&self.timeline)?.filter(|step| step["role"] == "target").skip(1);
        let mut wire_times: Vec<u64> = of_target.filter_map(wire).collect();
        wire_times.sort_unstable();
        Ok(wire_times.get(wire_times.len() / 2).copied().unwrap_or(0))
    }

    fn ended_us(&self) -> anyhow::Result<u64> {
        self.timeline["ended_us"].as_u64().context("a timeline has an end")
    }

    /// Checks that this part of the request was the longest in the console's record, and over half of the
    /// total.
    fn check_longest(&self, expected: &str) -> anyhow::Result<()> {
        let parts = self.parts()?;
        let longest = parts.iter().max_by_key(|(_, us)| **us).map(|(name, _)| *name);
        ensure!(longest == Some(expected), "{expected} is not the longest of {parts:?}");
        ensure!(
            2 * parts[expected] > self.ended_us()?,
            "{expected} is not half of {}: {parts:?}",
            self.timeline
        );
        Ok(())
    }

    /// Checks that the spans directly below the request account for its time: together they cover at least
    /// 95% of it and count at most 5% twice.
    fn check_adds_up(&self) -> anyhow::Result<()> {
        let request = self.spans.iter().find(|span| span.name == "request").context("a request span")?;
        let below = self.spans.iter().filter(|span| span.parent_id == request.span_id);
        let mut parts: Vec<(u64, u64)> =
            below.map(|span| (span.start_nanos, span.start_nanos + span.nanos)).collect();
        parts.sort_unstable();
        let sum: u64 = parts.iter().map(|(start, end)| end - start).sum();
        let (mut covered, mut until) = (0, request.start_nanos);
        for (start, end) in parts {
            covered += end.saturating_sub(start.max(until));
            until = until.max(end);
        }
        let total = request.nanos;
        ensure!(100 * covered > 95 * total, "the parts cover {covered} of {total} ns: {:#?}", self.spans);
        ensure!(100 * sum < 105 * total, "the parts sum up to {sum} of {total} ns: {:#?}", self.spans);
        Ok(())
    }

    /// Total nanoseconds of all spans with this name.
    fn nanos(&self, name: &str) -> u64 {
        self.spans.iter().filter(|span| span.name == name).map(|span| span.nanos).sum()
    }
}

/// Mean time of a worker's forwards, seconds.
fn mean_forward(page: &Page) -> f64 {
    page.total("outrider_worker_forward_seconds_sum")
        / page.total("outrider_worker_forward_seconds_count").max(1.0)
}

fn profile(text: &str) -> anyhow::Result<(TempDir, PathBuf)> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("profile.toml");
    std::fs::write(&path, text)?;
    Ok((folder, path))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_draft_worker_is_identified() -> anyhow::Result<()> {
    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4701";
    let (_folder, profile) = profile(SLOW_DRAFT)?;
    let observed = Observed::start(|spec| {
        spec.target = TargetKind::Synthetic { profile, time_scale: 1.0 };
        spec.draft = DraftKind::Synthetic;
    })
    .await?;
    processes::wait_known(&observed.cluster, &["target-0", "draft-0"]).await?;
    // A fixed k: a lane would have noticed and drafted nothing.
    let body = json!({ "prompt": "slow", "max_tokens": 12, "speculation": { "num_draft_tokens": 3 } });
    let id = observed.ask(TRACE, body).await?;
    let found = observed.evidence(TRACE, &id).await?;
    found.check_longest("draft")?;
    found.check_adds_up()?;
    let (draft, verify) = (found.nanos("draft"), found.nanos("verify"));
    ensure!(draft > 2 * verify, "spans of drafts took {draft} ns, of verifications {verify} ns");
    let (draft, target) = (observed.metrics("draft-0").await?, observed.metrics("target-0").await?);
    let (draft, target) = (mean_forward(&draft), mean_forward(&target));
    ensure!(draft > 2.0 * target, "a forward of the draft takes {draft} s, of the target {target} s");
    observed.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_target_is_identified() -> anyhow::Result<()> {
    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4702";
    const HELD: usize = 250;
    let observed = Observed::start(|spec| {
        spec.target_args.extend(["--kv-memory".to_owned(), SMALL_KV_BYTES.to_string()]);
        spec.draft = DraftKind::None;
    })
    .await?;
    // Takes 21 of 24 blocks until its client disconnects.
    let prompt = PairText::load()?.chat_ids("Tell me a long story about a lighthouse.")?;
    let prompt: Vec<u32> = prompt.into_iter().cycle().take(24).collect();
    let large =
        Case { max_tokens: 300, ignore_eos: true, num_draft_tokens: 0, ..Case::new("large", prompt, 0.0) };
    let mut large = client(&observed.cluster).await?.open(&large).await?;
    large.read_tokens(1).await?;
    let waits = async {
        until("the router says that a sequence waits", async || {
            Ok(observed.metrics("router").await?.sum("outrider_sequences_waiting_for_target") == 1)
        })
        .await?;
        // The other request waits for far longer than it will run.
        let so_far = large.so_far().token_ids.len();
        large.read_tokens((so_far + HELD).min(299)).await?;
        drop(large);
        anyhow::Ok(())
    };
    let body = json!({ "prompt": "A short one.", "max_tokens": 60, "speculation": { "enabled": false } });
    let (id, waited) = tokio::join!(observed.ask(TRACE, body), waits);
    waited?;
    let found = observed.evidence(TRACE, &id?).await?;
    found.check_longest("before")?;
    found.check_adds_up()?;
    let (wait, request) = (found.nanos("wait for target"), found.nanos("request"));
    ensure!(2 * wait > request, "the span of the wait took {wait} of {request} ns");
    let page = observed.metrics("router").await?;
    let waited = page.total("outrider_target_wait_seconds_sum");
    ensure!(2e6 * waited > found.ended_us()? as f64, "sequences waited for {waited} s by the metric");
    observed.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cold_prefix_is_identified() -> anyhow::Result<()> {
    const COLD: &str = "4bf92f3577b34da6a3ce929d0e0e4703";
    const WARM: &str = "4bf92f3577b34da6a3ce929d0e0e4704";
    let observed = Observed::start(|spec| spec.draft = DraftKind::None).await?;
    let prompt = "Summarize: the orders of every customer were counted, sorted and written down. ".repeat(40);
    let body =
        |prompt: &str| json!({ "prompt": prompt, "max_tokens": 3, "speculation": { "enabled": false } });
    let prefixes = async || {
        let page = observed.metrics("target-0").await?;
        let of = |what: &str| page.sum(&format!("outrider_worker_prefix_{what}_tokens_total"));
        anyhow::Ok((of("query"), of("hit")))
    };
    let before = prefixes().await?;
    let id = observed.ask(COLD, body(&prompt)).await?;
    let between = prefixes().await?;
    let cold = observed.evidence(COLD, &id).await?;
    let id = observed.ask(WARM, body(&prompt)).await?;
    let after = prefixes().await?;
    let warm = observed.evidence(WARM, &id).await?;

    cold.check_longest("prompt")?;
    // Prefill is so short that any time in which a busy machine does not run the router appears as a gap.
    // That happens in single requests; a part without a span would leave a gap in every request.
    let mut adds_up = cold.check_adds_up();
    for again in 0..5 {
        if adds_up.is_ok() {
            break;
        }
        let trace = format!("4bf92f3577b34da6a3ce929d0e0e480{again}");
        let id = observed.ask(&trace, body(&format!("{again}. {prompt}"))).await?;
        adds_up = observed.evidence(&trace, &id).await?.check_adds_up();
    }
    adds_up?;
    let verify = cold.nanos("verify");
    let first = cold.spans.iter().filter(|span| span.name == "verify").min_by_key(|span| span.start_nanos);
    let first = first.context("a verify span")?.nanos;
    ensure!(2 * first > verify, "the first verify span took {first} of {verify} ns");
    let (looked_up, hit) = (between.0 - before.0, between.1 - before.1);
    ensure!(
        looked_up > 500 && hit == 0,
        "of {looked_up} ids {hit} were cached before any request had sent them"
    );

    // The same prompt again: its ids are cached, and prefill does not dominate.
    let (looked_up, hit) = (after.0 - between.0, after.1 - between.1);
    ensure!(10 * hit > 9 * looked_up, "of {looked_up} ids only {hit} were cached");
    let prompts = [cold.parts()?["prompt"], warm.parts()?["prompt"]];
    ensure!(prompts[0] > 4 * prompts[1], "the prompt took {prompts:?} us, cold and warm");
    observed.cluster.stop().await;
    Ok(())
}
