//! Cost of traces: CPU time of each process per output token without an exporter, with 1% and with all
//! requests sampled.
//!
//! Real processes; workers reproduce a profile's step times. Each window serves the same requests to their
//! end, and the three settings alternate. A sink in this process receives the spans and discards them, so
//! that the receiving side costs only the counting.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::ensure;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use outrider_cli::cluster::usage::CpuSnapshot;
use outrider_cli::cluster::{Binaries, ProcessCluster};
use service::shutdown::Lifetime;
use tests::metrics::Page;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

use crate::cost::start;
use crate::load::Streams;

/// Export delay of spans, short enough for the export to fall into the window.
const EXPORT_DELAY: Duration = Duration::from_millis(500);

/// Share of sampled requests; `None` means no exporter.
const SETTINGS: [Option<&str>; 3] = [None, Some("0.01"), Some("1")];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Profile of the workers
    #[arg(long, default_value = "deploy/profiles/8b-h100.toml")]
    profile: PathBuf,
    /// Factor on the workers' times
    #[arg(long, default_value_t = 0.3)]
    time_scale: f64,
    /// Concurrent requests
    #[arg(long, default_value_t = 64)]
    streams: usize,
    /// Requests per window
    #[arg(long, default_value_t = 1024)]
    requests: usize,
    /// Output tokens per request
    #[arg(long, default_value_t = 128)]
    max_tokens: u32,
    /// Windows per setting
    #[arg(long, default_value = "3")]
    turns: NonZeroUsize,
}

/// Results of one window.
struct Window {
    tokens: f64,
    spans: u64,
    /// CPU time per token, microseconds: of the router, and of all processes.
    router: f64,
    all: f64,
    busy: f64,
}

pub(crate) async fn run(args: &Args, binaries: &Binaries) -> anyhow::Result<()> {
    println!(
        "| sampled | tokens | spans per token | router, us per token | all processes, us per token | CPU utilization |"
    );
    println!("|---|---|---|---|---|---|");
    let mut sums = [(0.0, 0.0); SETTINGS.len()];
    let turns = args.turns.get();
    for _ in 0..turns {
        for (setting, sum) in SETTINGS.iter().zip(&mut sums) {
            let Window { tokens, spans, router, all, busy } = measure(args, binaries, *setting).await?;
            println!(
                "| {} | {tokens:.0} | {:.3} | {router:.2} | {all:.2} | {busy:.2} |",
                setting.unwrap_or("no exporter"),
                spans as f64 / tokens
            );
            *sum = (sum.0 + router / turns as f64, sum.1 + all / turns as f64);
        }
    }
    let [off, ..] = sums;
    for (setting, (router, all)) in SETTINGS.iter().zip(sums).skip(1) {
        println!(
            "\nsampled {}: CPU per token relative to no exporter: router {:.2}, all processes {:.2}",
            setting.unwrap_or_default(),
            router / off.0,
            all / off.1
        );
    }
    Ok(())
}

async fn measure(args: &Args, binaries: &Binaries, sampled: Option<&str>) -> anyhow::Result<Window> {
    let sink = Sink::start().await?;
    let env = sampled.map_or_else(Vec::new, |share| sink.environment(share));
    let cluster = start(&args.profile, binaries, args.time_scale, env).await?;
    let clients = Streams::new(&cluster.http_url(), args.requests, (4, args.max_tokens)).await?;
    let before = snapshots(&cluster)?;
    clients.finish(args.streams).await?;
    tokio::time::sleep(2 * EXPORT_DELAY).await;
    let after = snapshots(&cluster)?;
    let page = Page::scrape(&cluster.admin_url("router")?).await?;
    let tokens = page.total("vllm:generation_tokens_total");
    ensure!(tokens > 0.0, "no token was generated: raise --requests");
    cluster.stop().await;
    let spans = sink.spans.load(Ordering::Relaxed);
    match sampled {
        Some(share) => ensure!(spans > 0, "no span arrived with {share} of the requests: raise --requests"),
        None => ensure!(spans == 0, "{spans} spans arrived without an exporter"),
    }
    let usages: Vec<_> = before
        .iter()
        .zip(&after)
        .map(|((name, before), (_, after))| (name, before.usage_until(after)))
        .collect();
    let micros = |cpu: f64| cpu * 1e6 / tokens;
    Ok(Window {
        tokens,
        spans,
        router: micros(usages.iter().filter(|(name, _)| *name == "router").map(|(_, span)| span.cpu).sum()),
        all: micros(usages.iter().map(|(_, span)| span.cpu).sum()),
        busy: usages[0].1.busy,
    })
}

/// CPU usage of every process so far.
fn snapshots(cluster: &ProcessCluster) -> anyhow::Result<Vec<(String, CpuSnapshot)>> {
    let names = cluster.names();
    let snapshot = |name: &&str| Ok(((*name).to_owned(), CpuSnapshot::at(cluster.process(name)?.pid())?));
    names.iter().map(snapshot).collect()
}

/// Receives spans and discards them.
struct Sink {
    url: String,
    spans: Arc<AtomicU64>,
    /// The server task ends when this is dropped.
    _lifetime: Lifetime,
}

struct Counter(Arc<AtomicU64>);

impl Sink {
    async fn start() -> anyhow::Result<Self> {
        let (spans, lifetime) = (Arc::<AtomicU64>::default(), Lifetime::new());
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let service = TraceServiceServer::new(Counter(Arc::clone(&spans)));
        let server = tonic::transport::Server::builder().add_service(service);
        let incoming = TcpListenerStream::new(listener);
        lifetime.spawn("sink", server.serve_with_incoming_shutdown(incoming, lifetime.cancelled()));
        Ok(Self { url, spans, _lifetime: lifetime })
    }

    fn environment(&self, share: &str) -> Vec<(String, String)> {
        let delay = EXPORT_DELAY.as_millis().to_string();
        [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", self.url.as_str()),
            ("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"),
            ("OTEL_TRACES_SAMPLER_ARG", share),
            ("OTEL_BSP_SCHEDULE_DELAY", &delay),
            ("OTEL_BSP_MAX_QUEUE_SIZE", "65536"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into()
    }
}

#[tonic::async_trait]
impl TraceService for Counter {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let scopes = request.into_inner().resource_spans.into_iter().flat_map(|spans| spans.scope_spans);
        let spans: usize = scopes.map(|scope| scope.spans.len()).sum();
        self.0.fetch_add(spans as u64, Ordering::Relaxed);
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}
